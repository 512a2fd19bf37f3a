"""Lazy reader of transformers 4's Flax checkpoints (`flax_model.msgpack`).

The file is MessagePack as written by `flax.serialization.to_bytes`: nested maps with arrays as
leaves. Flax reads all of it at once; this reader walks its structure once, checks it against the
file size, and reads each tensor when needed. Nothing in the file can run code.
"""

import io
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.errors import CheckpointError
from jaxllm.files import open_regular
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.safetensors import DTYPES, empty_aligned, open_raw_tensor

FILE_NAME = "flax_model.msgpack"
INDEX_NAME = "flax_model.msgpack.index.json"
MODEL_TYPES = ("gpt2", "llama", "mistral")  # supported model_types that had Flax classes
MAX_DEPTH = 16  # nested maps; GPT-2 has 6
MAX_ITEMS = 1 << 20  # entries of all maps in a file
MAX_NAME = 200
MAX_AXES = 8
ARRAY, SCALAR = 1, 3  # Flax's extension types, both (shape, dtype name, bytes)
CHUNKED_KEY = "__msgpack_chunked_array__"  # arrays beyond 1 GiB, in pieces
TORCH_NAMES = {"kernel": "weight", "embedding": "weight", "scale": "weight"}

Tree = dict[str, Any]  # of trees, lazy tensors and, in chunked arrays, numbers


def open_flax(path: Path) -> dict[str, LazyTensor]:
    """Return a file's lazy tensors, by path (`transformer/h/0/ln_1/scale`).

    Raises CheckpointError for a malformed file.
    """
    with open_regular(path) as file:
        reader = _Reader(path, file, os.fstat(file.fileno()).st_size)
        tree = reader.read_value(0)
        if not isinstance(tree, dict):
            raise reader.error("has no map of parameters")
        if reader.position != reader.size:
            raise reader.error(f"has {reader.size - reader.position:,} bytes after its end")
    return _flatten(tree, f"{path}: ", "")


def as_torch(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Return the tensors by PyTorch's names, in PyTorch's shapes.

    Kernels are transposed: Dense has `[in, out]` and PyTorch's Linear `[out, in]`; GPT-2's
    FlaxConv1D and Conv1D are the other way round.
    """
    renamed: dict[str, LazyTensor] = {}
    for path, tensor in tensors.items():
        *modules, last = path.removeprefix("params/").split("/")
        name = ".".join((*modules, TORCH_NAMES.get(last, last)))
        if name in renamed:
            raise CheckpointError(f"{path} is a duplicate of {name}")
        renamed[name] = tensor.transpose() if last == "kernel" and tensor.ndim == 2 else tensor
    return renamed


def _flatten(tree: Tree, where: str, path: str) -> dict[str, LazyTensor]:
    flat: dict[str, LazyTensor] = {}
    for name, value in tree.items():
        inner = f"{path}{name}"
        if isinstance(value, dict):
            held = _join_chunks(value, where + inner) if CHUNKED_KEY in value else None
            flat |= _flatten(value, where, f"{inner}/") if held is None else {inner: held}
        elif isinstance(value, LazyTensor):
            flat[inner] = value
        else:
            raise CheckpointError(f"{where}{inner} is {value!r:.40}, expected an array")
    return flat


def _join_chunks(tree: Tree, where: str) -> LazyTensor:
    """Join the chunks of a long array; its lists are maps with the keys "0", "1", ...

    Raises CheckpointError for chunks that do not fit.
    """
    shape, chunks = (_read_list(tree.get(name), where) for name in ("shape", "chunks"))
    if len(tree) != 3 or any(type(n) is not int for n in shape) or len(shape) > MAX_AXES:
        raise _chunk_error(where, f"has {', '.join(tree)} and the shape {shape!r:.40}")
    if not chunks or not all(isinstance(x, LazyTensor) and x.ndim == 1 for x in chunks):
        raise _chunk_error(where, "has chunks that are not vectors")
    size, dtype = sum(x.shape[0] for x in chunks), chunks[0].dtype
    if size != math.prod(shape) or any(x.dtype != dtype for x in chunks):
        raise _chunk_error(
            where, f"has {size:,} numbers in its chunks, but the shape {shape!r:.40}"
        )

    def read() -> np.ndarray:
        joined, done = empty_aligned((size,), dtype), 0
        for chunk in chunks:
            joined[done : done + chunk.shape[0]] = chunk.read()
            done += chunk.shape[0]
        return joined.reshape(shape)

    return LazyTensor(dtype, tuple(shape), read)


def _read_list(items: Any, where: str) -> list[Any]:
    if not isinstance(items, dict) or list(items) != [str(i) for i in range(len(items))]:
        raise _chunk_error(where, "lacks the list of its sizes or of its chunks")
    return list(items.values())


def _chunk_error(where: str, what: str) -> CheckpointError:
    return CheckpointError(f"{where} {what}: not a chunked array written by Flax")


class _Reader:
    """A MessagePack reader; every length is checked against the rest of the file."""

    def __init__(self, path: Path, file: io.BufferedReader, size: int) -> None:
        self.path, self.file, self.size, self.position, self.item_count = path, file, size, 0, 0

    def error(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: not a checkpoint written by Flax: at byte {self.position:,} it {what}"
        )

    def read_value(self, depth: int) -> Any:
        """Read a map, an array (as a lazy tensor) or a number; refuse any other type."""
        kind = self._read_number(1)
        if kind < 0x80:
            return kind
        if (length := self._read_length(kind, 0x80, 0x8F, {0xDE: 2, 0xDF: 4})) is not None:
            return self._read_map(length, depth)
        if kind in (0xC2, 0xC3):
            return kind == 0xC3
        if kind in _UNSIGNED:
            return self._read_number(_UNSIGNED[kind])
        if kind in _EXTENSIONS or kind in _FIXED:
            length = _FIXED.get(kind) or self._read_number(_EXTENSIONS[kind])
            return self._read_array(self._read_number(1), length)
        raise self.error(f"holds a value of type 0x{kind:02x}")

    def _read_map(self, length: int, depth: int) -> Tree:
        self.item_count += length
        if depth >= MAX_DEPTH or self.item_count > MAX_ITEMS:
            raise self.error(f"nests more than {MAX_DEPTH} maps, or {MAX_ITEMS:,} entries")
        tree: Tree = {}
        for _ in range(length):
            name = self._read_text()
            if name in tree or not name or set(name) & set("./"):
                raise self.error(f"has a duplicate or invalid name {name!r}")
            tree[name] = self.read_value(depth + 1)
        return tree

    def _read_text(self) -> str:
        kind = self._read_number(1)
        length = self._read_length(kind, 0xA0, 0xBF, {**_STRINGS, **_BINARY})
        if length is None or length > MAX_NAME:
            raise self.error(f"should have a name of at most {MAX_NAME} bytes")
        try:
            return self._read_bytes(length).decode()
        except UnicodeDecodeError:
            raise self.error("has a name that is not UTF-8") from None

    def _read_array(self, kind: int, length: int) -> LazyTensor:
        """Read an extension's payload, `(shape, dtype name, bytes)`, itself MessagePack."""
        end = self.position + length
        if kind not in (ARRAY, SCALAR) or end > self.size:
            raise self.error(f"has {length:,} bytes of extension {kind}")
        if self._read_number(1) != 0x93:
            raise self.error("should have shape, dtype and bytes")
        axes = self._read_length(self._read_number(1), 0x90, 0x9F, {})
        if axes is None or axes > MAX_AXES:
            raise self.error(f"should have a shape of at most {MAX_AXES} axes")
        shape = tuple(self._read_axis() for _ in range(axes))
        if (name := self._read_text()) not in DTYPES:
            raise self.error(f"has an array of {name!r:.40}")
        dtype = DTYPES[name]
        count = self._read_length(self._read_number(1), 0xA0, 0xBF, {**_STRINGS, **_BINARY})
        nbytes = math.prod(shape) * dtype.itemsize
        if count != nbytes or self.position + nbytes != end:
            raise self.error(f"has {end - self.position:,} bytes for {dtype.name} {shape}")
        begin, self.position = self.position, end
        self.file.seek(end)
        return open_raw_tensor(self.path, begin, dtype, shape)

    def _read_axis(self) -> int:
        kind = self._read_number(1)
        if kind >= 0x80 and kind not in _UNSIGNED:
            raise self.error("has a shape that is not integers")
        return kind if kind < 0x80 else self._read_number(_UNSIGNED[kind])

    def _read_length(
        self, kind: int, first: int, last: int, widths: Mapping[int, int]
    ) -> int | None:
        """Return the length in a type from `first` to `last`, or in the bytes that follow."""
        if first <= kind <= last:
            return kind - first
        return self._read_number(widths[kind]) if kind in widths else None

    def _read_number(self, width: int) -> int:
        return int.from_bytes(self._read_bytes(width), "big")

    def _read_bytes(self, count: int) -> bytes:
        if self.position + count > self.size or len(raw := self.file.read(count)) != count:
            raise self.error("ends too soon: cut off?")
        self.position += count
        return raw


# MessagePack types, with the size in bytes of the number or length that follows.
_UNSIGNED = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
_STRINGS = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_BINARY = {0xC4: 1, 0xC5: 2, 0xC6: 4}
_EXTENSIONS = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_FIXED = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}  # extensions of fixed size
