"""Row and column slices of weights: equal values, bit for bit, in the same format."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.sharding.shard_list import ShardList, equalize_shapes, max_lengths
from jaxllm.weights.formats import as_weight, parse_format
from jaxllm.weights.types.int_weight import IntWeight
from jaxllm.weights.types.permuted import PermutedWeight
from tests.weights.products import plain_product

SHAPE = (12, 384)
BORDERS = ((0, 5, 6, 12), (0, 64, 192, 384))  # of parts, by axis; tests share their programs
RANDOM = np.random.default_rng(0)
ARRAY = RANDOM.standard_normal(SHAPE, np.float32)


def _quantize(name: str) -> Any:
    return parse_format(name).quantize(
        jnp.asarray(ARRAY, "bfloat16" if name.startswith("b") else "float32")
    )


def _two_scales() -> IntWeight:
    first = _quantize("int8-g32")
    return first.replace(second_scale=first.scale * 0.5)


MAKERS: dict[str, Any] = {
    **{
        name: (lambda name=name: _quantize(name))
        for name in (
            "float32", "bfloat16", "bf16-packed", "int8", "int8-zp", "int8-g64", "int4-g32",
            "int4-g64-zp-f16", "int3-g64", "int2-g32", "nf4", "nf4-f32", "rank8/int8",
        )
    },
    "int8-g16": _two_scales,
    "offset": lambda: _quantize("int4-g32-zp").replace(offset=_quantize("int4-g32-zp").scale * 3),
}  # fmt: skip


@pytest.mark.parametrize("name", MAKERS)
def test_with_columns_equals_dense_slice(name: str) -> None:
    assert_columns_equal_dense(as_weight(MAKERS[name]()))


def assert_columns_equal_dense(whole: Any, *, products: bool = True) -> None:
    """Check runs of columns of a weight of `SHAPE`, and products unless they round their inputs."""
    for begin, end in itertools.pairwise(BORDERS[1]):
        part = as_weight(whole.with_columns(begin, end))
        assert part.shape == (SHAPE[0], end - begin)
        np.testing.assert_array_equal(part.to_dense(), whole.to_dense()[:, begin:end])
        x = jnp.asarray(RANDOM.standard_normal((3, end - begin), np.float32))
        if products:
            expected = x @ part.to_dense("float32").T
            np.testing.assert_allclose(plain_product(x, part), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MAKERS)
def test_with_rows_equals_dense_rows(name: str) -> None:
    assert_rows_equal_dense(as_weight(MAKERS[name]()))


def assert_rows_equal_dense(whole: Any) -> None:
    index = np.array([7, 2, 3, 11])
    part = as_weight(whole.with_rows(index))
    np.testing.assert_array_equal(part.to_dense(), whole.to_dense()[index])


@pytest.mark.parametrize("name", ["int8-g64", "int4-g64-zp-f16", "int8-g16", "nf4", "offset"])
def test_with_columns_refuses_splitting_groups(name: str) -> None:
    with pytest.raises(ConfigError, match=r"columns 0 to 48 of .* split a group of"):
        as_weight(MAKERS[name]()).with_columns(0, 48)


def test_permuted_weight_slices_rows_but_not_columns() -> None:
    order = jnp.asarray(RANDOM.permutation(SHAPE[1]).astype(np.int32))
    leaf = PermutedWeight(_quantize("int4-g32"), order)
    np.testing.assert_array_equal(leaf.with_rows(np.array([3])).to_dense(), leaf.to_dense()[3:4])
    with pytest.raises(ConfigError, match="use exact=True on a mesh"):
        leaf.with_columns(0, 128)
    one, *rest = (leaf.with_rows(np.arange(i, i + 4)) for i in range(0, SHAPE[0], 4))
    np.testing.assert_array_equal(one.concatenate(rest, 0).to_dense(), leaf.to_dense())
    with pytest.raises(ConfigError, match="cannot be concatenated: they are permuted"):
        leaf.concatenate([leaf], 1)


@pytest.mark.parametrize("name", ["float32", "bf16-packed", "int4-g32", "nf4"])
def test_shard_list_of_runs_merges_to_whole(name: str) -> None:
    assert_runs_merge(as_weight(MAKERS[name]()))


def assert_runs_merge(whole: Any) -> None:
    """Check that shards of a part of each of three row runs merge to the whole weight, and that
    each shard can be extracted again.
    """
    rows = np.arange(SHAPE[0]).reshape(3, 2, 2)  # three runs, each split in two
    shares = [whole.with_rows(rows[:, i].reshape(-1)) for i in range(2)]
    even = equalize_shapes(shares, max_lengths(shares))
    joint = ShardList(jax.tree.map(lambda *x: jnp.stack(x), *even), 0, 3, SHAPE[0])
    assert joint.shape == SHAPE
    np.testing.assert_array_equal(joint.to_dense(), whole.to_dense())
    np.testing.assert_array_equal(as_weight(joint.merge()).to_dense(), whole.to_dense())
    np.testing.assert_array_equal(
        as_weight(joint.get_shard(1)).to_dense(), as_weight(shares[1]).to_dense()
    )


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("axis", [0, 1])
def test_concatenated_parts_equal_whole_bitwise(name: str, axis: int) -> None:
    assert_parts_join(as_weight(MAKERS[name]()), axis)


def assert_parts_join(whole: Any, axis: int) -> None:
    """Check that runs of rows (axis 0) or columns (1) join to the whole, bit for bit."""
    first, *rest = (
        as_weight(whole.with_columns(*span) if axis else whole.with_rows(np.arange(*span)))
        for span in itertools.pairwise(BORDERS[axis])
    )
    found = as_weight(first.concatenate(rest, axis))
    # Slices of doubly quantized weights store absmax in float32.
    expected = as_weight(whole.with_rows(np.arange(SHAPE[0]))) if whole.format == "nf4" else whole
    assert found.format == expected.format
    pieces = expected.arrays()
    assert found.arrays().keys() == pieces.keys()
    for key, piece in found.arrays().items():
        assert piece.dtype == pieces[key].dtype, key
        np.testing.assert_array_equal(piece, pieces[key], err_msg=key)
    np.testing.assert_array_equal(found.to_dense(), whole.to_dense())


@pytest.mark.parametrize("columns", [96, 160, 200])
def test_concatenate_pads_last_chunk_once(columns: int) -> None:
    array = jnp.asarray(ARRAY[:, :columns])
    for name in ("int4-g32", "int8", "int8-g32-zp", "int3-g32"):
        whole: Any = parse_format(name).quantize(array)
        some = [whole.with_columns(0, 64), whole.with_columns(64, columns)]
        found = some[0].concatenate(some[1:], 1)
        for piece, theirs in zip(*map(jax.tree.leaves, (found, whole)), strict=True):
            np.testing.assert_array_equal(piece, theirs, err_msg=name)
