"""Shows that the tests see faults: puts each of mutants/*.toml into a copy of the sources.

A fault is one small change, found by its exact text; the tests that it names must fail with it and
pass without it. One design decision: the large libraries are imported once, and every run is a fork
of that process, so that a fault costs what its tests cost.

    python scripts/tools/mutate.py
    python scripts/tools/mutate.py --only rotary --only window

Faults that were killed are kept, and what has not changed since is not run again. The table of all
of them is mutants/README.md.
"""

import argparse
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
COPIED = ("jaxllm", "convert", "scripts", "tests", "pyproject.toml", "README.md", "Makefile")
KERNELS = Path("jaxllm/ops/native/csrc")
UNEDITABLE = """\
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "skbc" not in type(f).__module__]
"""
SECONDS = 600  # a fault that makes its tests hang for so long is seen
ENVIRONMENT = {
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    "CI": "1",  # hypothesis draws the same examples every time
}


class Fault(NamedTuple):
    """A change of one file, `old` to `new`; `tests`, as pytest takes them, should fail with it.

    wide: what is tried where they do not.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str
    wide: str


class Result(NamedTuple):
    """outcome: killed, survived, or stale (its text is not there once, its tests are none, or fail
    without it). by: the test that failed, or why it is stale.
    """

    outcome: str
    by: str = ""


def read_faults(folder: Path) -> list[Fault]:
    """The faults of all tables in a folder."""
    return [
        Fault(**row, wide=table["wide"])
        for path in sorted(folder.glob("*.toml"))
        for table in [tomllib.loads(path.read_text(encoding="utf-8"))]
        for row in table["fault"]
    ]


def is_stale(fault: Fault, root: Path) -> bool:
    """Whether the fault's text is not there exactly once."""
    path = root / fault.file
    return not path.is_file() or path.read_text(encoding="utf-8").count(fault.old) != 1


def results(
    faults: Sequence[Fault], root: Path, kept: dict[str, list[str]], libraries: Sequence[str]
) -> Iterator[tuple[Fault, Result]]:
    """Each fault's result, as it is found; `kept` is read, and grows."""
    for name in libraries:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        copy, passing = _copied(root, Path(folder) / "copy"), set[str]()
        for fault in faults:
            if is_stale(fault, root):
                yield fault, Result("stale")
                continue
            own = fault._replace(wide="")
            key = _digest(*own, *_texts([fault.file, *shlex.split(fault.tests)], root))
            if key in kept:
                yield fault, Result(*kept[key])
                continue
            try:
                result = _result(fault, copy, passing)
            except RuntimeError as error:  # its tests cannot say anything
                result = Result("stale", " ".join(str(error).split())[-200:])
            if result.outcome == "killed":
                kept[key] = list(result)
            yield fault, result


def _result(fault: Fault, copy: Path, passing: set[str]) -> Result:
    """Raises RuntimeError where its tests are none, or fail without any fault."""
    source = copy / fault.file
    good = source.read_text(encoding="utf-8")
    for tests in filter(None, (fault.tests, fault.wide)):
        if tests not in passing and (failed := _failed(tests, copy, None)):
            raise RuntimeError(f"{tests} fails without any fault: {failed}")
        passing.add(tests)
        source.write_text(good.replace(fault.old, fault.new), encoding="utf-8")
        try:
            library = _built(copy) if Path(fault.file).is_relative_to(KERNELS) else None
            failed = _failed(tests, copy, library)
        finally:
            source.write_text(good, encoding="utf-8")
        if failed:
            return Result("killed", failed)
    return Result("survived")


def _texts(names: Sequence[str], root: Path) -> Iterator[str]:
    """What stands in those of them that are files."""
    for path in (root / name for name in names):
        if path.is_file():
            yield path.read_text(encoding="utf-8")


def _copied(root: Path, copy: Path) -> Path:
    for name in COPIED:
        if (root / name).is_dir():
            skipped = shutil.ignore_patterns("__pycache__")
            shutil.copytree(root / name, copy / name, symlinks=True, ignore=skipped)
        elif (root / name).exists():
            shutil.copy(root / name, copy / name)
    return copy


def _failed(tests: str, copy: Path, library: Path | None) -> str:
    """The first test that fails, "" where none does; in a fork, from the copy's sources."""
    log = copy.parent / "log"
    sys.stdout.flush()
    child = os.fork()
    if not child:
        code = 4
        try:
            with log.open("wb") as out:
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
            code = _run(tests, copy, library)
        except BaseException:  # whatever it is, this process must not go on as its parent does
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said = log.read_text(encoding="utf-8", errors="replace")
    if code in (4, 5):  # nothing was run
        raise RuntimeError(f"pytest {tests}: {said.strip()[-400:]}")
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", said, re.MULTILINE)
    return "" if code == 0 else found[1] if found else f"{tests} (ended with {code})"


def _run(tests: str, copy: Path, library: Path | None) -> int:
    """pytest in the copy, in this process: nothing of jaxllm has been imported so far."""
    import pytest

    os.chdir(copy)
    sys.dont_write_bytecode = True  # a fault may come and go within a file's second
    # An editable installation finds its own sources before any path, here and in processes that
    # tests start, which run `sitecustomize` first.
    exec(UNEDITABLE)
    sys.path.insert(0, str(copy))
    (copy / "sitecustomize.py").write_text(UNEDITABLE, encoding="utf-8")
    os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    if library:
        os.environ["JAXLLM_LIBRARY"] = str(library)
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not full", "--tb", "no"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of plugins imported before
    hung = ["--timeout", str(SECONDS), "--timeout-method", "thread"]
    return int(pytest.main([*shlex.split(tests), *options, *hung]))


def _built(copy: Path) -> Path:
    """The kernels of the copy, those for any machine."""
    import jaxlib

    library, sources = copy.parent / "_kernels.so", copy / KERNELS
    include = Path(jaxlib.__file__).parent / "include"
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-isystem", include]
    command += ["-DJAXLLM_SET=portable", '-DJAXLLM_LAYER="layers/portable.h"']
    files = [sources / name for name in ("ffi.cc", "sets.cc", "set.cc")]
    subprocess.run([*map(str, command), *map(str, files), "-o", str(library)], check=True)
    return library


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:20]


def table(found: Sequence[tuple[Fault, Result]]) -> str:
    """The results as Markdown."""
    count = {outcome: 0 for outcome in ("killed", "survived", "stale")}
    rows = []
    for fault, result in found:
        count[result.outcome] += 1
        by = f"`{result.by}`" if result.by else ""
        rows.append(f"| {fault.name} | `{fault.file}` | {result.outcome} | {by} |")
    said = ", ".join(f"{n} {outcome}" for outcome, n in count.items())
    return "\n".join(
        [
            "# Faults that the tests see",
            "",
            "Written by `python scripts/tools/mutate.py`, which puts each fault of the tables"
            " beside this file into a copy of the sources and runs the tests that should notice:"
            f" {len(rows)} faults, {said}.",
            "",
            "| fault | in | outcome | the first test that failed |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main() -> int:
    """Tries the faults that were asked for; 1 where one survived or is stale."""
    parser = argparse.ArgumentParser(
        description="Put small faults into a copy of the sources and see that tests fail.",
        epilog="example: python scripts/tools/mutate.py --only rotary",
    )
    parser.add_argument("--only", action="append", help="faults whose name or file contains this")
    parser.add_argument("--root", type=Path, default=ROOT, help="the sources (default: these)")
    parser.add_argument(
        "--narrow", action="store_true", help="try a fault's own tests only, not the wide ones"
    )
    parser.add_argument("--again", action="store_true", help="forget the results that are kept")
    options = parser.parse_args()
    folder = options.root / "scripts" / "tools" / "mutants"
    memory = options.root / "build" / "mutants.json"
    wanted = [
        fault._replace(wide="") if options.narrow else fault
        for fault in read_faults(folder)
        if not options.only or any(word in fault.name + fault.file for word in options.only)
    ]
    kept = {} if options.again or not memory.exists() else json.loads(memory.read_text())
    memory.parent.mkdir(exist_ok=True)
    compiled = str(memory.parent.resolve() / "compiled")
    data = str(options.root.resolve().parent / "shared" / "data")
    found = []
    for name, value in {
        **ENVIRONMENT, "JAX_COMPILATION_CACHE_DIR": compiled, "JAXLLM_TEST_DATA": data,
    }.items():  # fmt: skip
        os.environ.setdefault(name, value)
    libraries = LIBRARIES if options.root == ROOT else ("pytest",)
    for fault, result in results(wanted, options.root, kept, libraries):
        found.append((fault, result))
        print(f"{len(found)}/{len(wanted)} {result.outcome}: {fault.name} {result.by}", flush=True)
        memory.write_text(json.dumps(kept), encoding="utf-8")
    if not options.only:
        (folder / "README.md").write_text(table(found), encoding="utf-8")
    return int(any(result.outcome != "killed" for _, result in found))


if __name__ == "__main__":
    sys.exit(main())
