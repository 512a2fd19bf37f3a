"""The header of a GGUF file: settings by key, and the places of its tensors.

ggml's `docs/gguf.md`, versions 2 and 3, little endian. The file is memory-mapped. Every count,
length and offset is checked against limits and the rest of the file before anything of that size is
allocated. Nothing in the file is run, and no other file is opened.
"""

import mmap
import struct
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxllm.convert.gguf.blocks import BLOCKS, UNSUPPORTED, TensorType
from jaxllm.errors import CheckpointError
from jaxllm.weights.safetensors import map_file

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32  # bytes; default of general.alignment

# Far above published files, whose headers have up to 30 MB, 300,000 tokens and 600,000 merges.
MAX_HEADER = 1 << 27
MAX_STRINGS = 1 << 21  # in all arrays together
MAX_KEYS = 1 << 12
MAX_TENSORS = 1 << 17
MAX_NAME = 1 << 10
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 16

_SCALARS: dict[int, tuple[str, np.dtype]] = {
    0: ("<B", np.dtype("u1")),
    1: ("<b", np.dtype("i1")),
    2: ("<H", np.dtype("<u2")),
    3: ("<h", np.dtype("<i2")),
    4: ("<I", np.dtype("<u4")),
    5: ("<i", np.dtype("<i4")),
    6: ("<f", np.dtype("<f4")),
    7: ("<B", np.dtype("u1")),  # bool
    10: ("<Q", np.dtype("<u8")),
    11: ("<q", np.dtype("<i8")),
    12: ("<d", np.dtype("<f8")),
}
_FLOAT, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9


class TensorInfo(NamedTuple):
    """A tensor of the file: its type, its shape in NumPy's order, and its offset."""

    block: TensorType
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape[:-1], dtype=object)) * self.block.row_bytes(self.shape[-1])


class GGUFHeader(NamedTuple):
    """The contents of a GGUF header.

    Attributes:
        settings: Values by key; numeric arrays are NumPy's, string arrays lists.
        tensor_infos: The tensors by name, in file order.
        buffer: The memory-mapped file.
    """

    path: Path
    settings: Mapping[str, Any]
    tensor_infos: Mapping[str, TensorInfo]
    buffer: mmap.mmap


def is_gguf(path: Path) -> bool:
    """Return whether a file has GGUF's magic number."""
    try:
        with open(path, "rb") as file:
            return file.read(4) == MAGIC
    except OSError:
        return False


def read_header(path: Path) -> GGUFHeader:
    """Return the header of a GGUF file, checked against the file size.

    Raises CheckpointError for a malformed file and for tensors of an unsupported type.
    """
    file_map = map_file(path)
    reader = _Reader(file_map, f"{path}: its GGUF header")
    version = reader.read_version()
    count, keys = reader.read_count("tensors", MAX_TENSORS), reader.read_count("keys", MAX_KEYS)
    if version not in VERSIONS:
        raise reader.error(f"version {version} is not supported (known: 2, 3)")
    settings: dict[str, Any] = {}
    for number in range(keys):
        key = reader.read_text(f"key {number}", MAX_NAME)
        if key in settings:
            raise reader.error(f"the key {key!r:.80} occurs twice")
        settings[key] = reader.read_value(key)
    infos = [reader.read_tensor_info(number) for number in range(count)]
    entries = dict(infos)
    if len(entries) < len(infos):
        ((twice, _),) = Counter(name for name, _ in infos).most_common(1)
        raise reader.error(f"the tensor {twice!r:.80} occurs twice")
    alignment = settings.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or alignment not in {1 << n for n in range(3, 17)}:
        raise reader.error(
            f"general.alignment is {alignment!r:.40}, expected a power of 2, 8 to {MAX_ALIGNMENT}"
        )
    start = -(-reader.position // alignment) * alignment
    return GGUFHeader(path, settings, _locate_tensors(entries, start, alignment, reader), file_map)


def _locate_tensors(
    entries: Mapping[str, TensorInfo], start: int, alignment: int, reader: "_Reader"
) -> dict[str, TensorInfo]:
    """Return the entries with offsets in the file, sorted; refuse overlaps and overruns."""
    end, before = start, ""
    placed = {}
    for name, entry in sorted(entries.items(), key=lambda item: item[1].offset):
        begin = start + entry.offset
        if entry.offset % alignment:
            raise reader.error(
                f"{name!r:.80} is at offset {entry.offset:,}, which is not a multiple of the"
                f" alignment {alignment}"
            )
        if begin < end:
            raise reader.error(f"{name!r:.80} at offset {entry.offset:,} overlaps {before!r:.80}")
        end, before = begin + entry.nbytes, name
        if end > reader.size:
            raise reader.error(
                f"{name!r:.80}, {entry.block.name} {entry.shape}, ends at byte {end:,}, but the"
                f" file ends at {reader.size:,}: cut off?"
            )
        placed[name] = entry._replace(offset=begin)
    return placed


class _Reader:
    """A reader with a position, `position`. where: the prefix of error messages."""

    def __init__(self, buffer: mmap.mmap, where: str) -> None:
        self.buffer, self.where, self.position = buffer, where, 0
        self.size, self.string_count = len(buffer), 0

    def error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {text}")

    def read_version(self) -> int:
        if self.buffer[:4] != MAGIC:
            raise CheckpointError(f"{self.where} does not begin with {MAGIC.decode()}")
        self.position = 4
        version = int(self.read_number(4, "its version"))
        if version and not version & 0xFFFF:
            raise self.error("big endian is not supported. Convert it with gguf_convert_endian")
        return version

    def advance(self, size: int, what: str) -> int:
        """Advance by `size` bytes, within the file and the limit; return their offset."""
        begin, self.position = self.position, self.position + size
        if self.position > min(self.size, MAX_HEADER):
            text = f"{what} takes {size:,} bytes from byte {begin:,}"
            if self.position > self.size:
                raise self.error(f"{text}, but the file has {self.size:,}: cut off?")
            raise self.error(f"{text}; at most {MAX_HEADER:,} bytes of a header are read")
        return begin

    def read_number(self, kind: int, what: str) -> Any:
        code, dtype = _SCALARS[kind]
        (value,) = struct.unpack_from(code, self.buffer, self.advance(dtype.itemsize, what))
        return value

    def read_count(self, what: str, maximum: int) -> int:
        count = int(self.read_number(10, f"the number of {what}"))
        if count > maximum:
            raise self.error(f"{count:,} {what}, expected at most {maximum:,}")
        return count

    def read_text(self, what: str, maximum: int = MAX_HEADER) -> str:
        length = self.read_count(f"bytes of {what}", maximum)
        begin = self.advance(length, what)
        return self.decode_text(self.buffer[begin : begin + length], what)

    def decode_text(self, raw: bytes, what: str) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.error(f"{what} is not UTF-8: {raw[:40]!r}") from None

    def read_value(self, key: str) -> Any:
        kind = int(self.read_number(4, f"the type of {key!r:.80}"))
        if kind == _STRING:
            return self.read_text(f"{key!r:.80}")
        if kind == _ARRAY:
            return self.read_array(key)
        if kind not in _SCALARS:
            raise self.error(f"{key!r:.80} has the unknown type {kind}")
        value = self.read_number(kind, f"{key!r:.80}")
        if kind == _FLOAT:
            return float(str(np.float32(value)))  # shortest decimal: 1e-05
        if kind != _BOOL:
            return value
        if value > 1:
            raise self.error(f"{key!r:.80} is {value}, expected a boolean")
        return bool(value)

    def read_array(self, key: str) -> Any:
        what = f"{key!r:.80}"
        kind = int(self.read_number(4, f"the item type of {what}"))
        count = self.read_count(f"items of {what}", MAX_HEADER)
        if kind == _STRING:
            return self.read_texts(count, what)
        if kind not in _SCALARS:
            within = "arrays" if kind == _ARRAY else f"items of type {kind}"
            raise self.error(f"{what} is an array of {within}, which is not supported")
        dtype = _SCALARS[kind][1]
        begin = self.advance(count * dtype.itemsize, what)
        array = np.frombuffer(self.buffer, dtype, count, begin)
        if kind == _BOOL and array.max(initial=0) > 1:
            raise self.error(f"{what} contains {array.max()}, expected booleans")
        return array.astype(bool) if kind == _BOOL else array

    def read_texts(self, count: int, what: str) -> list[str]:
        self.string_count += count
        if self.string_count > MAX_STRINGS:
            raise self.error(f"{what} has {count:,} strings; at most {MAX_STRINGS:,} are read")
        self.advance(8 * count, what)  # their lengths alone
        begin, last = self.position - 8 * count, min(self.size, MAX_HEADER)
        place_C = _find_strings(self.buffer, begin, last, count)
        if len(place_C) <= count:
            raise self.error(f"string {len(place_C):,} of {what} exceeds the file or the limit")
        self.position = int(place_C[-1])
        if (texts := _split_texts(self.buffer, place_C)) is not None:
            return texts
        raws = (self.buffer[start + 8 : stop] for start, stop in pairwise(place_C.tolist()))
        return [self.decode_text(raw, f"a string of {what}") for raw in raws]

    def read_tensor_info(self, number: int) -> tuple[str, TensorInfo]:
        name = self.read_text(f"the name of tensor {number}", MAX_NAME)
        rank = int(self.read_number(4, f"the rank of {name!r:.80}"))
        if not 0 < rank <= MAX_DIMENSIONS:
            raise self.error(f"{name!r:.80} has {rank} dimensions, expected 1 to {MAX_DIMENSIONS}")
        sizes = [int(self.read_number(10, f"the shape of {name!r:.80}")) for _ in range(rank)]
        shape = tuple(reversed(sizes))  # stored with the contiguous axis first
        kind = int(self.read_number(4, f"the type of {name!r:.80}"))
        begin = int(self.read_number(10, f"the offset of {name!r:.80}"))
        if kind not in BLOCKS:
            known = ", ".join(block.name for block in BLOCKS.values())
            raise self.error(
                f"{name!r:.80} has type {UNSUPPORTED.get(kind, kind)}, which is not supported"
                f" (known: {known})"
            )
        block = BLOCKS[kind]
        if not all(0 < size <= self.size * 2 for size in shape):
            raise self.error(f"{name!r:.80} has shape {shape}, in a file of {self.size:,} bytes")
        if shape[-1] % block.columns:
            raise self.error(
                f"{name!r:.80} has rows of {shape[-1]}, expected a multiple of {block.name}'s block"
                f" size {block.columns}"
            )
        return name, TensorInfo(block, shape, begin)


def _find_strings(buffer: mmap.mmap, begin: int, end: int, count: int) -> np.ndarray:
    """Return the offsets of strings, which begin with their lengths, and where the last one ends.

    If string i ends after `end`, return i offsets. A length below 256 is a byte with seven zeros
    after it: these are found all at once, others one by one.
    """
    size = min(end - begin, 32 * count)  # published vocabularies take up to 22 bytes a string
    byte_N = np.frombuffer(buffer, np.uint8, size, begin)
    is_zero_N = byte_N == 0
    is_length_N = np.ones(max(0, size - 7), bool)
    for place in range(1, 8):
        is_length_N &= is_zero_N[place : place + len(is_length_N)]
    short_C = np.flatnonzero(is_length_N)
    stop_C = short_C + 8 + byte_N[short_C]
    # Where the next offset is not the end of this string.
    breaks = [*np.flatnonzero(short_C[1:] != stop_C[:-1]).tolist(), len(short_C) - 1]
    short_C, stop_C = short_C + begin, stop_C + begin
    runs, missing, at = [np.zeros(0, np.int64)], count, begin
    while missing and at + 8 <= end:
        first = int(np.searchsorted(short_C, at))
        run = np.array([at])
        if first < len(short_C) and short_C[first] == at:
            run = short_C[first : breaks[bisect_left(breaks, first)] + 1][:missing]
            at = int(stop_C[first + len(run) - 1])
        else:
            at += 8 + int(struct.unpack_from("<Q", buffer, at)[0])
        runs.append(run)
        missing -= len(run)
        if at > end:
            return np.concatenate(runs)[:-1]
    return np.concatenate([*runs, [at]])


def _split_texts(buffer: mmap.mmap, place_C: np.ndarray) -> list[str] | None:
    """Return the strings at these places; None if a null is in one, or one is not UTF-8."""
    begin, total = int(place_C[0]), int(place_C[-1] - place_C[0])
    start_C = place_C[:-1] - begin
    text_N = np.frombuffer(buffer, np.uint8, total, begin).copy()
    is_text_N = np.ones(total, bool)  # with one null in place of each length
    text_N[start_C] = 0
    is_text_N[(start_C[:, None] + np.arange(1, 8)).ravel()] = False
    try:
        texts = text_N[is_text_N].tobytes().decode().split("\0")
    except UnicodeDecodeError:
        return None
    return texts[1:] if len(texts) == len(place_C) else None
