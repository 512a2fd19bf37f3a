"""`jaxllm doctor` on this installation, and on four that are broken on purpose."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import __version__
from jaxllm.cli import doctor
from jaxllm.evaluate import installation
from jaxllm.ops import native
from tests.conftest import ROOT

needs_kernels = pytest.mark.skipif(native.load_kernels() is None, reason="no kernels are built")

# A child whose set "b" ends its process.
DYING = """
import json, os, signal, sys
facts = {
    "devices": {"backend": "cpu", "devices": ["cpu"]},
    "library": {"path": "x.so", "selected": "c", "available": ["a", "b", "c"]},
    "set a": {"problems": []}, "set c": {"problems": ["int8: wrong"]}, "bandwidth": {"gb_s": 1},
}
if "set b" in sys.argv:
    os.kill(os.getpid(), signal.SIGILL)
print(json.dumps({stage: facts[stage] for stage in sys.argv[1:]}))
"""


def run_doctor(
    *arguments: str, flags: Sequence[str] = (), **environment: str
) -> tuple[int, dict[str, Any]]:
    """Run `jaxllm doctor --json` in a process of its own; return its status and report."""
    names = ("JAXLLM_NATIVE", "JAXLLM_ISA", "JAXLLM_LIBRARY", "PYTHONPATH")
    inherited = {n: x for n, x in os.environ.items() if n not in names}
    command = [sys.executable, *flags, "-m", "jaxllm", "doctor", "--json", *arguments]
    done = subprocess.run(
        command, env=inherited | environment, capture_output=True, text=True, timeout=600,
        cwd=environment.get("PYTHONPATH", str(ROOT)).split(os.pathsep)[0],
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


def wrong(report: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Return the checks that are errors, by name."""
    assert report["healthy"] == all(c["status"] != "error" for c in report["checks"])
    found = [c for c in report["checks"] if c["status"] == "error"]
    assert all(c["remedy"] for c in found)
    return {c["name"]: c for c in found}


@pytest.mark.more
@needs_kernels
def test_healthy_installation_passes(tmp_path: Path) -> None:
    """Every set of this machine is compared, and every line is there."""
    status, report = run_doctor(JAXLLM_COMPILE_CACHE=str(tmp_path / "programs"))
    assert (status, wrong(report)) == (0, {})
    checks = {c["name"]: c["text"] for c in report["checks"]}
    assert {*checks} >= {
        "python", "jaxllm", "packages", "jax", "kernels", "threads", "memory",
        "compiled programs", "downloads", "temporary files", "environment",
    }  # fmt: skip
    assert report["jaxllm"] == __version__
    for name in native.available_isas():
        assert name in checks["kernels"]
    assert "within 1e-6 of float64" in checks["kernels"]
    assert float(re.findall(r"read at ([\d.]+) GB/s", checks["memory"])[0]) > 0
    assert "free" in checks["compiled programs"]


def test_installation_without_kernels_is_an_error(tmp_path: Path) -> None:
    """A package that was built without a compiler; -S hides the one of this checkout."""
    ignored = shutil.ignore_patterns("csrc", "*.so", "__pycache__", "demo")
    shutil.copytree(ROOT / "jaxllm", tmp_path / "jaxllm", ignore=ignored)
    path = os.pathsep.join([str(tmp_path), sysconfig.get_path("purelib")])
    programs = str(tmp_path / "programs")
    status, report = run_doctor(
        "--quick", flags=["-S"], PYTHONPATH=path, JAXLLM_COMPILE_CACHE=programs
    )
    assert status == 1
    (error,) = wrong(report).values()
    assert error["name"] == "kernels" and "none are installed" in error["text"]
    assert "C++ compiler" in error["remedy"]


def test_library_that_cannot_be_loaded_is_an_error(tmp_path: Path) -> None:
    """The error has the name of the file; on a GPU, no library is only a warning."""
    status, report = run_doctor("--quick", JAXLLM_LIBRARY=str(tmp_path / "none.so"))
    assert status == 1 and str(tmp_path / "none.so") in wrong(report)["kernels"]["text"]
    assert wrong(report)["kernels"]["remedy"] == "unset JAXLLM_LIBRARY"
    (on_gpu,) = doctor._check_kernels(
        {"devices": {"backend": "gpu"}, "library": {"path": None, "available": []}}, quick=True
    )
    assert on_gpu.status == "warning"


@pytest.mark.parametrize("has_metadata", [True, False])
def test_wrong_jaxlib_is_diagnosed(tmp_path: Path, has_metadata: bool) -> None:
    """An old jaxlib on PYTHONPATH is an error with its version, or else with its folder, although
    JAX cannot be imported.
    """
    package = tmp_path / "jaxlib"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "version.py").write_text("__version__ = '0.4.1'\n", encoding="utf-8")
    if has_metadata:
        about = tmp_path / "jaxlib-0.4.1.dist-info"
        about.mkdir()
        lines = "Metadata-Version: 2.1\nName: jaxlib\nVersion: 0.4.1\n"
        (about / "METADATA").write_text(lines, encoding="utf-8")
    status, report = run_doctor("--quick", PYTHONPATH=str(tmp_path))
    assert status == 1
    errors = wrong(report)
    assert "cannot be used" in errors["jax"]["text"]
    if has_metadata:
        assert f"jaxlib in {tmp_path} is 0.4.1, but jax requires" in errors["packages"]["text"]
        assert "pip install 'jaxlib" in errors["packages"]["remedy"]
    else:
        (shadow,) = (c for c in report["checks"] if c["status"] == "warning")
        assert str(package) in shadow["text"] and "PYTHONPATH" in shadow["remedy"]


def test_read_only_cache_folder_is_an_error(tmp_path: Path) -> None:
    """The error has the folder and the system's reason."""
    folder = tmp_path / "read-only"
    folder.mkdir(mode=0o500)
    if os.access(folder, os.W_OK):  # the superuser: only the kernel's own folders refuse a file
        folder = Path("/sys/kernel")
        if not folder.is_dir():
            pytest.skip("the superuser may write everywhere on this system")
    status, report = run_doctor("--quick", JAXLLM_COMPILE_CACHE=str(folder))
    assert status == 1
    (error,) = wrong(report).values()
    assert error["name"] == "compiled programs"
    assert f"cannot be kept in {folder}/compiled-" in error["text"]
    assert re.search("ermission denied|not permitted|[Rr]ead-only", error["text"])
    assert "JAXLLM_COMPILE_CACHE" in error["remedy"]


def test_set_that_dies_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process ends by a signal; the sets before and after it are compared all the same."""
    (tmp_path / "dying.py").write_text(DYING, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor, "CHILD", "dying")
    wrong = {f.text: f.remedy for f in doctor.examine() if f.name == "kernels"}
    assert {*wrong} == {"b: ended by SIGILL (Illegal instruction)", "c: int8: wrong"}
    assert all("set JAXLLM_ISA=a in the environment" in remedy for remedy in wrong.values())


@needs_kernels
def test_wrong_products_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of 1e-5 in the products of a set is named."""
    before, linear = native.isa(), native.linear
    monkeypatch.setattr(
        native, "linear", lambda *a, **k: [y * np.float32(1.00002) for y in linear(*a, **k)]
    )
    try:
        problems = installation.check_set(native.available_isas()[-1])
    finally:
        native.isa(before)
    assert any(re.match(r"float32, 2 rows: wrong by .* of the magnitudes", x) for x in problems)


def test_report_ends_with_what_to_do_and_hides_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug report has neither the user's name nor a key."""
    monkeypatch.setenv("HOME", "/home/someone")
    assert doctor._hide_home('"/home/someone/x", /home/someone') == '"~/x", ~'
    assert doctor._hide_home("/home/someone-else/x") == "/home/someone-else/x"
    monkeypatch.setenv("JAXLLM_API_KEY", "abc123")
    monkeypatch.setenv("XLA_FLAGS", "--xla_x=1")
    monkeypatch.setattr(doctor, "_run_stages", lambda *x: {n: {"error": "no JAX"} for n in x})
    described = [*doctor.examine(quick=True)][-1].text
    assert "abc123" not in described and "XLA_FLAGS=--xla_x=1" in described
    findings = doctor.Finding("one", "good"), doctor.Finding("another", "bad", "error", "mend it")
    assert doctor._render([*findings]).splitlines() == [
        "ok       one      good",
        "error    another  bad",
        "",
        "What to do:",
        "  another: mend it",
    ]


def test_few_processors_in_container_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA starts a thread for each processor that it sees, whatever a container may use."""
    monkeypatch.setattr(doctor, "_read_processor_limit", lambda: 1.5)
    monkeypatch.setenv("JAXLLM_THREADS", "8")
    found = doctor._check_threads()
    assert (found.status, found.remedy) == ("warning", "set JAXLLM_THREADS=1")
    monkeypatch.setenv("JAXLLM_THREADS", "1")
    assert doctor._check_threads().status == "ok"


def test_process_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX waits forever for some broken devices."""
    monkeypatch.setattr(doctor, "TIMEOUT_S", 0.01)
    stages = doctor._run_stages("devices")
    assert stages == {"devices": {"error": "it did not end within 0.01 seconds"}}
    assert doctor._check_devices(stages["devices"]).status == "error"


def test_kernels_for_a_gpu_are_named() -> None:
    """Whether they are on, or why they are not."""
    facts = {"backend": "gpu", "devices": ["NVIDIA H100"], "kernels": "the driver is too old"}
    found = doctor._check_devices(facts | {"memory": "", "cudnn": None})
    assert "CUDA kernels: the driver is too old" in found.text
