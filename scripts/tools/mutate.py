"""Mutation testing: each fault of mutants/*.toml, put into a copy of the sources, must fail tests.

A fault is one small change, located by its exact text; the tests that it names must fail with it
and pass without it. One decision: the large libraries are imported once, and every run is a fork of
that process, so that a fault costs only the time of its tests.

    python scripts/tools/mutate.py
    python scripts/tools/mutate.py --only rotary --only window

Results of killed faults are cached in build/, and run again only if the fault, its source or its
tests change.
"""

import argparse
import functools
import hashlib
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = (
    "jax", "jax.numpy", "flax.linen", "optax", "torch", "hypothesis", "pytest", "scipy.stats",
    "transformers", "transformers.generation", "transformers.models.llama.modeling_llama",
    "transformers.models.mistral.modeling_mistral", "transformers.models.gpt2.modeling_gpt2",
    "tokenizers", "msgspec", "re2", "jinja2", "typer.testing", "rich.progress",
)  # fmt: skip
COPIED = (
    "jaxllm", "convert", "scripts", "tests", "pyproject.toml", "README.md", "Makefile",
    "CMakeLists.txt",
)  # fmt: skip
KERNELS = Path("jaxllm/ops/native/csrc")
UNEDITABLE = """\
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "skbc" not in type(f).__module__]
"""
OUTCOMES = ("killed", "survived", "stale", "not run here")
SECONDS = 600  # timeout of a test; a fault that makes a test hang is killed
ENVIRONMENT = {
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_parallel_codegen_split_count=1",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    "CI": "1",  # hypothesis draws the same examples every time
}


class Fault(NamedTuple):
    """A change of one file, `old` to `new`."""

    name: str
    file: str
    old: str
    new: str
    tests: str
    """pytest arguments of the tests that should fail."""
    wide: str
    """pytest arguments to try if those pass."""
    isa: str = "portable"
    """For C++: the instruction set that is built, and that the tests run with."""


class Result(NamedTuple):
    """The outcome of a fault.

    It is stale if the source does not have its text exactly once, if it does not compile, or if its
    tests do not exist or fail without it.
    """

    outcome: str
    """killed, survived, stale, or "not run here": this machine lacks its instruction set."""
    by: str = ""
    """The test that failed, or the reason."""


def read_faults(folder: Path) -> list[Fault]:
    """Read the faults of all tables in a folder."""
    return [
        Fault(**row, wide=table["wide"])
        for path in sorted(folder.glob("*.toml"))
        for table in [tomllib.loads(path.read_text(encoding="utf-8"))]
        for row in table["fault"]
    ]


def is_stale(fault: Fault, root: Path) -> bool:
    """Return whether the source does not have the fault's text exactly once."""
    path = root / fault.file
    return not path.is_file() or path.read_text(encoding="utf-8").count(fault.old) != 1


def try_faults(
    faults: Sequence[Fault], root: Path, cache: dict[str, list[str]], libraries: Sequence[str]
) -> Iterator[tuple[Fault, Result]]:
    """Yield each fault's result; read known results from `cache`, and add new ones to it."""
    for name in libraries:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        copy, passing = _copy_sources(root, Path(folder) / "copy"), set[tuple[str, str]]()
        for fault in faults:
            if is_stale(fault, root):
                yield fault, Result("stale")
                continue
            texts = _read_texts([fault.file, *shlex.split(fault.tests)], root)
            key = _digest(*fault._replace(wide=""), *texts)
            if key in cache:
                yield fault, Result(*cache[key])
                continue
            if missing := _find_missing(fault.isa, copy):
                yield fault, Result("not run here", f"(needs {missing})")
                continue
            try:
                result = _try_fault(fault, copy, passing)
            except RuntimeError as error:  # it does not compile, or its tests do not run or pass
                result = Result("stale", " ".join(str(error).split())[-200:])
            if result.outcome == "killed":
                cache[key] = list(result)
            yield fault, result


def _try_fault(fault: Fault, copy: Path, passing: set[tuple[str, str]]) -> Result:
    """Run the tests of a fault; `passing` has the tests and sets that pass without one.

    Raises:
        RuntimeError: if it does not compile, if there are no such tests, or if they fail without
            the fault.
    """
    source = copy / fault.file
    good = source.read_text(encoding="utf-8")
    isa = fault.isa if Path(fault.file).is_relative_to(KERNELS) else ""
    for tests in filter(None, (fault.tests, fault.wide)):
        if (tests, isa) not in passing and (failed := _find_failure(tests, copy, isa)):
            raise RuntimeError(f"{tests} fails without a fault: {failed}")
        passing.add((tests, isa))
        source.write_text(good.replace(fault.old, fault.new), encoding="utf-8")
        try:
            failed = _find_failure(tests, copy, isa)
        finally:
            source.write_text(good, encoding="utf-8")
        if failed:
            return Result("killed", failed)
    return Result("survived")


def _read_texts(names: Sequence[str], root: Path) -> Iterator[str]:
    """Read those of the names that are files."""
    for path in (root / name for name in names):
        if path.is_file():
            yield path.read_text(encoding="utf-8")


def _copy_sources(root: Path, copy: Path) -> Path:
    for name in COPIED:
        if (root / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(root / name, copy / name, symlinks=True, ignore=ignored)
        elif (root / name).exists():
            shutil.copy(root / name, copy / name)
    (copy / "jaxllm" / "convert").symlink_to("../convert")  # what an editable install maps
    (copy / "sitecustomize.py").write_text(UNEDITABLE, encoding="utf-8")
    return copy


@functools.cache
def _find_missing(isa: str, copy: Path) -> str:
    """Return what the machine lacks for an instruction set, or "" if it can run it."""
    if isa == "portable":
        return ""
    code = f"""from jaxllm.ops import native
print("" if {isa!r} in native.available_isas() else native.INSTRUCTION_SETS[{isa!r}])"""
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, cwd=copy, env=environment
    ).stdout.strip()


def _find_failure(tests: str, copy: Path, isa: str) -> str:
    """Run tests of the copy in a fork, with the copy's kernels if `isa` is given.

    Returns:
        The first test that fails, or "" if all pass.
    """
    library = _build_kernels(copy, isa) if isa else None
    log = copy.parent / "log"
    sys.stdout.flush()
    child = os.fork()
    if not child:
        code = 4
        try:
            with log.open("wb") as out:
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
            if library:
                os.environ |= {"JAXLLM_LIBRARY": str(library), "JAXLLM_ISA": isa}
            code = _run_pytest(tests, copy)
        except BaseException:  # this process must not continue with the parent's code
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    output = log.read_text(encoding="utf-8", errors="replace")
    if code in (4, 5):  # usage error, or no tests
        raise RuntimeError(f"pytest {tests}: {output.strip()[-400:]}")
    match = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output, re.MULTILINE)
    return "" if code == 0 else match[1] if match else f"{tests} (ended with code {code})"


def _run_pytest(tests: str, copy: Path) -> int:
    """Run pytest on the copy in this process, which has not imported jaxllm yet."""
    import pytest

    os.chdir(copy)
    sys.dont_write_bytecode = True  # two versions of a file may have the same modification time
    # An editable install takes precedence over sys.path. It is removed here, and by
    # `sitecustomize` in processes that tests start.
    exec(UNEDITABLE)
    sys.path.insert(0, str(copy))
    os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not full", "--tb", "no"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # plugins are imported before
    timeout = ["--timeout", str(SECONDS), "--timeout-method", "thread"]
    # A fault's own -m, the last one, counts.
    return int(pytest.main([*options, *timeout, *shlex.split(tests)]))


def _build_kernels(copy: Path, isa: str) -> Path:
    """Build the copy's kernels for an instruction set; equal sources are built once."""
    files = sorted(path for path in (copy / KERNELS).rglob("*") if path.is_file())
    library = copy.parent / f"{isa}-{_digest(*(path.read_text() for path in files))}.so"
    if library.exists():
        return library
    folder = copy.parent / isa
    options = [f"-DJAXLLM_SETS={isa}", f"-DPython_EXECUTABLE={sys.executable}"]
    options += ["-DJAXLLM_OPTIMIZE=-O1"]
    for command in (
        ["cmake", "-S", str(copy), "-B", str(folder), *options],
        ["cmake", "--build", str(folder), "--target", "_kernels", "--parallel", "2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{isa} is not built: {done.stdout}{done.stderr}")
    shutil.copy(folder / "_kernels.so", library)
    return library


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:20]


def main() -> int:
    """Try the selected faults; return 1 if one survived or is stale."""
    parser = argparse.ArgumentParser(
        description="Put small faults into a copy of the sources and check that tests fail.",
        epilog="example: python scripts/tools/mutate.py --only rotary",
    )
    parser.add_argument(
        "--only", action="append", help="part of a fault's name or file; repeatable"
    )
    parser.add_argument(
        "--root", type=Path, default=ROOT, help="source tree (default: this repository)"
    )
    parser.add_argument(
        "--narrow", action="store_true", help="each fault's tests only, not the wide ones"
    )
    parser.add_argument("--again", action="store_true", help="no cached results")
    options = parser.parse_args()
    folder = options.root / "scripts" / "tools" / "mutants"
    cache_file = options.root / "build" / "mutants.json"
    selected = [
        fault._replace(wide="") if options.narrow else fault
        for fault in read_faults(folder)
        if not options.only or any(word in fault.name + fault.file for word in options.only)
    ]
    cache = {} if options.again or not cache_file.exists() else json.loads(cache_file.read_text())
    cache_file.parent.mkdir(exist_ok=True)
    compiled = str(cache_file.parent.resolve() / "compiled")
    data = str(options.root.resolve().parent / "shared" / "data")
    results = []
    for name, value in {
        **ENVIRONMENT, "JAX_COMPILATION_CACHE_DIR": compiled, "JAXLLM_TEST_DATA": data,
    }.items():  # fmt: skip
        os.environ.setdefault(name, value)
    libraries = LIBRARIES if options.root == ROOT else ("pytest",)
    for fault, result in try_faults(selected, options.root, cache, libraries):
        results.append((fault, result))
        progress = f"{len(results)}/{len(selected)} {result.outcome}"
        print(f"{progress}: {fault.name} {result.by}", flush=True)
        cache_file.write_text(json.dumps(cache), encoding="utf-8")
    counts = Counter(result.outcome for _, result in results)
    print(", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES))
    return int(counts["survived"] + counts["stale"] > 0)


if __name__ == "__main__":
    sys.exit(main())
