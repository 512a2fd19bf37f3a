"""The fault tables match the sources, and a fault is detected."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxllm.ops import native
from scripts.tools import mutate
from tests.conftest import ROOT

FAULTS = mutate.read_faults(ROOT / "scripts" / "tools" / "mutants")
TABLE = """
wide = "tests/test_sums.py"
[[fault]]
name = "sum subtracts"
file = "jaxllm/sums.py"
old = "a + b"
new = "a - b"
tests = "tests/test_sums.py -k sum"
[[fault]]
name = "product divides"
file = "jaxllm/sums.py"
old = "a * b"
new = "a / b"
tests = "tests/test_sums.py"
[[fault]]
name = "text is missing"
file = "jaxllm/sums.py"
old = "a % b"
new = "a"
tests = "tests/test_sums.py"
[[fault]]
name = "kernels subtract"
file = "jaxllm/ops/native/csrc/sums.h"
old = "a + b"
new = "a - b"
tests = "tests/test_kernels.py"
isa = "wide"
[[fault]]
name = "kernels subtract"
file = "jaxllm/ops/native/csrc/sums.h"
old = "a + b"
new = "a - b"
tests = "tests/test_kernels.py"
isa = "wider"
"""
# The machine has one of two sets. The library is a text: the set that it is built for, and the
# source.
NATIVE = """
INSTRUCTION_SETS = {"wide": "AVX", "wider": "AVX and VNNI"}
available_isas = lambda: ["wide"]
"""
CMAKE = """
cmake_minimum_required(VERSION 3.20)
project(sums LANGUAGES NONE)
file(READ jaxllm/ops/native/csrc/sums.h SOURCE)
file(WRITE ${CMAKE_BINARY_DIR}/_kernels.so "${JAXLLM_SETS}: ${SOURCE}")
add_custom_target(_kernels)
"""
KERNEL_TEST = """
import os
from pathlib import Path

def test_library():
    assert os.environ["JAXLLM_ISA"] == "wide"
    assert Path(os.environ["JAXLLM_LIBRARY"]).read_text() == "wide: a + b"
"""


def test_every_fault_matches_source_and_tests_exist() -> None:
    """Every fault matches its source once, has a unique name, and names existing tests."""
    assert len(FAULTS) >= 60
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert [fault.name for fault in FAULTS if mutate.is_stale(fault, ROOT)] == []
    for fault in FAULTS:
        assert fault.new not in ("", fault.old) or fault.file.endswith(".h"), fault.name
        assert fault.isa in native.INSTRUCTION_SETS, fault.name
        for word in shlex.split(f"{fault.tests} {fault.wide}"):
            assert not word.startswith("tests/") or (ROOT / word).exists(), fault.name


def test_mutate_reports_each_outcome(tmp_path: Path) -> None:
    """The script reports each fault as killed, survived, stale or not run here, builds and selects
    the instruction set of a fault in C++, and restores the source.
    """
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not installed")
    for name, text in {
        "jaxllm/sums.py": "add = lambda a, b: a + b\ntimes = lambda a, b: a * b\n",
        "jaxllm/__init__.py": "",
        "jaxllm/ops/native/__init__.py": NATIVE,
        "jaxllm/ops/native/csrc/sums.h": "a + b",
        "CMakeLists.txt": CMAKE,
        "tests/test_kernels.py": KERNEL_TEST,
        "tests/test_sums.py": "from jaxllm.sums import add\n\n\n"
        "def test_sum():\n    assert add(1, 2) == 3\n",
        "scripts/tools/mutants/all.toml": TABLE,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    before = (tmp_path / "jaxllm/sums.py").read_bytes()
    command = [sys.executable, ROOT / "scripts" / "tools" / "mutate.py", "--root", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and not done.stderr, done.stderr
    assert done.stdout.splitlines() == [
        "1/5 killed: sum subtracts tests/test_sums.py::test_sum",
        "2/5 survived: product divides ",
        "3/5 stale: text is missing ",
        "4/5 killed: kernels subtract tests/test_kernels.py::test_library",
        "5/5 not run here: kernels subtract (needs AVX and VNNI)",
        "2 killed, 1 survived, 1 stale, 1 not run here",
    ]
    assert (tmp_path / "jaxllm/sums.py").read_bytes() == before
