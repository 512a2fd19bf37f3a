"""The native kernels called through ctypes, without XLA: any shape, address, instruction set.

The structures are those of csrc/kernels.h. Arrays end where their memory ends and begin one element
past a boundary, so that sanitizers detect out-of-bounds reads and loads are unaligned.
"""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_bool, c_float, c_int32, c_int64, c_size_t, c_void_p
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from jaxllm.ops import native
from jaxllm.ops.native import Kind

bfloat16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {
    Kind.FLOAT32: np.dtype(np.float32), Kind.BFLOAT16: bfloat16, Kind.FLOAT16: np.dtype(np.float16),
    Kind.INT8: np.dtype(np.int8),
}  # fmt: skip
KINDS = {dtype: kind for kind, dtype in DTYPES.items()}
STRIP, BLOCK, SPAN = 16, 64, 512  # tokens of a strip, positions of a block and of a span


def structure(title: str, /, **fields: Any) -> type[ctypes.Structure]:
    return type(title, (ctypes.Structure,), {"_fields_": list(fields.items())})


Weight = structure(
    "Weight", kind=c_int32, rows=c_int64, columns=c_int64, stride=c_int64, data=c_void_p,
    group=c_int64, groups=c_int64, half=c_bool, scale=c_void_p, zero=c_void_p, e2m1=c_bool,
    blocks=c_bool,
    codebook=c_void_p, scale_codebook=c_void_p, factor=c_void_p, mean=c_void_p,
    nibbles=c_void_p, nibble_stride=c_int64, base=c_int32, escape_begin=c_void_p,
    escape_column=c_void_p, escape_value=c_void_p, escapes=c_int32, mask=c_void_p,
    mask_stride=c_int64, begin=c_void_p, values=c_int64,
)  # fmt: skip
Input = structure(
    "Input", x=c_void_p, bf16=c_bool, rows=c_int64, columns=c_int64, quantize=c_bool,
    quantized=c_bool,
)  # fmt: skip
CachePart = structure(
    "CachePart", kind=c_int32, shared_k=c_bool, shared_v=c_bool, shared_position=c_bool,
    slots=c_int64, row=c_void_p, rows=c_int64, rows_each=c_int64, k=c_void_p, v=c_void_p,
    k_scale=c_void_p, v_scale=c_void_p, position=c_void_p,
)  # fmt: skip
Queries = structure(
    "Queries", q=c_void_p, bf16=c_bool, position=c_void_p, B=c_int64, T=c_int64, N=c_int64,
    K=c_int64, H=c_int64, window=c_int64, scale=c_float, cap=c_float, sink=c_void_p,
)  # fmt: skip

Block = structure("Block", base=c_int64, lanes=c_int32 * (3 * BLOCK))
Blocks = structure("Blocks", begin=POINTER(Block), end=c_void_p)

Operand = structure(
    "Operand", data=c_void_p, bf16=c_bool, transposed=c_bool, rows=c_int64, depth=c_int64
)

_W, _I, _Q, _P, _S = (POINTER(s) for s in (Weight, Input, Queries, CachePart, Operand))
Products = structure(
    "Products",
    supports=ctypes.CFUNCTYPE(ctypes.c_bool, _W, _I),
    prepared_bytes=ctypes.CFUNCTYPE(c_size_t, _W, _I),
    prepare=ctypes.CFUNCTYPE(None, _W, _I, c_int64, c_int64, c_void_p),
    multiply=ctypes.CFUNCTYPE(None, _W, _I, c_void_p, c_int64, c_int64, c_void_p),
)
Kernels = structure(
    "Kernels",
    products=Products,
    dequantize=ctypes.CFUNCTYPE(None, _W, c_int64, c_int64, c_bool, c_void_p),
    state_bytes=ctypes.CFUNCTYPE(c_size_t, _Q, c_int64),
    fold=ctypes.CFUNCTYPE(
        None, _Q, _P, c_int64, c_int64, c_int64, c_int64, Blocks, c_void_p
    ),
    merge=ctypes.CFUNCTYPE(None, _Q, c_int64, c_void_p, c_void_p),
    store_output=ctypes.CFUNCTYPE(None, _Q, c_int64, c_int64, c_int64, c_int64, c_void_p, c_void_p),
    sum_rows=c_void_p,
    logsumexp_rows=c_void_p,
    softmax_rows=c_void_p,
    normalize=c_void_p,
    matrix_unit=Products,
    multiply_operands=ctypes.CFUNCTYPE(
        None, _S, _S, c_int64, c_int64, c_int64, c_int64, c_void_p
    ),
)  # fmt: skip


def kernels(isa: str) -> Any:
    """Return an instruction set's functions; None if this machine or build lacks it."""
    loaded = native.load_kernels()
    found = loaded and loaded.jaxllm_kernels(isa.encode())
    return ctypes.cast(found, POINTER(Kernels)).contents if found else None


def placed(array: np.ndarray) -> np.ndarray:
    """Return a copy at the end of its memory, aligned only to its element size."""
    size = array.dtype.itemsize
    raw = np.empty(size + array.nbytes, np.uint8)[size:]
    at = raw.view(array.dtype).reshape(array.shape)
    at[...] = array
    return at


def address(array: np.ndarray | None) -> int | None:
    return None if array is None else array.ctypes.data


@dataclass
class Matrix:
    """A weight's arrays, and the float64 values `[O, I]` that they encode."""

    kind: Kind
    numbers: np.ndarray
    data: np.ndarray
    group: int = 0  # 0: one scale per row
    scale: np.ndarray | None = None
    zero: np.ndarray | None = None
    packed: Sequence[np.ndarray] = field(default_factory=list)  # nibbles, base, escapes
    mask: np.ndarray | None = None  # sparse weights only; data holds their values
    begin: np.ndarray | None = None  # bitmap weights only
    codebook: Sequence[np.ndarray] = field(default_factory=list)  # of NF4: scales, codebook, ...
    blocks: bool = False  # data holds the scales too, as GGUF's blocks
    # Magnitudes [O, I] that bound roundings; None: those of numbers. Sums are rounded before an
    # offset is added to them.
    sizes: np.ndarray | None = None

    @property
    def magnitudes(self) -> np.ndarray:
        """Of numbers, or of their parts."""
        return np.abs(self.numbers) if self.sizes is None else self.sizes

    @property
    def is_integer(self) -> bool:
        """Whether products round inputs to int8 on request."""
        return self.scale is not None or self.kind >= Kind.Q4_K

    @property
    def native(self) -> Any:
        rows, columns = self.numbers.shape
        w = Weight(
            kind=Kind.INT4 if self.kind == Kind.MXFP4 else self.kind,
            e2m1=self.kind == Kind.MXFP4, rows=rows, columns=columns, data=address(self.data),
            stride=self.data.shape[-1] * self.data.itemsize, zero=address(self.zero),
            scale=None if self.blocks else address(self.scale), blocks=self.blocks,
        )  # fmt: skip
        if self.scale is not None:
            w.groups = self.scale.shape[1]
            w.half = self.scale.dtype == np.float16 and not self.blocks
            w.group = self.group or -(-columns // 128) * 128
        if self.codebook:
            w.scale, w.codebook, *coded = map(address, self.codebook)
            w.group, w.groups = 64, self.codebook[0].shape[1]
            if coded:
                w.scale_codebook, w.factor, w.mean = coded
        if self.packed:
            nibbles, base, begin, column, value = self.packed
            w.nibbles, w.nibble_stride, w.base = address(nibbles), nibbles.shape[1], int(base)
            w.escape_begin, w.escape_column = address(begin), address(column)
            w.escape_value, w.escapes = address(value), len(column)
        if self.mask is not None:
            w.mask, w.mask_stride, w.begin = (
                address(self.mask),
                self.mask.shape[1],
                address(self.begin),
            )
        if self.begin is not None:
            w.values, w.stride = len(self.data), self.data.nbytes // max(rows, 1)
        return w


_LIBC = ctypes.CDLL(None)


def product(isa: str, matrix: Matrix, x: np.ndarray, *, rounded: bool = False) -> np.ndarray:
    """Return a kernel's `x @ matrix.T`, float32 `[R, O]`; x: float32, bfloat16 or int8 `[R, I]`.

    Uses the instruction set's matrix unit if it supports these. The work is split in two, as
    between threads.
    """
    k, w, (rows, columns), outputs = kernels(isa), matrix.native, x.shape, len(matrix.numbers)
    codes = x.dtype == np.int8
    given = Input(address(x), x.dtype == bfloat16, rows, columns, rounded or codes, codes)
    y = placed(np.full((rows, outputs), 7, np.float32))
    room = c_void_p()
    unit = bool(k.matrix_unit.supports) and k.matrix_unit.supports(byref(w), byref(given))
    by = k.matrix_unit if unit else k.products
    size = by.prepared_bytes(byref(w), byref(given))
    assert _LIBC.posix_memalign(byref(room), c_size_t(64), c_size_t(size)) == 0
    try:
        middle = rows // 2 // 16 * 16  # kernels.h requires multiples of 16
        for begin, end in ((0, middle), (middle, rows)):
            by.prepare(byref(w), byref(given), begin, end, room)
        half = outputs // 8 * 4
        for begin, end in ((0, half), (half, outputs)):
            by.multiply(byref(w), byref(given), room, begin, end, address(y))
    finally:
        _LIBC.free(room)
    return y


def dequantize(isa: str, matrix: Matrix, dtype: Any) -> np.ndarray:
    """Return a kernel's dequantized matrix in bfloat16 or float32."""
    out = placed(np.full(matrix.numbers.shape, 7, dtype))
    rows = len(out)
    for begin, end in ((0, rows // 2), (rows // 2, rows)):
        kernels(isa).dequantize(
            byref(matrix.native), begin, end, out.dtype == bfloat16, address(out)
        )
    return out


def multiply_operands(isa: str, a: np.ndarray, b: np.ndarray, axes: tuple[int, int]) -> np.ndarray:
    """Return the product of two matrices over an axis of each, one half of its rows at a time."""
    left, right = (
        Operand(address(x), x.dtype == bfloat16, axis == 0, x.shape[1 - axis], x.shape[axis])
        for x, axis in zip((a, b), axes, strict=True)
    )
    out = placed(np.full((left.rows, right.rows), 7, a.dtype))
    for begin, end in ((0, left.rows // 2), (left.rows // 2, left.rows)):
        kernels(isa).multiply_operands(
            byref(left), byref(right), begin, end, 0, right.rows, address(out)
        )
    return out


@dataclass
class Cached:
    """One part of a cache: k, v `[B or 1, S, K, H]`, positions `[B or 1, S]`, int8 scales."""

    k: np.ndarray
    v: np.ndarray
    position: np.ndarray
    k_scale: np.ndarray | None = None
    v_scale: np.ndarray | None = None


def attend(
    isa: str, q: np.ndarray, position: np.ndarray, parts: Sequence[Cached], *, scale: float,
    window: int | None, cap: float | None = None, sink: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """Return a kernel's attention; q and result `[B, T, N, H]`, float32 or bfloat16."""
    B, T, N, H = q.shape
    K = parts[0].k.shape[2]
    queries = Queries(
        address(q), q.dtype == bfloat16, address(position), B, T, N, K, H,
        -1 if window is None else window, scale, cap or 0, address(sink),
    )  # fmt: skip
    each = (CachePart * len(parts))(*(
        CachePart(
            KINDS[p.k.dtype], len(p.k) == 1, len(p.v) == 1, len(p.position) == 1, p.k.shape[1],
            None, max(len(p.k), len(p.v), len(p.position)), 1,
            *(address(a) for a in (p.k, p.v, p.k_scale, p.v_scale, p.position)),
        )
        for p in parts
    ))  # fmt: skip
    out = placed(np.full(q.shape, 7, q.dtype))
    some = kernels(isa)
    spans_B = [
        layout(b, [p.position[min(b, len(p.position) - 1)] for p in parts]) for b in range(B)
    ]
    for b, k, strip in np.ndindex(B, K, -(-T // STRIP)):
        first, tokens = strip * STRIP, min(STRIP, T - strip * STRIP)
        size = some.state_bytes(byref(queries), tokens)
        spans = spans_B[b]
        states = [placed(np.full(size // 4, 7, np.float32)) for _ in spans]
        for blocks, state in reversed([*zip(spans, states, strict=True)]):  # in any order
            end = ctypes.addressof(blocks) + ctypes.sizeof(blocks)
            of_span = Blocks(ctypes.cast(blocks, POINTER(Block)), end)
            some.fold(byref(queries), each, b, k, first, tokens, of_span, address(state))
        for state in states[1:]:
            some.merge(byref(queries), tokens, address(states[0]), address(state))
        some.store_output(byref(queries), b, k, first, tokens, address(states[0]), address(out))
    return out


def layout(row: int, positions: Sequence[np.ndarray]) -> list[Any]:
    """Return the blocks of each span of a row, from the positions of its parts; at least one."""
    part = np.repeat(np.arange(len(positions)), [len(of) for of in positions])
    slot = np.concatenate([np.arange(len(of)) for of in positions])
    at = np.concatenate(positions)
    order = np.lexsort((slot, part, at))
    at, part, slot = (x[order[at[order] >= 0]] for x in (at, part, slot))
    # A block begins at a multiple of its size, and where it already has the position.
    base = at // BLOCK * BLOCK
    number = np.cumsum((np.diff(at, prepend=-1) == 0) | (np.diff(base, prepend=-1) != 0)) - 1
    blocks = np.zeros(number.max(initial=-1) + 1, [("base", "i8"), ("lanes", "i4", (BLOCK, 3))])
    blocks["lanes"] = (-1, 0, 0)
    blocks["base"][number] = base
    blocks["lanes"][number, at % BLOCK] = np.stack([part, np.full_like(part, row), slot], axis=1)
    spans = np.split(blocks, np.flatnonzero(np.diff(blocks["base"] // SPAN)) + 1)
    return [(Block * len(span)).from_buffer_copy(span) for span in spans]
