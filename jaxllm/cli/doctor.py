"""`jaxllm doctor`: what is installed, whether it works, and what to do about what does not.

Nothing here imports JAX: a child process does, and runs the kernels, so that a library that cannot
be imported or that ends its process is a finding too.
"""

import glob
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import typer

from jaxllm import __version__
from jaxllm.cli.console import spinner, write
from jaxllm.cli.options import AsJson
from jaxllm.files import machine_memory
from jaxllm.files.program_folder import CACHE_ENV, find_folder_problem, locate_program_folder

EXAMPLE = "Example: jaxllm doctor --json"
CHILD = "jaxllm.evaluate.installation"  # its stages are the keys of `_Stages`
TIMEOUT_S = 300
MIN_FREE_GB = 1.0
_ENVIRONMENT = ("JAXLLM_", "JAX_", "XLA_", "PJRT_", "OMP_NUM_THREADS", "PYTHONPATH", "HF_HOME")
_SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD")
_INSTALL = "python -m pip install"
_BUILD_AGAIN = (
    "install a C++ compiler (g++ or clang++), then jaxllm again:"
    f" {_INSTALL} --force-reinstall --no-deps jaxllm"
)
_Stages = dict[str, dict[str, Any]]  # stage of the child -> what it returned, or its "error"


class Finding(NamedTuple):
    """One thing that was looked at. A warning: it works, but slowly or not as it seems."""

    name: str
    text: str
    status: Literal["ok", "warning", "error"] = "ok"
    remedy: str = ""


def doctor(as_json: AsJson = False, quick: bool = False) -> None:
    """Check this installation. The exit status is 1 if something is wrong.

    Args:
        quick: Leave out the comparison of kernels and the memory bandwidth.
    """
    with spinner("examining"):
        findings = [*examine(quick=quick)]
    healthy = all(f.status != "error" for f in findings)
    checks = [f._asdict() for f in findings]
    report = {"jaxllm": __version__, "healthy": healthy, "checks": checks}
    write(_hide_home(f"{json.dumps(report, indent=2)}\n" if as_json else _render(findings)))
    if not healthy:
        raise typer.Exit(1)


def examine(*, quick: bool = False) -> Iterator[Finding]:
    """Yield the findings; quick: see `doctor`."""
    python = f"{platform.python_version()} at {sys.executable}, {platform.platform()}"
    yield Finding("python", python)
    yield Finding("jaxllm", f"{__version__} at {Path(__file__).parents[1]}")
    yield from _check_packages()
    stages = _run_stages("devices", "library")
    if not quick and (sets := stages["library"].get("available")):
        stages |= _run_stages(*(f"set {name}" for name in sets), "bandwidth")
    yield _check_devices(stages["devices"])
    yield from _check_kernels(stages, quick)
    yield _check_threads()
    total, rate = machine_memory(), stages.get("bandwidth", {}).get("gb_s")
    size = f"{total / 1e9:,.1f} GB" if total else "of unknown size"
    yield Finding("memory", size + (f", read at {rate} GB/s by all threads" if rate else ""))
    yield from _check_folders()
    variables = {n: x for n, x in sorted(os.environ.items()) if n.startswith(_ENVIRONMENT)}
    shown = (f"{n}={'(hidden)' if _SECRET.search(n) else x}" for n, x in variables.items())
    yield Finding("environment", ", ".join(shown) or "nothing is set")


def _render(findings: list[Finding]) -> str:
    width = max(len(f.name) for f in findings)
    lines = [f"{f.status:7}  {f.name:{width}}  {f.text}" for f in findings]
    if wrong := [f"  {f.name}: {f.remedy}" for f in findings if f.status != "ok"]:
        lines += ["", "What to do:", *wrong]
    return "".join(f"{line}\n" for line in lines)


def _hide_home(text: str) -> str:
    """Return a report without the user's name in its paths."""
    home = str(Path.home())
    return re.sub(rf"{re.escape(home)}(?=[/\s\",:]|$)", "~", text) if len(home) > 1 else text


def _check_packages() -> Iterator[Finding]:
    """Check versions against the requirements of jaxllm and JAX, and where JAX is imported from."""
    from packaging.requirements import Requirement

    good, wrong = list[str](), dict[str, str]()  # wrong: complaint -> what to install
    for owner in ("jaxllm", "jax"):
        needs = (metadata.requires if (metadata := _find(owner)) else None) or [owner]
        for need in map(Requirement, needs):
            if need.marker is not None and not need.marker.evaluate({"extra": "cli"}):
                continue
            package, wanted = _find(need.name), f"{need.name}{need.specifier}"
            if package is None:
                wrong[f"{need.name} is missing"] = f"'{wanted}'"
            elif need.specifier.contains(package.version, prereleases=True):
                good.append(f"{need.name} {package.version}")
            else:
                where = f"{need.name} in {package.locate_file('')} is {package.version}"
                wrong[f"{where}, but {owner} requires {wanted}"] = f"'{wanted}'"
    remedy = f"{_INSTALL} {' '.join(dict.fromkeys(wrong.values()))}"
    if wrong:
        yield Finding("packages", "; ".join(wrong), "error", remedy)
    else:
        yield Finding("packages", ", ".join(sorted(set(good))))
    for name in ("jax", "jaxlib"):
        package, spec = _find(name), importlib.util.find_spec(name)
        folder = Path((spec and spec.origin) or "").resolve().parent
        if package and folder.parent != Path(str(package.locate_file(""))).resolve():
            text = f"{name} is imported from {folder}, not as installed"
            remedy = f"remove {folder.parent} from PYTHONPATH, unless you want this {name}"
            yield Finding("packages", text, "warning", remedy)


def _find(name: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _run_stages(*stages: str) -> _Stages:
    """Return what stages of the child return; if it ends early, of a child for each of them."""
    path = [p for p in (os.environ.get("PYTHONPATH"), str(Path(__file__).parents[2])) if p]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    flags = ["-P", *(["-S"] * sys.flags.no_site)]
    command = [sys.executable, *flags, "-m", CHILD, *stages]
    options: Any = {"env": environment, "capture_output": True, "timeout": TIMEOUT_S}
    try:
        done = subprocess.run(command, text=True, **options)
    except subprocess.TimeoutExpired:
        return {x: {"error": f"it did not end within {TIMEOUT_S} seconds"} for x in stages}
    if done.returncode == 0:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    if len(stages) > 1:
        return {name: facts for x in stages for name, facts in _run_stages(x).items()}
    ended = signal.strsignal(-done.returncode) if done.returncode < 0 else None
    lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
    error = f"ended by {signal.Signals(-done.returncode).name} ({ended})" if ended else lines[-1]
    return {stages[0]: {"error": error[:400]}}


def _check_devices(facts: dict[str, Any]) -> Finding:
    if "error" in facts:
        remedy = f"install what jaxllm requires: {_INSTALL} --force-reinstall jax jaxlib jaxllm"
        return Finding("jax", f"cannot be used: {facts['error']}", "error", remedy)
    count = len(facts["devices"])
    text = f"{facts['backend']}: {count} device{'s' * (count != 1)} ({facts['devices'][0]})"
    text += f". {facts['memory']}" if facts.get("memory") else ""
    text += f". CUDA kernels: {facts['kernels']}" if facts.get("kernels") else ""
    gpus = glob.glob("/dev/nvidia[0-9]*") + glob.glob("/dev/kfd")
    if gpus and facts["backend"] == "cpu" and "cpu" not in os.environ.get("JAX_PLATFORMS", ""):
        remedy = f"install JAX for it: {_INSTALL} 'jaxllm[cuda]', or set JAX_PLATFORMS=cpu"
        return Finding("jax", f"{text}, although {gpus[0]} is there", "warning", remedy)
    if facts.get("cudnn"):
        remedy = f"install cuDNN with JAX: {_INSTALL} 'jaxllm[cuda]'"
        return Finding("jax", f"{text}; long texts are slow: {facts['cudnn']}", "warning", remedy)
    return Finding("jax", text if gpus else f"{text}; no GPU")


def _check_kernels(stages: _Stages, quick: bool) -> Iterator[Finding]:
    """Report the library, and each instruction set that is wrong."""
    facts = stages["library"]
    if os.environ.get("JAXLLM_NATIVE") == "0":
        text = "off (JAXLLM_NATIVE=0): decoding is slow on a CPU"
        yield Finding("kernels", text, "warning", "unset JAXLLM_NATIVE")
    elif "error" in stages["devices"]:  # JAX does not start, which is reported
        return
    elif "error" in facts:
        named = [n for n in ("JAXLLM_LIBRARY", "JAXLLM_ISA") if n in os.environ]
        remedy = f"unset {' and '.join(named)}" if named else _BUILD_AGAIN
        yield Finding("kernels", f"cannot be loaded: {facts['error']}", "error", remedy)
    elif facts["path"] is None:
        text = "none are installed: on a CPU, decoding in anything but float32 is slow"
        on_cpu = stages["devices"].get("backend") == "cpu"
        yield Finding("kernels", text, "error" if on_cpu else "warning", _BUILD_AGAIN)
    else:
        results = {name: stages.get(f"set {name}", {}) for name in facts["available"]}
        wrong = {n: x.get("error") or "; ".join(x.get("problems", [])) for n, x in results.items()}
        right = [name for name, problem in wrong.items() if not problem]
        advice = f"JAXLLM_ISA={right[-1]}" if right else "JAXLLM_NATIVE=0"
        remedy = f"set {advice} in the environment, and report this: jaxllm doctor --json"
        for name, problem in wrong.items():
            if problem:
                yield Finding("kernels", f"{name}: {problem[:400]}", "error", remedy)
        if len(right) == len(wrong):
            compared = "" if quick else "; products within 1e-6 of float64"
            text = f"{facts['selected']} of {', '.join(right)}, from {facts['path']}{compared}"
            yield Finding("kernels", text)


def _check_threads() -> Finding:
    given = os.environ.get("JAXLLM_THREADS") or os.environ.get("PJRT_NPROC") or ""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads, limit = int(given) if given.isdecimal() else usable or 1, _read_processor_limit()
    text = f"{threads} of {os.cpu_count()} processors ({platform.machine()})"
    if limit >= threads:
        return Finding("threads", text)
    remedy = f"set JAXLLM_THREADS={max(1, int(limit))}"
    return Finding("threads", f"{text}, but this container may use {limit:g}", "warning", remedy)


def _read_processor_limit() -> float:
    """Return the number of processors that a container may use at a time."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return int(quota) / int(period)
    except (OSError, ValueError):
        return float("inf")


def _check_folders() -> Iterator[Finding]:
    """Check the folders of compiled programs, of downloads and of temporary files."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    home = Path(os.environ.get("HF_HOME") or cache / "huggingface")
    hub, programs = Path(os.environ.get("HF_HUB_CACHE") or home / "hub"), locate_program_folder()
    folders = {"downloads": hub, "temporary files": Path(tempfile.gettempdir())}
    if os.environ.get(CACHE_ENV) == "0":
        yield Finding("compiled programs", f"not kept ({CACHE_ENV}=0)")
    elif problem := find_folder_problem(programs):
        text = f"cannot be kept in {programs}: {problem}; each start compiles them again"
        remedy = f"chmod u+rwx,go-w {programs}, or set {CACHE_ENV} to a folder of yours"
        yield Finding("compiled programs", text, "error", remedy)
    else:
        folders = {"compiled programs": programs, **folders}
    for name, folder in folders.items():
        nearest = next(p for p in (folder, *folder.absolute().parents) if os.path.exists(p))
        free = shutil.disk_usage(nearest).free / 1e9
        text = f"{folder}{'' if nearest == folder else ' (none yet)'}, {free:,.1f} GB free"
        if not os.access(nearest, os.W_OK | os.X_OK):
            remedy = f"chmod u+rwx {nearest}, or name another folder (HF_HOME, TMPDIR)"
            yield Finding(name, f"{text}, but it is not writable", "error", remedy)
        elif free < MIN_FREE_GB:
            yield Finding(name, text, "warning", "free some of the disk")
        else:
            yield Finding(name, text)
