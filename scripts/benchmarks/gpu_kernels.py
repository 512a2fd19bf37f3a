"""Kernels for a GPU: checked, timed one by one, and in whole models with and without them.

    python scripts/benchmarks/gpu_kernels.py [--parts sanitize,check,products,models] [--minutes 9]

One decision: weights and inputs are random, so that no file is needed. A row is printed as soon as
it is measured. `sanitize` runs small checks under compute-sanitizer, where it is; `check` compares
every format and number of rows with float64, and each row's bits with those of the row alone;
`products` has microseconds and GB/s of weights that rotate through more than the second-level
cache, by the kernel and by XLA; `models` runs benchmarks/gpu.py for some formats and each of
`MODES`.
Example: python scripts/benchmarks/gpu_kernels.py --parts check
"""

import argparse
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ENV = "JAXLLM_GPU_KERNELS"
CHUNKS = {"nf4": 128, "bf16-packed": 128, "q4_k": 256, "q5_k": 256, "q6_k": 256}  # of columns
FORMATS = (
    *("bfloat16", "int8", "int8-g32-f16", "int4-g64-f16", "int4-g32-zp"),
    *("bfloat16-2:4", "int8-2:4"),
    *CHUNKS,
)
LARGEST_ERROR = {"nf4": 5e-3}  # of the largest product: levels are rounded; others 1e-5
SHAPES = {  # outputs and columns, of TinyLlama's and Llama 7B's layers and heads
    "small": [(256, 264), (256, 768)],
    "tinyllama": [(2560, 2048), (2048, 2048), (11264, 2048), (2048, 5632), (32000, 2048)],
    "7b": [(12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008)],
}
MODES = {
    "off": {ENV: "0"},
    "on": {ENV: "1"},
    "early": {ENV: "early"},
    # XLA captures each launch by itself, so in its graphs no kernel may start early.
    "early, no graphs": {
        **{ENV: "early", "JAXLLM_GPU_OPTIONS": "0"},
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer=",
    },
}
ROWS = (1, 8, 16, 32, 64)
CACHE_BYTES = 300 << 20  # of weights that are read before the first is read again
RUNS = 7


def draw_weight(fmt: str, outputs: int, columns: int, seed: int = 0) -> Any:
    """Return a random weight as a GPU has it."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxllm.weights.formats import for_accelerator, parse_format
    from jaxllm.weights.types.super_blocks import SUPER_BLOCKS

    key, shape = jax.random.key(seed), (outputs, columns)
    if fmt.endswith("_k"):  # a search of scales would take minutes
        block = SUPER_BLOCKS[fmt.upper()]
        bytes_ = jax.random.bits(key, (outputs, columns // 256, block.nbytes), jnp.uint8)
        halves = np.full(len(range(block.nbytes)[block.halves]) // 2, 1e-3, np.float16)
        bytes_ = bytes_.at[..., block.halves].set(halves.view(np.uint8)).reshape(outputs, -1)
        return for_accelerator(parse_format(fmt).from_arrays(shape, {".blocks": bytes_}))
    weight = jax.random.normal(key, shape).astype(jnp.bfloat16)
    if fmt.endswith("2:4"):
        weight = jnp.where(jnp.arange(columns) % 4 % 3 == 0, weight, jnp.bfloat16(0))
    return weight if fmt == "bfloat16" else for_accelerator(parse_format(fmt).quantize(weight))


def list_cases(shapes: Sequence[tuple[int, int]]) -> Iterator[tuple[str, int, int]]:
    """Yield each format with the outputs and columns of the shapes that it has."""
    for fmt, (outputs, columns) in itertools.product(FORMATS, shapes):
        if columns % CHUNKS.get(fmt, 1) == 0:
            yield fmt, outputs, columns


def multiply(x: Any, weight: Any) -> Any:
    from jaxllm.weights.linear import linear

    return linear(x, weight)


def check(shapes: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Yield a line for each format, shape and number of rows that the kernels take."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxllm.ops import cuda
    from jaxllm.weights.formats import as_weight

    run = jax.jit(multiply)
    for fmt, outputs, columns in list_cases(shapes):
        weight = draw_weight(fmt, outputs, columns)
        dense = np.asarray(as_weight(weight).to_dense(jnp.float32), np.float64)
        x = jax.random.normal(jax.random.key(1), (max(ROWS), columns), jnp.bfloat16)
        exact, alone = np.asarray(x, np.float64) @ dense.T, np.asarray(run(x[:1], weight))
        for rows in ROWS:
            if not cuda.takes(x[:rows], as_weight(weight).cuda_matrix()):
                continue
            y = np.asarray(run(x[:rows], weight))
            error = np.abs(y - exact[:rows]).max() / np.abs(exact[:rows]).max()
            same = np.array_equal(y[:1], alone)
            yield f"| {fmt} | {outputs} x {columns} | {rows} | {error:.1e} | {same} |"
            assert error < LARGEST_ERROR.get(fmt, 1e-5) and same, "a kernel is wrong"


def time_products(shapes: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Yield a line for each format, shape and number of rows, by the kernel and by XLA."""
    import jax
    import jax.numpy as jnp

    from jaxllm.ops import cuda
    from jaxllm.weights.formats import as_weight

    for fmt, outputs, columns in list_cases(shapes):
        nbytes = sum(x.nbytes for x in jax.tree.leaves(draw_weight(fmt, outputs, columns)))
        count = max(2, -(-CACHE_BYTES // nbytes))
        weights = [draw_weight(fmt, outputs, columns, seed) for seed in range(count)]
        for rows in ROWS:
            x = jax.random.normal(jax.random.key(1), (rows, columns), jnp.bfloat16)
            cells = []
            for switch in "01":
                os.environ[ENV] = switch
                if switch == "1" and not cuda.takes(x, as_weight(weights[0]).cuda_matrix()):
                    cells.append("| | ")
                    continue
                seconds = _time(x, weights) / count
                cells.append(f"| {seconds * 1e6:.2f} | {nbytes / seconds / 1e9:,.0f} ")
            yield f"| {fmt} | {outputs} x {columns} | {rows} {''.join(cells)}|"


def _time(x: Any, weights: Sequence[Any]) -> float:
    """Return the median seconds of one program that multiplies by all weights, after a first run.

    Each product waits for the one before.
    """
    import jax

    @jax.jit
    def run(x: Any, weights: Sequence[Any]) -> Any:
        for weight in weights:
            y = multiply(x, weight)
            x = x + (y[:, :1] * 0).astype(x.dtype)
        return x

    jax.block_until_ready(run(x, weights))
    seconds = []
    for _ in range(RUNS):
        start = time.perf_counter()
        jax.block_until_ready(run(x, weights))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def sanitize() -> Iterator[str]:
    """Run small checks under compute-sanitizer; yield the last line of each run."""
    if (tool := shutil.which("compute-sanitizer")) is None:
        yield "compute-sanitizer was not found"
        return
    command = [sys.executable, __file__, "--parts", "check", "--shapes", "small"]
    for kind in ("memcheck", "racecheck"):
        call = [tool, "--tool", kind, "--error-exitcode", "9", *command]
        done = subprocess.run(call, capture_output=True, text=True, cwd=ROOT)
        yield f"{kind}: {(done.stdout.strip().splitlines() or ['nothing'])[-1]}"
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def run_models(shapes: Sequence[str], minutes: float) -> Iterator[str]:
    """Yield the decoding rows of benchmarks/gpu.py by format and mode."""
    begin = time.monotonic()
    for fmt in ("bfloat16", "int8", "int4-g64-f16"):
        for mode, settings in MODES.items():
            left = minutes - (time.monotonic() - begin) / 60
            if left <= 0:
                yield f"{fmt}, kernels {mode}: the time was over"
                continue
            command = [sys.executable, str(ROOT / "scripts/benchmarks/gpu.py"), "--no-peers"]
            command += [
                "--shapes",
                ",".join(shapes),
                "--formats",
                fmt,
                "--decode-only",
                "--rows",
                "256",
            ]
            environment = {**os.environ, **settings}
            done = subprocess.run(
                [*command, "--minutes", f"{left:.2f}"], env=environment, cwd=ROOT,
                capture_output=True, text=True,
            )  # fmt: skip
            rows = [line for line in done.stdout.splitlines() if " tg" in line]
            yield from (f"{line} kernels {mode} |" for line in rows)
            if done.returncode:
                yield done.stderr.strip()[-500:]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog=__doc__.splitlines()[-1]
    )
    parser.add_argument("--parts", default="sanitize,check,products,models")
    parser.add_argument("--shapes", default="tinyllama,7b", help=", ".join(SHAPES))
    parser.add_argument("--minutes", type=float, default=9.0, help="when to end")
    options = parser.parse_args()
    begin = time.monotonic()
    os.environ[ENV] = "1"
    from jaxllm.ops import cuda

    if (problem := cuda.find_problem()) is not None:
        print(f"no kernels: {problem}", file=sys.stderr)
        return 1
    names = options.shapes.split(",")
    shapes = [shape for name in names for shape in SHAPES[name]]
    parts = {
        "sanitize": ("", sanitize),
        "check": (
            "| format | weight | rows | error | bits as alone |\n|---|---|---:|---:|---|",
            lambda: check(shapes),
        ),
        "products": (
            "| format | weight | rows | XLA, us | GB/s | kernel, us | GB/s |\n"
            "|---|---|---:|---:|---:|---:|---:|",
            lambda: time_products(shapes),
        ),
        "models": (
            "",
            lambda: run_models(names, options.minutes - (time.monotonic() - begin) / 60),
        ),
    }
    for part in options.parts.split(","):
        head, lines = parts[part]
        print(f"\n{part}\n{head}".rstrip(), flush=True)
        for line in lines():
            print(line, flush=True)
            if time.monotonic() - begin > 60 * options.minutes:
                print("the time was over", flush=True)
                return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
