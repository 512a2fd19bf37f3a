"""Long runs: many requests through `LM.serve`, many generations in one process.

Requests arrive at random, some are cancelled while they run, some are nonsense. Every answer must
be what `LM.generate` gives the prompt alone. After the first fifth live arrays may not grow, after
the first half no program may be compiled any more (until then a combination of samplers may come
for the first time); memory is shown, and bounded by --most-growth. Whatever is random comes from
--seed, arrivals too: a run can be had again.

    python scripts/tools/soak.py --requests 1000 --generations 10000

Exit status 1 where something differs or grows.
"""

import argparse
import gc
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import jaxllm
from jaxllm.errors import JaxllmError
from jaxllm.runtime.progress import steps_bar

LONGEST, NEW = 24, 16  # tokens of a prompt, and new ones
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9},
    {"temperature": 1.1, "top_k": 20},
    {"stopping_criteria": lambda text, ids: len(ids) >= 6},
)
NONSENSE: tuple[dict[str, Any], ...] = (
    {"prompt": [10**9]},
    {"prompt": None},
    {"prompt": [5], "temperature": "hot"},
    {"prompt": [5], "max_tokens": 5},
    {"prompt": [5], "num_beams": 4},
    {"prompt": [5], "max_new_tokens": 2**40},
)


class Mark(NamedTuple):
    """What the process holds at some point: programs compiled so far, arrays, bytes of memory."""

    done: int
    programs: int
    arrays: int
    nbytes: int


class Watch:
    """Takes marks of a phase of `total` steps, one each tenth, the first after a fifth."""

    def __init__(self, total: int) -> None:
        self.marks: list[Mark] = []
        self._at = {total * tenth // 10 for tenth in range(2, 11)}
        self._done = self._programs = 0
        jax.monitoring.register_event_duration_secs_listener(self._count)

    def step(self) -> None:
        """One more step is done."""
        self._done += 1
        if self._done in self._at:
            gc.collect()
            mark = Mark(self._done, self._programs, len(jax.live_arrays()), resident())
            self.marks.append(mark)

    def complaints(self, most_growth: int) -> list[str]:
        """What grew, since when."""
        first, last = self.marks[0], self.marks[-1]
        half = next(mark for mark in self.marks if 2 * mark.done >= last.done)
        grown = {
            "compiled programs than after the first half": (last.programs - half.programs, 0),
            "live arrays than after the first fifth": (last.arrays - first.arrays, 0),
            "bytes than after the first fifth": (last.nbytes - first.nbytes, most_growth),
        }
        return [f"{n:,} more {what}" for what, (n, most) in grown.items() if n > most]

    def _count(self, event: str, seconds: float, **_: Any) -> None:
        self._programs += event == "/jax/core/compile/backend_compile_duration"


def resident() -> int:
    """Bytes of memory that the process has now; its peak where the system does not say."""
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def requests(lm: jaxllm.LM, count: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Requests: one in ten is nonsense, one in ten is cancelled."""
    made: list[dict[str, Any]] = []
    for _ in range(count):
        kind = rng.integers(10)
        request = asked(lm, rng) if kind else NONSENSE[rng.integers(len(NONSENSE))]
        gone = {"is_cancelled": after(int(rng.integers(0, 12)))} if kind == 1 else {}
        made.append({**request, **gone})
    return made


def asked(lm: jaxllm.LM, rng: np.random.Generator) -> dict[str, Any]:
    """A prompt and options."""
    prompt = rng.integers(3, lm.config.vocab_size, rng.integers(1, LONGEST + 1)).tolist()
    options = OPTIONS[rng.integers(len(OPTIONS))]
    new, seed = int(rng.integers(1, NEW + 1)), int(rng.integers(1 << 32))
    return {"prompt": prompt, "max_new_tokens": new, "seed": seed, **options}


def after(times: int) -> Any:
    """A `is_cancelled` that says yes from the so-manieth time on that it is asked."""
    left = iter(range(times))
    return lambda: next(left, None) is None


def serve(
    lm: jaxllm.LM, count: int, seed: int, watch: Watch, show: bool | None = None
) -> dict[str, int]:
    """Serve `count` requests that arrive at random; how each ended. Raises where one is wrong."""
    rng = np.random.default_rng(seed)
    waiting = requests(lm, count, rng)

    def arriving() -> Iterator[dict[str, Any] | None]:
        for request in waiting:
            while rng.random() < 0.4:
                yield None
            yield request

    ends: dict[str, int] = {}
    with steps_bar("requests", count, show) as advance:
        for number, answer in lm.serve(arriving(), rows=4, capacity=LONGEST + NEW):
            end = check(lm, waiting[number], answer)
            ends[end] = ends.get(end, 0) + 1
            watch.step()
            advance()
    if sum(ends.values()) != count:
        raise SystemExit(f"{count} requests, {sum(ends.values())} answers")
    return ends


def check(lm: jaxllm.LM, request: dict[str, Any], answer: Any) -> str:
    """How a request ended. Raises SystemExit for an answer that it does not get alone."""
    if isinstance(answer, JaxllmError) != (request in NONSENSE):
        raise SystemExit(f"request {request} got {answer}")
    if isinstance(answer, JaxllmError):
        return "refused"
    options = {k: v for k, v in request.items() if k not in ("prompt", "is_cancelled")}
    alone = lm.generate(request["prompt"], **options).tokens
    if answer.finish_reason == "cancelled":
        alone = alone[: len(answer.tokens)]
    if answer.tokens != alone:
        raise SystemExit(f"request {request} got {answer.tokens}, alone {alone}")
    return str(answer.finish_reason)


def generate(lm: jaxllm.LM, count: int, seed: int, watch: Watch, show: bool | None = None) -> None:
    """Generate `count` times, over and over the same hundredth; the same must come out."""
    rng = np.random.default_rng(seed)
    cases = [asked(lm, rng) for _ in range(max(4, count // 100))]
    found: dict[int, list[int]] = {}
    with steps_bar("generations", count, show) as advance:
        for step in range(count):
            case = step % len(cases)
            tokens = lm.generate(**cases[case]).tokens
            if tokens != found.setdefault(case, tokens):
                raise SystemExit(f"generation {step}: {tokens}, before {found[case]}")
            watch.step()
            advance()


def report(name: str, watch: Watch, most_growth: int) -> bool:
    """Print a phase's marks, and what grew."""
    print(f"{name:>12} {'programs':>9} {'arrays':>7} {'memory':>10}")
    for mark in watch.marks:
        row = f"{mark.done:>12,} {mark.programs:>9,} {mark.arrays:>7,}"
        print(f"{row} {mark.nbytes / 1e6:>7,.1f} MB")
    for complaint in (complaints := watch.complaints(most_growth)):
        print(f"{name}: {complaint}")
    return not complaints


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo:llama", help="as for jaxllm generate")
    parser.add_argument("--requests", type=int, default=1000, help="through LM.serve")
    parser.add_argument("--generations", type=int, default=10_000, help="by LM.generate")
    parser.add_argument("--seed", type=int, default=0, help="of everything random")
    parser.add_argument(
        "--most-growth", type=float, default=64, metavar="MB", help="of memory in a phase"
    )
    asked_for = parser.parse_args(arguments)
    if min(asked_for.requests, asked_for.generations) < 10:
        parser.error("--requests and --generations must be at least 10")
    lm, flat = jaxllm.load(asked_for.model, dtype="float32"), True
    most = int(asked_for.most_growth * 1e6)
    watch = Watch(asked_for.requests)
    ends = serve(lm, asked_for.requests, asked_for.seed, watch)
    flat &= report("requests", watch, most)
    print("ended: " + ", ".join(f"{n:,} {end}" for end, n in sorted(ends.items())))
    watch = Watch(asked_for.generations)
    generate(lm, asked_for.generations, asked_for.seed, watch)
    flat &= report("generations", watch, most)
    print("every answer is what the prompt gets alone")
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(main())
