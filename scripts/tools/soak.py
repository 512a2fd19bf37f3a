"""Soak test: many requests through `LM.serve` and many generations in one process.

Requests arrive at random times; some are cancelled while they run, some are invalid. Every answer
must equal that of `LM.generate` for the prompt alone. Live arrays must not grow after the first
fifth. No program may compile after the first half (earlier, combinations of samplers may be new).
Memory is printed, and its growth is limited by --most-growth. One decision: --seed determines
everything random, including the arrivals, so that a run is reproducible.

    python scripts/tools/soak.py --requests 1000 --generations 10000

The exit status is 1 if an answer differs or something grows.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where `scripts` is
import jaxllm
from jaxllm.errors import JaxllmError
from jaxllm.runtime.progress import steps_bar
from scripts.tools.same_bits import cancel_after

MAX_PROMPT, MAX_NEW = 24, 16  # tokens
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9},
    {"temperature": 1.1, "top_k": 20},
    {"stopping_criteria": lambda text, ids: len(ids) >= 6},
)
INVALID: tuple[dict[str, Any], ...] = (
    {"prompt": [10**9]},
    {"prompt": None},
    {"prompt": [5], "temperature": "hot"},
    {"prompt": [5], "max_tokens": 5},
    {"prompt": [5], "num_beams": 4},
    {"prompt": [5], "max_new_tokens": 2**40},
)


class Mark(NamedTuple):
    """State of the process after some steps: compiled programs, live arrays, bytes of memory."""

    steps: int
    programs: int
    arrays: int
    nbytes: int


class Monitor:
    """A recorder of marks in a phase of `total` steps: one per tenth, the first after a fifth."""

    def __init__(self, total: int) -> None:
        self.marks: list[Mark] = []
        self._at = {total * tenth // 10 for tenth in range(2, 11)}
        self._steps = self._programs = 0
        jax.monitoring.register_event_duration_secs_listener(self._count)

    def step(self) -> None:
        """Count a step, and record a mark if one is due."""
        self._steps += 1
        if self._steps in self._at:
            gc.collect()
            mark = Mark(self._steps, self._programs, len(jax.live_arrays()), resident_bytes())
            self.marks.append(mark)

    def describe_growth(self, most_growth: int) -> list[str]:
        """Return a message for each quantity that grew too much."""
        first, last = self.marks[0], self.marks[-1]
        half = next(mark for mark in self.marks if 2 * mark.steps >= last.steps)
        growth = {
            "compiled programs than after the first half": (last.programs - half.programs, 0),
            "live arrays than after the first fifth": (last.arrays - first.arrays, 0),
            "bytes than after the first fifth": (last.nbytes - first.nbytes, most_growth),
        }
        return [f"{n:,} more {label}" for label, (n, limit) in growth.items() if n > limit]

    def _count(self, event: str, seconds: float, **_: Any) -> None:
        self._programs += event == "/jax/core/compile/backend_compile_duration"


def resident_bytes() -> int:
    """Return the process's resident memory in bytes, or its peak without /proc."""
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def draw_requests(lm: jaxllm.LM, count: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Draw requests, of which one in ten is invalid and one in ten is cancelled."""
    requests: list[dict[str, Any]] = []
    for _ in range(count):
        kind = rng.integers(10)
        request = draw_request(lm, rng) if kind else INVALID[rng.integers(len(INVALID))]
        cancel = {"is_cancelled": cancel_after(int(rng.integers(0, 12)))} if kind == 1 else {}
        requests.append({**request, **cancel})
    return requests


def draw_request(lm: jaxllm.LM, rng: np.random.Generator) -> dict[str, Any]:
    """Draw a prompt and options."""
    prompt = rng.integers(3, lm.config.vocab_size, rng.integers(1, MAX_PROMPT + 1)).tolist()
    options = OPTIONS[rng.integers(len(OPTIONS))]
    new, seed = int(rng.integers(1, MAX_NEW + 1)), int(rng.integers(1 << 32))
    return {"prompt": prompt, "max_new_tokens": new, "seed": seed, **options}


def serve(
    lm: jaxllm.LM, count: int, seed: int, monitor: Monitor, show: bool | None = None
) -> dict[str, int]:
    """Serve `count` requests that arrive at random; return the number of each finish reason.

    Raises:
        SystemExit: if an answer is missing, or not as for the prompt alone.
    """
    rng = np.random.default_rng(seed)
    requests = draw_requests(lm, count, rng)

    def yield_arrivals() -> Iterator[dict[str, Any] | None]:
        for request in requests:
            while rng.random() < 0.4:
                yield None
            yield request

    reasons: dict[str, int] = {}
    with steps_bar("requests", count, show) as advance:
        for number, answer in lm.serve(yield_arrivals(), rows=4, capacity=MAX_PROMPT + MAX_NEW):
            reason = check_answer(lm, requests[number], answer)
            reasons[reason] = reasons.get(reason, 0) + 1
            monitor.step()
            advance()
    if sum(reasons.values()) != count:
        raise SystemExit(f"{count} requests, {sum(reasons.values())} answers")
    return reasons


def check_answer(lm: jaxllm.LM, request: dict[str, Any], answer: Any) -> str:
    """Return the finish reason of an answer.

    Raises:
        SystemExit: if the answer differs from that for the prompt alone.
    """
    if isinstance(answer, JaxllmError) != (request in INVALID):
        raise SystemExit(f"request {request} got {answer}")
    if isinstance(answer, JaxllmError):
        return "refused"
    options = {k: v for k, v in request.items() if k not in ("prompt", "is_cancelled")}
    expected = lm.generate(request["prompt"], **options).tokens
    if answer.finish_reason == "cancelled":
        expected = expected[: len(answer.tokens)]
    if answer.tokens != expected:
        raise SystemExit(f"request {request} got {answer.tokens}, expected {expected}")
    return str(answer.finish_reason)


def generate(
    lm: jaxllm.LM, count: int, seed: int, monitor: Monitor, show: bool | None = None
) -> None:
    """Generate `count` times, repeating `count / 100` requests (at least 4).

    Raises:
        SystemExit: if a request's tokens change.
    """
    rng = np.random.default_rng(seed)
    cases = [draw_request(lm, rng) for _ in range(max(4, count // 100))]
    first_tokens: dict[int, list[int]] = {}
    with steps_bar("generations", count, show) as advance:
        for step in range(count):
            case = step % len(cases)
            tokens = lm.generate(**cases[case]).tokens
            if tokens != first_tokens.setdefault(case, tokens):
                raise SystemExit(f"generation {step}: {tokens}, expected {first_tokens[case]}")
            monitor.step()
            advance()


def report(name: str, monitor: Monitor, most_growth: int) -> bool:
    """Print a phase's marks and its growth; return whether nothing grew."""
    print(f"{name:>12} {'programs':>9} {'arrays':>7} {'memory':>10}")
    for mark in monitor.marks:
        row = f"{mark.steps:>12,} {mark.programs:>9,} {mark.arrays:>7,}"
        print(f"{row} {mark.nbytes / 1e6:>7,.1f} MB")
    for message in (messages := monitor.describe_growth(most_growth)):
        print(f"{name}: {message}")
    return not messages


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo:llama", help="model, as for jaxllm generate")
    parser.add_argument("--requests", type=int, default=1000, help="requests through LM.serve")
    parser.add_argument("--generations", type=int, default=10_000, help="calls of LM.generate")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    parser.add_argument(
        "--most-growth", type=float, default=64, metavar="MB", help="memory growth limit per phase"
    )
    options = parser.parse_args(arguments)
    if min(options.requests, options.generations) < 10:
        parser.error("--requests and --generations must be at least 10")
    lm, passed = jaxllm.load(options.model, dtype="float32"), True
    most_growth = int(options.most_growth * 1e6)
    monitor = Monitor(options.requests)
    reasons = serve(lm, options.requests, options.seed, monitor)
    passed &= report("requests", monitor, most_growth)
    print(
        "finish reasons: " + ", ".join(f"{n:,} {reason}" for reason, n in sorted(reasons.items()))
    )
    monitor = Monitor(options.generations)
    generate(lm, options.generations, options.seed, monitor)
    passed &= report("generations", monitor, most_growth)
    print("every answer equals that for the prompt alone")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
