"""Safetensors files, tensor by tensor: headers, lazy reading, and writing as a stream.

A header is accepted if it fits its schema and its tensors fill the rest of the file without gaps.
Files that we write have every tensor on a 64-byte boundary, so that it can be memory-mapped and
used in place.
"""

import contextlib
import hashlib
import io
import json
import math
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import ml_dtypes
import msgspec
import numpy as np

from jaxllm.errors import CheckpointError
from jaxllm.files import atomic_file, open_regular, parse_json
from jaxllm.runtime.schema import as_schema
from jaxllm.weights.lazy import LazyTensor

MAX_HEADER = 1 << 25  # 200,000 tensors
ALIGNMENT = 64  # bytes: what XLA:CPU needs to use a buffer without copying it
BLOCK_BYTES = 4 << 20  # bytes that are written at a time, about
SCAN_BLOCK = 1 << 17  # numbers that are checked for NaN at a time; they fit a processor's cache
_FAULT_AROUND = 1 << 16  # bytes of cached pages that Linux maps around a page fault
_PADDING_PREFIX = (
    "__align."  # name prefix of tensors that only fill gaps: the format allows no holes
)

_DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F64": np.dtype(np.float64),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
DTYPES = {dtype.name: dtype for dtype in _DTYPES.values()}
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """A header's entry for one tensor; offsets are relative to the header's end."""

    dtype: str
    shape: Annotated[list[_Count], msgspec.Meta(max_length=8)]
    data_offsets: tuple[_Count, _Count]


class SafetensorsHeader(NamedTuple):
    """A safetensors header: metadata, entries in file order, and the byte where tensors begin."""

    metadata: dict[str, str]
    entries: dict[str, _Entry]
    start: int


_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def open_tensors(path: Path, *, mapped: bool = False) -> dict[str, LazyTensor]:
    """Return the tensors of a safetensors file by name, in file order; nothing is read yet.

    Args:
        mapped: make tensors views of the memory-mapped file (which must not change meanwhile).
            Otherwise each `read()` fills a new buffer, aligned so that XLA can take it over.

    Raises:
        CheckpointError: for a file that is not well-formed safetensors.
    """
    header = read_header(path)
    file_map = map_file(path) if mapped else None
    tensors = {}
    for name, entry in header.entries.items():
        if name.startswith(_PADDING_PREFIX):
            continue
        dtype, shape = _DTYPES[entry.dtype], tuple(entry.shape)
        begin, end = (header.start + offset for offset in entry.data_offsets)
        raw = _make_reader(path) if file_map is None else _make_viewer(file_map)
        release = _make_releaser(file_map, begin, end)
        tensors[name] = _make_tensor(begin, end, dtype, shape, raw, release)
    return tensors


def open_raw_tensor(path: Path, begin: int, dtype: np.dtype, shape: tuple[int, ...]) -> LazyTensor:
    """Return the tensor at this byte of a file, row by row, in the machine's byte order."""
    end = begin + math.prod(shape) * dtype.itemsize
    return _make_tensor(begin, end, dtype, shape, _make_reader(path), lambda: None)


def view_mapped_tensor(
    whole: mmap.mmap, begin: int, dtype: Any, shape: tuple[int, ...]
) -> LazyTensor:
    """Return the tensor at `begin` of a file that `map_file` mapped, without a copy."""
    dtype = np.dtype(dtype)
    end = begin + math.prod(shape) * dtype.itemsize
    return _make_tensor(
        begin, end, dtype, shape, _make_viewer(whole), _make_releaser(whole, begin, end)
    )


def empty_aligned(shape: tuple[int, ...], dtype: Any, *, zeroed: bool = False) -> np.ndarray:
    """Return an array, uninitialized if not `zeroed`, that XLA:CPU can use without a copy."""
    dtype, make = np.dtype(dtype), np.zeros if zeroed else np.empty
    raw = make(math.prod(shape) * dtype.itemsize + ALIGNMENT, np.uint8)
    return raw[-raw.ctypes.data % ALIGNMENT :][: raw.size - ALIGNMENT].view(dtype).reshape(shape)


def read_header(path: Path) -> SafetensorsHeader:
    """Read the header of a safetensors file, and check it against the file's size.

    Raises:
        CheckpointError: for a file that is not well-formed safetensors.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))
        if length > min(size - 8, MAX_HEADER):
            raise CheckpointError(
                f"{path}: not a safetensors file: header of {length:,} bytes in a file of"
                f" {size:,} (the maximum is {MAX_HEADER:,})"
            )
        text = file.read(length)
    where = f"{path}: its safetensors header"
    content = as_schema(parse_json(text, where), dict[str, Any], where)
    metadata = as_schema(content.pop("__metadata__", {}), dict[str, str], f"{where}: __metadata__")
    entries = {n: as_schema(entry, _Entry, f"{where}: {n:.200}") for n, entry in content.items()}
    entries = dict(sorted(entries.items(), key=lambda item: item[1].data_offsets))
    end = 0
    for name, entry in entries.items():
        if entry.dtype not in _DTYPES:
            raise CheckpointError(f"{where}: {name} has unknown dtype {entry.dtype!r:.40}")
        nbytes = math.prod(entry.shape) * _DTYPES[entry.dtype].itemsize
        if entry.data_offsets != (end, end + nbytes):
            raise CheckpointError(
                f"{where}: offsets of {name}, {entry.dtype} {entry.shape}: got"
                f" {entry.data_offsets}, expected {(end, end + nbytes)}"
            )
        end += nbytes
    if 8 + length + end != size:
        raise CheckpointError(
            f"{where} describes {8 + length + end:,} bytes, but the file has {size:,}. It may be"
            " truncated: download it again"
        )
    return SafetensorsHeader(metadata, entries, 8 + length)


def write_tensors(
    path: Path,
    tensors: Mapping[str, LazyTensor],
    *,
    aligned: bool = True,
    metadata: Mapping[str, str] | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Write a safetensors file, with one block of a tensor in memory at a time.

    The file appears under its name only when it is complete.

    Args:
        aligned: start each tensor on a 64-byte boundary, with extra tensors that fill the gaps;
            pass False for files that other programs read.
        progress: called with the number of bytes written.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    # Tensors of odd sizes come last: what precedes them needs no filling.
    names = sorted(tensors, key=lambda name: tensors[name].nbytes % ALIGNMENT != 0)
    offset = 0
    plan: list[tuple[LazyTensor | None, int]] = []
    for name in names:
        tensor = tensors[name]
        if aligned and (gap := -offset % ALIGNMENT):
            header[f"{_PADDING_PREFIX}{len(plan)}"] = _entry("U8", (gap,), offset, gap)
            plan.append((None, gap))
            offset += gap
        header[name] = _entry(_NAMES[tensor.dtype], tensor.shape, offset, tensor.nbytes)
        plan.append((tensor, tensor.nbytes))
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    with atomic_file(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for item, size in plan:
            for some in [bytes(size)] if item is None else iter_bytes(item):
                file.write(some)
                progress(len(some))


def first_non_finite(array: np.ndarray) -> int | None:
    """Return the flat index of the first NaN or infinity in a float array, or None.

    A float's bits grow with its magnitude, so the maximum shows whether any number is beyond the
    finite ones: compared as unsigned integers for negative floats, as signed ones for the others.
    """
    size = array.dtype.itemsize
    unsigned, signed = np.dtype(f"u{size}"), np.dtype(f"i{size}")
    infinities = np.array([np.inf, -np.inf], array.dtype)
    positive, negative = infinities.view(signed)[0], infinities.view(unsigned)[1]
    flat = array.reshape(-1).view(unsigned)
    for start in range(0, flat.size, SCAN_BLOCK):
        part = flat[start : start + SCAN_BLOCK]
        if part.max() >= negative or part.view(signed).max() >= positive:
            return start + int((~np.isfinite(part.view(array.dtype))).argmax())
    return None


def digest(tensors: Mapping[str, np.ndarray], header: str = "") -> str:
    """Return the SHA-256 of a text and of arrays by name: names, dtypes, shapes and all bits."""
    hasher = hashlib.sha256(header.encode())
    for name in sorted(tensors):
        array = np.ascontiguousarray(tensors[name])
        hasher.update(f"{name} {array.dtype} {array.shape}".encode())
        hasher.update(array.reshape(-1).view(np.uint8).data)
    return hasher.hexdigest()


def _entry(dtype: str, shape: tuple[int, ...], offset: int, size: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}


def map_file(path: Path) -> mmap.mmap:
    """Memory-map a file for reading. Raises CheckpointError if that fails."""
    with open_regular(path) as file:
        try:
            file_map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: the file has become empty
            raise CheckpointError(f"cannot read {path}: {error}") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):  # a hint: 2 MB pages read a little faster
        with contextlib.suppress(OSError):
            file_map.madvise(mmap.MADV_HUGEPAGE)
    return file_map


def _make_tensor(
    begin: int,
    end: int,
    dtype: np.dtype,
    shape: tuple[int, ...],
    raw: Callable[[int, int], np.ndarray],
    release: Callable[[], None],
) -> LazyTensor:
    """Return the tensor between two bytes of a file. `raw` returns the bytes of a range."""

    def read() -> np.ndarray:
        return raw(begin, end).view(dtype).reshape(shape)

    def parts(rows: int) -> Iterator[np.ndarray]:
        columns = shape[-1] if shape else 1
        step = max(rows * columns * dtype.itemsize, 1)
        for first in range(begin, end, step):
            yield raw(first, min(first + step, end)).view(dtype).reshape(-1, columns)
            release()

    def cut(first: int, last: int) -> LazyTensor:
        size = (end - begin) // shape[0]
        part = (last - first, *shape[1:])
        return _make_tensor(begin + first * size, begin + last * size, dtype, part, raw, release)

    return LazyTensor(
        dtype, shape, read, release, parts, slice_rows=cut if shape and end > begin else None
    )


def _make_viewer(file_map: mmap.mmap) -> Callable[[int, int], np.ndarray]:
    return lambda begin, end: np.frombuffer(file_map, np.uint8, end - begin, begin)


def _make_releaser(file_map: mmap.mmap | None, begin: int, end: int) -> Callable[[], None]:
    """Return a function that drops the pages of a tensor from memory.

    A later read gets them from the file again, also the parts that belong to its neighbors.
    """
    first = begin // _FAULT_AROUND * _FAULT_AROUND

    def release() -> None:
        if file_map is not None and hasattr(mmap, "MADV_DONTNEED"):
            last = min(-(-end // _FAULT_AROUND) * _FAULT_AROUND, len(file_map))
            file_map.madvise(mmap.MADV_DONTNEED, first, last - first)

    return release


def _make_reader(path: Path) -> Callable[[int, int], np.ndarray]:
    def read(begin: int, end: int) -> np.ndarray:
        raw = empty_aligned((end - begin,), np.uint8)
        with open_regular(path) as file:
            _fill(raw, file, begin, path)
        return raw

    return read


def _fill(raw: np.ndarray, file: io.BufferedReader, begin: int, path: Path) -> None:
    try:
        file.seek(begin)
        done = 0
        while done < raw.size:
            count = file.readinto(raw[done:].data)
            if not count:
                raise CheckpointError(f"{path}: ends in the middle of a tensor")
            done += count
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error


def iter_bytes(tensor: LazyTensor) -> "Iterator[memoryview[int]]":
    """Yield a tensor's bytes, about `BLOCK_BYTES` at a time."""
    written = 0
    for block in tensor.blocks(
        max(BLOCK_BYTES // max(tensor.columns * tensor.dtype.itemsize, 1), 1)
    ):
        assert block.dtype == tensor.dtype
        written += block.nbytes
        yield np.ascontiguousarray(block).reshape(-1).view(np.uint8).data
    assert written == tensor.nbytes
