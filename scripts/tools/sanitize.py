"""The kernels with every access to memory and every operation checked: a table of what was found.

    python scripts/tools/sanitize.py [--cases 2000] [--seed 0] [--through-xla]

Builds them with AddressSanitizer and UndefinedBehaviorSanitizer, calls each on every instruction
set of this machine with seeded random cases (`tests.ops.random_cases`), and with --through-xla runs
the tests that call them as XLA does. The status is 1 where anything was found. Needs cmake and gcc.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
CHECKS = "-fsanitize=address,undefined,float-cast-overflow -fno-omit-frame-pointer -g1"
KERNELS = ("linear", "widen", "attend")
FINDING = re.compile(r"ERROR: AddressSanitizer.*|.*runtime error:.*|wrong answer:.*")
THROUGH_XLA = ("test_ffi.py", "test_native.py", "test_native_attention.py", "test_experts.py")


class Missing(Exception):
    """Something that this needs is not on this machine."""


class Row(NamedTuple):
    kernel: str
    isa: str
    cases: int
    findings: list[str]


def build(folder: Path) -> dict[str, str]:
    """The checked kernels, in `folder`; the environment in which Python takes them.

    Raises Missing by name.
    """
    for program in ("cmake", "gcc", "g++"):
        if shutil.which(program) is None:
            raise Missing(program)
    # libstdc++ as well: XLA throws, and the checks catch that only where both came first.
    preloaded = [
        subprocess.run(
            ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    if not all(Path(library).is_absolute() for library in preloaded):
        raise Missing("gcc's libasan.so")
    options = [f"-DCMAKE_CXX_FLAGS={CHECKS}", f"-DPython_EXECUTABLE={sys.executable}"]
    options += ["-DJAXLLM_OPTIMIZE=-O1"]  # -O2 takes minutes a set
    for command in (
        ["cmake", "-S", str(ROOT), "-B", str(folder), "-DCMAKE_CXX_COMPILER=g++", *options],
        ["cmake", "--build", str(folder), "--target", "_kernels", "--parallel", "2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
    library = folder / "_kernels.so"
    assert b"__asan_report_store" in library.read_bytes(), "built without the checks"
    return {
        **{name: value for name, value in os.environ.items() if name != "JAXLLM_ISA"},
        "JAXLLM_LIBRARY": str(library),
        "LD_PRELOAD": ":".join(preloaded),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python leaves much behind on purpose
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def _run(module: list[str], environment: dict[str, str]) -> tuple[str, list[str]]:
    """What a program of ours printed, and what is wrong with it."""
    done = subprocess.run(
        [sys.executable, "-m", *module],
        capture_output=True, text=True, cwd=ROOT, env=environment,
    )  # fmt: skip
    findings = FINDING.findall(done.stdout + done.stderr)
    if done.returncode and not findings:
        findings = [f"it ended with {done.returncode}: {(done.stdout + done.stderr)[-3000:]}"]
    return done.stdout, findings


def instruction_sets(environment: dict[str, str]) -> list[str]:
    """Those that this machine has, as the checked kernels see it."""
    code = "from jaxllm.ops import native; print(*native.available())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout.split()


def check(environment: dict[str, str], cases: int, seed: int, through_xla: bool) -> list[Row]:
    """A row for each kernel and instruction set, and one for the tests."""
    rows = []
    for isa in instruction_sets(environment):
        for kernel in KERNELS:
            asked = [kernel, isa, "--cases", str(cases), "--seed", str(seed)]
            _, findings = _run(["tests.ops.random_cases", *asked], environment)
            rows.append(Row(kernel, isa, cases, findings))
    if through_xla:
        tests = [f"tests/ops/{name}" for name in THROUGH_XLA]
        options = ["-q", "-p", "no:cacheprovider", "--timeout", "3000"]
        printed, findings = _run(["pytest", *options, *tests], environment)
        passed = re.search(r"(\d+) passed", printed)
        rows.append(Row("as XLA calls them", "each", int(passed[1]) if passed else 0, findings))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000, help="of each kernel and set")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--through-xla", action="store_true", help="the tests too: minutes")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            environment = build(Path(folder))
        except Missing as what:
            sys.exit(f"{what} is not there, which checking the kernels takes")
        rows = check(environment, asked.cases, asked.seed, asked.through_xla)
    print(f"{'kernel':<20}{'set':<14}{'cases':>8}{'findings':>10}")
    for row in rows:
        print(f"{row.kernel:<20}{row.isa:<14}{row.cases:>8}{len(row.findings):>10}")
    for row in rows:
        for finding in row.findings:
            print(f"{row.kernel}, {row.isa}: {finding}")
    return any(row.findings for row in rows)


if __name__ == "__main__":
    sys.exit(main())
