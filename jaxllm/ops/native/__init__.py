"""C++ kernels called through XLA's FFI, for operations that XLA runs slowly on CPUs; optional.

`weights.linear` and `ops.attention` check `is_enabled()` and otherwise run plain JAX, which gives
the same numbers. The kernels distribute rows over XLA's own threads.

JAXLLM_NATIVE=0 disables them, JAXLLM_LIBRARY selects another library. JAXLLM_ISA selects the
instruction set, one of `INSTRUCTION_SETS`; default: the best that the machine supports.

Within an instruction set, an output's bits depend only on its own row and weights, and are
reproducible. The matrix unit (avx512-amx) adds in another order for many rows, as if it were
another set. Between sets, outputs differ by the order of additions: each is within 1e-6 of the sum
of its terms' magnitudes up to 2,048 columns, and beyond that in proportion to the square root of
their number. Sets with products of bfloat16 pairs (avx512-bf16, avx512-amx, neon-bf16) also round
attention weights to bfloat16 if queries and cache are bfloat16, as plain JAX does: an error of up
to 2**-7 of the values' magnitudes.
"""

import ctypes
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import ConfigError

# Name -> CPU features that it is compiled for; selected only if the CPU reports all of them.
INSTRUCTION_SETS = {
    "portable": "any processor",
    "avx2": "AVX2, FMA and F16C",
    "avx2-vnni": "AVX2, FMA, F16C and AVX-VNNI",
    "avx512": "AVX-512 F, BW, VL and DQ",
    "avx512-vnni": "AVX-512 F, BW, VL, DQ and VNNI",
    "avx512-bf16": "AVX-512 F, BW, VL, DQ, VNNI and BF16",
    "avx512-amx": "AVX-512 F, BW, VL, DQ, VNNI, BF16, and AMX TILE, BF16 and INT8",
    "neon": "aarch64",
    "neon-dot": "aarch64 with dotprod",
    "neon-bf16": "aarch64 with dotprod and bf16",
}


PATHS = os.path.join(os.path.dirname(__file__), "paths.json")


class Kind(IntEnum):
    """The storage type of a weight or cache, numbered as in csrc/kernels.h."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    INT8 = 3
    INT4 = 4
    PACKED_BF16 = 5
    NF4 = 6
    SPARSE24_F32 = 7
    SPARSE24_BF16 = 8
    SPARSE24_INT8 = 9
    BITMAP_F32 = 10
    BITMAP_BF16 = 11
    BITMAP_INT8 = 12
    Q4_K = 13
    Q5_K = 14
    Q6_K = 15
    MXFP4 = 16


PLAIN_KINDS = (Kind.FLOAT32, Kind.BFLOAT16, Kind.FLOAT16)
# Kinds that `experts` supports: each matrix of a stack starts at its own offset.
EXPERT_KINDS = (*PLAIN_KINDS, Kind.INT8, Kind.INT4, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.MXFP4)


class KernelPath(NamedTuple):
    """How a matmul runs, depending on its number of rows.

    Attributes:
        max_rows: Use the kernel for few rows up to this number; None: for any.
        fallback: Above that: "matrix_unit", its kernel; or XLA, on weights dequantized by a
            kernel ("dequantize") or by XLA ("xla").
    """

    max_rows: int | None = 16
    fallback: str = "dequantize"

    @property
    def takes_any_rows(self) -> bool:
        """Whether one kernel takes any number of rows."""
        return self.max_rows is None or (self.max_rows == 0 and self.fallback == "matrix_unit")


def kernel_path(kind: Kind, inputs: str) -> KernelPath:
    """Return the path for a kind of weights on the current instruction set, from paths.json.

    `scripts/benchmarks/paths.py` writes that file, from whole models. Sets without a row have
    defaults. Int8 inputs use the kernel for any number of rows: a prompt of 128 tokens is read 2.4
    times as fast (docs/benchmarks/decoding.md, AVX2). So do weights that XLA would have to
    dequantize first, on other AVX sets: measured on the nearest one, avx512-bf16, where the kernel
    reads a prompt of 128 tokens 1.5 to 2.2 times as fast and one of 512 0.95 to 1.4 times.
    Under `use_one_path` a matrix unit, or else the kernel for few rows, takes any number.
    inputs: float32, bfloat16 or int8.
    """
    if _INVARIANT.value:
        return KernelPath(0, "matrix_unit") if has_matrix_unit() else KernelPath(None)
    name = str(isa())
    row = _kernel_paths().get(name, {}).get(f"{kind.name.lower()} {inputs}")
    if row is not None:
        return KernelPath(row["rows"], row["fallback"])
    any_rows = inputs == "int8" or (name.startswith("avx") and kind not in PLAIN_KINDS)
    return KernelPath(max_rows=None) if any_rows else KernelPath()


@cache
def _kernel_paths() -> dict[str, dict[str, Any]]:
    with open(PATHS, encoding="utf-8") as file:
        table: dict[str, dict[str, Any]] = json.load(file)
    return table


# Addresses of a row's grammar, prompt length, length and text, then B, L, that of the bits, and W.
MaskFunction = ctypes.CFUNCTYPE(
    None, *[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 2, ctypes.c_void_p, ctypes.c_int64
)

# Part of the key of compiled functions, as device and precision are.
_ENABLED = jax.make_user_context(True)


# Likewise: whether the same kernel multiplies any number of rows.
_INVARIANT = jax.make_user_context(False)


@contextmanager
def use_one_path(invariant: bool) -> Iterator[None]:
    """Trace so that one kernel multiplies any number of rows, and a row's bits do not depend on it.

    invariant: False: by the table of paths.
    """
    with _INVARIANT(invariant):
        yield


@contextmanager
def disable_kernels() -> Iterator[None]:
    """Trace without native kernels in this context."""
    with _ENABLED(False):
        yield


def is_enabled() -> bool:
    """Whether native kernels are available and not disabled."""
    return _ENABLED.value and load_kernels() is not None


def isa(name: str | None = None) -> str | None:
    """Return the instruction set in use, after selecting `name` if given; None without kernels.

    Raises ConfigError if the machine does not support it.
    """
    loaded = load_kernels()
    return None if loaded is None else _select_isa(loaded, name)


def has_matrix_unit() -> bool:
    """Whether the current instruction set has a matrix unit, with kernels for many rows."""
    return isa() == "avx512-amx"


def available_isas() -> list[str]:
    """Return the instruction sets that both this machine and the library support."""
    loaded = load_kernels()
    return [name for name in INSTRUCTION_SETS if loaded and loaded.jaxllm_kernels(name.encode())]


def _select_isa(loaded: ctypes.CDLL, name: str | None) -> str:
    isa_name = loaded.jaxllm_isa(name.encode() if name else None)
    if isa_name is None and name not in INSTRUCTION_SETS:
        raise ConfigError(f"no instruction set {name!r} (known: {', '.join(INSTRUCTION_SETS)})")
    if isa_name is None:
        raise ConfigError(
            f"instruction set {name!r} is not available on this machine: it needs"
            f" {INSTRUCTION_SETS[str(name)]}"
        )
    return str(isa_name.decode())


_FUNCTIONS = (
    *("linear", "multiply", "experts", "dequantize", "take", "attend", "write", "read"),
    *("sum_rows", "logsumexp_rows", "softmax_rows", "normalize", "mask_tokens"),
)


@cache
def load_kernels() -> ctypes.CDLL | None:
    """Load the shared library and register its functions with XLA; None if there is none."""
    if os.environ.get("JAXLLM_NATIVE", "1") == "0" or (path := library_path()) is None:
        return None
    loaded = ctypes.CDLL(path)
    loaded.jaxllm_isa.restype = ctypes.c_char_p
    loaded.jaxllm_kernels.restype = ctypes.c_void_p
    _select_isa(loaded, os.environ.get("JAXLLM_ISA"))
    for name in _FUNCTIONS:
        capsule = jax.ffi.pycapsule(getattr(loaded, f"jaxllm_{name}"))
        jax.ffi.register_ffi_target(f"jaxllm_{name}", capsule, platform="cpu")
    return loaded


def set_mask_function(function: Any) -> None:
    """Set what `jaxllm_mask_tokens` calls, with kernels: a `MaskFunction` that is kept."""
    if (loaded := load_kernels()) is not None:
        loaded.jaxllm_set_mask_function(function)


def library_path() -> str | None:
    """Return the path of the shared library; None if there is none.

    Looks at JAXLLM_LIBRARY, then beside this file and, for a checkout, in the site-packages that
    its editable installation was built into.
    """
    if named := os.environ.get("JAXLLM_LIBRARY"):
        return named
    native_folder = os.path.dirname(__file__)
    checkout = os.path.isdir(os.path.join(native_folder, "csrc"))
    for folder in (native_folder, *(f"{p}/jaxllm/ops/native" for p in sys.path if checkout)):
        path = os.path.join(folder, "_kernels.so")
        if os.path.isfile(path):
            return path
    return None


class Matrix(NamedTuple):
    """A weight as the kernels take it.

    Attributes:
        kind: Storage type.
        arrays: Arrays `[O, ...]` of that type (see `weights.types`).
        group: Columns that share a scale; None if a row has one scale, or none.
        rows: Its rows, if its arrays are flat: GGUF's blocks as bytes, or blocks of NF4.
    """

    kind: Kind
    arrays: Sequence[jax.Array]
    group: int | None = None
    rows: int | None = None

    @property
    def row_count(self) -> int:
        return self.arrays[0].shape[0] if self.rows is None else self.rows


def linear(
    x_RI: jax.Array,
    weights: Sequence[Matrix],
    *,
    columns: int,
    digits: int = 3,
    matrix_unit: bool = False,
) -> list[jax.Array]:
    """Return `x @ weight.T` for each weight, float32 `[R, O]`; sums do not depend on R.

    Args:
        x_RI: float32 or bfloat16. With digits=1 and integer weights, also int8 from -127 to 127; if
            a row has one scale, the integer sum is exact.
        columns: I of all weights.
        digits: Base-256 digits of x for integer weights: 1 rounds x to int8, with a scale
            for the columns of a group, or for each 128 if rows have one scale; 3 keeps all of x.
        matrix_unit: Use the matrix unit if it supports these dtypes, with another order of
            additions.
    """
    rows = x_RI.shape[0]
    out = [jax.ShapeDtypeStruct((rows, w.row_count), jnp.float32) for w in weights]
    call = jax.ffi.ffi_call("jaxllm_linear", out, vmap_method="sequential")
    attributes = {
        "kinds": np.array([w.kind for w in weights], np.int32),
        "groups": np.array([w.group or 0 for w in weights], np.int64),
        "counts": np.array([len(w.arrays) for w in weights], np.int32),
        "columns": np.int64(columns),
        "digits": np.int32(digits),
        "matrix_unit": np.bool_(matrix_unit),
    }
    return list(call(x_RI, *(piece for w in weights for piece in w.arrays), **attributes))


def multiply(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
    """Return the product of two matrices over an axis of each, `[M, N]` in their dtype.

    Sums are float32. An output's bits do not depend on other rows and columns. Needs
    `has_matrix_unit()`.

    Args:
        a, b: both float32 or both bfloat16.
        a_axis, b_axis: the axes that are contracted; M and N are the others.
    """
    out = jax.ShapeDtypeStruct((a.shape[1 - a_axis], b.shape[1 - b_axis]), a.dtype)
    call = jax.ffi.ffi_call("jaxllm_multiply", out, vmap_method="sequential")
    y: jax.Array = call(a, b, a_axis=np.int64(a_axis), b_axis=np.int64(b_axis))
    return y


def experts(
    x_AI: jax.Array,
    expert_A: jax.Array,
    stacks: Sequence[Matrix],
    *,
    columns: int,
    digits: int = 3,
    matrix_unit: bool = False,
) -> list[jax.Array]:
    """Return `x[a] @ stack[expert[a]].T` for each stack, float32 `[A, O]`; zeros for no expert.

    Rows have the same bits as from `linear` with the expert's matrix. Only matrices named in
    expert_A are read, once for each run of rows with the same expert.

    Args:
        expert_A: int32.
        stacks: Arrays `[E, O, ...]` of a kind in `EXPERT_KINDS`.
        columns, digits, matrix_unit: As for `linear`.
    """
    rows, pieces = x_AI.shape[0], [piece for stack in stacks for piece in stack.arrays]
    counts = [len(stack.arrays) for stack in stacks]
    out = [jax.ShapeDtypeStruct((rows, w.arrays[0].shape[1]), jnp.float32) for w in stacks]
    call = jax.ffi.ffi_call("jaxllm_experts", out, vmap_method="sequential")
    attributes = {
        "kinds": np.array([w.kind for w in stacks], np.int32),
        "groups": np.array([w.group or 0 for w in stacks], np.int64),
        "counts": np.array(counts, np.int32),
        "columns": np.int64(columns),
        "experts": np.int64(pieces[0].shape[0]),
        "digits": np.int32(digits),
        "matrix_unit": np.bool_(matrix_unit),
    }
    # Without copies; blocks are bytes.
    flat = [
        x.reshape(-1, *(x.shape[2:] if w.rows is None else ())) for w in stacks for x in w.arrays
    ]
    return list(call(x_AI, expert_A, *flat, **attributes))


def dequantize(
    weight: Matrix,
    dtype: jnp.dtype,
    *,
    columns: int,
    first: jax.Array | int = 0,
    rows: int | None = None,
) -> jax.Array:
    """Dequantize a weight, or `rows` of it from `first` on, to `[O, I]` in bfloat16 or float32."""
    rows = weight.row_count if rows is None else rows
    out = jax.ShapeDtypeStruct((rows, columns), dtype)
    call = jax.ffi.ffi_call("jaxllm_dequantize", out, vmap_method="sequential")
    attributes = {
        "kind": np.int32(weight.kind),
        "group": np.int64(weight.group or 0),
        "columns": np.int64(columns),
    }
    dense: jax.Array = call(jnp.int32(first), *weight.arrays, **attributes)
    return dense


def take(table_VD: jax.Array, index_N: jax.Array) -> jax.Array:
    """Gather table rows, `[N, D]`. index_N: int32, clipped to the table."""
    out = jax.ShapeDtypeStruct((index_N.shape[0], table_VD.shape[1]), table_VD.dtype)
    call = jax.ffi.ffi_call("jaxllm_take", out, vmap_method="sequential")
    rows: jax.Array = call(table_VD, index_N)
    return rows


def attend(
    q_BTNH: jax.Array,
    position_BT: jax.Array,
    arrays: Sequence[jax.Array],
    *,
    scale: float,
    window: int | None,
    cap: float | None = None,
    row_B: jax.Array | None = None,
    cached: int = 0,
    sink_N: jax.Array | None = None,
) -> jax.Array:
    """Compute attention over the parts of a cache in place: `[B, T, N, H]`, in q's dtype.

    A result's bits follow from its query and from the keys and values by position: they depend
    neither on the parts and slots that these are in, nor on other queries.

    Args:
        q_BTNH: float32, or bfloat16; with a bfloat16 cache, the latter uses BF16 products.
        arrays: For each part k, v and positions, and then the two scales if k is int8.
        row_B: int32 `[B]` or `[B, P]`, which rows of the first `cached` parts each row of queries
            reads; default: its own.
        cap: Soft cap on scores, by a tanh within two units in the last place.
        sink_N: As for `ops.attend`.
    """
    out = jax.ShapeDtypeStruct(q_BTNH.shape, q_BTNH.dtype)
    call = jax.ffi.ffi_call("jaxllm_attend", out, vmap_method="sequential")
    limit = np.int64(-1 if window is None else window)
    attributes = {
        "cached": np.int64(0 if row_B is None else cached),
        "scale": np.float32(scale),
        "window": limit,
        "cap": np.float32(cap or 0),
    }
    none = np.zeros((0, 1), np.int32)
    rows = none if row_B is None or not cached else row_B.reshape(len(row_B), -1)
    sinks = np.zeros(0, np.float32) if sink_N is None else sink_N.astype(jnp.float32)
    y: jax.Array = call(q_BTNH, position_BT, rows, sinks, *arrays, **attributes)
    return y


def write(
    row_R: jax.Array,
    slot_RT: jax.Array,
    old: Sequence[jax.Array],
    new: Sequence[jax.Array],
    wait_for: Sequence[jax.Array] = (),
) -> list[jax.Array]:
    """Write `new`, `[R, T, ...]`, into rows and slots of `old`, `[B, S, ...]`, in place.

    Entries for rows and slots that do not exist are dropped. XLA first copies an array if a later
    reader may need its old value; the arrays in `wait_for` are computed before anything is written,
    so they need no copy.
    """
    out = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in old]
    aliases = {2 + i: i for i in range(len(old))}
    call = jax.ffi.ffi_call(
        "jaxllm_write", out, input_output_aliases=aliases, vmap_method="sequential"
    )
    marks = [x[(0,) * x.ndim].reshape(1, 1) for x in wait_for]
    return list(call(row_R, slot_RT, *old, *new, *marks))


def reduce_rows(name: str, x_RI: jax.Array) -> jax.Array:
    """Return the "sum", "logsumexp" or "softmax" of each row of a float32 matrix `[R, I]`.

    `[R]`, or `[R, I]` for the softmax. A row's bits do not depend on the others.
    """
    shape = x_RI.shape if name == "softmax" else x_RI.shape[:1]
    out = jax.ShapeDtypeStruct(shape, jnp.float32)
    y: jax.Array = jax.ffi.ffi_call(f"jaxllm_{name}_rows", out)(x_RI)
    return y


def normalize(
    x_RD: jax.Array,
    weight_D: jax.Array,
    bias_D: jax.Array | None,
    *,
    eps: float,
    weight_offset: float,
    centered: bool,
) -> jax.Array:
    """Return `x / sqrt(mean(x^2) + eps) * (weight + offset) + bias` of each row, in x's dtype.

    Args:
        x_RD: float32 or bfloat16.
        weight_D, bias_D: Any floats.
        centered: Subtract each row's mean first.
    """
    out = jax.ShapeDtypeStruct(x_RD.shape, x_RD.dtype)
    attributes = {
        "eps": np.float32(eps),
        "offset": np.float32(weight_offset),
        "centered": np.bool_(centered),
    }
    arrays = (x_RD, weight_D) if bias_D is None else (x_RD, weight_D, bias_D)
    y: jax.Array = jax.ffi.ffi_call("jaxllm_normalize", out)(*arrays, **attributes)
    return y


def read(x: jax.Array) -> jax.Array:
    """Read an array once at full memory bandwidth; return the sum of its 8-byte words, uint32.

    The last word is padded with zeros.
    """
    total: jax.Array = jax.ffi.ffi_call("jaxllm_read", jax.ShapeDtypeStruct((), jnp.uint32))(x)
    return total
