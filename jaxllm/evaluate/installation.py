"""What an installation can compute, for `jaxllm doctor`: devices, kernels of each set, bandwidth.

    python -m jaxllm.evaluate.installation [--quick] [STAGE ...]

`jaxllm doctor` starts it as a separate process, since a broken library can end it. It prints a JSON
line before and after each stage, so that the last line names the one that ended it; the stages in
the arguments are left out, and with --quick those that compute.

The kernels of a set are compared with float64 where they add, within the bound that `ops.native`
documents, and bit for bit with those of the portable set where they do not.
"""

import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.ops import flash, native
from jaxllm.ops.target import target
from jaxllm.runtime.device_memory import describe_memory
from jaxllm.weights.formats import as_format, as_weight, to_dense

DEVICES, LIBRARY, BANDWIDTH = "devices", "library", "bandwidth"
SET = "set "  # before the name of an instruction set
FORMATS = (
    "float32", "bfloat16", "float16", "bf16-packed", "int8", "int8-g64", "int4-g64", "int4-g32-zp",
    "nf4", "bfloat16-2:4", "int8-2:4", "bfloat16-bitmap", "int8-bitmap",
)  # fmt: skip
# Of the sum of the terms' magnitudes, up to 2,048 columns.
BOUND = 1e-6
_ROWS, _COLUMNS = 24, 256


def check_set(name: str) -> list[str]:
    """Return what the kernels of an instruction set get wrong; the set stays selected.

    Raises ConfigError if it is not available.
    """
    native.isa(name)
    problems = []
    for format in FORMATS:
        weight, w_OI = _make_weight(format)
        for rows, dtype in ((2, "float32"), (20, "bfloat16")):
            x_RI = jnp.asarray(_normal(rows, _COLUMNS, seed=rows)).astype(dtype)
            (y_RO,) = native.linear(
                x_RI, [weight], columns=_COLUMNS, matrix_unit=native.has_matrix_unit() and rows > 2
            )
            x = np.asarray(x_RI.astype(jnp.float32), np.float64)
            problems += _describe(
                f"{format}, {rows} rows", y_RO, x @ w_OI.T, np.abs(x) @ np.abs(w_OI).T
            )
    problems += _describe("attention", *_attention())
    x = _normal(3, 1000, seed=4)
    sums = native.reduce_rows("sum", jnp.asarray(x))
    problems += _describe("sums", sums, x.sum(1, dtype=np.float64), np.abs(x).sum(1))
    exact = _exact_results()
    native.isa("portable")
    portable = _exact_results()
    native.isa(name)
    for what, y in exact.items():
        if y.tobytes() != portable[what].tobytes():
            problems.append(f"{what}: the bits differ from those of the portable set")
    return problems


def _exact_results() -> dict[str, np.ndarray]:
    """Return results without additions that round, which have the same bits in all sets."""
    results = {}
    codes = np.random.default_rng(5).integers(-127, 128, (3, _COLUMNS)).astype(np.int8)
    for format in FORMATS:
        weight, _ = _make_weight(format)
        dense = native.dequantize(weight, jnp.dtype(jnp.float32), columns=_COLUMNS)
        results[f"{format}, dequantized"] = np.asarray(dense)
        if format in ("int8", "int8-2:4", "int8-bitmap"):
            x_RI = jnp.asarray(codes)
            (y_RO,) = native.linear(x_RI, [weight], columns=_COLUMNS, digits=1)
            results[f"{format}, int8 inputs"] = np.asarray(y_RO)
    return results


def _describe(what: str, y: Any, expected: np.ndarray, magnitudes: np.ndarray) -> list[str]:
    """Return a line if a result is not within the bound."""
    off = np.abs(np.asarray(y, np.float64) - expected) / np.maximum(magnitudes, 1e-30)
    worst = float(off.max()) if np.isfinite(off).all() else float("inf")
    return [] if worst <= BOUND else [f"{what}: wrong by {worst:.1e} of the sum of magnitudes"]


def _attention() -> tuple[Any, np.ndarray, np.ndarray]:
    """Return attention by the kernel and in float64, and the sum of its terms' magnitudes."""
    B, T, S, N, K, H = 2, 3, 70, 4, 2, 32
    q, k, v = (
        _normal(*shape, H, seed=seed)
        for seed, shape in enumerate(((B, T, N), (B, S, K), (B, S, K)))
    )
    at_BT = (S - T + np.arange(T) + np.zeros((B, 1))).astype(np.int32)
    slot_BS = (np.arange(S) + np.zeros((B, 1))).astype(np.int32)
    arrays = [jnp.asarray(x) for x in (k, v, slot_BS)]
    y = native.attend(jnp.asarray(q), jnp.asarray(at_BT), arrays, scale=0.2, window=None)
    k_BSNH, v_BSNH = (np.repeat(x.astype(np.float64), N // K, axis=2) for x in (k, v))
    score_BTNS = 0.2 * np.einsum("BTNH,BSNH->BTNS", q.astype(np.float64), k_BSNH)
    seen_BTS = slot_BS[:, None] <= at_BT[:, :, None]
    p_BTNS = np.exp(score_BTNS) * seen_BTS[:, :, None]
    p_BTNS /= p_BTNS.sum(-1, keepdims=True)
    expected, magnitudes = (
        np.einsum("BTNS,BSNH->BTNH", p_BTNS, x) for x in (v_BSNH, np.abs(v_BSNH))
    )
    return y, expected, magnitudes


@functools.cache
def _make_weight(format: str) -> tuple[native.Matrix, np.ndarray]:
    """Return a matrix for the kernels, and its numbers by plain JAX, float64 `[O, I]`."""
    with native.disable_kernels():
        x_OI = _normal(_ROWS, _COLUMNS, seed=3)
        if format.endswith(("2:4", "bitmap")):
            x_OI *= np.arange(_COLUMNS) % 4 % 3 == 0
        dense = jnp.asarray(x_OI).astype(jnp.bfloat16)
        dense = dense.astype(jnp.float32) if format == "float32" else dense
        weight = as_format(dense, format)
        numbers = np.asarray(to_dense(weight).astype(jnp.float32), np.float64)
        matrix = as_weight(weight).native_matrix()
    assert matrix is not None, f"the kernels have no {format}"
    return matrix, numbers


def _normal(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32)


def _describe_devices() -> dict[str, Any]:
    found = jax.devices()
    return {
        "jax": jax.__version__,
        "jaxlib": jax.lib.__version__,
        "backend": jax.default_backend(),
        "devices": [device.device_kind for device in found],
        "memory": describe_memory(),
        "cudnn": flash.find_problem() if target() == "cuda" else None,
    }


def _describe_library() -> dict[str, Any]:
    if not native.is_enabled():
        return {"path": native.library_path(), "selected": None, "available": []}
    return {
        "path": native.library_path(),
        "selected": native.isa(),
        "available": native.available_isas(),
    }


def _check_set(name: str) -> dict[str, Any]:
    return {"problems": check_set(name)}


def _measure_bandwidth() -> dict[str, Any]:
    from jaxllm.evaluate import bench  # with all models

    probe = jnp.arange(bench.PROBE_BYTES // 4, dtype=jnp.uint32).block_until_ready()
    return {"gb_s": round(bench.measure_bandwidth(probe), 2)}


def _stages(quick: bool) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    yield DEVICES, _describe_devices
    yield LIBRARY, _describe_library
    selected = native.isa() if native.is_enabled() else None
    for name in () if quick else native.available_isas():
        yield f"{SET}{name}", functools.partial(_check_set, name)
    if selected is not None:
        native.isa(selected)
    if not quick:
        yield BANDWIDTH, _measure_bandwidth


def main(arguments: Sequence[str]) -> None:
    """Run the stages, but those in the arguments, and print what they return."""
    for name, run in _stages("--quick" in arguments):
        if name in arguments:
            continue
        print(json.dumps({"stage": name}), flush=True)
        try:
            facts = run()
        except (ConfigError, RuntimeError, OSError, AttributeError) as error:
            facts = {"error": f"{error}"[:500]}
        print(json.dumps({"stage": name, "facts": facts}), flush=True)
        if name == LIBRARY and "error" in facts:
            return


if __name__ == "__main__":
    main(sys.argv[1:])
