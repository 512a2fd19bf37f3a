"""The fastest matrix product by format and batch size: native kernels compared with XLA.

    python scripts/benchmarks/paths.py [--sets avx2,avx512] [--seconds 120] [--write]

One decision: a machine contributes results for its best instruction set only. XLA's matrix products
(YNNPACK) detect the processor themselves, whatever XLA is configured to use, so a comparison with
an older set would mix two machines. --sets times other sets, but never writes them.

Each set runs in a separate process. For each weight format and input type, a model of two layers of
TinyLlama's shape runs 1 to 16 rows (a step of so many texts) and 64 to 512 (a prompt), with all its
products on one path: the native kernel; the kernel for many rows, if there is one; weights
dequantized natively for XLA's product; and plain JAX. Whole models, because a product that is timed
by itself finds its weights in the cache: tables made from such times chose a path for int4 prompts
that was 1.5 times slower in a model. --write writes the table that `native.kernel_path` reads: the
number of rows up to which the kernel is used, and the path beyond it, chosen to minimize the total
slowdown.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "jaxllm" / "ops" / "native" / "paths.json"
FORMATS = {
    "float32": ("float32",), "bfloat16": ("bfloat16", "float32"), "float16": ("float32",),
    "bf16-packed": ("bfloat16", "float32"), "int8": ("float32", "bfloat16", "int8"),
    "int4-g64-f16": ("float32", "bfloat16", "int8"), "nf4": ("float32", "bfloat16"),
    "float32-2:4": ("float32",), "bfloat16-2:4": ("bfloat16", "float32"),
    "int8-2:4": ("float32", "bfloat16", "int8"), "float32-bitmap": ("float32",),
    "bfloat16-bitmap": ("bfloat16", "float32"), "int8-bitmap": ("float32", "bfloat16", "int8"),
}  # fmt: skip
ROWS = (1, 2, 4, 8, 16, 64, 128, 512)
MAX_BATCH = 16  # more rows than this are one prompt
MODEL: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 2, "vocab_size": 1024,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 64, "hidden_act": "silu",
    "max_position_embeddings": 2048, "norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
MAX_SLOWDOWN = 3.0  # a kernel slower by this factor is not timed with more rows


class Row(NamedTuple):
    """Milliseconds of the model; None if a path was not timed or does not exist."""

    kind: str
    inputs: str
    rows: int
    kernel: float | None
    matrix_unit: float | None
    dequantize: float | None
    xla: float | None

    @property
    def times(self) -> tuple[float | None, ...]:
        return self[3:]


def measure(seconds: float) -> Iterator[Row]:
    """Yield the rows of the instruction set in use, within about `seconds`, compiling apart."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxllm import models
    from jaxllm.config.model import Rope
    from jaxllm.models.llama import LlamaConfig
    from jaxllm.ops import native
    from jaxllm.research.pruning.magnitude import prune_magnitude
    from jaxllm.research.pruning.sparsity import parse as parse_sparsity
    from jaxllm.steps import run_model
    from jaxllm.weights.formats import as_format, as_weight, parse_format
    from jaxllm.weights.paths import map_leaves
    from jaxllm.weights.precision import Precision
    from jaxllm.weights.types.base import WeightBase

    assert native.is_enabled() and jax.default_backend() == "cpu"
    row_seconds = seconds / (len(ROWS) * sum(map(len, FORMATS.values())))
    rng = np.random.default_rng(0)
    config = LlamaConfig(**MODEL, rope=Rope(rope_type="default", rope_theta=10000.0))
    for name, kinds in FORMATS.items():
        dtype = jnp.bfloat16 if name.startswith("bf") else jnp.float32

        def draw(path: str, form: Any, name: str = name, dtype: Any = dtype) -> Any:
            array = jnp.asarray(rng.normal(0, 0.02, form.shape).astype(np.float32), dtype)
            if len(form.shape) == 1 or "embed" in path:
                return array
            if parse_format(name).dense_format is not None:
                half = parse_sparsity("2:4" if name.endswith("2:4") else "50%")
                array = prune_magnitude(array, half)
            return as_format(array, name)

        params = map_leaves(draw, models.param_shapes(models.build(config)))
        leaf = params["layers.0"]["mlp"]["down_proj"]["weight"]
        for inputs in kinds:
            paths = {"kernel": native.KernelPath(None), "xla": native.KernelPath(0, "xla")}
            if native.has_matrix_unit() and (inputs == "int8" or inputs == "bfloat16"):
                paths["matrix_unit"] = native.KernelPath(0, "matrix_unit")
            if isinstance(leaf, WeightBase):
                paths["dequantize"] = native.KernelPath(0, "dequantize")
            floats = "bfloat16" if inputs == "bfloat16" else "float32"
            precision = Precision(activations=floats, cache=floats, int8_inputs=inputs == "int8")
            model = models.build(config, precision)
            for rows in ROWS:
                shape = (rows, 1) if rows <= MAX_BATCH else (1, rows)
                tokens = rng.integers(0, config.vocab_size, shape).astype(np.int32)
                positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
                last = np.full(shape[0], shape[1] - 1, np.int32)

                def run(
                    params: Any, model: Any = model, given: Any = (tokens, positions, last)
                ) -> Any:
                    tokens, positions, last = given
                    return run_model(model, params, (), tokens, positions, column_B=last)[0].logits

                best = time_paths(paths, run, params, row_seconds)
                if best.get("kernel", 0) > MAX_SLOWDOWN * min(best.values()):
                    del paths["kernel"]
                kind = as_weight(leaf).native_matrix().kind.name.lower()
                yield Row(kind, inputs, rows, *(best.get(path) for path in Row._fields[3:]))


def time_paths(
    paths: dict[str, Any], run: Callable[[Any], Any], params: Any, seconds: float
) -> dict[str, float]:
    """Return the milliseconds on each path: the best of several alternating runs."""
    import jax

    from jaxllm.ops import native
    from jaxllm.weights import linear

    compiled, best = {}, dict.fromkeys(paths, float("inf"))
    choose, products = native.kernel_path, linear._PRODUCTS
    try:
        for name, path in paths.items():
            native.kernel_path = lambda kind, inputs, path=path: path
            # Products traced for another path are cached.
            linear._PRODUCTS = {digits: linear._make_product(digits) for digits in products}
            compiled[name] = jax.jit(lambda params: run(params)).lower(params).compile()
    finally:
        native.kernel_path, linear._PRODUCTS = choose, products
    start, turns = time.perf_counter(), 0
    while True:
        for name, function in compiled.items():
            begin = time.perf_counter()
            jax.block_until_ready(function(params))
            if turns:  # the first run warms the caches
                best[name] = min(best[name], 1e3 * (time.perf_counter() - begin))
        turns += 1
        took = time.perf_counter() - start
        if (turns > 3 and took > seconds) or (turns > 1 and took > 2 * seconds):
            return best


def choose_paths(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """Return one instruction set's table for `native.kernel_path`."""
    table: dict[str, dict[str, Any]] = {}
    for kind, inputs in dict.fromkeys((row.kind, row.inputs) for row in rows):
        matching = [row for row in rows if (row.kind, row.inputs) == (kind, inputs)]
        others = [path for path in Row._fields[4:] if getattr(matching[0], path) is not None]
        choices = [(limit, fallback) for limit in (0, *ROWS) for fallback in others]
        limit, fallback = min(choices, key=lambda path: (total_slowdown(matching, *path), -path[0]))
        path = {"rows": None if limit == ROWS[-1] else limit, "fallback": fallback}
        table[f"{kind} {inputs}"] = path
    return table


def total_slowdown(rows: list[Row], limit: int, fallback: str) -> float:
    """Return the summed log slowdown of this choice relative to the fastest path of each row."""
    total = 0.0
    for row in rows:
        time_ms = row.kernel if row.rows <= limit else getattr(row, fallback)
        best = min(ms for ms in row.times if ms is not None)
        # The penalty keeps a path that was not timed from being chosen.
        total += math.log(time_ms / best) if time_ms is not None else 100.0
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--sets", default="", help="instruction sets, comma-separated (default: best)"
    )
    parser.add_argument("--seconds", type=float, default=120, help="seconds per set")
    parser.add_argument("--write", action="store_true", help="write the best set's table")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        for row in measure(options.seconds):
            print(json.dumps(row), flush=True)
        return 0
    from jaxllm.ops import native

    best = native.available_isas()[-1]
    sets = options.sets.split(",") if options.sets else [best]
    table = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.is_file() else {}
    print(
        f"{'set':<13}{'weights':<10}{'inputs':<10}{'rows':>5}"
        + "".join(f"{path:>10}" for path in Row._fields[3:])
    )
    for name in sets:
        command = [sys.executable, __file__, "--measure", "--seconds", str(options.seconds)]
        environment, rows = {**os.environ, "JAXLLM_ISA": name}, []
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                rows.append(row := Row(*json.loads(line)))
                cells = (f"{ms:>10.2f}" if ms is not None else f"{'-':>10}" for ms in row.times)
                print(
                    f"{name:<13}{row.kind:<10}{row.inputs:<10}{row.rows:>5}{''.join(cells)}",
                    flush=True,
                )
        if process.returncode:
            return process.returncode
        paths = choose_paths(rows)
        print(name, json.dumps(paths))
        table |= {name: paths} if name == best else {}
    if options.write:
        ordered = {name: table[name] for name in native.INSTRUCTION_SETS if name in table}
        lines = []
        for name, entries in ordered.items():
            body = ",\n".join(f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in entries.items())
            lines.append(f'  "{name}": {{\n{body}\n  }}')
        TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
