"""`jaxllm doctor`: what is installed, whether it works, and what to do about what does not.

Nothing here imports JAX: a child process does, and runs the kernels, so that a library that cannot
be imported or that ends its process is a finding too.
"""

import contextlib
import dataclasses
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
from typing import Annotated, Any, Literal

import typer

from jaxllm import __version__
from jaxllm.cli.console import spinner, write
from jaxllm.cli.options import AsJson
from jaxllm.files import machine_memory
from jaxllm.files.program_folder import CACHE_ENV, find_folder_problem, locate_program_folder

EXAMPLE = "Example: jaxllm doctor --json"
CHILD = "jaxllm.evaluate.installation"  # its stages are the keys of `_Stages`
TIMEOUT_S = 300
MIN_FREE_BYTES = 1 << 30
_ENVIRONMENT = ("JAXLLM_", "JAX_", "XLA_", "PJRT_", "OMP_NUM_THREADS", "PYTHONPATH", "HF_HOME")
_SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD")
_GPU_FILES = ("/dev/nvidia[0-9]*", "/dev/kfd")
_BUILD_AGAIN = (
    "install a C++ compiler (g++ or clang++), then jaxllm again: python -m pip install"
    " --force-reinstall --no-deps jaxllm"
)
_Stages = dict[str, dict[str, Any]]  # stage of the child -> what it returned, or its "error"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        status: "warning": it works, but slowly or not as it seems; "error": it does not work.
        text: What was found.
        remedy: What to do, if anything.
    """

    name: str
    status: Literal["ok", "warning", "error"]
    text: str
    remedy: str = ""


def doctor(
    as_json: AsJson = False,
    quick: Annotated[bool, typer.Option("--quick")] = False,
) -> None:
    """Check this installation. The exit status is 1 if something is wrong.

    Args:
      quick: Leave out the comparison of kernels, the memory bandwidth and the sizes of folders.
    """
    with spinner("examining"):
        findings = [*examine(quick=quick)]
    healthy = all(f.status != "error" for f in findings)
    if as_json:
        checks = [dataclasses.asdict(f) for f in findings]
        report = {"jaxllm": __version__, "healthy": healthy, "checks": checks}
        write(_hide_home(json.dumps(report, indent=2)) + "\n")
    else:
        write(_hide_home(_render(findings)))
    if not healthy:
        raise typer.Exit(1)


def examine(*, quick: bool = False) -> Iterator[Finding]:
    """Yield what is found; quick: see `doctor`."""
    python = f"{platform.python_version()} at {sys.executable}, {platform.platform()}"
    yield Finding("python", "ok", python)
    yield from _check_packages()
    yield Finding("processor", "ok", _describe_processor())
    stages = _run_stages(quick)
    yield _check_devices(stages)
    yield from _check_kernels(stages, quick)
    yield _check_threads()
    yield _check_memory(stages)
    yield _check_program_folder(quick)
    yield from _check_folders(quick)
    yield Finding("environment", "ok", _describe_environment())


def _render(findings: list[Finding]) -> str:
    width = max(len(f.name) for f in findings)
    lines = [f"{f.status:7}  {f.name:{width}}  {f.text}" for f in findings]
    if wrong := [f for f in findings if f.status != "ok"]:
        lines += ["", "What to do:"]
        lines += [f"  {f.name}: {f.remedy}" for f in wrong]
    return "".join(f"{line}\n" for line in lines)


def _hide_home(text: str) -> str:
    """Return a report without the user's name in its paths."""
    home = str(Path.home())
    return re.sub(rf"{re.escape(home)}(?=[/\s\",:]|$)", "~", text) if len(home) > 1 else text


def _check_packages() -> Iterator[Finding]:
    """Check versions against the requirements of jaxllm and JAX, and where JAX is imported from."""
    versions: dict[str, str] = {}
    wrong: list[str] = []
    remedies: list[str] = []
    for owner in ("jaxllm", "jax"):
        for name, specifier in _read_requirements(owner):
            try:
                versions[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                wrong.append(f"{name} is missing")
                remedies.append(f"'{name}{specifier}'")
                continue
            if not specifier.contains(versions[name], prereleases=True):
                wrong.append(
                    f"{name} in {_find_root(name)} is {versions[name]}, but {owner} requires"
                    f" {name}{specifier}"
                )
                remedies.append(f"'{name}{specifier}'")
    installed = _find_version("jaxllm")
    if installed != __version__:
        yield Finding(
            "jaxllm", "warning", f"{__version__}, but installed as {installed or 'no package'}",
            "install it again: python -m pip install --no-deps --editable . in a checkout",
        )  # fmt: skip
    else:
        yield Finding("jaxllm", "ok", f"{__version__} at {Path(__file__).parents[1]}")
    listed = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    if wrong:
        command = f"python -m pip install {' '.join(dict.fromkeys(remedies))}"
        yield Finding("packages", "error", "; ".join(dict.fromkeys(wrong)), command)
    else:
        yield Finding("packages", "ok", listed)
    for name in ("jax", "jaxlib"):
        if (folder := _find_shadow(name)) is not None:
            yield Finding(
                "packages", "warning", f"{name} is imported from {folder}, not as installed",
                f"remove {folder.parent} from PYTHONPATH, unless you want this {name}",
            )  # fmt: skip


def _read_requirements(name: str) -> Iterator[tuple[str, Any]]:
    """Yield the packages that a package requires without its extras, with their versions."""
    from packaging.requirements import Requirement

    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for line in importlib.metadata.requires(name) or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                yield requirement.name, requirement.specifier


def _find_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _find_root(name: str) -> Path:
    """Return the folder that a package is installed in."""
    return Path(str(importlib.metadata.distribution(name).locate_file(""))).resolve()


def _find_shadow(name: str) -> Path | None:
    """Return the folder that a package is imported from, unless it is the installed one."""
    try:
        spec, root = importlib.util.find_spec(name), _find_root(name)
    except (ImportError, ValueError):  # missing: reported as an error elsewhere
        return None
    folder = Path(spec.origin).resolve().parent if spec and spec.origin else root / name
    return None if folder.parent == root else folder


def _describe_processor() -> str:
    model = ""
    with contextlib.suppress(OSError):
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        found = re.search(r"^(?:model name|Model)\s*: (.*)$", info, re.M)
        model = f", {found[1]}" if found else ""
    return f"{platform.machine()}{model or ', ' + (platform.processor() or 'unknown')}"


def _run_stages(quick: bool) -> _Stages:
    """Run the child until every stage has run, or ended its process; return what they returned."""
    stages: _Stages = {}
    root = str(Path(__file__).parents[2])
    path = [p for p in (os.environ.get("PYTHONPATH"), root) if p]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    while True:
        flags = ["-P", *(["-S"] * sys.flags.no_site)]
        command = [sys.executable, *flags, "-m", CHILD, *(["--quick"] * quick), *stages]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
            )
            output, status, errors = done.stdout, done.returncode, done.stderr
        except subprocess.TimeoutExpired as error:
            output = (error.stdout or b"").decode(errors="replace")  # bytes even for a text
            status, errors = 1, f"it did not end within {TIMEOUT_S} seconds"
        last = "devices"  # what importing JAX belongs to
        for line in (x for x in output.splitlines() if x.startswith('{"stage"')):
            entry = json.loads(line)
            last = entry["stage"]
            if "facts" in entry:
                stages[last] = entry["facts"]
        if status == 0:
            return stages
        stages[last] = {"error": _describe_end(status, errors)}
        if not last.startswith("set "):  # all others need what this one does
            return stages


def _describe_end(status: int, errors: str) -> str:
    """Return why a process ended: the signal, or the last line that it wrote."""
    if status < 0:
        with contextlib.suppress(ValueError):
            number = signal.Signals(-status)
            return f"ended by {number.name} ({signal.strsignal(number)})"
    lines = [line for line in errors.splitlines() if line.strip()]
    return lines[-1][:400] if lines else f"exit status {status}"


def _check_devices(stages: _Stages) -> Finding:
    facts = stages.get("devices", {"error": "nothing was returned"})
    if "error" in facts:
        return Finding(
            "jax", "error", f"cannot be used: {facts['error']}",
            "install the versions that jaxllm requires: python -m pip install --force-reinstall"
            " jax jaxlib jaxllm",
        )  # fmt: skip
    count = len(facts["devices"])
    text = f"{facts['backend']}: {count} device{'s' * (count != 1)} ({facts['devices'][0]})"
    text += f". {facts['memory']}" if facts.get("memory") else ""
    gpus = [name for pattern in _GPU_FILES for name in glob.glob(pattern)]
    chosen = os.environ.get("JAX_PLATFORMS", "")
    if gpus and facts["backend"] == "cpu" and "cpu" not in chosen:
        return Finding(
            "jax", "warning", f"{text}, although {gpus[0]} is there",
            "install JAX for it: python -m pip install 'jaxllm[cuda]', or set JAX_PLATFORMS=cpu",
        )  # fmt: skip
    if facts.get("cudnn"):
        return Finding(
            "jax", "warning", f"{text}; long texts are slow: {facts['cudnn']}",
            "install cuDNN with JAX: python -m pip install 'jaxllm[cuda]'",
        )  # fmt: skip
    return Finding("jax", "ok", text if gpus else f"{text}; no GPU")


def _check_kernels(stages: _Stages, quick: bool) -> Iterator[Finding]:
    """Report the library, and each instruction set that is wrong."""
    if os.environ.get("JAXLLM_NATIVE") == "0":
        yield Finding(
            "kernels", "warning", "off (JAXLLM_NATIVE=0): decoding is slow on a CPU",
            "unset JAXLLM_NATIVE",
        )  # fmt: skip
        return
    facts = stages.get("library")
    if facts is None:  # JAX does not start, which is reported
        return
    if "error" in facts:
        named = [n for n in ("JAXLLM_LIBRARY", "JAXLLM_ISA") if n in os.environ]
        remedy = f"unset {' and '.join(named)}" if named else _BUILD_AGAIN
        yield Finding("kernels", "error", f"cannot be loaded: {facts['error']}", remedy)
        return
    if facts["path"] is None:
        text = "none are installed: on a CPU, decoding in anything but float32 is slow"
        on_cpu = stages["devices"].get("backend") == "cpu"
        yield Finding("kernels", "error" if on_cpu else "warning", text, _BUILD_AGAIN)
        return
    sets: list[str] = facts["available"]
    wrong = {name: _describe_set(stages.get(f"set {name}", {})) for name in sets}
    wrong = {name: problem for name, problem in wrong.items() if problem}
    right = [name for name in sets if name not in wrong]
    for name, problem in wrong.items():
        remedy = f"set JAXLLM_ISA={right[-1]}" if right else "set JAXLLM_NATIVE=0"
        yield Finding(
            "kernels", "error", f"{name}: {problem}",
            f"{remedy} in the environment, and report this with jaxllm doctor --json",
        )  # fmt: skip
    text = f"{facts['selected']} of {', '.join(sets)}, from {facts['path']}"
    compared = "" if quick else "; products, attention and sums within 1e-6 of float64"
    exact = "" if quick else ", dequantizing and int8 products bit for bit as portable"
    if not wrong:
        yield Finding("kernels", "ok", f"{text}{compared}{exact}")


def _describe_set(facts: dict[str, Any]) -> str:
    if "error" in facts:
        return str(facts["error"])
    problems = facts.get("problems", [])
    more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
    return "; ".join(problems[:3]) + more


def _check_threads() -> Finding:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    given = os.environ.get("JAXLLM_THREADS") or os.environ.get("PJRT_NPROC")
    threads = int(given) if given and given.isdecimal() else usable or 1
    text = f"{threads} of {os.cpu_count()} processors"
    limit = _read_processor_limit()
    if limit is not None and limit < threads:
        return Finding(
            "threads", "warning", f"{text}, but this container may use {limit:g}",
            f"set JAXLLM_THREADS={max(1, int(limit))}",
        )  # fmt: skip
    return Finding("threads", "ok", text)


def _read_processor_limit() -> float | None:
    """Return the number of processors that a container may use at a time; None for no limit."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return int(quota) / int(period)
    return None


def _check_memory(stages: _Stages) -> Finding:
    total, free = machine_memory(), None
    with contextlib.suppress(OSError):
        info = Path("/proc/meminfo").read_text(encoding="ascii")
        if found := re.search(r"^MemAvailable:\s+(\d+) kB$", info, re.M):
            free = int(found[1]) * 1024
    parts = [_show_bytes(total) if total else "of unknown size"]
    parts += [f"{_show_bytes(min(free, total or free))} available"] if free is not None else []
    rate = stages.get("bandwidth", {}).get("gb_s")
    parts += [f"read at {rate} GB/s by all threads"] if rate else []
    return Finding("memory", "ok", ", ".join(parts))


def _check_program_folder(quick: bool) -> Finding:
    """Check the folder of compiled programs, which is created if it is missing."""
    if os.environ.get(CACHE_ENV) == "0":
        return Finding("compiled programs", "ok", f"not kept ({CACHE_ENV}=0)")
    folder = locate_program_folder()
    if problem := find_folder_problem(folder):
        return Finding(
            "compiled programs", "error",
            f"cannot be kept in {folder}: {problem}; each start compiles them again",
            f"chmod u+rwx,go-w {folder}, or set {CACHE_ENV} to a folder of yours",
        )  # fmt: skip
    return Finding("compiled programs", "ok", _describe_folder(folder, quick))


def _check_folders(quick: bool) -> Iterator[Finding]:
    """Check the folders of downloads and of temporary files."""
    environment = os.environ
    cache = Path(environment.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    hub = environment.get("HF_HUB_CACHE") or (
        Path(environment.get("HF_HOME") or cache / "huggingface") / "hub"
    )
    for name, folder in (
        ("downloads", Path(hub)),
        ("temporary files", Path(tempfile.gettempdir())),
    ):
        nearest = next(p for p in (folder, *folder.absolute().parents) if os.path.exists(p))
        size = quick or name != "downloads"
        text = _describe_folder(folder, size) if nearest == folder else f"none yet in {folder}"
        free = shutil.disk_usage(nearest).free
        text += f", {_show_bytes(free)} free"
        if not os.access(nearest, os.W_OK | os.X_OK):
            remedy = f"chmod u+rwx {nearest}, or name another folder (HF_HOME, TMPDIR)"
            yield Finding(name, "error", f"{text}, but it is not writable", remedy)
        elif free < MIN_FREE_BYTES:
            yield Finding(name, "warning", text, "free some of the disk")
        else:
            yield Finding(name, "ok", text)


def _describe_folder(folder: Path, quick: bool) -> str:
    if quick:
        return str(folder)
    sizes = []
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                sizes.append(os.lstat(os.path.join(parent, name)).st_size)
    return f"{folder}: {len(sizes):,} files, {_show_bytes(sum(sizes))}"


def _describe_environment() -> str:
    found = {
        name: "(hidden)" if _SECRET.search(name) else value
        for name, value in sorted(os.environ.items())
        if name.startswith(_ENVIRONMENT)
    }
    return ", ".join(f"{name}={value}" for name, value in found.items()) or "nothing is set"


def _show_bytes(count: int) -> str:
    unit, size = ("GB", 1e9) if count >= 1e9 else ("MB", 1e6)
    return f"{count / size:,.1f} {unit}"
