"""Time and memory against the length of a text, for each kind of attention.

One decision: every measurement is a process of its own, which compiles first and reads its largest
resident set, so that one length or kind cannot warm, or swell, the next. A kind that took longer
than the limit is not asked for longer texts. A new kind is a row of `KINDS`.
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

# What `LlamaConfig` has of each kind.
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
Timed = dict[str, float]


def config_of(kind: str) -> Any:
    from jaxllm import models

    return models.config_from_dict({"model_type": "llama", **SHAPE, **KINDS[kind]})


def random_lm(config: Any) -> Any:
    """A model and random parameters."""
    import jax.numpy as jnp

    from jaxllm import models
    from jaxllm.weights.paths import map_leaves

    model, rng = models.build(config), np.random.default_rng(0)
    shapes = models.param_shapes(model)

    def draw(_: str, x: Any) -> Any:
        return jnp.asarray(0.1 * rng.standard_normal(x.shape, np.float32))

    return model, map_leaves(draw, shapes)


def timed(run: Callable[[], Any], repeats: int) -> Timed:
    """Seconds of the best of some runs after one that compiles, and what memory grew by."""
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


def time_layer(kind: str, length: int, repeats: int) -> Timed:
    """Attention of one layer over a whole text; no linears."""
    import jax
    import jax.numpy as jnp

    from jaxllm.models.layers import AttentionContext, attend

    config = config_of(kind)
    if config.segment_length is not None:
        raise ConfigError("a memory has parameters of its own: measure the model")
    rng, H = np.random.default_rng(0), config.head_dim
    q, k, v = (
        jnp.asarray(rng.standard_normal((1, length, heads, H), np.float32))
        for heads in (config.num_attention_heads, *2 * (config.num_key_value_heads,))
    )
    position_BT = jnp.arange(length, dtype=jnp.int32)[None]

    @jax.jit
    def run(q: Any, k: Any, v: Any) -> Any:
        settings = {"window": config.window(0), "kind": config.long_attention(0)}
        scope = AttentionContext(position_BT)
        options: Any = {"cache_dtype": "float32", "scale": config.attention_scale, **settings}
        return attend(scope, 0, q, k, v, lambda x: x, **options).heads

    return timed(lambda: run(q, k, v), repeats)


def time_gradient(kind: str, length: int, repeats: int) -> Timed:
    """A loss and its gradient, as training needs them; what a block computes is computed again."""
    import jax
    import jax.numpy as jnp

    from jaxllm.train.data.rows import Rows
    from jaxllm.train.objective import NextToken

    model, params = random_lm(config_of(kind))
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

    return timed(lambda: run(params, rows), repeats)


def time_model(kind: str, length: int, repeats: int) -> Timed:
    """The prefill of a small model into a cache, 2048 tokens at a time."""
    import jaxllm

    model, params = random_lm(config_of(kind))
    ids = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], (1, length))

    def run() -> Any:
        cache = jaxllm.init_cache(model, 1, length)
        return jaxllm.prefill(model, params, cache, ids, chunk=2048, donate=True).logits

    return timed(run, repeats)


def time_decode(kind: str, length: int, repeats: int) -> Timed:
    """One token of a small model whose cache holds a text, of random keys and values."""
    import jax
    import jax.numpy as jnp

    import jaxllm

    model, params = random_lm(config_of(kind))
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

    found = timed(run, repeats)
    return {"seconds": found["seconds"] / steps, "first": found["first"]}


TIMERS: dict[str, Callable[[str, int, int], Timed]] = {
    "layer": time_layer,
    "model": time_model,
    "gradient": time_gradient,
    "decode": time_decode,
}


def worker(measure: str, kind: str, length: str, repeats: str) -> None:
    """One measurement, printed as JSON. memory: the largest resident set, less that of a process
    with JAX running, in bytes.
    """
    import jax.numpy as jnp

    import jaxllm  # noqa: F401

    (jnp.ones(8) + 1).block_until_ready()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = TIMERS[measure](kind, int(length), int(repeats))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({**found, "memory": (after - before) * 1024}))


def measured(measure: str, kind: str, length: int, repeats: int, limit: float) -> Timed | None:
    """What a process of its own found; None where it failed or took too long."""
    program = [sys.executable, __file__, "--worker", measure, kind, str(length), str(repeats)]
    # The kept programs of other processes would hide what compiling takes.
    environment = {**os.environ, "JAXLLM_COMPILE_CACHE": "0"}
    try:
        done = subprocess.run(
            program, capture_output=True, text=True, check=False, timeout=limit, env=environment
        )
    except subprocess.TimeoutExpired:
        log(f"{measure} {kind} {length}: over {limit:.0f} s")
        return None
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or [f"ended with {done.returncode}"]
        log(f"{measure} {kind} {length}: {said[0]}")
        return None
    found: Timed = json.loads(done.stdout.splitlines()[-1])
    return found


def slope(points: dict[int, float]) -> float:
    """Of the logarithms, by least squares, over the upper half of the lengths."""
    lengths = sorted(points)[len(points) // 2 - (len(points) == 2) :]
    above = [(n, points[n]) for n in lengths if points[n] > 0]
    if len(above) < 2:
        return math.nan
    xs, ys = np.log([n for n, _ in above]), np.log([y for _, y in above])
    return float(np.polyfit(xs, ys, 1)[0])


Found = dict[tuple[str, str], dict[int, Timed]]


def kept(path: Path | None) -> Found:
    """The rows of a file of results, if there is one."""
    found: Found = {}
    lines = path.read_text("utf-8").splitlines() if path is not None and path.exists() else []
    for row in map(json.loads, lines):
        found.setdefault((row.pop("measure"), row.pop("kind")), {})[row.pop("tokens")] = row
    return found


def plot(found: Found, path: Path) -> None:
    """Seconds and memory against length, both logarithmic, with slopes: one row for a measure."""
    from matplotlib.figure import Figure

    measures = list(dict.fromkeys(measure for measure, _ in found))
    figure = Figure(figsize=(11, 4 * len(measures)), layout="constrained")
    axes = figure.subplots(len(measures), 2, squeeze=False)
    names = {"seconds": ("seconds", 1.0), "memory": ("memory beside the program, GB", 1e-9)}
    for (measure, kind), each in found.items():
        for axis, (field, (label, unit)) in zip(
            axes[measures.index(measure)], names.items(), strict=True
        ):
            points = {n: timed[field] * unit for n, timed in each.items() if timed[field] > 0}
            if not points:
                continue
            said = f"{kind}, slope {slope(points):.2f}" if len(points) > 1 else kind
            axis.loglog(list(points), list(points.values()), "o-", label=said)
            axis.set(xlabel="tokens", ylabel=label, title=measure)
            axis.legend(fontsize=8)
            axis.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(
    kinds: Annotated[str, typer.Option(help=f"Of {', '.join(KINDS)}.")] = ",".join(KINDS),
    measures: Annotated[str, typer.Option(help=f"Of {', '.join(TIMERS)}.")] = ",".join(TIMERS),
    least: Annotated[int, typer.Option(min=2, help="The shortest text.")] = 1024,
    most: Annotated[int, typer.Option(min=2, help="The longest.")] = 262144,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each process.")] = 2,
    limit: Annotated[float, typer.Option(help="Seconds that a process may take.")] = 240,
    out: Annotated[Path, typer.Option(help="The picture.")] = Path("docs/long_context.png"),
    results: Annotated[
        Path | None, typer.Option(help="JSON Lines: what is there is not measured again.")
    ] = None,
) -> None:
    """Time prefill, training and decoding against length; lengths double."""
    for name, known in ((kinds, KINDS), (measures, TIMERS)):
        if unknown := set(name.split(",")) - set(known):
            raise ConfigError(f"{', '.join(sorted(unknown))} is not one of {', '.join(known)}")
    lengths = [least << i for i in range(int(math.log2(most / least)) + 1)]
    before = kept(results)
    found: Found = {}
    write("| measure | kind | tokens | seconds | tokens/s | memory, MB | first run, s |\n")
    write("|---|---|---|---|---|---|---|\n")
    for measure in measures.split(","):
        for kind in kinds.split(","):
            for length in lengths:
                known = before.get((measure, kind), {}).get(length)
                one = known or measured(measure, kind, length, repeats, limit)
                if one is None:
                    break
                found.setdefault((measure, kind), {})[length] = one
                tokens = 1 if measure == "decode" else length
                write(
                    f"| {measure} | {kind} | {length} | {one['seconds']:.4f}"
                    f" | {tokens / one['seconds']:.0f} | {one['memory'] / 1e6:.0f}"
                    f" | {one['first']:.1f} |\n"
                )
                if results is not None and not known:
                    row = {"measure": measure, "kind": kind, "tokens": length, **one}
                    with results.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
    for (measure, kind), each in found.items():
        times = {n: one["seconds"] for n, one in each.items()}
        write(f"slope of {measure}, {kind}: {slope(times):.2f}\n")
    if found:
        plot(found, out)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:])
    else:
        run_command(main, "python scripts/benchmarks/long.py", EXAMPLE)
