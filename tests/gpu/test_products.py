"""Products as an accelerator computes them, run on a CPU."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.ops.target import trace_for
from jaxllm.weights import linear
from jaxllm.weights.formats import as_format, as_weight, for_accelerator, parse_format
from jaxllm.weights.types.permuted import PermutedWeight


@pytest.fixture(scope="module", autouse=True)
def _accelerator() -> Iterator[None]:
    with trace_for("rocm"):
        yield


def draw(fmt: str, shape: tuple[int, ...] = (96, 320), seed: int = 0) -> Any:
    rng, format = np.random.default_rng(seed), parse_format(fmt)
    if getattr(format, "is_plain", True):
        weight = jnp.asarray(rng.normal(0, 1, shape), format.lossless_dtype or "float32")
        return as_format(weight, fmt)
    arrays = {
        name: rng.integers(0, 16, size, np.uint8).view(dtype) if np.dtype(dtype).itemsize == 1
        else rng.normal(0, 1, size).astype(dtype)
        for name, (size, dtype) in format.array_specs(shape).items()
    }  # fmt: skip
    return format.from_arrays(shape, {name: jnp.asarray(x) for name, x in arrays.items()})


FORMATS = ["int8", "int8-g64", "int8-g32-zp", "int4-g64", "int4-g32-f16", "int4-g128-zp",
           "int3-g64", "nf4", "bfloat16-bitmap", "ordered/int4-g64", "int8-g16",
           "offset/int4-g32-zp", "bf16-packed"]  # fmt: skip


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("dtype", "row_counts"), [("bfloat16", (1, 40)), ("float32", (3, 40))])
def test_products_equal_those_of_dense_weights(
    fmt: str, dtype: str, row_counts: tuple[int, ...]
) -> None:
    """float32 is exact; a bfloat16 weight is rounded twice, so 2**-7 of the magnitudes."""
    weight = draw("int4-g64" if fmt.startswith("ordered/") else fmt)
    if fmt.startswith("ordered/"):
        order = np.random.default_rng(1).permutation(320)
        weight = PermutedWeight(weight, jnp.asarray(order, jnp.int32))
    dense = np.asarray(as_weight(weight).to_dense(jnp.float32), np.float64)
    (stored,) = for_accelerator([weight])
    for rows in row_counts:
        x = jnp.asarray(np.random.default_rng(rows).normal(0, 1, (rows, 320)), dtype)
        found = jax.jit(linear.linear)(x, stored)
        x_64 = np.asarray(x, np.float64)
        size = abs(x_64) @ abs(dense).T
        bound = 1e-6 if dtype == "float32" else 2**-7
        assert (abs(np.asarray(found) - x_64 @ dense.T) < bound * size).all(), rows


@pytest.mark.parametrize("fmt", ["int4-g64", "int4-g32-zp-f16", "int8-g16"])
def test_integers_of_an_accelerator_are_the_stored_ones(fmt: str) -> None:
    """XLA's int4, and one array of scales for groups of 16, hold the same weights: files, rows,
    columns and joined parts are the same.
    """
    weight = draw(fmt)
    (stored,) = for_accelerator([weight])
    assert stored.format == weight.format == fmt and not stored.is_composite
    assert stored.data.dtype == (jnp.int4 if fmt.startswith("int4") else jnp.int8)
    dense = np.asarray(weight.to_dense())
    np.testing.assert_array_equal(stored.to_dense(), dense)
    for name, array in weight.arrays().items():
        np.testing.assert_array_equal(stored.arrays()[name], array)
    index = np.array([5, 0, 95])
    np.testing.assert_array_equal(stored.with_rows(index).to_dense(), dense[index])
    np.testing.assert_array_equal(stored.take(jnp.asarray(index)), dense[index])
    np.testing.assert_array_equal(stored.with_columns(128, 256).to_dense(), dense[:, 128:256])
    both = stored.concatenate([stored.with_rows(index)], 0)
    np.testing.assert_array_equal(both.to_dense(), np.concatenate([dense, dense[index]]))
