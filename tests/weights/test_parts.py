"""Rows and columns of a weight by themselves: the same numbers, bit for bit, in the same format."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.sharding.shard_list import ShardList, equalize_shapes, max_lengths
from jaxllm.weights.formats import as_weight, parse_format
from jaxllm.weights.types.act_order import PermutedWeight
from jaxllm.weights.types.int_offset import OffsetWeight
from jaxllm.weights.types.q6_k import Q6K
from jaxllm.weights.types.static_quant import StaticQuantWeight

SHAPE = (12, 384)
RANDOM = np.random.default_rng(0)
ARRAY = RANDOM.standard_normal(SHAPE, np.float32)
TWO = ARRAY * np.tile([1, 0, 0, 1], SHAPE[1] // 4)[None].astype(np.float32)


def _made(name: str) -> Any:
    exact = "bfloat16" if name.startswith("b") else "float32"
    return parse_format(name).quantize(
        jnp.asarray(TWO if "2:4" in name or "bit" in name else ARRAY, exact)
    )


def _fine() -> Q6K:
    first = _made("int8-g32")
    return Q6K(first.data, first.scale, first.scale * 0.5, SHAPE[1])


MADE: dict[str, Any] = {
    **{
        name: (lambda name=name: _made(name))
        for name in (
            "float32", "bfloat16", "bf16-packed", "int8", "int8-zp", "int8-g64", "int4-g32",
            "int4-g64-zp-f16", "int3-g64", "int2-g32", "nf4", "nf4-f32", "rank8/int8",
            "float32-2:4", "int8-2:4", "bfloat16-bitmap", "int8-bitmap",
        )
    },
    "int8-g16": _fine,
    "offset": lambda: OffsetWeight(_made("int4-g32-zp"), _made("int4-g32-zp").scale * 3),
    "static": lambda: StaticQuantWeight.from_grid(_made("int8"), 0.1, 3),
}  # fmt: skip


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize(("begin", "end"), [(0, 128), (128, 384), (64, 192), (320, 384)])
def test_columns_are_those_of_the_whole(name: str, begin: int, end: int) -> None:
    whole = as_weight(MADE[name]())
    part = as_weight(whole.with_columns(begin, end))
    assert part.shape == (SHAPE[0], end - begin)
    np.testing.assert_array_equal(part.to_dense(), whole.to_dense()[:, begin:end])
    x = jnp.asarray(RANDOM.standard_normal((3, end - begin), np.float32))
    if name != "static":  # which rounds its inputs
        np.testing.assert_allclose(
            part.matmul(x), x @ part.to_dense("float32").T, rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("name", MADE)
def test_rows_are_those_of_the_whole(name: str) -> None:
    whole, index = as_weight(MADE[name]()), np.array([7, 2, 3, 11])
    part = as_weight(whole.with_rows(index))
    np.testing.assert_array_equal(part.to_dense(), whole.to_dense()[index])


@pytest.mark.parametrize("name", ["int8-g64", "int4-g64-zp-f16", "int8-g16", "nf4", "offset"])
def test_a_group_is_not_cut(name: str) -> None:
    with pytest.raises(ConfigError, match=r"columns 0 to 48 of .* split a group of"):
        as_weight(MADE[name]()).with_columns(0, 48)


def test_columns_of_an_order_of_their_own_stay_together() -> None:
    order = jnp.asarray(RANDOM.permutation(SHAPE[1]).astype(np.int32))
    leaf = PermutedWeight(_made("int4-g32"), order)
    np.testing.assert_array_equal(leaf.with_rows(np.array([3])).to_dense(), leaf.to_dense()[3:4])
    with pytest.raises(ConfigError, match="use exact=True on a mesh"):
        leaf.with_columns(0, 128)
    one, *others = (leaf.with_rows(np.arange(i, i + 4)) for i in range(0, SHAPE[0], 4))
    np.testing.assert_array_equal(one.concatenate(others, 0).to_dense(), leaf.to_dense())
    with pytest.raises(ConfigError, match="cannot be concatenated: they are permuted"):
        leaf.concatenate([leaf], 1)


@pytest.mark.parametrize("name", ["float32", "bf16-packed", "int4-g32", "int8-bitmap", "nf4"])
def test_shares_of_runs_are_the_whole_again(name: str) -> None:
    whole = as_weight(MADE[name]())
    rows = np.arange(SHAPE[0]).reshape(3, 2, 2)  # three runs, each of two shares
    shares = [whole.with_rows(rows[:, i].reshape(-1)) for i in range(2)]
    even = equalize_shapes(shares, max_lengths(shares))
    joint = ShardList(jax.tree.map(lambda *x: jnp.stack(x), *even), 0, 3, SHAPE[0])
    assert joint.shape == SHAPE
    np.testing.assert_array_equal(joint.to_dense(), whole.to_dense())
    np.testing.assert_array_equal(as_weight(joint.merge()).to_dense(), whole.to_dense())
    np.testing.assert_array_equal(
        as_weight(joint.get_shard(1)).to_dense(), as_weight(shares[1]).to_dense()
    )


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize(
    ("axis", "borders"),
    [
        (0, (0, 5, 6, 12)),
        (1, (0, 64, 192, 384)),
        pytest.param(1, (0, 128, 384), marks=pytest.mark.full),
    ],
)
def test_parts_put_together_are_the_whole_bit_for_bit(
    name: str, axis: int, borders: tuple[int, ...]
) -> None:
    whole = as_weight(MADE[name]())
    spans = list(itertools.pairwise(borders))
    first, *others = (
        as_weight(whole.with_columns(*span) if axis else whole.with_rows(np.arange(*span)))
        for span in spans
    )
    found = as_weight(first.concatenate(others, axis))
    # What is doubly quantized has its absmax in float32 once it is cut.
    expected = as_weight(whole.with_rows(np.arange(SHAPE[0]))) if name == "nf4" else whole
    assert found.format == expected.format
    pieces = expected.arrays()
    assert found.arrays().keys() == pieces.keys()
    for key, piece in found.arrays().items():
        assert piece.dtype == pieces[key].dtype, key
        np.testing.assert_array_equal(piece, pieces[key], err_msg=key)
    np.testing.assert_array_equal(found.to_dense(), whole.to_dense())


@pytest.mark.parametrize("columns", [96, 160, 200])
def test_what_is_added_to_the_last_chunk_is_added_once(columns: int) -> None:
    array = jnp.asarray(ARRAY[:, :columns])
    for name in ("int4-g32", "int8", "int8-g32-zp", "int3-g32"):
        whole: Any = parse_format(name).quantize(array)
        some = [whole.with_columns(0, 64), whole.with_columns(64, columns)]
        found = some[0].concatenate(some[1:], 1)
        for piece, theirs in zip(*map(jax.tree.leaves, (found, whole)), strict=True):
            np.testing.assert_array_equal(piece, theirs, err_msg=name)
