"""Which path multiplies fastest: the kernels, or XLA, for an instruction set, each format and rows.

    python scripts/benchmarks/paths.py [--sets avx2,avx512] [--seconds 120] [--write]

One decision: a machine speaks for its best set alone. XLA's matrix products (YNNPACK) ask the
processor itself what it has, whatever XLA is told, so that beside an older set they would be of
another machine. Others are timed if they are named, and never written.

Each set runs in a process of its own. For each kind of weight and of inputs, and for 1 to 512 rows,
the products of a few shapes are timed on all paths: the native kernel; that for many rows, where
there is one; weights widened natively for XLA's product; and plain JAX, as with JAXLLM_NATIVE=0.
With --write, the table that `native.path` reads is written: up to how many rows the kernel is
taken, and which of the others beyond, so that least is lost in all.
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
LARGEST = 1  # rows for which the last shape is timed too
HOPELESS = 3.0  # a kernel that is so much slower is not tried with more rows


class Row(NamedTuple):
    """Milliseconds of all shapes' products; None where a path was not tried, or is none."""

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
    """The rows of the instruction set in use, in about so many seconds."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxllm.compress.methods.magnitude import prune_magnitude
    from jaxllm.compress.sparsity import parse as parse_sparsity
    from jaxllm.ops import native
    from jaxllm.weights import linear
    from jaxllm.weights.formats import as_format, as_weight
    from jaxllm.weights.types.base import WeightBase
    from jaxllm.weights.types.sparse import parse as parse_sparse

    assert native.is_enabled() and jax.default_backend() == "cpu"
    each = seconds / (len(ROWS) * sum(map(len, FORMATS.values())))
    rng = np.random.default_rng(0)
    for name, kinds in FORMATS.items():
        dtype = jnp.bfloat16 if name.startswith("bf") else jnp.float32
        drawn = [jnp.asarray(rng.normal(0, 0.02, s).astype(np.float32), dtype) for s in SHAPES]
        if parse_sparse(name) is not None:
            half = parse_sparsity("2:4" if name.endswith("2:4") else "50%")
            drawn = [prune_magnitude(array, half) for array in drawn]
        weights = [as_format(array, name) for array in drawn]
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
                some = weights if rows <= LARGEST else weights[:-1]
                dtype = "bfloat16" if inputs == "bfloat16" else "float32"
                shapes = [(rows, w.shape[1]) for w in some]
                x = [jnp.asarray(rng.normal(0, 1, shape), dtype) for shape in shapes]
                best = _times(paths, digits, x, some, each)
                if best.get("kernel", 0) > HOPELESS * min(best.values()):
                    del paths["kernel"]
                yield Row(kind, inputs, rows, *(best.get(path) for path in Row._fields[3:]))


def _times(
    paths: dict[str, Callable[..., Any]], digits: int, x: Any, weights: Any, seconds: float
) -> dict[str, float]:
    """Milliseconds of each path, the best of several in turns."""
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
            if turns:  # the first is for the caches
                best[name] = min(best[name], 1e3 * (time.perf_counter() - begin))
        turns += 1
        took = time.perf_counter() - start
        if (turns > 3 and took > seconds) or (turns > 1 and took > 2 * seconds):
            return best


def chosen(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """What `native.path` reads, of one set."""
    table: dict[str, dict[str, Any]] = {}
    for kind, inputs in dict.fromkeys((row.kind, row.inputs) for row in rows):
        mine = [row for row in rows if (row.kind, row.inputs) == (kind, inputs)]
        choices = [(limit, beyond) for limit in (0, *ROWS) for beyond in Row._fields[4:]]
        limit, beyond = min(choices, key=lambda path: (_lost(mine, *path), -path[0]))
        path = {"rows": None if limit == ROWS[-1] else limit, "beyond": beyond}
        table[f"{kind} {inputs}"] = path
    return table


def _lost(rows: list[Row], limit: int, beyond: str) -> float:
    """How much slower than the fastest path this choice is: the sum of logarithms over rows."""
    lost = 0.0
    for row in rows:
        taken = row.kernel if row.rows <= limit else getattr(row, beyond)
        best = min(ms for ms in row.times if ms is not None)
        lost += math.log(taken / best) if taken is not None else 100.0  # never what was not tried
    return lost


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", default="", help="of those that there are; the best by default")
    parser.add_argument("--seconds", type=float, default=120, help="for each of them, about")
    parser.add_argument("--write", action="store_true", help="write what the best set's rows say")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        for row in measure(asked.seconds):
            print(json.dumps(row), flush=True)
        return 0
    from jaxllm.ops import native

    best = native.available_isas()[-1]
    sets = asked.sets.split(",") if asked.sets else [best]
    table = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.is_file() else {}
    print(
        f"{'set':<13}{'weights':<10}{'inputs':<10}{'rows':>5}"
        + "".join(f"{path:>10}" for path in Row._fields[3:])
    )
    for name in sets:
        command = [sys.executable, __file__, "--measure", "--seconds", str(asked.seconds)]
        environment, rows = {**os.environ, "JAXLLM_ISA": name}, []
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                rows.append(row := Row(*json.loads(line)))
                shown = (f"{ms:>10.2f}" if ms is not None else f"{'-':>10}" for ms in row.times)
                print(
                    f"{name:<13}{row.kind:<10}{row.inputs:<10}{row.rows:>5}{''.join(shown)}",
                    flush=True,
                )
        if process.returncode:
            return process.returncode
        mine = chosen(rows)
        print(name, json.dumps(mine))
        table |= {name: mine} if name == best else {}
    if asked.write:
        ordered = {name: table[name] for name in native.INSTRUCTION_SETS if name in table}
        lines = []
        for name, rows_of in ordered.items():
            each = ",\n".join(f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in rows_of.items())
            lines.append(f'  "{name}": {{\n{each}\n  }}')
        TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
