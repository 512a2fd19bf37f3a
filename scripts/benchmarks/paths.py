"""The fastest matrix product by format and batch size: native kernels compared with XLA.

    python scripts/benchmarks/paths.py [--sets avx2,avx512] [--seconds 120] [--write]

One decision: a machine contributes results for its best instruction set only. XLA's matrix products
(YNNPACK) detect the processor themselves, whatever XLA is configured to use, so a comparison with
an older set would mix two machines. --sets times other sets, but never writes them.

Each set runs in a separate process. For each weight format and input type, and for 1 to 512 rows,
the products of a few shapes are timed on all paths: the native kernel; the kernel for many rows, if
there is one; weights dequantized natively for XLA's product; and plain JAX, as with
JAXLLM_NATIVE=0. --write writes the table that `native.kernel_path` reads: the number of rows up to
which the kernel is used, and the path beyond it, chosen to minimize the total slowdown.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "jaxllm" / "ops" / "native" / "paths.json"
FORMATS = {
    "float32": ("float32",), "bfloat16": ("bfloat16", "float32"), "float16": ("float32",),
    "bf16-packed": ("bfloat16", "float32"), "int8": ("float32", "bfloat16", "int8"),
    "int4-g64-f16": ("float32", "bfloat16", "int8"),
    "float32-2:4": ("float32",), "bfloat16-2:4": ("bfloat16", "float32"),
    "int8-2:4": ("float32", "bfloat16", "int8"), "float32-bitmap": ("float32",),
    "bfloat16-bitmap": ("bfloat16", "float32"), "int8-bitmap": ("float32", "bfloat16", "int8"),
}  # fmt: skip
ROWS = (1, 2, 4, 8, 16, 64, 128, 512)
SHAPES = [(2048, 2048), (5632, 2048), (2048, 5632), (32000, 2048)]  # [out, in]
MAX_ROWS_OF_HEAD = 1  # rows up to which the last shape is timed too
MAX_SLOWDOWN = 3.0  # a kernel slower by this factor is not timed with more rows


class Row(NamedTuple):
    """Total milliseconds for all shapes; None if a path was not timed or does not exist."""

    kind: str
    inputs: str
    rows: int
    kernel: float | None
    many: float | None
    widened: float | None
    plain: float | None

    @property
    def times(self) -> tuple[float | None, ...]:
        return self[3:]


def measure(seconds: float) -> Iterator[Row]:
    """Yield the rows of the instruction set in use, within about `seconds`."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxllm.compress.methods.magnitude import prune_magnitude
    from jaxllm.ops import native
    from jaxllm.weights import linear
    from jaxllm.weights.formats import as_format, as_weight
    from jaxllm.weights.sparsity import parse as parse_sparsity
    from jaxllm.weights.types.base import WeightBase
    from jaxllm.weights.types.sparse import parse as parse_sparse

    assert native.is_enabled() and jax.default_backend() == "cpu"
    row_seconds = seconds / (len(ROWS) * sum(map(len, FORMATS.values())))
    rng = np.random.default_rng(0)
    for name, kinds in FORMATS.items():
        dtype = jnp.bfloat16 if name.startswith("bf") else jnp.float32
        matrices = [jnp.asarray(rng.normal(0, 0.02, s).astype(np.float32), dtype) for s in SHAPES]
        if parse_sparse(name) is not None:
            half = parse_sparsity("2:4" if name.endswith("2:4") else "50%")
            matrices = [prune_magnitude(array, half) for array in matrices]
        weights = [as_format(array, name) for array in matrices]
        kind = as_weight(weights[0]).native_matrix().kind.name.lower()
        for inputs in kinds:
            digits = 1 if inputs == "int8" else 3
            paths: dict[str, Callable[..., Any]] = {
                "kernel": linear._multiply_native,
                "plain": linear._multiply_jax,
            }
            if native.has_matrix_unit() and (inputs == "int8" or inputs == "bfloat16"):
                paths["many"] = linear._multiply_many
            if isinstance(weights[0], WeightBase):
                paths["widened"] = linear._multiply_dequantized
            for rows in ROWS:
                timed_weights = weights if rows <= MAX_ROWS_OF_HEAD else weights[:-1]
                dtype = "bfloat16" if inputs == "bfloat16" else "float32"
                shapes = [(rows, w.shape[1]) for w in timed_weights]
                x = [jnp.asarray(rng.normal(0, 1, shape), dtype) for shape in shapes]
                best = time_paths(paths, digits, x, timed_weights, row_seconds)
                if best.get("kernel", 0) > MAX_SLOWDOWN * min(best.values()):
                    del paths["kernel"]
                yield Row(kind, inputs, rows, *(best.get(path) for path in Row._fields[3:]))


def time_paths(
    paths: dict[str, Callable[..., Any]], digits: int, x: Any, weights: Any, seconds: float
) -> dict[str, float]:
    """Return the milliseconds of each path: the best of several alternating runs."""
    import jax

    from jaxllm.ops import native

    def run(call: Callable[..., Any], x: Any, weights: Any) -> Any:
        return [call(digits, x_RI, (w,))[0] for x_RI, w in zip(x, weights, strict=True)]

    compiled, best = {}, dict.fromkeys(paths, float("inf"))
    start, turns = time.perf_counter(), 0
    for name, call in paths.items():
        function = jax.jit(partial(run, call))
        if name == "plain":
            with native.disable_kernels():
                compiled[name] = function.lower(x, weights).compile()
        else:
            compiled[name] = function.lower(x, weights).compile()
    while True:
        for name, function in compiled.items():
            begin = time.perf_counter()
            jax.block_until_ready(function(x, weights))
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
        choices = [(limit, beyond) for limit in (0, *ROWS) for beyond in Row._fields[4:]]
        limit, beyond = min(choices, key=lambda path: (total_slowdown(matching, *path), -path[0]))
        path = {"rows": None if limit == ROWS[-1] else limit, "beyond": beyond}
        table[f"{kind} {inputs}"] = path
    return table


def total_slowdown(rows: list[Row], limit: int, beyond: str) -> float:
    """Return the summed log slowdown of this choice relative to the fastest path of each row."""
    total = 0.0
    for row in rows:
        time_ms = row.kernel if row.rows <= limit else getattr(row, beyond)
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
