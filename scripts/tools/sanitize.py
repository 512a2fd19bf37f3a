"""The kernels under AddressSanitizer and UndefinedBehaviorSanitizer: a table of findings.

    python scripts/tools/sanitize.py [--cases 2000] [--seed 0] [--through-xla]

It builds the kernels with both sanitizers and calls each on every instruction set of this machine
with seeded random cases (`tests.ops.random_cases`). --through-xla also runs the tests that call
them through XLA. The exit status is 1 if there are findings. It requires cmake and gcc.
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
KERNELS = ("linear", "dequantize", "attend", "multiply")
FINDING = re.compile(r"ERROR: AddressSanitizer.*|.*runtime error:.*|wrong answer:.*")
THROUGH_XLA = [
    f"tests/ops/test_{name}.py" for name in ("ffi", "native", "native_attention", "experts")
]
THROUGH_XLA += [
    "tests/weights/test_block_weight.py",
]


class Missing(Exception):
    """A required program or library is not installed."""


class Row(NamedTuple):
    kernel: str
    isa: str
    cases: int
    findings: list[str]


def build(folder: Path) -> dict[str, str]:
    """Build the checked kernels in `folder`; return the environment that makes Python load them.

    Raises:
        Missing: if a program or library is not installed.
    """
    for program in ("cmake", "gcc", "g++"):
        if shutil.which(program) is None:
            raise Missing(program)
    # libstdc++ too: XLA throws exceptions, and the sanitizers handle them only if both load first.
    preloaded = [
        subprocess.run(
            ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    if not all(Path(library).is_absolute() for library in preloaded):
        raise Missing("gcc's libasan.so")
    options = [f"-DCMAKE_CXX_FLAGS={CHECKS}", f"-DPython_EXECUTABLE={sys.executable}"]
    options += ["-DJAXLLM_SETS=machine", "-DJAXLLM_OPTIMIZE=-O1"]  # -O2 takes minutes per set
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
        "ASAN_OPTIONS": "detect_leaks=0",  # Python leaks much on purpose
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def run_module(module: list[str], environment: dict[str, str]) -> tuple[str, list[str]]:
    """Run a Python module; return its stdout and its findings."""
    done = subprocess.run(
        [sys.executable, "-m", *module],
        capture_output=True, text=True, cwd=ROOT, env=environment,
    )  # fmt: skip
    findings = FINDING.findall(done.stdout + done.stderr)
    if done.returncode and not findings:
        output = (done.stdout + done.stderr)[-3000:]
        findings = [f"ended with code {done.returncode}: {output}"]
    return done.stdout, findings


def list_instruction_sets(environment: dict[str, str]) -> list[str]:
    """Return this machine's instruction sets, as the checked kernels detect them."""
    code = "from jaxllm.ops import native; print(*native.available_isas())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout.split()


def check(environment: dict[str, str], cases: int, seed: int, through_xla: bool) -> list[Row]:
    """Return a row for each kernel and instruction set, and one for the tests."""
    rows = []
    for isa in list_instruction_sets(environment):
        for kernel in KERNELS:
            arguments = [kernel, isa, "--cases", str(cases), "--seed", str(seed)]
            _, findings = run_module(["tests.ops.random_cases", *arguments], environment)
            rows.append(Row(kernel, isa, cases, findings))
    if through_xla:
        options = ["-q", "-p", "no:cacheprovider", "--timeout", "3000"]
        output, findings = run_module(["pytest", *options, *THROUGH_XLA], environment)
        passed = re.search(r"(\d+) passed", output)
        rows.append(Row("through XLA", "all", int(passed[1]) if passed else 0, findings))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000, help="cases per kernel and set")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--through-xla", action="store_true", help="also run the tests (minutes)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            environment = build(Path(folder))
        except Missing as missing:
            sys.exit(f"{missing} is required, but not installed")
        rows = check(environment, options.cases, options.seed, options.through_xla)
    print(f"{'kernel':<20}{'set':<14}{'cases':>8}{'findings':>10}")
    for row in rows:
        print(f"{row.kernel:<20}{row.isa:<14}{row.cases:>8}{len(row.findings):>10}")
    for row in rows:
        for finding in row.findings:
            print(f"{row.kernel}, {row.isa}: {finding}")
    return any(row.findings for row in rows)


if __name__ == "__main__":
    sys.exit(main())
