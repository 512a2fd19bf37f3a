"""Run fuzz cases in processes: `python -m tests.fuzz.run [--cases N] [--first SEED] [--kind KIND]`.

A case is a kind and a seed, which determine the file. Exits with status 1 and lists the cases if
any has an outcome other than `loaded` and `refused`.
"""

import argparse
import collections
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Result(NamedTuple):
    kind: str
    seed: int
    outcome: str  # "loaded", "refused" or "other"
    message: str


def make_bases(directory: Path, kinds: Iterable[str]) -> None:
    """Write valid files of each kind to a separate directory, and read them."""
    from tests.fuzz.kinds import KINDS

    for name in kinds:
        (directory / name).mkdir()
        KINDS[name].make(directory / name)
        KINDS[name].use(directory / name)


def run_cases(bases: Path, cases: list[tuple[str, int]]) -> Iterator[Result]:
    """Yield each case's outcome; if a case ends the process, continue in a new one."""
    waiting = collections.deque(cases)
    while waiting:
        worker = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.worker", str(bases)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )  # fmt: skip
        assert worker.stdin is not None
        assert worker.stdout is not None
        with worker:
            while waiting:
                kind, seed = waiting[0]
                try:
                    worker.stdin.write(f"{kind}\t{seed}\n")
                    worker.stdin.flush()
                except BrokenPipeError:
                    pass
                answer = worker.stdout.readline()
                waiting.popleft()
                if not answer:
                    status = worker.wait()
                    name = signal.Signals(-status).name if status < 0 else f"status {status}"
                    yield Result(kind, seed, "other", f"ended its process: {name}")
                    break
                _, _, outcome, message = answer.rstrip("\n").split("\t", 3)
                yield Result(kind, seed, outcome, message)


def table(results: Iterable[Result]) -> str:
    """Format counts by kind, and every case that was neither loaded nor refused."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    bad = []
    for result in results:
        counts[result.kind][result.outcome] += 1
        if result.outcome == "other":
            bad.append(f"{result.kind} {result.seed}: {result.message}")
    total = sum(counts.values(), collections.Counter[str]())
    lines = [f"{'kind':18}{'cases':>8}{'loaded':>8}{'refused':>9}{'other':>7}"]
    for name, count in [*sorted(counts.items()), ("all", total)]:
        lines.append(
            f"{name:18}{count.total():8}{count['loaded']:8}{count['refused']:9}{count['other']:7}"
        )
    return "\n".join([*lines, "", *bad])


def main() -> None:
    from tests.fuzz.kinds import KINDS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    kinds = options.kind or list(KINDS)
    cases = [(kinds[n % len(kinds)], options.first + n // len(kinds)) for n in range(options.cases)]
    with tempfile.TemporaryDirectory() as folder:
        make_bases(Path(folder), kinds)
        with ThreadPoolExecutor(options.workers) as threads:
            parts = [cases[i :: options.workers] for i in range(options.workers)]
            found = threads.map(lambda part: list(run_cases(Path(folder), part)), parts)
            results = [result for part in found for result in part]
    print(table(results))
    sys.exit(any(result.outcome == "other" for result in results))


if __name__ == "__main__":
    main()
