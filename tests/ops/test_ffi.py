"""FFI calls to the kernels: arguments that do not fit raise an error before they are read."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.ops import native
from jaxllm.ops.native import Kind, Matrix
from jaxllm.weights.formats import as_format

pytestmark = pytest.mark.usefixtures("kernels")

f32, bf16, i8, u8, i32 = jnp.float32, jnp.bfloat16, jnp.int8, jnp.uint8, jnp.int32
X = jnp.ones((2, 200))


PACKED: Any = as_format(jnp.ones((5, 200), bf16), "bf16-packed")
BLOCKS: Any = as_format(jnp.ones((5, 256)), "nf4")


def zeros(*shape: int, dtype: Any = f32) -> jax.Array:
    return jnp.asarray(np.zeros(shape, dtype))  # `jnp.zeros` would compile each shape


def packed(**changed: jax.Array) -> Matrix:
    return Matrix(Kind.PACKED_BF16, jax.tree.leaves(PACKED.replace(**changed)))


def int8(data: jax.Array, scale: jax.Array, *more: jax.Array, group: int | None = None) -> Matrix:
    return Matrix(Kind.INT8, [data, scale, *more], group)


def int4(data: jax.Array, scale: jax.Array, *more: jax.Array, group: int | None = 64) -> Matrix:
    return Matrix(Kind.INT4, [data, scale, *more], group)


def nf4(count: int = 6, **changed: jax.Array) -> Matrix:
    """Return 20 blocks of nf4, of which 200 columns are no whole number, or some of its pieces."""
    matrix = BLOCKS.replace(**changed).native_matrix()
    return matrix._replace(arrays=matrix.arrays[:count])


Q8, Q4 = zeros(5, 256, dtype=i8), zeros(5, 128, dtype=u8)
WEIGHTS = {
    "a vector": Matrix(Kind.FLOAT32, [zeros(200)]),
    "a stack": Matrix(Kind.FLOAT32, [zeros(5, 200, 1)]),
    "too narrow": Matrix(Kind.FLOAT32, [zeros(5, 199)]),
    "of another type": Matrix(Kind.FLOAT32, [zeros(5, 200, dtype=bf16)]),
    "of another type still": Matrix(Kind.BFLOAT16, [zeros(5, 200)]),
    "in two pieces": Matrix(Kind.FLOAT32, [zeros(5, 200), zeros(5, 200)]),
    "of no kind": Matrix(9, [zeros(5, 200)]),  # type: ignore[arg-type]
    "integers without scales": Matrix(Kind.INT8, [Q8]),
    "integers of another type": int8(Q8.astype(u8), zeros(5, 1)),
    "integers in no whole 128": int8(zeros(5, 200, dtype=i8), zeros(5, 1)),
    "scales in a vector": int8(Q8, zeros(5)),
    "scales for fewer rows": int8(Q8, zeros(4, 1)),
    "scales for fewer groups": int8(Q8, zeros(5, 3), group=64),
    "scales of another type": int8(Q8, zeros(5, 1, dtype=bf16)),
    "a group of no size": int8(Q8, zeros(5, 16), group=16),
    "a negative group": int8(Q8, zeros(5, 1), group=-256),
    "zero points of 8 bits": int8(Q8, zeros(5, 1), zeros(5, 1, dtype=u8)),
    "four bits with a scale a row": int4(Q4, zeros(5, 1), group=None),
    "four bits in half the bytes": int4(zeros(5, 64, dtype=u8), zeros(5, 4)),
    "four bits, zero points of another type": int4(Q4, zeros(5, 4), zeros(5, 4, dtype=i8)),
    "four bits, fewer zero points": int4(Q4, zeros(5, 4), zeros(5, 3, dtype=u8)),
    "four bits and a piece too many": int4(Q4, zeros(5, 4), zeros(5, 4, dtype=u8), zeros(1)),
    "mxfp4 with scales": Matrix(Kind.MXFP4, [Q4, zeros(5, 8)], 32),
    "mxfp4 in groups of 64": Matrix(Kind.MXFP4, [Q4, zeros(5, 4, dtype=u8)], 64),
    "mxfp4 with zero points": Matrix(Kind.MXFP4, [Q4, *[zeros(5, 8, dtype=u8)] * 2], 32),
    "mxfp4 without exponents": Matrix(Kind.MXFP4, [zeros(5 * 144, dtype=u8)], 32, 5),
    "exponents as scales of integers": int4(Q4, zeros(5, 8, dtype=u8), group=32),
    "super-blocks of fewer rows": Matrix(Kind.Q6_K, [zeros(5 * 210 - 1, dtype=u8)], 32, 5),
    "super-blocks of 16 columns": Matrix(Kind.Q6_K, [zeros(5 * 210, dtype=u8)], 16, 5),
    "super-blocks of another type": Matrix(Kind.Q4_K, [zeros(5 * 144, dtype=i8)], 32, 5),
    "super-blocks in pieces": Matrix(Kind.Q4_K, [zeros(5, 144, dtype=u8), zeros(5, 1)], 32, 5),
    "blocks in a matrix": Matrix(Kind.INT4, [zeros(5, 144, dtype=u8)], 32, 5),
    "blocks of another type": Matrix(Kind.INT8, [zeros(5 * 272, dtype=i8)], 32, 5),
    "blocks of 64 columns": Matrix(Kind.INT8, [zeros(5 * 272, dtype=u8)], 64, 5),
    "blocks of fewer rows": Matrix(Kind.INT8, [zeros(5 * 272 - 1, dtype=u8)], 32, 5),
    "packed without escapes": Matrix(Kind.PACKED_BF16, packed().arrays[:5]),
    "packed too narrow": packed(sign_mantissa=zeros(5, 192, dtype=u8)),
    "packed with fewer exponents": packed(nibbles=zeros(5, 64, dtype=u8)),
    "packed with a list of bases": packed(base=zeros(1, dtype=i32)),
    "packed with fewer beginnings": packed(escape_begin=zeros(5, dtype=i32)),
    "packed with more columns than values": packed(escape_column=zeros(3, dtype=i32)),
    "packed with values of another type": packed(escape_value=zeros(0, dtype=jnp.float16)),
}


NF4 = {
    "fewer bytes": nf4(data=zeros(20, 31, dtype=u8)),
    "no whole rows": nf4(data=zeros(19, 32, dtype=u8)),
    "signed bytes": nf4(data=zeros(20, 32, dtype=i8)),
    "fewer scales": nf4(absmax=zeros(19, dtype=u8)),
    "scales of another type": nf4(absmax=zeros(20)),
    "coded scales without a table": nf4(3),
    "no mean": nf4(5),
    "two factors": nf4(scale=zeros(2)),
    "means of rows": nf4(mean=zeros(5)),
    "scales alone": nf4(2),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_ffi_refuses_malformed_weights(name: str) -> None:
    """dequantize and linear raise on a weight whose arrays have a wrong count, shape, type or group
    size.
    """
    with pytest.raises(jax.errors.JaxRuntimeError, match="jaxllm: "):
        native.dequantize(WEIGHTS[name], f32, columns=200)
    with pytest.raises(jax.errors.JaxRuntimeError, match="jaxllm: "):
        native.linear(X, [WEIGHTS[name]], columns=200)


def test_ffi_refuses_malformed_nf4() -> None:
    """dequantize raises on pieces that do not fit 5 rows of 4 blocks, and on columns that are no
    whole blocks.
    """
    assert native.dequantize(nf4(), f32, columns=256).shape == (5, 256)
    cases = [*((name, matrix, 256) for name, matrix in NF4.items()), ("200 columns", nf4(), 200)]
    for name, matrix, columns in cases:
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"jaxllm: .*nf4"):
            native.dequantize(matrix, f32, columns=columns)
            pytest.fail(name)


def call(name: str, out: Any, *args: Any, **attributes: Any) -> Any:
    return jax.ffi.ffi_call(f"jaxllm_{name}", out)(*args, **attributes)


def dequantize(out: Any, columns: int = 200) -> Any:
    settings = {"kind": np.int32(0), "group": np.int64(0), "columns": np.int64(columns)}
    return call("dequantize", out, jnp.int32(0), W, **settings)


def shape(*size: int, dtype: Any = f32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(size, dtype)


def multiply(
    x: Any, weight: Any, out: Any, counts: tuple[int, ...] = (1,), groups: int = 1
) -> Callable[[], Any]:
    attributes = {
        "kinds": np.zeros(len(out), np.int32), "groups": np.zeros(groups, np.int64),
        "counts": np.array(counts, np.int32), "columns": np.int64(200), "digits": np.int32(3),
        "matrix_unit": np.bool_(False),
    }  # fmt: skip
    return lambda: call("linear", out, x, *weight, **attributes)


def experts(
    *pieces: Any, x: Any = None, at: Any = None, out: Any = None, **changed: Any
) -> Callable[[], Any]:
    """Return a call with three experts `[5, 200]` and the rows of two tokens."""
    out = [shape(2, 5)] if out is None else out
    attributes = {
        "kinds": np.zeros(1, np.int32), "groups": np.zeros(1, np.int64),
        "counts": np.array([len(pieces)], np.int32), "columns": np.int64(200),
        "experts": np.int64(3), "digits": np.int32(3), "matrix_unit": np.bool_(False), **changed,
    }  # fmt: skip
    at = zeros(2, dtype=i32) if at is None else at
    return lambda: call("experts", out, X if x is None else x, at, *pieces, **attributes)


def attend(
    *pieces: Any,
    q: Any = None,
    at: Any = None,
    out: Any = None,
    rows: Any = None,
    sinks: Any = None,
) -> Callable[[], Any]:
    q = zeros(2, 3, 4, 16) if q is None else q
    at = zeros(2, 3, dtype=i32) if at is None else at
    out = shape(*q.shape, dtype=q.dtype) if out is None else out
    return lambda: call(
        "attend", out, q, at, zeros(0, dtype=i32) if rows is None else rows,
        zeros(0) if sinks is None else sinks, *pieces,
        cached=np.int64(rows is not None), scale=np.float32(1), window=np.int64(-1),
        cap=np.float32(0),
    )  # fmt: skip


def write(old: Any, *new: Any, out: Any = None, rows: Any = None) -> Callable[[], Any]:
    rows = zeros(2, dtype=i32) if rows is None else rows
    out = [shape(*old.shape, dtype=old.dtype)] if out is None else out
    return lambda: call("write", out, rows, zeros(2, 2, dtype=i32), old, *new)


def normalize(x: Any, *weights: Any, out: Any = None) -> Callable[[], Any]:
    out = shape(*x.shape, dtype=x.dtype) if out is None else out
    return lambda: call(
        "normalize", out, x, *weights,
        eps=np.float32(1), offset=np.float32(0), centered=np.bool_(False),
    )  # fmt: skip


def contract(a: Any, b: Any, out: Any, axes: tuple[int, int] = (1, 1)) -> Callable[[], Any]:
    return lambda: call("multiply", out, a, b, a_axis=np.int64(axes[0]), b_axis=np.int64(axes[1]))


STACK = zeros(15, 200)
W, K, AT = zeros(5, 200), zeros(2, 7, 2, 16), zeros(2, 7, dtype=i32)
K8, S8 = zeros(2, 7, 2, 16, dtype=i8), zeros(2, 7, 2)
TABLE, INDEX = zeros(9, 8), zeros(3, dtype=i32)
CALLS: dict[str, Callable[[], Any]] = {
    "x in a vector": multiply(zeros(200), [W], [shape(1, 5)]),
    "x of another width": multiply(zeros(2, 199), [W], [shape(2, 5)]),
    "x of float16": multiply(X.astype(jnp.float16), [W], [shape(2, 5)]),
    "a product with fewer rows": multiply(X, [W], [shape(1, 5)]),
    "a product of another type": multiply(X, [W], [shape(2, 5, dtype=bf16)]),
    "fewer groups than weights": multiply(X, [W, W], [shape(2, 5)] * 2, (1, 1)),
    "no pieces": multiply(X, [W], [shape(2, 5)], (0,)),
    "fewer than no pieces": multiply(X, [W], [shape(2, 5)], (-1,)),
    "more pieces than there are": multiply(X, [W], [shape(2, 5)], (2,)),
    "a piece of no weight": multiply(X, [W, W], [shape(2, 5)]),
    "two vectors": contract(zeros(200), zeros(200), shape(1, 1)),
    "two matrices of integers": contract(X.astype(i8), W.astype(i8), shape(2, 5)),
    "two matrices of two types": contract(X, W.astype(bf16), shape(2, 5)),
    "two matrices of two widths": contract(X, W, shape(200, 5), (0, 1)),
    "two matrices over a third axis": contract(X, W, shape(2, 5), (1, 2)),
    "two matrices over no axis": contract(X, W, shape(2, 5), (-1, 1)),
    "a product of two matrices with fewer rows": contract(X, W, shape(1, 5)),
    "a product of two matrices in another type": contract(X, W, shape(2, 5, dtype=bf16)),
    "experts of int8 x": experts(STACK, x=X.astype(i8), digits=np.int32(1)),
    "experts for x of another width": experts(STACK, x=zeros(2, 199)),
    "experts for more rows than x has": experts(STACK, at=zeros(3, dtype=i32)),
    "experts in a stack": experts(STACK.reshape(3, 5, 200)),
    "experts of no whole number of rows": experts(zeros(14, 200)),
    "experts of another number": experts(STACK, experts=np.int64(5)),
    "no experts": experts(STACK, experts=np.int64(0)),
    "fewer than no experts": experts(STACK, experts=np.int64(-3)),
    "experts with fewer results": experts(STACK, out=[shape(1, 5)]),
    "experts with results of another type": experts(STACK, out=[shape(2, 5, dtype=bf16)]),
    "experts with two results": experts(STACK, out=[shape(2, 5)] * 2),
    "experts without pieces": experts(),
    "experts with a piece of no weight": experts(STACK, STACK, counts=np.array([1], np.int32)),
    "packed experts": experts(*packed().arrays, kinds=np.array([5], np.int32)),
    "dequantized to another size": lambda: dequantize(shape(5, 100)),
    "more rows than the weight's": lambda: dequantize(shape(6, 200)),
    "dequantized to another type": lambda: dequantize(shape(5, 200, dtype=i8)),
    "a negative number of columns": lambda: dequantize(shape(5, 200), columns=-200),
    "a table of one row": lambda: call("take", shape(3, 8), zeros(8), INDEX),
    "rows of another width": lambda: call("take", shape(3, 9), TABLE, INDEX),
    "more rows than numbers": lambda: call("take", shape(4, 8), TABLE, INDEX),
    "rows of another type": lambda: call("take", shape(3, 8, dtype=bf16), TABLE, INDEX),
    "rows of half bytes": lambda: call(
        "take", shape(3, 8, dtype=jnp.int4), TABLE.astype(jnp.int4), INDEX
    ),
    "half bytes read": lambda: call("read", shape(dtype=jnp.uint32), TABLE.astype(jnp.int4)),
    "written without what is new": write(zeros(2, 7)),
    "written to no slots": write(zeros(7), zeros(7)),
    "written for fewer rows": write(zeros(2, 7, 3), zeros(1, 2, 3)),
    "written to fewer rows": write(zeros(2, 7, 3), zeros(2, 2, 3), rows=zeros(1, dtype=i32)),
    "written with narrower slots": write(zeros(2, 7, 3), zeros(2, 2, 2)),
    "written of another type": write(zeros(2, 7, 3), zeros(2, 2, 3, dtype=bf16)),
    "written elsewhere": write(zeros(2, 7, 3), zeros(2, 2, 3), out=[shape(2, 6, 3)]),
    "sums of rank 3": lambda: call("sum_rows", shape(2), zeros(2, 3, 4)),
    "sums of bfloat16": lambda: call("sum_rows", shape(2), zeros(2, 3, dtype=bf16)),
    "sums of fewer rows": lambda: call("logsumexp_rows", shape(1), zeros(2, 3)),
    "softmaxes of fewer columns": lambda: call("softmax_rows", shape(2, 2), zeros(2, 3)),
    "normalized without rows": normalize(zeros(3), zeros(3)),
    "normalized with fewer weights": normalize(zeros(2, 3), zeros(2)),
    "normalized with a longer bias": normalize(zeros(2, 3), zeros(3), zeros(4)),
    "normalized with two biases": normalize(zeros(2, 3), zeros(3), zeros(3), zeros(3)),
    "normalized with integers": normalize(zeros(2, 3), zeros(3, dtype=i32)),
    "normalized to another type": normalize(zeros(2, 3), zeros(3), out=shape(2, 3, dtype=bf16)),
    "rows of a cache for fewer queries": attend(K, K, AT, K, K, AT, rows=zeros(1, dtype=i32)),
    "rows of a cache that are floats": attend(K, K, AT, K, K, AT, rows=zeros(2)),
    "rows of a cache without rows": attend(K[:0], K[:0], AT[:0], K, K, AT, rows=AT[:, 0]),
    "sinks of fewer heads": attend(K, K, AT, sinks=zeros(2)),
    "sinks of integers": attend(K, K, AT, sinks=zeros(4, dtype=i32)),
    "queries of rank 3": attend(K, K, AT, q=zeros(2, 3, 16)),
    "queries of float16": attend(K, K, AT, q=zeros(2, 3, 4, 16, dtype=jnp.float16)),
    "queries elsewhere": attend(K, K, AT, at=zeros(2, 4, dtype=i32)),
    "positions of queries that are floats": attend(K, K, AT, at=zeros(2, 3)),
    "an answer of another size": attend(K, K, AT, out=shape(2, 3, 4, 8)),
    "no parts": attend(),
    "a part without positions": attend(K, K),
    "a part of rank 3": attend(K[0], K[0], AT),
    "another batch of keys": attend(zeros(3, 7, 2, 16), K, AT),
    "another batch of values": attend(K, zeros(3, 7, 2, 16), AT),
    "another batch of positions": attend(K, K, zeros(3, 7, dtype=i32)),
    "fewer slots of values": attend(K, zeros(2, 6, 2, 16), AT),
    "fewer positions": attend(K, K, AT[:, :6]),
    "fewer heads of values": attend(K, zeros(2, 7, 1, 16), AT),
    "smaller heads": attend(zeros(2, 7, 2, 8), zeros(2, 7, 2, 8), AT),
    "heads that do not divide": attend(zeros(2, 7, 3, 16), zeros(2, 7, 3, 16), AT),
    "no heads": attend(zeros(2, 7, 0, 16), zeros(2, 7, 0, 16), AT),
    "other heads in a second part": attend(K, K, AT, K[:, :, :1], K[:, :, :1], AT),
    "values of another type": attend(K, K.astype(bf16), AT),
    "keys of integers": attend(K.astype(i32), K.astype(i32), AT),
    "positions that are floats": attend(K, K, AT.astype(f32)),
    "int8 without scales": attend(K8, K8, AT),
    "int8 with fewer scales": attend(K8, K8, AT, S8, S8[:, :, :1]),
    "int8 with scales of another type": attend(K8, K8, AT, S8.astype(bf16), S8.astype(bf16)),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_ffi_refuses_malformed_arguments(name: str) -> None:
    """Every FFI target raises if the shapes, types or counts of its arguments and outputs do not
    agree.
    """
    with pytest.raises(jax.errors.JaxRuntimeError, match="jaxllm: "):
        jax.block_until_ready(CALLS[name]())


def test_experts_give_zero_rows_for_invalid_indices() -> None:
    """Rows with an expert index outside 0 to 2 are zeros; an input without rows gives an empty
    result.
    """
    at = jnp.array([-1, 3, -(2**31), 2**31 - 1, 2], i32)
    result = experts(STACK + 1, x=jnp.ones((5, 200)), at=at, out=[shape(5, 5)])()
    np.testing.assert_array_equal(result[0], np.repeat([[0.0], [200.0]], [4, 1], 0) * np.ones(5))
    assert experts(STACK, x=zeros(0, 200), at=at[:0], out=[shape(0, 5)])()[0].shape == (0, 5)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 50 * 8, 4099, (1 << 20) + 8 * 33 + 5])
def test_read_sums_every_byte(size: int) -> None:
    """read returns the sum of all 8-byte words modulo 2**32, with the last word padded by zeros."""
    raw = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    words = np.pad(raw, (0, -size % 8)).view(np.uint64)
    assert int(native.read(jnp.asarray(raw))) == int(words.sum()) % 2**32


def test_take_handles_empty_tables_and_indices() -> None:
    """Rows of a table without rows are zeros; a table without columns or an empty index gives an
    empty result.
    """
    assert not np.asarray(native.take(zeros(0, 8), INDEX)).any()
    assert native.take(zeros(9, 0), INDEX).shape == (3, 0)
    assert native.take(TABLE, INDEX[:0]).shape == (0, 8)


def test_write_stays_within_rows_and_slots() -> None:
    """Write changes exactly the slots and rows that exist, with or without arrays to wait for."""
    old = jnp.arange(24, dtype=f32).reshape(2, 4, 3)
    new = -jnp.ones((3, 2, 3)) * jnp.arange(1.0, 4.0)[:, None, None]
    ends = (-(2**31), -3, -1, 0, 3, 4, 2**31 - 1)
    for row, slot in itertools.product((-1, 0, 1, 2, 2**31 - 1), ends):
        rows, slots = jnp.int32([row, 1, 0]), jnp.int32([[slot, 2], [0, slot], [1, 1]])
        expected = np.asarray(old).copy()
        for r, t in np.ndindex(3, 2):
            if 0 <= int(rows[r]) < 2 and 0 <= int(slots[r, t]) < 4:
                expected[int(rows[r]), int(slots[r, t])] = new[r, t]
        for after in ([], [new, jnp.int32(3)]):
            (written,) = native.write(rows, slots, [old], [new], after)
            np.testing.assert_array_equal(written, expected)
