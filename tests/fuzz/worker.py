"""Fuzz worker: reads lines `KIND<tab>SEED`, writes `KIND<tab>SEED<tab>OUTCOME<tab>MESSAGE`.

Time and memory per case are limited; the parent detects a case that ends the process.
"""

import contextlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random

from jaxllm.errors import JaxllmError
from tests.fuzz.kinds import KINDS, Kind
from tests.fuzz.mutate import mutate

MEMORY = 2 << 30  # in addition to the process's memory at its start
CPU_SECONDS = 20
WALL_SECONDS = 600  # for blocking calls: a FIFO without a writer


def outcome(kind: Kind, seed: int, base: Path, scratch: Path) -> tuple[str, str]:
    """Run one case; return its outcome (loaded, refused or other) and a message."""
    directory = scratch / "case"
    shutil.copytree(base, directory)
    rng = Random(seed)
    mutate(rng, directory, kind.names)
    regular = all((directory / name).is_file() for name in kind.names)
    if kind.redigest and regular and rng.random() < 0.5:
        with contextlib.suppress(Exception):  # the mutated file may be unreadable
            kind.redigest(directory)
    try:
        return run_limited(lambda: kind.use(directory))
    finally:
        for path in scratch.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def run_limited(use: Callable[[], object]) -> tuple[str, str]:
    """Call `use` within the time limits; return its outcome and a message."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    spent = int(used.ru_utime + used.ru_stime)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (spent + CPU_SECONDS, hard))
    signal.alarm(WALL_SECONDS)
    try:
        use()
    except JaxllmError as error:
        return "refused", str(error)
    except BaseException as error:  # a Rust panic is not an Exception
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        return "other", f"{type(error).__name__} at {place}: {error!s:.200}"
    finally:
        signal.alarm(0)
    return "loaded", ""


def main() -> None:
    bases, scratch = Path(sys.argv[1]), Path(tempfile.mkdtemp(dir=sys.argv[1]))
    # Libraries' output about bad files is discarded; only answers reach stdout.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        name, seed = line.rstrip("\n").split("\t")
        found, message = outcome(KINDS[name], int(seed), bases / name, scratch)
        answers.write(f"{name}\t{seed}\t{found}\t{' '.join(message.split())}\n")
    shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
