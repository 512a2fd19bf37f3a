"""Quantized leaves as the tensors of a file: taken apart for writing, put together and checked."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import CheckpointError
from jaxllm.weights.formats import DTYPES, PACKED, Leaf, parse
from jaxllm.weights.qtensor import CHUNK, Packed, QTensor

Shape = tuple[int | None, ...]  # None: of any size


def pieces_of(leaf: Leaf) -> dict[str, jax.Array]:
    """What a leaf consists of, by the names that follow its own: `{"": array}` for an array."""
    if isinstance(leaf, QTensor):
        parts = {".data": leaf.data, ".scale": leaf.scale, ".zero": leaf.zero}
        return {name: part for name, part in parts.items() if part is not None}
    if isinstance(leaf, Packed):
        names = ("sign_mantissa", "nibbles", "base", *_ESCAPES)
        return {f".{name}": getattr(leaf, name) for name in names}
    return {"": leaf}


def expected_pieces(name: str, shape: tuple[int, ...]) -> dict[str, tuple[Shape, Any]]:
    """The shape and dtype of each piece of a leaf of `shape` in the format `name`."""
    wanted = parse(name)
    if wanted == PACKED:
        rows, columns = shape
        return {
            ".sign_mantissa": ((rows, _up(columns, 64)), np.uint8),
            ".nibbles": ((rows, _up(columns, 128) // 2), np.uint8),
            ".base": ((), np.int32),
            ".escape_begin": ((rows + 1,), np.int32),
            ".escape_column": ((None,), np.int32),
            ".escape_value": ((None,), DTYPES["bfloat16"]),
        }
    if isinstance(wanted, str):
        return {"": (shape, DTYPES[wanted])}
    rows, columns = shape
    width = _up(columns, CHUNK)
    groups = (rows, width // (wanted.group or width))
    data = np.uint8 if wanted.bits == 4 else np.int8
    found: dict[str, tuple[Shape, Any]] = {
        ".data": ((rows, width * wanted.bits // 8), data),
        ".scale": (groups, DTYPES[wanted.scale]),
    }
    return {**found, ".zero": (groups, np.uint8)} if wanted.zero_point else found


def assemble(
    path: str, name: str, shape: tuple[int, ...], pieces: Mapping[str, np.ndarray]
) -> Leaf:
    """The leaf at `path` from its pieces, whose shapes have been checked.

    Raises CheckpointError for numbers that no leaf has: kernels trust them.
    """
    wanted = parse(name)
    device = {key: jax.device_put(piece, may_alias=True) for key, piece in pieces.items()}
    if wanted == PACKED:
        _check_packed(path, shape[1], pieces)
        widest = int(np.diff(pieces[".escape_begin"]).max(initial=0))
        fields = {key.removeprefix("."): value for key, value in device.items()}
        return Packed(**fields, columns=shape[1], widest=widest)
    assert not isinstance(wanted, str)
    zero = pieces.get(".zero")
    if not np.isfinite(pieces[".scale"].astype(np.float32)).all():
        raise CheckpointError(f"{path}.scale holds NaN or infinity")
    if zero is not None and zero.max(initial=0) > 15:
        raise CheckpointError(f"{path}.zero holds {zero.max()}: a zero point is at most 15")
    if wanted.bits == 8 and pieces[".data"].min(initial=0) < -127:
        raise CheckpointError(f"{path}.data holds -128: integers run from -127 to 127")
    return QTensor(
        device[".data"], device[".scale"], device.get(".zero"), wanted.bits, wanted.group, shape[1]
    )


_ESCAPES = ("escape_begin", "escape_column", "escape_value")


def _check_packed(path: str, columns: int, pieces: Mapping[str, np.ndarray]) -> None:
    begin, column, value = (pieces[f".{name}"] for name in _ESCAPES)
    ordered = np.diff(column) > 0
    ordered[np.unique(begin[(begin > 0) & (begin < len(column))]) - 1] = True  # a row's first
    sound = (
        len(column) == len(value)
        and begin[0] == 0
        and begin[-1] == len(column)
        and (np.diff(begin) >= 0).all()
        and column.min(initial=0) >= 0
        and column.max(initial=0) < columns
        and ordered.all()
        and 0 <= int(pieces[".base"]) <= 240
    )
    if not sound:
        raise CheckpointError(f"{path}: the packed exponents' escapes do not fit the matrix")


def _up(n: int, to: int) -> int:
    return -(-n // to) * to


def count(leaf: Any) -> int:
    """How many weights a leaf stands for."""
    return int(leaf.size if isinstance(leaf, QTensor | Packed) else jnp.size(leaf))
