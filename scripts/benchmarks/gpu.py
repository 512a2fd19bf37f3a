"""Decoding and prefill speed on a GPU, at the shapes of TinyLlama and of a 7B Llama.

    python scripts/benchmarks/gpu.py [--shapes tinyllama,7b] [--formats bfloat16,int8,int4-g64-f16]

One decision: random weights are drawn on the device, so that no file is needed. The table reports
decoding as a share of the device's memory bandwidth (a copy of 1 GiB, timed in the same process),
and prefill in teraflops. Integer formats are timed twice: in plain JAX (JAXLLM_PALLAS=0), and with
the Pallas kernel, which runs for 2 to 16 rows. Results: docs/benchmarks/gpu.md.
Example: python scripts/benchmarks/gpu.py --shapes tinyllama --batches 1,8
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COMMON: dict[str, Any] = {
    "vocab_size": 32000, "hidden_act": "silu", "norm_eps": 1e-5, "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
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


def measure(shape: str, fmt: str, options: argparse.Namespace) -> None:
    """Print one line of JSON per test."""
    import jax

    from jaxllm.evaluate import bench
    from jaxllm.evaluate.bench import Test

    lm, bus = draw_model(shape, fmt, options.layers), measure_copy()
    size = bench.weight_bytes(lm)
    numbers = sum(leaf.size for leaf in jax.tree.leaves(lm.params, is_leaf=_is_weight))
    tests = [Test(decode=options.decode, batch=int(b)) for b in options.batches.split(",")]
    for test in tests + [Test(prompt=options.prompt)] * (options.prompt > 0):
        run = bench.prepare_run(lm, test, 512)
        run()
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        took = sorted(seconds)[2]
        row: dict[str, Any] = {"test": test.name, "rate": test.tokens / took}
        if test.decode:
            row["share"] = size * test.decode / took / 1e9 / bus
        else:
            row["tflops"] = 2 * numbers * test.tokens / took / 1e12
        print(json.dumps({**row, "bus": bus, "device": jax.devices()[0].device_kind}), flush=True)


def _is_weight(node: Any) -> bool:
    from jaxllm.weights.types.base import WeightBase

    return isinstance(node, WeightBase)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog=__doc__.splitlines()[-1]
    )
    parser.add_argument(
        "--shapes", default="tinyllama,7b", help=f"model shapes: {', '.join(SHAPES)}"
    )
    parser.add_argument("--formats", default="bfloat16,int8,int4-g64-f16")
    parser.add_argument("--batches", default="1,8,64", help="batch sizes for decoding")
    parser.add_argument("--prompt", type=int, default=512, help="prompt length, tokens; 0: none")
    parser.add_argument("--decode", type=int, default=64, help="decoded tokens")
    parser.add_argument("--layers", type=int, help="instead of the shape's number of layers")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(*options.measure, options)
        return 0
    if unknown := [name for name in options.shapes.split(",") if name not in SHAPES]:
        parser.error(f"--shapes must be among {', '.join(SHAPES)}, got {', '.join(unknown)}")
    print("| shape | weights | test | tokens/s | share of memory bandwidth | TFLOPS |")
    print("|---|---|---|---:|---:|---:|")
    status, device = 0, "?"
    sizes = ["--batches", options.batches, "--prompt", str(options.prompt)]
    sizes += ["--layers", str(options.layers)] if options.layers else []
    for shape in options.shapes.split(","):
        for fmt in options.formats.split(","):
            for kernel in ("0", "1") if fmt.startswith("int") else ("0",):
                command = [sys.executable, __file__, "--measure", shape, fmt, *sizes]
                environment = {**os.environ, "JAXLLM_PALLAS": kernel}
                done = subprocess.run(
                    [*command, "--decode", str(options.decode)],
                    stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT,
                )  # fmt: skip
                status = status or done.returncode
                for line in done.stdout.splitlines():
                    row = json.loads(line)
                    device = f"{row['device']}, {row['bus']:.0f} GB/s copy bandwidth"
                    name = fmt + ", Pallas" * (kernel == "1")
                    share = f"{row['share']:.0%}" if "share" in row else ""
                    flops = f"{row['tflops']:.1f}" if "tflops" in row else ""
                    cells = (shape, name, row["test"], f"{row['rate']:.1f}", share, flops)
                    print(f"| {' | '.join(cells)} |", flush=True)
    print(f"\n{device}")
    return status


if __name__ == "__main__":
    sys.exit(main())
