"""Decoding, prompts, serving, training and starts on a GPU, at TinyLlama's and Llama 7B's shape.

    python scripts/benchmarks/gpu.py [--shapes tinyllama,7b] [--formats bfloat16,int8,int4-g64-f16]

One decision: weights and texts are random, so that no file is needed. A row is printed as soon as
it is measured: the rate, its share of the memory bandwidth (a copy of 1 GiB in the same process) or
teraflops, the seconds of the first run, which compiles, and the peak of the device's memory. Where
torch and transformers are installed, they do the same afterwards. Each shape and format is a
process of its own. The run ends after `--minutes`; a line names each part that it left out.
Results: docs/benchmarks/gpu.md.
Example: python scripts/benchmarks/gpu.py --shapes tinyllama --formats bfloat16 --minutes 4
"""

import argparse
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COMMON: dict[str, Any] = {
    "vocab_size": 32000, "hidden_act": "silu", "norm_eps": 1e-5, "tie_word_embeddings": False,
    "max_position_embeddings": 65536,
}  # fmt: skip
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    "tinyllama": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
                  "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 64},
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128},
}  # fmt: skip
COPY_BYTES = 1 << 30
# By format: rows, slots in the cache before; and prompts.
DECODING = {
    "bfloat16": [(1, 0), (1, 8192), (1, 32768), (8, 0), (64, 0), (64, 2048)],
    "": [(1, 0), (8, 0), (64, 0)],
}
# With --decode-only, of every format.
ONLY_DECODING = [(1, 0), (8, 0), (16, 0), (64, 0), (256, 0), (1, 8192), (8, 8192), (1, 32768)]
PROMPTS = {"bfloat16": [512, 4096, 16384], "": [512]}
TRAINING = [(4, 1024), (4, 2048)]
SERVED = (64, 128, 128)  # rows, tokens of a prompt and new ones; of twice as many requests
NEW = 64  # decoded tokens
RUNS = 5

Row = dict[str, Any]


def draw_model(shape: str, fmt: str, layers: int | None) -> Any:
    """Return a model with random weights, each drawn and quantized on the device.

    layers: use so many instead of the shape's number.
    """
    import jax
    import jax.numpy as jnp

    from jaxllm import models
    from jaxllm.config.model import Rope
    from jaxllm.lm import LM
    from jaxllm.models.llama import LlamaConfig
    from jaxllm.ops.target import is_accelerator
    from jaxllm.weights.formats import for_accelerator
    from jaxllm.weights.paths import map_leaves
    from jaxllm.weights.precision import Precision
    from jaxllm.weights.types.arrays import DTYPES

    plain = fmt in DTYPES
    precision = Precision().with_dtype(fmt if plain else "bfloat16")
    if not plain:
        precision = dataclasses.replace(precision, quantize=fmt)
    rope = Rope(rope_type="default", rope_theta=10000.0)
    sizes = {**SHAPES[shape], **({"num_hidden_layers": layers} if layers else {})}
    config = LlamaConfig(**COMMON, **sizes, rope=rope)
    model = models.build(config, precision)
    keys = iter(jax.random.split(jax.random.key(0), 1_000))

    def draw(path: str, form: Any) -> Any:
        weight = jax.random.normal(next(keys), form.shape, jnp.bfloat16) * jnp.bfloat16(0.02)
        return jax.block_until_ready(precision.cast(path, weight))

    params = map_leaves(draw, models.param_shapes(model))
    params = for_accelerator(params) if is_accelerator() else params
    return LM(config, model, params, None, {}, Path(shape))


def measure_copy() -> float:
    """Return the copy bandwidth, reads plus writes, in GB/s: the best of ten."""
    import jax
    import jax.numpy as jnp

    size = COPY_BYTES if jax.default_backend() != "cpu" else COPY_BYTES // 16
    x, best = jnp.zeros(size // 4, jnp.float32), 0.0
    add = jax.jit(lambda x: x + 1)
    for _ in range(10):
        start = time.perf_counter()
        jax.block_until_ready(add(x))
        best = max(best, 2 * x.nbytes / (time.perf_counter() - start) / 1e9)
    return best


def time_runs(run: Callable[[], Any], most: float = 6.0) -> tuple[float, float]:
    """Return the seconds of the first run, and the median of up to `RUNS` more."""
    start = time.perf_counter()
    run()
    first, seconds = time.perf_counter() - start, list[float]()
    while len(seconds) < RUNS and sum(seconds) < most:
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return first, statistics.median(seconds)


def measure_text(lm: Any, fmt: str, options: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each way to decode, and each prompt."""
    import jax

    from jaxllm.evaluate import bench
    from jaxllm.evaluate.bench import Test
    from jaxllm.steps import default_chunk

    bus, size = measure_copy(), bench.weight_bytes(lm)
    numbers = sum(leaf.size for leaf in jax.tree.leaves(lm.params, is_leaf=_is_weight))
    kind = fmt if fmt in DECODING else ""
    decoding = ONLY_DECODING if options.decode_only else DECODING[kind]
    tests = [Test(decode=NEW, depth=depth, batch=rows) for rows, depth in decoding]
    tests += [Test(prompt=tokens) for tokens in PROMPTS[kind] if not options.decode_only]
    for test in tests:
        if max(test.prompt, test.depth) > options.longest or test.batch > options.rows:
            continue
        first, took = time_runs(bench.prepare_run(lm, test, max(512, default_chunk())))
        row: Row = {"test": test.name, "rate": test.tokens / took, "first": first}
        if test.decode:
            row["share"] = size * test.decode / took / 1e9 / bus
        else:
            row["tflops"] = 2 * numbers * test.tokens / took / 1e12
        yield row


def measure_serving(lm: Any, options: argparse.Namespace) -> Iterator[Row]:
    """Yield the rate of new tokens of requests that come all at once."""
    import numpy as np

    rows, length, new = SERVED
    rows = min(rows, options.rows)
    rng = np.random.default_rng(0)

    def run() -> None:
        asked = [
            {"prompt": rng.integers(5, 30000, length).tolist(), "max_new_tokens": new,
             "temperature": 0.8, "seed": i}
            for i in range(2 * rows)
        ]  # fmt: skip
        for _, answer in lm.serve(asked, rows=rows, capacity=length + new):
            assert len(answer.tokens) == new

    first, took = time_runs(run)
    name = f"serve, {rows} rows, {length} + {new}"
    yield {"test": name, "rate": 2 * rows * new / took, "first": first}


def measure_training(lm: Any, options: argparse.Namespace) -> Iterator[Row]:
    """Yield steps of LoRA on all linears, and of all weights."""
    import jax

    from jaxllm.adapters import LoraConfig
    from jaxllm.train import jobs

    numbers = sum(leaf.size for leaf in jax.tree.leaves(lm.params))
    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    made = {
        "lora": (4, lambda: jobs.lora(lm, config)),
        "full": (6, lambda: jobs.full_finetune(lm, dtype="bfloat16")),
    }
    for kind, (flops, make) in made.items():
        for batch, width in TRAINING:
            width = min(width, options.longest)
            first, took = time_runs(_training_step(make(), batch, width))
            yield {
                "test": f"{kind} step, {batch} x {width}", "rate": batch * width / took,
                "seconds": took, "first": first,
                "tflops": flops * numbers * batch * width / took / 1e12,
            }  # fmt: skip


def _training_step(job: Any, batch: int, width: int) -> Callable[[], None]:
    """Return a function that trains on one batch of random tokens again and again."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxllm.train.data.rows import Rows
    from jaxllm.train.optimizer import Optimizer
    from jaxllm.train.partition import partition
    from jaxllm.train.step import Setup, init_state, train_step

    model = job.model.clone(packed=True)
    trained, frozen = partition(job.params, job.rules, job.compute_params)
    setup = Setup(model, job.objective, Optimizer(lr=1e-5, steps=100))
    token_BT = np.random.default_rng(0).integers(5, 30000, (1, batch, width))
    at_BT = np.broadcast_to(np.arange(width), token_BT.shape)
    arrays = (token_BT, np.roll(token_BT, -1, 2), at_BT, np.zeros_like(token_BT))
    rows = Rows(*(jnp.asarray(x, jnp.int32) for x in arrays))
    held = [init_state(trained, setup)]

    def run() -> None:
        held[0], metrics = train_step(
            held[0], frozen, job.extra_inputs, rows, jax.random.key(0), setup=setup
        )
        assert bool(metrics.finite)

    return run


def measure_starts() -> Iterator[Row]:
    """Yield the seconds of `jaxllm generate` until its first token, with an empty folder of
    programs and then with its own.
    """
    asked = ["generate", "demo:llama", "-p", "x", "-n", "1"]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "JAXLLM_COMPILE_CACHE": folder}
        for name in ("first start", "second start"):
            start = time.perf_counter()
            command = [sys.executable, "-m", "jaxllm", *asked]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
            seconds = time.perf_counter() - start
            yield {"test": f"{name} of jaxllm {' '.join(asked)}", "seconds": seconds}


def measure(shape: str, fmt: str, options: argparse.Namespace) -> Iterator[Row]:
    """Yield all rows of a shape and format; each ends with the device's peak so far."""
    import jax

    lm = draw_model(shape, fmt, options.layers)
    device = jax.devices()[0]
    parts = [measure_text(lm, fmt, options)]
    if fmt == "bfloat16" and shape != "7b" and not options.decode_only:
        parts += [measure_serving(lm, options), measure_training(lm, options)]
    for rows in parts:
        for row in rows:
            stats = device.memory_stats() or {}
            yield {**row, "peak": stats.get("peak_bytes_in_use"), "device": device.device_kind}


def measure_peer(shape: str, options: argparse.Namespace) -> Iterator[Row]:
    """Yield rows of transformers with random weights of a shape, in bfloat16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {**SHAPES[shape], **({"num_hidden_layers": options.layers} if options.layers else {})}
    config = LlamaConfig(**sizes, vocab_size=32000, max_position_embeddings=65536)
    config._attn_implementation = "sdpa"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = LlamaForCausalLM(config).to(device=device, dtype=torch.bfloat16)
    sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def read(ids: Any) -> None:
        with torch.no_grad():
            model(ids, logits_to_keep=1)
        sync()

    def decode(ids: Any, new: int) -> float:
        settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
        start = time.perf_counter()
        model.generate(ids, **settings, cache_implementation="static")
        sync()
        return time.perf_counter() - start

    def step(ids: Any) -> None:
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        sync()

    def draw(rows: int, tokens: int) -> Any:
        return torch.randint(5, 30000, (rows, min(tokens, options.longest)), device=device)

    def with_peak(row: Row) -> Row:
        on_gpu = device.type == "cuda"
        return {**row, "peak": torch.cuda.max_memory_allocated() if on_gpu else None}

    for tokens in (n for n in PROMPTS["bfloat16"] if n <= options.longest):
        first, took = time_runs(partial(read, draw(1, tokens)))
        yield with_peak({"test": f"pp{tokens}", "rate": tokens / took, "first": first})
    for depth in (n for n in (0, 8192) if n <= options.longest):
        ids = draw(1, max(depth, 1))
        decode(ids, NEW + 1)  # compiles, if transformers compiles on this device
        took = statistics.median(decode(ids, NEW + 1) - decode(ids, 1) for _ in range(3))
        name = f"tg{NEW}" + f" @ d{depth}" * (depth > 0)
        yield with_peak({"test": name, "rate": NEW / took})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")
    for batch, width in TRAINING:
        ids = draw(batch, width)
        first, took = time_runs(partial(step, ids))
        name, rate = f"full step, {batch} x {ids.shape[1]}", ids.numel() / took
        yield with_peak({"test": name, "rate": rate, "seconds": took, "first": first})


def _is_weight(node: Any) -> bool:
    from jaxllm.weights.types.base import WeightBase

    return isinstance(node, WeightBase)


def describe(shape: str, what: str, row: Row) -> str:
    """Return a row as a line of the table."""

    def show(name: str, form: str, factor: float = 1) -> str:
        value = row.get(name)
        return "" if value is None else form.format(value * factor)

    cells = (
        shape, what, row["test"], show("rate", "{:,.1f}"), show("seconds", "{:.3f}"),
        show("share", "{:.0%}"), show("tflops", "{:.1f}"), show("first", "{:.1f}"),
        show("peak", "{:.2f}", 1e-9),
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def run_part(command: list[str], seconds: float) -> Iterator[Row]:
    """Yield the rows that a process prints, until it ends or the time is over."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        timer = threading.Timer(max(seconds, 0.0), process.kill)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        timer.cancel()
    if process.returncode:
        over = process.returncode == -signal.SIGKILL
        why = "the time was over" if over else f"it ended with status {process.returncode}"
        yield {"failed": why}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog=__doc__.splitlines()[-1]
    )
    known = ", ".join(SHAPES)
    parser.add_argument("--shapes", default="tinyllama,7b", help=f"model shapes: {known}")
    parser.add_argument("--formats", default="bfloat16,int8,int4-g64-f16,nf4,bf16-packed")
    parser.add_argument("--longest", type=int, default=65536, help="longest text to measure")
    parser.add_argument("--rows", type=int, default=64, help="most rows to measure")
    parser.add_argument("--layers", type=int, help="instead of the shape's number of layers")
    parser.add_argument("--minutes", type=float, default=9.0, help="when to end")
    parser.add_argument("--no-peers", action="store_true", help="without transformers")
    parser.add_argument("--decode-only", action="store_true", help="1 to 256 rows, no prompts")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        shape, what = options.measure
        ways = {"transformers": lambda: measure_peer(shape, options), "starts": measure_starts}
        for row in ways.get(what, lambda: measure(shape, what, options))():
            print(json.dumps(row), flush=True)
        return 0
    if unknown := [name for name in options.shapes.split(",") if name not in SHAPES]:
        parser.error(f"--shapes must be among {known}, got {', '.join(unknown)}")
    begin, status, device = time.monotonic(), 0, "?"
    heads = ("tokens/s", "s", "share of memory bandwidth", "TFLOPS", "first run, s", "peak, GB")
    print(f"| shape | what | test | {' | '.join(heads)} |")
    print("|---|---|---|---:|---:|---:|---:|---:|---:|")
    parts = [(shape, fmt) for shape in options.shapes.split(",")
             for fmt in options.formats.split(",")]  # fmt: skip
    peers = not options.no_peers and find_spec("torch") and find_spec("transformers")
    parts[1:1] = [(parts[0][0], "transformers")] if peers else []
    parts += [] if options.decode_only else [(parts[0][0], "starts")]
    sizes = ["--longest", str(options.longest), "--rows", str(options.rows)]
    sizes += ["--layers", str(options.layers)] if options.layers else []
    sizes += ["--decode-only"] if options.decode_only else []
    for shape, what in parts:
        left = 60 * options.minutes - (time.monotonic() - begin)
        for row in run_part([sys.executable, __file__, "--measure", shape, what, *sizes], left):
            if "failed" in row:
                status = 1
                print(f"{shape}, {what}: {row['failed']}", file=sys.stderr, flush=True)
                continue
            device = row.get("device", device)
            print(describe(shape, what, row), flush=True)
    print(f"\n{device}")
    return status


if __name__ == "__main__":
    sys.exit(main())
