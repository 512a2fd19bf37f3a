"""The header of a GGUF file: settings by key, and the places of its tensors.

ggml's `docs/gguf.md`, versions 2 and 3, little endian. The file is memory-mapped. Every count,
length and offset is checked against limits and the rest of the file before anything of that size is
allocated. Nothing in the file is run, and no other file is opened.
"""

import mmap
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxllm.errors import CheckpointError
from jaxllm.weights.files import map_file

from .blocks import BLOCKS, NAMES, Block

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


class Entry(NamedTuple):
    """A tensor of the file: its type, its shape in NumPy's order, and its offset."""

    block: Block
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape[:-1], dtype=object)) * self.block.row_bytes(self.shape[-1])


class Header(NamedTuple):
    """The contents of a GGUF header.

    Attributes:
        settings: Values by key; numeric arrays are NumPy's, string arrays lists.
        entries: The tensors by name, in file order.
        whole: The memory-mapped file.
    """

    path: Path
    settings: Mapping[str, Any]
    entries: Mapping[str, Entry]
    whole: mmap.mmap


def is_gguf(path: Path) -> bool:
    """Return whether a file has GGUF's magic number."""
    try:
        with open(path, "rb") as file:
            return file.read(4) == MAGIC
    except OSError:
        return False


def read_header(path: Path) -> Header:
    """Return the header of a GGUF file, checked against the file size.

    Raises CheckpointError for a malformed file and for tensors of an unsupported type.
    """
    whole = map_file(path)
    reader = _Reader(whole, f"{path}: its GGUF header")
    version = reader.version()
    count, keys = reader.count("tensors", MAX_TENSORS), reader.count("keys", MAX_KEYS)
    if version not in VERSIONS:
        raise reader.error(f"version {version} is not supported (known: 2, 3)")
    settings: dict[str, Any] = {}
    for number in range(keys):
        key = reader.text(f"key {number}", MAX_NAME)
        if key in settings:
            raise reader.error(f"the key {key!r:.80} occurs twice")
        settings[key] = reader.value(key)
    found = [reader.entry(number) for number in range(count)]
    entries = dict(found)
    if len(entries) < len(found):
        ((twice, _),) = Counter(name for name, _ in found).most_common(1)
        raise reader.error(f"the tensor {twice!r:.80} occurs twice")
    alignment = settings.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or alignment not in {1 << n for n in range(3, 17)}:
        raise reader.error(
            f"general.alignment is {alignment!r:.40}, expected a power of 2, 8 to {MAX_ALIGNMENT}"
        )
    start = -(-reader.at // alignment) * alignment
    return Header(path, settings, _placed(entries, start, alignment, reader), whole)


def _placed(
    entries: Mapping[str, Entry], start: int, alignment: int, reader: "_Reader"
) -> dict[str, Entry]:
    """Return the entries with offsets in the file, sorted; refuse overlaps and overruns."""
    end, before = start, ""
    placed = {}
    for name, entry in sorted(entries.items(), key=lambda item: item[1].begin):
        begin = start + entry.begin
        if entry.begin % alignment:
            raise reader.error(
                f"{name!r:.80} is at offset {entry.begin:,}, which is not a multiple of the"
                f" alignment {alignment}"
            )
        if begin < end:
            raise reader.error(f"{name!r:.80} at offset {entry.begin:,} overlaps {before!r:.80}")
        end, before = begin + entry.nbytes, name
        if end > reader.size:
            raise reader.error(
                f"{name!r:.80}, {entry.block.name} {entry.shape}, ends at byte {end:,}, but the"
                f" file ends at {reader.size:,}: cut off?"
            )
        placed[name] = entry._replace(begin=begin)
    return placed


class _Reader:
    """A reader with a position, `at`. where: the prefix of error messages."""

    def __init__(self, whole: mmap.mmap, where: str) -> None:
        self.whole, self.where, self.at = whole, where, 0
        self.size, self.strings = len(whole), 0

    def error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {text}")

    def version(self) -> int:
        if self.whole[:4] != MAGIC:
            raise CheckpointError(f"{self.where} does not begin with {MAGIC.decode()}")
        self.at = 4
        version = int(self.number(4, "its version"))
        if version and not version & 0xFFFF:
            raise self.error("big endian is not supported. Convert it with gguf_convert_endian")
        return version

    def need(self, size: int, what: str) -> int:
        """Advance by `size` bytes, within the file and the limit; return their offset."""
        begin, self.at = self.at, self.at + size
        if self.at > min(self.size, MAX_HEADER):
            text = f"{what} takes {size:,} bytes from byte {begin:,}"
            if self.at > self.size:
                raise self.error(f"{text}, but the file has {self.size:,}: cut off?")
            raise self.error(f"{text}; at most {MAX_HEADER:,} bytes of a header are read")
        return begin

    def number(self, kind: int, what: str) -> Any:
        code, dtype = _SCALARS[kind]
        (value,) = struct.unpack_from(code, self.whole, self.need(dtype.itemsize, what))
        return value

    def count(self, what: str, most: int) -> int:
        count = int(self.number(10, f"the number of {what}"))
        if count > most:
            raise self.error(f"{count:,} {what}, expected at most {most:,}")
        return count

    def text(self, what: str, most: int = MAX_HEADER) -> str:
        length = self.count(f"bytes of {what}", most)
        begin = self.need(length, what)
        return self.decoded(self.whole[begin : begin + length], what)

    def decoded(self, raw: bytes, what: str) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.error(f"{what} is not UTF-8: {raw[:40]!r}") from None

    def value(self, key: str) -> Any:
        kind = int(self.number(4, f"the type of {key!r:.80}"))
        if kind == _STRING:
            return self.text(f"{key!r:.80}")
        if kind == _ARRAY:
            return self.array(key)
        if kind not in _SCALARS:
            raise self.error(f"{key!r:.80} has the unknown type {kind}")
        value = self.number(kind, f"{key!r:.80}")
        if kind == _FLOAT:
            return float(str(np.float32(value)))  # shortest decimal: 1e-05
        if kind != _BOOL:
            return value
        if value > 1:
            raise self.error(f"{key!r:.80} is {value}, expected a boolean")
        return bool(value)

    def array(self, key: str) -> Any:
        what = f"{key!r:.80}"
        kind = int(self.number(4, f"the item type of {what}"))
        count = self.count(f"items of {what}", MAX_HEADER)
        if kind == _STRING:
            return self.texts(count, what)
        if kind not in _SCALARS:
            within = "arrays" if kind == _ARRAY else f"items of type {kind}"
            raise self.error(f"{what} is an array of {within}, which is not supported")
        dtype = _SCALARS[kind][1]
        begin = self.need(count * dtype.itemsize, what)
        array = np.frombuffer(self.whole, dtype, count, begin)
        if kind == _BOOL and array.max(initial=0) > 1:
            raise self.error(f"{what} contains {array.max()}, expected booleans")
        return array.astype(bool) if kind == _BOOL else array

    def texts(self, count: int, what: str) -> list[str]:
        self.strings += count
        if self.strings > MAX_STRINGS:
            raise self.error(f"{what} has {count:,} strings; at most {MAX_STRINGS:,} are read")
        self.need(8 * count, what)  # their lengths alone
        at, last = self.at - 8 * count, min(self.size, MAX_HEADER)
        whole, length_at = self.whole, struct.Struct("<Q").unpack_from
        found: list[bytes] = []
        keep: Callable[[bytes], None] = found.append
        for _ in range(count):  # inlined: 0.1 s for 300,000 strings
            if at + 8 > last:
                break
            begin = at + 8
            at = begin + length_at(whole, at)[0]
            if at > last:
                break
            keep(whole[begin:at])
        if len(found) < count or at > last:
            raise self.error(f"string {len(found):,} of {what} exceeds the file or the limit")
        self.at = at
        try:
            return [raw.decode() for raw in found]
        except UnicodeDecodeError:
            return [self.decoded(raw, f"a string of {what}") for raw in found]

    def entry(self, number: int) -> tuple[str, Entry]:
        name = self.text(f"the name of tensor {number}", MAX_NAME)
        rank = int(self.number(4, f"the rank of {name!r:.80}"))
        if not 0 < rank <= MAX_DIMENSIONS:
            raise self.error(f"{name!r:.80} has {rank} dimensions, expected 1 to {MAX_DIMENSIONS}")
        sizes = [int(self.number(10, f"the shape of {name!r:.80}")) for _ in range(rank)]
        shape = tuple(reversed(sizes))  # stored with the contiguous axis first
        kind = int(self.number(4, f"the type of {name!r:.80}"))
        begin = int(self.number(10, f"the offset of {name!r:.80}"))
        if kind not in BLOCKS:
            known = ", ".join(block.name for block in BLOCKS.values())
            raise self.error(
                f"{name!r:.80} has type {NAMES.get(kind, kind)}, which is not supported"
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
        return name, Entry(block, shape, begin)
