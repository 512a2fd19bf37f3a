"""The fault tables match the sources, and a fault is detected."""

import shlex
import subprocess
import sys
from pathlib import Path

from scripts.tools import mutate
from tests.conftest import ROOT

FAULTS = mutate.read_faults(ROOT / "scripts" / "tools" / "mutants")
TABLE = """
wide = "tests"
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
"""


def test_every_fault_matches_source_and_tests_exist() -> None:
    """Every fault of the tables matches its source once, has a unique name, and names existing
    tests.
    """
    assert len(FAULTS) >= 60
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert [fault.name for fault in FAULTS if mutate.is_stale(fault, ROOT)] == []
    for fault in FAULTS:
        assert fault.new not in ("", fault.old) or fault.file.endswith(".h"), fault.name
        for word in shlex.split(f"{fault.tests} {fault.wide}"):
            assert not word.startswith("tests/") or (ROOT / word).exists(), fault.name


def test_mutate_reports_killed_survived_and_stale_faults(tmp_path: Path) -> None:
    """The script reports each fault as killed, survived or stale, and restores the source."""
    for name, text in {
        "jaxllm/sums.py": "add = lambda a, b: a + b\ntimes = lambda a, b: a * b\n",
        "jaxllm/__init__.py": "",
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
        "1/3 killed: sum subtracts tests/test_sums.py::test_sum",
        "2/3 survived: product divides ",
        "3/3 stale: text is missing ",
        "1 killed, 1 survived, 1 stale",
    ]
    assert (tmp_path / "jaxllm/sums.py").read_bytes() == before
