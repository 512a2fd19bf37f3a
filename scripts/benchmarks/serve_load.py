"""A load client for servers with OpenAI's interface: throughput and latencies under N clients.

The protocol, the names of the results and their formulas are those of `vllm bench serve`: prompts
of random tokens, streamed completions of a fixed length, requests that arrive as a gamma process.
It works with llama.cpp's `llama-server` too. `--in-process` sends the same requests through
`LM.serve` in this process, which shows what HTTP costs. One decision: several targets take
alternating rounds in one run, so that background load affects all.

    python scripts/benchmarks/serve_load.py --url http://127.0.0.1:8000 --clients 16 --requests 64

stdout has JSON, one object per target, of the round with the median throughput; then a Markdown
table with medians over the rounds.
"""

import asyncio
import json
import math
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import httpx
import numpy as np
import typer

from jaxllm.cli import run_command
from jaxllm.cli.console import log, write
from jaxllm.errors import ConfigError

EXAMPLE = (
    "Example: python scripts/benchmarks/serve_load.py --url http://127.0.0.1:8000 --clients 16"
    " --requests 64 --compare http://127.0.0.1:8080 --rounds 5"
)
WORDS = ("the", "man", "went", "down", "to", "a", "river", "and", "saw", "small", "boats")
FIRST_ID = 3  # ids below are special tokens in most vocabularies
LATENCIES = ("ttft", "tpot", "itl", "e2el")
COLUMNS = {
    "request_throughput": "requests/s",
    "output_throughput": "tokens/s",
    "median_ttft_ms": "first token, ms",
    "p99_ttft_ms": "p99",
    "median_tpot_ms": "per token, ms",
    "p99_tpot_ms": "p99",
    "median_e2el_ms": "whole, ms",
    "p99_e2el_ms": "p99",
}


@dataclass(frozen=True)
class Load:
    """The requests of a round.

    Attributes:
        prompts: Token ids, or texts.
        arrivals: Seconds after the start.
        new_tokens: Tokens of each answer.
        clients: Requests that may be open at once.
    """

    prompts: Sequence[Any]
    arrivals: Sequence[float]
    new_tokens: int
    clients: int


@dataclass
class Timing:
    """Times of one request: its start, and of each chunk; `tokens` is empty while it failed."""

    start: float = 0.0
    stamps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens: int = 0


def draw_load(
    count: int, *, clients: int, rate: float, burstiness: float, prompt_tokens: int,
    new_tokens: int, vocab: int, words: bool, seed: int,
) -> Load:  # fmt: skip
    """Draw a round's requests. Gaps are gamma(burstiness), rescaled to `count / rate` in all."""
    rng = np.random.default_rng(seed)
    prompts: list[Any]
    if words:
        prompts = [" ".join(rng.choice(WORDS, prompt_tokens)) for _ in range(count)]
    else:
        prompts = rng.integers(FIRST_ID, vocab, (count, prompt_tokens)).tolist()
    arrivals = np.zeros(count)
    if math.isfinite(rate):
        arrivals = np.cumsum(rng.gamma(burstiness, 1 / (rate * burstiness), count))
        arrivals *= count / rate / arrivals[-1]
    return Load(prompts, arrivals.tolist(), new_tokens, clients)


async def run_http(url: str, model: str, load: Load) -> tuple[list[Timing], float]:
    """Send a round's requests to a server; return their times and the round's seconds."""
    timings = [Timing() for _ in load.prompts]
    slots = asyncio.Semaphore(load.clients)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits, trust_env=False) as client:
        start = time.perf_counter()

        async def ask(number: int) -> None:
            await asyncio.sleep(load.arrivals[number] - (time.perf_counter() - start))
            async with slots:
                await _stream(client, url, model, load, number, timings[number])

        async with asyncio.TaskGroup() as group:
            for number in range(len(timings)):
                group.create_task(ask(number))
    return timings, time.perf_counter() - start


async def _stream(
    client: httpx.AsyncClient, url: str, model: str, load: Load, number: int, timing: Timing
) -> None:
    """Stream one completion; a failure is logged, and has no tokens."""
    body = {
        "model": model, "prompt": load.prompts[number], "max_tokens": load.new_tokens,
        "temperature": 0.0, "ignore_eos": True, "seed": number, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    timing.start = time.perf_counter()
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                log(f"{url}: status {answer.status_code}: {(await answer.aread())[:200]!r}")
                return
            async for line in _read_lines(answer):
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    log(f"{url}: {event['error']}")
                    return
                if event.get("choices"):
                    timing.stamps.append(time.perf_counter())
                if usage := event.get("usage"):
                    timing.prompt_tokens = usage["prompt_tokens"]
                    timing.tokens = usage["completion_tokens"]
    except (httpx.HTTPError, json.JSONDecodeError) as error:  # an answer that was cut off
        timing.tokens = 0
        log(f"{url}: {error!r}")


async def _read_lines(answer: httpx.Response) -> AsyncIterator[str]:
    """Yield the lines of a stream; httpx also splits at characters that a JSON text may contain."""
    rest = ""
    async for text in answer.aiter_text():
        *lines, rest = (rest + text).split("\n")
        for line in lines:
            yield line.removesuffix("\r")


def run_in_process(lm: Any, rows: int, load: Load) -> tuple[list[Timing], float]:
    """Run a round's requests through `LM.serve`; return their times and the round's seconds."""
    timings = [Timing() for _ in load.prompts]
    start, open_ones = time.perf_counter(), 0

    def yield_requests() -> Iterator[dict[str, Any] | None]:
        nonlocal open_ones
        for number, prompt in enumerate(load.prompts):
            while (wait := load.arrivals[number] - (time.perf_counter() - start)) > 0 or (
                open_ones >= load.clients
            ):
                if not open_ones:
                    time.sleep(max(wait, 0.0))
                else:
                    yield None
            open_ones += 1
            timing = timings[number]
            timing.start = time.perf_counter()
            yield {
                "id": number, "prompt": prompt, "max_new_tokens": load.new_tokens,
                "min_new_tokens": load.new_tokens, "do_sample": False, "seed": number,
                "on_chunk": lambda _, t=timing: t.stamps.append(time.perf_counter()),
            }  # fmt: skip

    longest = max(len(lm.encode(prompt)) for prompt in load.prompts)
    capacity = longest + load.new_tokens
    for number, answer in lm.serve(yield_requests(), rows=rows, capacity=capacity):
        open_ones -= 1
        if isinstance(answer, Exception):
            log(f"request {number}: {answer}")
            continue
        timings[number].prompt_tokens = answer.prompt_tokens
        timings[number].tokens = len(answer.tokens)
    return timings, time.perf_counter() - start


def summarize(timings: Sequence[Timing], seconds: float) -> dict[str, float]:
    """Return a round's results under the names of `vllm bench serve`."""
    done = [t for t in timings if t.tokens and t.stamps]
    if not done:
        raise ConfigError("all requests failed")
    prompt, new = sum(t.prompt_tokens for t in done), sum(t.tokens for t in done)
    latencies: dict[str, list[float]] = {
        "ttft": [t.stamps[0] - t.start for t in done],
        "tpot": [(t.stamps[-1] - t.stamps[0]) / (t.tokens - 1) for t in done if t.tokens > 1],
        "itl": [float(gap) for t in done for gap in np.diff(t.stamps)],
        "e2el": [t.stamps[-1] - t.start for t in done],
    }
    found = {
        "duration": seconds, "completed": len(done), "failed": len(timings) - len(done),
        "total_input_tokens": prompt, "total_output_tokens": new,
        "request_throughput": len(done) / seconds, "output_throughput": new / seconds,
        "total_token_throughput": (prompt + new) / seconds,
        "max_concurrent_requests": _count_open(done),
    }  # fmt: skip
    for name in LATENCIES:
        ms_N = np.array(latencies[name] or [0.0]) * 1e3
        found |= {
            f"mean_{name}_ms": float(ms_N.mean()), f"median_{name}_ms": float(np.median(ms_N)),
            f"std_{name}_ms": float(ms_N.std()), f"p99_{name}_ms": float(np.percentile(ms_N, 99)),
        }  # fmt: skip
    return found


def _count_open(done: Sequence[Timing]) -> int:
    """Return how many requests were open at once."""
    changes = sorted([(t.start, 1) for t in done] + [(t.stamps[-1], -1) for t in done])
    return int(np.cumsum([change for _, change in changes]).max())


def format_table(results: dict[str, list[dict[str, float]]]) -> str:
    """Format medians over rounds by target, and their ratios to the first target."""
    lines = [f"| target | {' | '.join(COLUMNS.values())} | against the first |"]
    lines.append("|---" + "|---:" * (len(COLUMNS) + 1) + "|")
    base = 0.0
    for target, rounds in results.items():
        medians = {name: statistics.median(one[name] for one in rounds) for name in COLUMNS}
        base = base or medians["output_throughput"]
        cells = " | ".join(f"{value:.1f}" for value in medians.values())
        lines.append(f"| {target} | {cells} | {medians['output_throughput'] / base:.2f} |")
    return "\n".join(lines) + "\n"


def find_model(url: str) -> str:
    """Return the name of a server's first model."""
    answer = httpx.get(f"{url}/v1/models", timeout=60, trust_env=False)
    return str(answer.raise_for_status().json()["data"][0]["id"])


def serve_load(
    url: Annotated[str, typer.Option(help="Server.")] = "http://127.0.0.1:8000",
    compare: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="Further server; repeatable.")
    ] = None,
    in_process: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Model to run in this process too.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model name [default: the server's].")] = None,
    clients: Annotated[
        int, typer.Option("--clients", "--max-concurrency", min=1, help="Open requests.")
    ] = 8,
    requests: Annotated[int, typer.Option(min=1, help="Requests per round.")] = 64,
    rate: Annotated[float, typer.Option(min=0.001, help="Arrivals per second.")] = math.inf,
    burstiness: Annotated[float, typer.Option(min=0.01, help="Shape of the gaps; 1: Poisson.")] = 1,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens (or words) per prompt.")] = 64,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 64,
    words: Annotated[bool, typer.Option("--words", help="Texts instead of token ids.")] = False,
    vocab: Annotated[int, typer.Option(min=4, help="Random token ids are below.")] = 1000,
    rows: Annotated[int, typer.Option(min=1, help="Rows of the model in this process.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds per target.")] = 3,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
) -> None:
    """Measure servers under load: throughput, and times to the first token and between tokens."""
    targets: dict[str, Callable[[Load], tuple[list[Timing], float]]] = {}
    for server in [url, *(compare or [])]:
        server = server.rstrip("/").removesuffix("/v1")
        try:
            name = model or find_model(server)
        except httpx.HTTPError as error:
            raise ConfigError(f"{server} does not answer: {error}") from None
        targets[server] = lambda load, s=server, n=name: asyncio.run(run_http(s, n, load))
    if in_process is not None:
        import jaxllm

        lm = jaxllm.load(in_process)
        targets["in process"] = lambda load: run_in_process(lm, rows, load)

    def draw(count: int, number: int) -> Load:
        return draw_load(
            count, clients=clients, rate=rate, burstiness=burstiness, prompt_tokens=prompt_tokens,
            new_tokens=new_tokens, vocab=vocab, words=words, seed=seed * 1000 + number,
        )  # fmt: skip

    results: dict[str, list[dict[str, float]]] = {}
    order = list(targets)
    for target in order:  # compiles
        targets[target](draw(min(2 * clients, requests), rounds))
    for number in range(rounds):
        for target in order[:: 1 if number % 2 == 0 else -1]:
            found = summarize(*targets[target](draw(requests, number)))
            results.setdefault(target, []).append(found)
            log(f"{target}: {found['output_throughput']:.1f} tokens/s, {found['failed']} failed")
    for target in order:
        ordered = sorted(results[target], key=lambda one: one["output_throughput"])
        write(json.dumps({"target": target, **ordered[len(ordered) // 2]}) + "\n")
    write("\n" + format_table({target: results[target] for target in order}))


if __name__ == "__main__":
    run_command(serve_load, "python scripts/benchmarks/serve_load.py", EXAMPLE)
