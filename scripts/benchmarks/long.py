"""Time and memory by text length, for each kind of attention.

One decision: every measurement runs in a separate process, which compiles first and reads its peak
resident set, so that one measurement cannot affect the next. A kind that exceeds the time limit
skips longer texts. A new kind is a row of `KINDS`.
"""

import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from jaxllm.cli import run_command
from jaxllm.cli.console import log, write
from jaxllm.errors import ConfigError

EXAMPLE = "Example: python scripts/benchmarks/long.py --measures layer,model --most 16384"

# The fields of `LlamaConfig` for each kind.
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "window": {"sliding_window": 2048},
    "dilated": {
        "attention": {
            "kind": "dilated",
            "segment_lengths": [2048, 8192, 32768],
            "dilated_ratios": [1, 4, 16],
        }
    },
    "infini": {"attention": {"kind": "infini", "segment_length": 2048}},
}
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 1 << 20,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope": {"rope_type": "default", "rope_theta": 1e6},
}
Timing = dict[str, float]


def make_config(kind: str) -> Any:
    from jaxllm import models

    return models.config_from_dict({"model_type": "llama", **SHAPE, **KINDS[kind]})


def make_random_model(config: Any) -> Any:
    """Return a model and random parameters."""
    import jax.numpy as jnp

    from jaxllm import models
    from jaxllm.weights.paths import map_leaves

    model, rng = models.build(config), np.random.default_rng(0)
    shapes = models.param_shapes(model)

    def draw(_: str, x: Any) -> Any:
        return jnp.asarray(0.1 * rng.standard_normal(x.shape, np.float32))

    return model, map_leaves(draw, shapes)


def time_runs(run: Callable[[], Any], repeats: int) -> Timing:
    """Return the seconds of the first run, which compiles, and of the best later one."""
    import jax

    begin = time.perf_counter()
    jax.block_until_ready(run())
    first = time.perf_counter() - begin
    best = math.inf
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        best = min(best, time.perf_counter() - begin)
    return {"seconds": best, "first": first}


def time_layer(kind: str, length: int, repeats: int) -> Timing:
    """Time one layer's attention over a text, without its linear layers."""
    import jax
    import jax.numpy as jnp

    from jaxllm.models.layers import AttentionContext, attend
    from jaxllm.models.sites import NO_EDITS, SiteRecorder

    config = make_config(kind)
    if config.segment_length is not None:
        raise ConfigError("a memory has parameters: use the measure model")
    rng, H = np.random.default_rng(0), config.head_dim
    q, k, v = (
        jnp.asarray(rng.standard_normal((1, length, heads, H), np.float32))
        for heads in (config.num_attention_heads, *2 * (config.num_key_value_heads,))
    )
    position_BT = jnp.arange(length, dtype=jnp.int32)[None]

    @jax.jit
    def run(q: Any, k: Any, v: Any) -> Any:
        settings = {"window": config.window(0), "kind": config.attention_kind(0)}
        context = AttentionContext(position_BT)
        options: Any = {"cache_dtype": "float32", "scale": config.attention_scale, **settings}
        site = SiteRecorder(0, position_BT, NO_EDITS, frozenset())
        return attend(context, site, 0, q, k, v, lambda x: x, **options).x

    return time_runs(lambda: run(q, k, v), repeats)


def time_gradient(kind: str, length: int, repeats: int) -> Timing:
    """Time a loss and its gradient, with activation recomputation."""
    import jax
    import jax.numpy as jnp

    from jaxllm.train.data.rows import Rows
    from jaxllm.train.objective import NextToken

    model, params = make_random_model(make_config(kind))
    model = model.clone(remat=True)
    ids = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], (1, length + 1))
    rows = Rows(
        *(
            jnp.asarray(x, jnp.int32)
            for x in (ids[:, :-1], ids[:, 1:], np.arange(length)[None], np.zeros((1, length)))
        )
    )

    @jax.jit
    def run(params: Any, rows: Any) -> Any:
        def loss(params: Any) -> Any:
            return NextToken()(model, params, None, rows, jax.random.key(0)).total

        return jax.grad(loss)(params)

    return time_runs(lambda: run(params, rows), repeats)


def time_model(kind: str, length: int, repeats: int) -> Timing:
    """Time the prefill of a small model, 2048 tokens at a time."""
    import jaxllm

    model, params = make_random_model(make_config(kind))
    ids = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], (1, length))

    def run() -> Any:
        cache = jaxllm.init_cache(model, 1, length)
        return jaxllm.prefill(model, params, cache, ids, chunk=2048, donate=True).logits

    return time_runs(run, repeats)


def time_decode(kind: str, length: int, repeats: int) -> Timing:
    """Time a decoding step of a small model after a text of random keys and values."""
    import jax
    import jax.numpy as jnp

    import jaxllm

    model, params = make_random_model(make_config(kind))
    steps = 16
    cache = jaxllm.init_cache(model, 1, length + steps * (repeats + 1))
    rng = np.random.default_rng(0)
    tail = cache.tail
    k, v = (
        tuple(jnp.asarray(rng.standard_normal(x.shape, np.float32)) for x in entries)
        for entries in (tail.k, tail.v)
    )
    slot_BS = np.arange(cache.capacity, dtype=np.int32)[None]
    position_BS = jnp.asarray(np.where(slot_BS < length, slot_BS, -1))
    state = cache.replace(
        tail=tail.replace(k=k, v=v, position_BS=position_BS),
        cursor=jnp.int32(length),
        next_position_B=jnp.full((1,), length, jnp.int32),
    )

    def run() -> Any:
        nonlocal state
        for _ in range(steps):
            token_B = np.zeros(1, np.int32)
            logits, state = jaxllm.decode_step(model, params, state, token_B, donate=True)
        return jax.block_until_ready(logits)

    timing = time_runs(run, repeats)
    return {"seconds": timing["seconds"] / steps, "first": timing["first"]}


TIMERS: dict[str, Callable[[str, int, int], Timing]] = {
    "layer": time_layer,
    "model": time_model,
    "gradient": time_gradient,
    "decode": time_decode,
}


def run_worker(measure: str, kind: str, length: str, repeats: str) -> None:
    """Print one measurement as JSON.

    Its memory is the growth of the peak resident set after JAX has started, in bytes.
    """
    import jax.numpy as jnp

    import jaxllm  # noqa: F401

    (jnp.ones(8) + 1).block_until_ready()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    timing = TIMERS[measure](kind, int(length), int(repeats))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({**timing, "memory": (after - before) * 1024}))


def measure_in_process(
    measure: str, kind: str, length: int, repeats: int, limit: float
) -> Timing | None:
    """Return a separate process's measurement; None if it failed or exceeded the limit."""
    program = [sys.executable, __file__, "--worker", measure, kind, str(length), str(repeats)]
    # Cached programs of other processes would hide the compile time.
    environment = {**os.environ, "JAXLLM_COMPILE_CACHE": "0", "JAX_TRACEBACK_FILTERING": "off"}
    try:
        done = subprocess.run(
            program, capture_output=True, text=True, check=False, timeout=limit, env=environment
        )
    except subprocess.TimeoutExpired:
        log(f"{measure} {kind} {length}: over {limit:.0f} s")
        return None
    if done.returncode:
        message = done.stderr.strip().splitlines()[-1:] or [f"ended with code {done.returncode}"]
        log(f"{measure} {kind} {length}: {message[0]}")
        return None
    timing: Timing = json.loads(done.stdout.splitlines()[-1])
    return timing


def fit_slope(points: dict[int, float]) -> float:
    """Return the log-log slope by least squares over the upper half of the lengths."""
    lengths = sorted(points)[len(points) // 2 - (len(points) == 2) :]
    above = [(n, points[n]) for n in lengths if points[n] > 0]
    if len(above) < 2:
        return math.nan
    xs, ys = np.log([n for n, _ in above]), np.log([y for _, y in above])
    return float(np.polyfit(xs, ys, 1)[0])


Results = dict[tuple[str, str], dict[int, Timing]]


def read_results(path: Path | None) -> Results:
    """Read a results file; return no rows if there is none."""
    results: Results = {}
    lines = path.read_text("utf-8").splitlines() if path is not None and path.exists() else []
    for row in map(json.loads, lines):
        results.setdefault((row.pop("measure"), row.pop("kind")), {})[row.pop("tokens")] = row
    return results


def plot(results: Results, path: Path) -> None:
    """Plot seconds and memory by length on log-log axes, with slopes: a row per measure."""
    from matplotlib.figure import Figure

    measures = list(dict.fromkeys(measure for measure, _ in results))
    figure = Figure(figsize=(11, 4 * len(measures)), layout="constrained")
    axes = figure.subplots(len(measures), 2, squeeze=False)
    names = {"seconds": ("seconds", 1.0), "memory": ("memory, GB", 1e-9)}
    for (measure, kind), timings in results.items():
        for axis, (field, (axis_label, unit)) in zip(
            axes[measures.index(measure)], names.items(), strict=True
        ):
            points = {n: t[field] * unit for n, t in timings.items() if t[field] > 0}
            if not points:
                continue
            label = f"{kind}, slope {fit_slope(points):.2f}" if len(points) > 1 else kind
            axis.loglog(list(points), list(points.values()), "o-", label=label)
            axis.set(xlabel="tokens", ylabel=axis_label, title=measure)
            axis.legend(fontsize=8)
            axis.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(
    kinds: Annotated[str, typer.Option(help=f"Attention kinds: {', '.join(KINDS)}.")] = ",".join(
        KINDS
    ),
    measures: Annotated[str, typer.Option(help=f"Measures: {', '.join(TIMERS)}.")] = ",".join(
        TIMERS
    ),
    least: Annotated[int, typer.Option(min=2, help="Shortest text, tokens.")] = 1024,
    most: Annotated[int, typer.Option(min=2, help="Longest text, tokens.")] = 262144,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs per process.")] = 2,
    limit: Annotated[float, typer.Option(help="Time limit per process, seconds.")] = 240,
    out: Annotated[Path, typer.Option(help="Output PNG file.")] = Path("docs/long_context.png"),
    results: Annotated[
        Path | None, typer.Option(help="JSON Lines file of results to read and extend.")
    ] = None,
) -> None:
    """Time prefill, training and decoding by text length; lengths double."""
    for option, text, known in (("--kinds", kinds, KINDS), ("--measures", measures, TIMERS)):
        if unknown := set(text.split(",")) - set(known):
            names = ", ".join(sorted(unknown))
            raise ConfigError(f"{option} must be among {', '.join(known)}, got {names}")
    lengths = [least << i for i in range(int(math.log2(most / least)) + 1)]
    saved = read_results(results)
    timings: Results = {}
    write("| measure | kind | tokens | seconds | tokens/s | memory, MB | first run, s |\n")
    write("|---|---|---|---|---|---|---|\n")
    for measure in measures.split(","):
        for kind in kinds.split(","):
            for length in lengths:
                stored = saved.get((measure, kind), {}).get(length)
                timing = stored or measure_in_process(measure, kind, length, repeats, limit)
                if timing is None:
                    break
                timings.setdefault((measure, kind), {})[length] = timing
                tokens = 1 if measure == "decode" else length
                write(
                    f"| {measure} | {kind} | {length} | {timing['seconds']:.4f}"
                    f" | {tokens / timing['seconds']:.0f} | {timing['memory'] / 1e6:.0f}"
                    f" | {timing['first']:.1f} |\n"
                )
                if results is not None and not stored:
                    row = {"measure": measure, "kind": kind, "tokens": length, **timing}
                    with results.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
    for (measure, kind), by_length in timings.items():
        seconds = {n: timing["seconds"] for n, timing in by_length.items()}
        write(f"slope of {measure}, {kind}: {fit_slope(seconds):.2f}\n")
    if timings:
        plot(timings, out)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        run_worker(*sys.argv[2:])
    else:
        run_command(main, "python scripts/benchmarks/long.py", EXAMPLE)
