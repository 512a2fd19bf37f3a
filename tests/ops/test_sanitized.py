"""The kernels' tests with every access to memory and every operation checked by the compiler."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

CHECKS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1"


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_no_kernel_reads_or_writes_outside_its_arrays(tmp_path: Path) -> None:
    for program in ("cmake", "gcc"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not there")
    # libstdc++ as well: XLA throws, and the checks catch that only where both came first.
    preloaded = [
        subprocess.run(
            ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    if not all(Path(library).is_absolute() for library in preloaded):
        pytest.skip("gcc comes without libasan.so")
    options = [f"-DCMAKE_CXX_FLAGS={CHECKS}", f"-DPython_EXECUTABLE={sys.executable}"]
    for command in (
        ["cmake", "-S", ROOT, "-B", tmp_path, "-DCMAKE_CXX_COMPILER=g++", *options],
        ["cmake", "--build", tmp_path, "--target", "_kernels"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    library = tmp_path / "_kernels.so"
    assert b"__asan_report_store" in library.read_bytes()
    checked = {
        "JAXLLM_LIBRARY": str(library),
        "LD_PRELOAD": ":".join(preloaded),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python leaves much behind on purpose
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "--timeout", "3000",
         "tests/ops/test_native.py", "tests/ops/test_native_attention.py"],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, **checked},
    )  # fmt: skip
    found = re.search(r"ERROR: AddressSanitizer.*|.*runtime error:.*", done.stdout + done.stderr)
    assert found is None, f"{found[0]}\n{done.stdout[-3000:]}\n{done.stderr[-8000:]}"
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-3000:]
    assert re.search(r"\d+ passed", done.stdout)
    assert "skipped" not in done.stdout
