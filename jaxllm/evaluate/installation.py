"""Checks of an installation for `jaxllm doctor`: devices, products of each instruction set.

    python -m jaxllm.evaluate.installation STAGE ...

`jaxllm doctor` starts it as a separate process, since a broken library can end it. The last line is
a JSON object: what each stage returned, or its "error".
"""

import functools
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.ops import cuda, flash, native
from jaxllm.ops.target import target
from jaxllm.runtime.device_memory import describe_memory
from jaxllm.weights.formats import as_format, as_weight, further_names, parse_format, to_dense

FORMATS = (
    "float32", "bfloat16", "float16", "bf16-packed", "int8", "int8-g64", "int4-g64", "int4-g32-zp",
    "nf4",
)  # fmt: skip
BOUND = 1e-6  # of the sum of the terms' magnitudes, up to 2,048 columns
_ROWS, _COLUMNS = 24, 256


def check_set(name: str) -> list[str]:
    """Return the products of an instruction set that differ from float64; it stays selected."""
    native.isa(name)
    problems = list[str]()
    sparse = [name for name in further_names() if parse_format(name).dense_format is not None]
    for format in (*FORMATS, *sparse):
        matrix, w_OI = _make_weight(format)
        for rows, dtype in ((2, "float32"), (20, "bfloat16")):
            x_RI = jnp.asarray(_normal(rows)).astype(dtype)
            unit = native.has_matrix_unit() and rows > 2
            (y_RO,) = native.linear(x_RI, [matrix], columns=_COLUMNS, matrix_unit=unit)
            x = np.asarray(x_RI.astype(jnp.float32), np.float64)
            off = np.abs(np.asarray(y_RO, np.float64) - x @ w_OI.T) / (np.abs(x) @ np.abs(w_OI).T)
            worst = float(off.max()) if np.isfinite(off).all() else float("inf")
            if not worst <= BOUND:
                problems.append(f"{format}, {rows} rows: wrong by {worst:.1e} of the magnitudes")
    return problems


@functools.cache
def _make_weight(format: str) -> tuple[native.Matrix, np.ndarray]:
    """Return a matrix for the kernels, and its numbers by XLA, float64 `[O, I]`."""
    with native.disable_kernels():
        x_OI = _normal(_ROWS)
        if parse_format(format).dense_format is not None:
            x_OI *= np.arange(_COLUMNS) % 4 % 3 == 0
        dense = jnp.asarray(x_OI).astype(jnp.bfloat16)
        dense = dense.astype(jnp.float32) if format == "float32" else dense
        weight = as_format(dense, format)
        numbers = np.asarray(to_dense(weight).astype(jnp.float32), np.float64)
        matrix = as_weight(weight).native_matrix()
    assert matrix is not None, f"the kernels have no {format}"
    return matrix, numbers


def _normal(rows: int) -> np.ndarray:
    return np.random.default_rng(rows).normal(0, 1, (rows, _COLUMNS)).astype(np.float32)


def _describe_devices() -> dict[str, Any]:
    return {
        "backend": jax.default_backend(),
        "devices": [device.device_kind for device in jax.devices()],
        "memory": describe_memory(),
        "cudnn": flash.find_problem() if target() == "cuda" else None,
        "kernels": (cuda.find_problem() or "on") if target() == "cuda" else None,
    }


def _describe_library() -> dict[str, Any]:
    enabled = native.is_enabled()
    selected, available = (native.isa(), native.available_isas()) if enabled else (None, [])
    return {"path": native.library_path(), "selected": selected, "available": available}


def _measure_bandwidth() -> dict[str, Any]:
    from jaxllm.evaluate import bench  # with all models

    probe = jnp.arange(bench.PROBE_BYTES // 4, dtype=jnp.uint32).block_until_ready()
    return {"gb_s": round(bench.measure_bandwidth(probe), 2)}


def _run(stage: str) -> dict[str, Any]:
    """Return the facts of a stage: devices, library, set NAME or bandwidth."""
    try:
        if stage.startswith("set "):
            return {"problems": check_set(stage.removeprefix("set "))}
        stages = {"devices": _describe_devices, "library": _describe_library}
        return stages.get(stage, _measure_bandwidth)()
    except (ConfigError, RuntimeError, OSError, AttributeError) as error:
        return {"error": f"{error}"[:500]}


if __name__ == "__main__":
    print(json.dumps({stage: _run(stage) for stage in sys.argv[1:]}))
