"""C++ kernels behind XLA's FFI, for what XLA does slowly on a CPU; absent where none were built.

Nothing here decides anything: `weights.linear` and `ops.attention` ask `enabled()` and have a path
in plain JAX that gives the same numbers. The kernels share their rows out over XLA's own threads.

JAXLLM_NATIVE=0 turns them off, JAXLLM_LIBRARY names another library. JAXLLM_ISA names the
instruction set, one of `INSTRUCTION_SETS`; by default the best that the machine has.

Within a set an output's bits depend on its own row and weights alone, and are the same in every
run. A matrix unit (avx512-amx) has an order of additions of its own for many rows, as if it were
another set. Between sets outputs differ by the order of additions: each is within 1e-6 of the sum
of its terms' magnitudes up to 2,048 columns, and beyond in proportion to the root of their number.
Sets with products of bfloat16 pairs (avx512-bf16, avx512-amx, neon-bf16) also round attention's
weights to bfloat16 where queries and cache are, as plain JAX does: a share of 2**-7 of the values'
magnitudes.
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

# What each is compiled for, and taken only where the processor says that it has all of it.
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
    """What a weight or a cache is made of, as csrc/kernels.h numbers it."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    INT8 = 3
    INT4 = 4
    PACKED = 5
    SPARSE24_F32 = 6
    SPARSE24_BF16 = 7
    SPARSE24_INT8 = 8
    BITMAP_F32 = 9
    BITMAP_BF16 = 10
    BITMAP_INT8 = 11


# Those of which `experts` takes stacks: each matrix's pieces begin at a place of their own.
EXPERTS = (Kind.FLOAT32, Kind.BFLOAT16, Kind.FLOAT16, Kind.INT8, Kind.INT4)


class Path(NamedTuple):
    """What multiplies: the kernel up to so many rows (None: any number), then `beyond`: "many", the
    kernel for many rows, or XLA, by weights that are "widened" natively or by itself ("plain")."""

    rows: int | None = 16
    beyond: str = "widened"


def path(kind: Kind, inputs: str) -> Path:
    """The path for weights of a kind on the instruction set in use, as paths.json has it, which
    `scripts/bench_paths.py` writes from measurements; inputs: float32, bfloat16 or int8."""
    row = _paths().get(str(isa()), {}).get(f"{kind.name.lower()} {inputs}")
    return Path() if row is None else Path(row["rows"], row["beyond"])


@cache
def _paths() -> dict[str, dict[str, Any]]:
    with open(PATHS, encoding="utf-8") as file:
        table: dict[str, dict[str, Any]] = json.load(file)
    return table


# Part of what a compiled function is compiled for, as a device or a precision is.
_ENABLED = jax.make_user_context(True)


@contextmanager
def disabled() -> Iterator[None]:
    """What is traced inside uses no kernel of ours."""
    with _ENABLED(False):
        yield


def enabled() -> bool:
    """Whether there are kernels and nobody has turned them off."""
    return _ENABLED.value and kernels() is not None


def isa(name: str | None = None) -> str | None:
    """The instruction set in use, after taking the one that is named; None without kernels.

    Raises ConfigError for one that this machine has not.
    """
    loaded = kernels()
    return None if loaded is None else _take(loaded, name)


def has_many() -> bool:
    """Whether the instruction set in use has kernels for many rows: a matrix unit."""
    return isa() == "avx512-amx"


def available() -> list[str]:
    """The instruction sets that this machine, and the library as it was built, have."""
    loaded = kernels()
    return [name for name in INSTRUCTION_SETS if loaded and loaded.jaxllm_kernels(name.encode())]


def _take(loaded: ctypes.CDLL, name: str | None) -> str:
    found = loaded.jaxllm_isa(name.encode() if name else None)
    if found is None and name not in INSTRUCTION_SETS:
        raise ConfigError(f"no instruction set {name!r}: there are {', '.join(INSTRUCTION_SETS)}")
    if found is None:
        raise ConfigError(
            f"this machine has no kernels for the instruction set {name!r}, which takes"
            f" {INSTRUCTION_SETS[str(name)]}"
        )
    return str(found.decode())


@cache
def kernels() -> ctypes.CDLL | None:
    """The kernels' shared library, its functions registered with XLA; None where there is none."""
    if os.environ.get("JAXLLM_NATIVE", "1") == "0" or (path := library()) is None:
        return None
    loaded = ctypes.CDLL(path)
    loaded.jaxllm_isa.restype = ctypes.c_char_p
    loaded.jaxllm_kernels.restype = ctypes.c_void_p
    _take(loaded, os.environ.get("JAXLLM_ISA"))
    for name in ("linear", "experts", "widen", "take", "attend", "write", "read"):
        capsule = jax.ffi.pycapsule(getattr(loaded, f"jaxllm_{name}"))
        jax.ffi.register_ffi_target(f"jaxllm_{name}", capsule, platform="cpu")
    return loaded


def library() -> str | None:
    """Where the shared library is: as JAXLLM_LIBRARY says, beside this file, or, for a checkout, in
    the site-packages that its editable installation built into."""
    if named := os.environ.get("JAXLLM_LIBRARY"):
        return named
    here = os.path.dirname(__file__)
    checkout = os.path.isdir(os.path.join(here, "csrc"))
    for folder in (here, *(f"{p}/jaxllm/ops/native" for p in sys.path if checkout)):
        path = os.path.join(folder, "_kernels.so")
        if os.path.isfile(path):
            return path
    return None


class Matrix(NamedTuple):
    """A weight as the kernels take it: arrays `[O, ...]` of a kind (see `weights.leaves`), whose
    columns share a scale in groups of `group`; None where a row has one, or none."""

    kind: Kind
    pieces: Sequence[jax.Array]
    group: int | None = None


def linear(
    x_RI: jax.Array,
    weights: Sequence[Matrix],
    *,
    columns: int,
    digits: int = 3,
    many: bool = False,
) -> list[jax.Array]:
    """`x @ weight.T` of each: float32 `[R, O]`, each row in the same order of additions whatever R.

    x_RI: float32 or bfloat16; or, with one digit and integer weights, int8 from -127 to 127, which
    is multiplied as it is: where a row has one scale, the integers' sum is exact. columns: I of all
    weights. digits: of x to base 256 where weights are integers: 1 rounds it to int8 in blocks of
    512 columns, 3 keeps all of it. many: by the matrix unit, in another order of additions, where
    there is one that takes these numbers.
    """
    rows = x_RI.shape[0]
    out = [jax.ShapeDtypeStruct((rows, w.pieces[0].shape[0]), jnp.float32) for w in weights]
    call = jax.ffi.ffi_call("jaxllm_linear", out, vmap_method="sequential")
    attributes = {
        "kinds": np.array([w.kind for w in weights], np.int32),
        "groups": np.array([w.group or 0 for w in weights], np.int64),
        "counts": np.array([len(w.pieces) for w in weights], np.int32),
        "columns": np.int64(columns),
        "digits": np.int32(digits),
        "many": np.bool_(many),
    }
    return list(call(x_RI, *(piece for w in weights for piece in w.pieces), **attributes))


def experts(
    x_AI: jax.Array,
    expert_A: jax.Array,
    stacks: Sequence[Matrix],
    *,
    columns: int,
    digits: int = 3,
    many: bool = False,
) -> list[jax.Array]:
    """`x[a] @ stack[expert[a]].T` of each: float32 `[A, O]`, of which a row has the bits that
    `linear` gives it with that matrix; zeros where there is no such expert.

    stacks: pieces `[E, O, ...]` of a kind of `EXPERTS`. Of the matrices only those that expert_A
    (int32) names are read, once for each run of rows that have the same. The rest: see `linear`.
    """
    rows, pieces = x_AI.shape[0], [piece for stack in stacks for piece in stack.pieces]
    counts = [len(stack.pieces) for stack in stacks]
    out = [jax.ShapeDtypeStruct((rows, w.pieces[0].shape[1]), jnp.float32) for w in stacks]
    call = jax.ffi.ffi_call("jaxllm_experts", out, vmap_method="sequential")
    attributes = {
        "kinds": np.array([w.kind for w in stacks], np.int32),
        "groups": np.array([w.group or 0 for w in stacks], np.int64),
        "counts": np.array(counts, np.int32),
        "columns": np.int64(columns),
        "experts": np.int64(pieces[0].shape[0]),
        "digits": np.int32(digits),
        "many": np.bool_(many),
    }
    flat = [piece.reshape(-1, *piece.shape[2:]) for piece in pieces]  # where they lie
    return list(call(x_AI, expert_A, *flat, **attributes))


def widen(weight: Matrix, dtype: jnp.dtype, *, columns: int) -> jax.Array:
    """The weight itself, `[O, I]` in bfloat16 or float32."""
    out = jax.ShapeDtypeStruct((weight.pieces[0].shape[0], columns), dtype)
    call = jax.ffi.ffi_call("jaxllm_widen", out, vmap_method="sequential")
    attributes = {
        "kind": np.int32(weight.kind),
        "group": np.int64(weight.group or 0),
        "columns": np.int64(columns),
    }
    dense: jax.Array = call(*weight.pieces, **attributes)
    return dense


def take(table_VD: jax.Array, index_N: jax.Array) -> jax.Array:
    """Rows of a table by number, `[N, D]`; index_N: int32, taken as the nearest that there is."""
    out = jax.ShapeDtypeStruct((index_N.shape[0], table_VD.shape[1]), table_VD.dtype)
    call = jax.ffi.ffi_call("jaxllm_take", out, vmap_method="sequential")
    rows: jax.Array = call(table_VD, index_N)
    return rows


def attend(
    q_BTNH: jax.Array,
    position_BT: jax.Array,
    pieces: Sequence[jax.Array],
    *,
    scale: float,
    window: int | None,
    cap: float | None = None,
) -> jax.Array:
    """Attention over the parts of a cache where they lie: `[B, T, N, H]`, of the queries' dtype.

    q_BTNH: float32 or bfloat16; the latter meets a bfloat16 cache in BF16's own products. pieces:
    for each part k, v and positions, and after them the two scales where k is int8. cap: scores
    are bent to stay within it, by a tanh that is within two units in the last place.
    """
    out = jax.ShapeDtypeStruct(q_BTNH.shape, q_BTNH.dtype)
    call = jax.ffi.ffi_call("jaxllm_attend", out, vmap_method="sequential")
    limit = np.int64(-1 if window is None else window)
    attributes = {"scale": np.float32(scale), "window": limit, "cap": np.float32(cap or 0)}
    y: jax.Array = call(q_BTNH, position_BT, *pieces, **attributes)
    return y


def write(
    cursor: jax.Array,
    old: Sequence[jax.Array],
    new: Sequence[jax.Array],
    after: Sequence[jax.Array] = (),
) -> list[jax.Array]:
    """Each of `old`, `[B, S, ...]`, with `new`, `[B, T, ...]`, at slots `cursor ...`, in place.

    What would run past the end is dropped. XLA copies an array first if somebody may still need it
    as it was: nobody does whose result is among `after`, which is made before anything is written.
    """
    count, marks = len(old), [x[(0,) * x.ndim].reshape(1, 1) for x in after]
    # A number of each is written too, where nobody reads: XLA drops its own barriers before it
    # decides what to copy.
    old, new = [*old, *map(jnp.zeros_like, marks)], [*new, *marks]
    out = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in old]
    aliases = {1 + i: i for i in range(len(old))}
    call = jax.ffi.ffi_call(
        "jaxllm_write", out, input_output_aliases=aliases, vmap_method="sequential"
    )
    return list(call(cursor, *old, *new))[:count]


def read(x: jax.Array) -> jax.Array:
    """Read an array once, as fast as memory gives it: the sum of its 8-byte words, uint32.

    Where its bytes are no multiple of 8, zeros fill the last word.
    """
    total: jax.Array = jax.ffi.ffi_call("jaxllm_read", jax.ShapeDtypeStruct((), jnp.uint32))(x)
    return total
