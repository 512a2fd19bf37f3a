"""Benchmark of prefill and decoding speed, and of the memory bandwidth used.

Tests are named as in llama-bench: `pp128` is a prompt of 128 tokens, `tg32` 32 decoded tokens,
`@ d1024` starts with 1,024 tokens in the cache, `x 8` has eight rows. Compile time is separate.
"""

import dataclasses
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.kv import KVCache, init_cache
from jaxllm.errors import CapacityError, ConfigError
from jaxllm.lm import LM
from jaxllm.models import get_family
from jaxllm.models.moe import max_read_fraction
from jaxllm.models.packing import promise_packed
from jaxllm.ops import native
from jaxllm.ops.target import Program
from jaxllm.steps import StepOutput, default_chunk, prefill, run_and_commit
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params, flatten
from jaxllm.weights.types.arrays import as_weight

PROBE_BYTES = 256 << 20  # far more than any processor cache


@dataclasses.dataclass(frozen=True)
class Test:
    """One measurement. prompt: prompt length in tokens, or 0 to decode `decode` tokens with `depth`
    tokens already in the cache. batch: rows."""

    prompt: int = 0
    decode: int = 0
    depth: int = 0
    batch: int = 1

    @property
    def name(self) -> str:
        """Name in llama-bench's notation."""
        kind = f"pp{self.prompt}" if self.prompt else f"tg{self.decode}"
        depth = f" @ d{self.depth}" if self.depth else ""
        return f"{kind}{depth}{f' x {self.batch}' if self.batch > 1 else ''}"

    @property
    def tokens(self) -> int:
        return (self.prompt or self.decode) * self.batch


@dataclasses.dataclass(frozen=True)
class BenchResult:
    """Result of a test. seconds: time of each repetition. compile_s: the first run minus their
    median. weights_gb_s: weights read, in GB/s; None for prompts, which read them once for many
    tokens. bus_gb_s: memory bandwidth measured between the repetitions, in GB/s."""

    test: str
    tokens: int
    seconds: tuple[float, ...]
    compile_s: float
    weights_gb_s: float | None
    bandwidth_gb_s: float

    @property
    def tokens_per_second(self) -> float:
        """Median tokens per second."""
        return self.tokens / statistics.median(self.seconds)

    @property
    def stdev(self) -> float:
        """Standard deviation of the tokens per second."""
        rates = [self.tokens / s for s in self.seconds]
        return statistics.stdev(rates) if len(rates) > 1 else 0.0

    def to_dict(self) -> dict[str, Any]:
        share = None if self.weights_gb_s is None else self.weights_gb_s / self.bandwidth_gb_s
        return {
            "test": self.test,
            "tokens_per_second": round(self.tokens_per_second, 2),
            "spread": round(self.stdev, 2),
            "compile_s": round(self.compile_s, 2),
            "weights_gb_s": None if self.weights_gb_s is None else round(self.weights_gb_s, 2),
            "bus_gb_s": round(self.bandwidth_gb_s, 2),
            "share_of_bus": None if share is None else round(share, 3),
        }


def make_tests(
    prompts: Iterable[int], decode: int, depths: Iterable[int], batches: Iterable[int]
) -> list[Test]:
    """Return tests: prompts and decoding depths with one row, and batches at depth 0.

    Raises ConfigError for numbers that are too small.
    """
    prompts, depths, batches = list(prompts), list(depths), list(batches)
    for name, values, least in (
        ("prompts", prompts, 1),
        ("decode", [decode], 1),
        ("depths", depths, 0),
        ("batches", batches, 1),
    ):
        if any(v < least for v in values):
            raise ConfigError(f"bench: {name} must be at least {least}, got {values}")
    tests = [Test(prompt=n) for n in prompts] + [Test(decode=decode, depth=d) for d in depths]
    return tests + [Test(decode=decode, batch=b) for b in batches if b > 1]


def bench(
    lm: LM, tests: Sequence[Test], *, repetitions: int = 5, chunk: int | None = None
) -> Iterator[BenchResult]:
    """Run each test `repetitions` times after a first run that compiles; yield its result.

    chunk: tokens of a prompt that run at once; default: 512, more on an accelerator.

    Raises CapacityError if a test exceeds the model's context.
    """
    chunk = max(512, default_chunk()) if chunk is None else chunk
    probe = jnp.arange(PROBE_BYTES // 4, dtype=jnp.uint32).block_until_ready()
    for test in tests:
        size = weight_bytes(lm, test.batch)
        run = prepare_run(lm, test, chunk)
        first = time_run(run)
        seconds, bus = [], []
        for _ in range(repetitions):
            bus.append(measure_bandwidth(probe))
            seconds.append(time_run(run))
        middle = statistics.median(seconds)
        streamed = size * test.decode / middle / 1e9 if test.decode else None
        yield BenchResult(
            test.name, test.tokens, tuple(seconds), max(0.0, first - middle), streamed, max(bus)
        )


def prepare_run(lm: LM, test: Test, chunk: int) -> Callable[[], None]:
    """Return a function that runs a test once; its initial cache is filled here."""
    vocabulary, batch = lm.config.vocab_size, test.batch
    context = lm.config.context_length
    if (test.prompt or test.depth + test.decode) > context:
        raise CapacityError(f"{test.name} exceeds the model's context of {context} tokens")
    generator = np.random.default_rng(0)
    capacity = test.prompt or test.depth + test.decode
    ids_BT = generator.integers(0, vocabulary, (batch, test.prompt or max(1, test.depth)))

    def new_cache() -> KVCache:
        return init_cache(lm.model, batch, capacity + 1)

    def run_prefill(cache: KVCache, *, donate: bool) -> StepOutput:
        return prefill(lm.model, lm.params, cache, ids_BT, chunk=chunk, donate=donate)

    def read_prompt() -> None:
        jax.block_until_ready(run_prefill(new_cache(), donate=True).logits)

    if test.prompt:
        return read_prompt
    start = run_prefill(new_cache(), donate=True).cache if test.depth else new_cache()
    token_SB = generator.integers(0, vocabulary, (test.decode, batch)).astype(np.int32)

    model = promise_packed(lm.model, start)
    return lambda: jax.block_until_ready(decode_given(model, lm.params, start, token_SB))


@partial(Program, static_argnums=0)
def decode_given(model: Model, params: Params, cache: KVCache, token_SB: jax.Array) -> jax.Array:
    """Decode given tokens step by step in one loop, as `generate` does; return maximum logits."""

    def step(cache: KVCache, token_B: jax.Array) -> tuple[KVCache, jax.Array]:
        position_BT = cache.next_position_B[:, None]
        out = run_and_commit(model, params, (), cache, token_B[:, None], position_BT)
        return out.cache, out.logits[:, 0].max(axis=1)

    return jax.lax.scan(step, cache, token_SB)[1]


def measure_bandwidth(probe: jax.Array) -> float:
    """Measure the current read bandwidth with all threads, in GB/s."""
    by_kernel = native.is_enabled() and jax.default_backend() == "cpu"
    read = jax.jit(native.read) if by_kernel else _sum
    jax.block_until_ready(read(probe))
    return max(
        probe.nbytes / time_run(lambda: read(probe).block_until_ready()) / 1e9 for _ in "123"
    )


def weight_bytes(lm: LM, batch: int = 1) -> int:
    """Return the bytes of weights that a decoding step reads.

    Tables count only if the output uses them too, and experts as many as the tokens can route to.
    """
    row = get_family(lm.config.model_type)
    tables = {row.position_table} if lm.config.tie_word_embeddings else set(row.embedding_tables)
    rest = {name: node for name, node in lm.params.items() if name not in tables}
    leaves = (as_weight(leaf) for _, leaf in flatten(rest))
    return sum(
        round(leaf.nbytes * max_read_fraction(lm.config, leaf.ndim, batch)) for leaf in leaves
    )


def peak_bytes() -> int:
    """Return the peak memory of this process, in bytes."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def as_markdown(rows: Sequence[BenchResult]) -> str:
    """Return a Markdown table with one line per test."""
    lines = [
        "| test | tokens/s | ± | compile s | weights GB/s | of the bus |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        d = row.to_dict()
        streamed = d["weights_gb_s"]
        share = f"{d['share_of_bus']:.0%} of {row.bandwidth_gb_s:.1f}" if streamed else ""
        lines.append(
            f"| {row.test} | {row.tokens_per_second:.2f} | {row.stdev:.2f} | {row.compile_s:.1f}"
            f" | {'' if streamed is None else f'{streamed:.1f}'} | {share} |"
        )
    return "\n".join(lines) + "\n"


def as_csv(rows: Sequence[BenchResult]) -> str:
    """Return CSV with a header line; figures that do not apply are empty."""
    fields = [row.to_dict() for row in rows]
    lines = [",".join(fields[0])] if fields else []
    lines += [",".join("" if v is None else str(v) for v in f.values()) for f in fields]
    return "\n".join(lines) + "\n"


def as_json(rows: Sequence[BenchResult], metadata: dict[str, Any]) -> str:
    """Return one JSON object with the results and `metadata`, which describes the run."""
    return json.dumps({**metadata, "rows": [row.to_dict() for row in rows]}, indent=2) + "\n"


@jax.jit
def _sum(x: jax.Array) -> jax.Array:
    return x.sum(dtype=jnp.uint32)


def time_run(run: Callable[[], Any]) -> float:
    """Return the run time in seconds."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
