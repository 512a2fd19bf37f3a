"""A process that tries cases: `KIND<tab>SEED` a line in, `KIND<tab>SEED<tab>OUTCOME<tab>...` out.

It has little time and memory for each; what ends it is seen by whoever gave it the case.
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

MEMORY = 2 << 30  # beyond what the process has when it begins
CPU_SECONDS = 20
WALL_SECONDS = 600  # for what waits without working: a FIFO that nobody writes to


def outcome(kind: Kind, seed: int, base: Path, scratch: Path) -> tuple[str, str]:
    """What becomes of one case: loaded, refused, or other and what."""
    directory = scratch / "case"
    shutil.copytree(base, directory)
    rng = Random(seed)
    mutate(rng, directory, kind.names)
    regular = all((directory / name).is_file() for name in kind.names)
    if kind.redigest and regular and rng.random() < 0.5:
        with contextlib.suppress(Exception):  # there may be nothing left to take the digest of
            kind.redigest(directory)
    try:
        return tried(lambda: kind.use(directory))
    finally:
        for path in scratch.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def tried(use: Callable[[], object]) -> tuple[str, str]:
    """Run something within the limits."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    spent = int(used.ru_utime + used.ru_stime)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (spent + CPU_SECONDS, hard))
    signal.alarm(WALL_SECONDS)
    try:
        use()
    except JaxllmError as error:
        return "refused", str(error)
    except BaseException as error:  # a panic of Rust's is none of Exception's
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        return "other", f"{type(error).__name__} at {place}: {error!s:.200}"
    finally:
        signal.alarm(0)
    return "loaded", ""


def main() -> None:
    bases, scratch = Path(sys.argv[1]), Path(tempfile.mkdtemp(dir=sys.argv[1]))
    # What libraries say of bad files goes nowhere; the answers keep the only way out.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        name, seed = line.rstrip("\n").split("\t")
        found, said = outcome(KINDS[name], int(seed), bases / name, scratch)
        answers.write(f"{name}\t{seed}\t{found}\t{' '.join(said.split())}\n")
    shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
