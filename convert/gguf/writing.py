"""GGUF writer: a type or a mixture for matrices, and F32 for vectors, like llama.cpp.

Matrices that are already quantized in the same groups keep their integers; all others are rounded
once, a block of rows at a time.
"""

import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxllm.checkpoint import Checkpoint, dequantized
from jaxllm.config import ModelConfig
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.files import is_there, writing
from jaxllm.progress import bytes_bar
from jaxllm.text.formats import TokenizerTree
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.leaves.integers import Integer
from jaxllm.weights.leaves.leaf import ROWS

from . import names
from .blocks import BY_NAME, Block
from .header import ALIGNMENT
from .names import Named
from .settings import write_config
from .stored import LEAVES, blocks_of
from .tensor_types import FILE_TYPES, KINDS, choose_block
from .vocabulary_keys import tokenizer_keys

QUANTIZATION_VERSION = 2
FULL = 1 << 10  # columns; a multiple of every block size
_TYPES: dict[type, tuple[int, str]] = {bool: (7, "<B"), int: (4, "<I"), float: (6, "<f")}
_ARRAYS = {np.dtype(np.int32): 5, np.dtype(np.float32): 6}


class Written(NamedTuple):
    """A tensor to write. rows: yields its bytes, a block of rows at a time."""

    name: str
    block: Block
    shape: tuple[int, ...]
    rows: Callable[[], Iterator[np.ndarray]]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape[:-1])) * self.block.row_bytes(self.shape[-1])


def write_gguf(
    path: Path,
    checkpoint: Checkpoint,
    kind: str,
    *,
    tokenizer: TokenizerTree | None = None,
    template: str | None = None,
    show_progress: bool | None = None,
) -> dict[str, int]:
    """Write a GGUF file that llama.cpp loads, atomically.

    Args:
        kind: A name of `KINDS`.
        tokenizer: The tokenizer to include.
        template: The chat template to include.

    Returns:
        Matrix counts by type, of types that replace those of `kind` because of short rows.

    Raises:
        ConfigError: If GGUF cannot express the model.
        CheckpointError: If the file exists or cannot be written, or a number overflows its type.
    """
    check_absent(path)
    if kind not in KINDS:
        raise ConfigError(f"GGUF type {kind!r:.40} is not supported (known: {', '.join(KINDS)})")
    config = checkpoint.config
    architecture, row, keys, divisors = write_config(config)
    spoken: dict[str, Any] = {"tokenizer.ggml.model": "no_vocab"}
    if tokenizer is not None:
        spoken = tokenizer_keys(tokenizer, template, checkpoint.generation, config.vocab_size)
    settings = {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": checkpoint.directory.resolve().stem,
        "general.file_type": FILE_TYPES[kind],
        "general.quantization_version": QUANTIZATION_VERSION,
        **keys,
        **spoken,
    }
    plain = dequantized(checkpoint) if checkpoint.formats else checkpoint
    tensors, parts = list[Written](), dict[str, list[tuple[int, Written]]]()
    replaced = dict[str, str]()
    for found in names.theirs(row.modules, plain.tensors):
        if isinstance(found, str):
            raise ConfigError(f"{found} has no GGUF name")
        tensor = plain.tensors[found.path]
        single, columns = tensor.ndim < 2 or found.module.single, tensor.columns
        block = BY_NAME["F32"] if single else choose_block(kind, found.name, columns, config)
        if not single and block is not choose_block(kind, found.name, FULL, config):
            replaced[found.name] = block.name
        held = _held(checkpoint, found, block)
        made = held or _rounded(tensor, found, block, config)
        if found.module.part is None:
            tensors.append(made)
        else:
            parts.setdefault(found.name, []).append((found.module.part(config)[0], made))
    tensors += [
        _joined([made for _, made in sorted(each, key=lambda part: part[0])])
        for each in parts.values()
    ]
    tensors += [_vector(name, vector) for name, vector in divisors.items()]
    _write(path, settings, tensors, show_progress)
    return dict(Counter(replaced.values()))


def check_absent(path: Path) -> None:
    """Raise CheckpointError if a file exists, before any work is done."""
    if is_there(path):
        raise CheckpointError(f"{path} already exists. Choose a new file name")


def write_file(path: Path, settings: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
    """Write a small file of float32 arrays."""
    held = [_vector(name, array) for name, array in tensors.items()]
    _write(path, settings, held, show_progress=False)


def _held(checkpoint: Checkpoint, found: Named, block: Block) -> Written | None:
    """Return a leaf unchanged if its integers and scales are those of the type, else None."""
    leaf = LEAVES[block.name].format if block.name in ("Q8_0", "Q4_0") else None
    if not isinstance(leaf, Integer) or checkpoint.formats.get(found.path) != leaf.name:
        return None
    data, scale = (checkpoint.tensors[f"{found.path}.{piece}"] for piece in ("data", "scale"))
    order, lead = _order(found, checkpoint.config), data.shape[:-1]
    columns = _columns(checkpoint.config, found.path)

    def rows() -> Iterator[np.ndarray]:
        codes, scales = (x.read().reshape(-1, x.shape[-1]) for x in (data, scale))
        for index in _runs(len(codes), order):
            yield blocks_of(leaf, codes[index], scales[index], columns)

    if columns % leaf.size(columns):
        return None
    return Written(found.name, block, (*lead, columns), rows)


def _rounded(tensor: LazyTensor, found: Named, block: Block, config: ModelConfig) -> Written:
    order, plus = _order(found, config), np.float32(found.module.plus)

    def checked(part: np.ndarray) -> np.ndarray:
        numbers = part.astype(np.float32) + plus if plus else part
        raw = block.quantized(numbers)
        back = raw if block.dtype is None else raw.view(block.dtype)
        sound = np.isfinite(numbers.astype(np.float32))
        if block.dtype is not None:
            sound &= np.isfinite(back.astype(np.float32))
        else:
            sound &= np.isfinite(block.dequantized(raw))
        if not sound.all():
            wrong = numbers[~sound][0]
            raise CheckpointError(f"{found.path}: {wrong} is not a finite number in {block.name}")
        return raw

    def rows() -> Iterator[np.ndarray]:
        if order is None and tensor.ndim > 1:
            for part in tensor.blocks(ROWS):
                yield checked(part)
            return
        whole = tensor.read().reshape(len(order) if order is not None else 1, -1)
        for index in _runs(len(whole), order):
            yield checked(whole[index])

    return Written(found.name, block, tensor.shape, rows)


def _joined(parts: list[Written]) -> Written:
    """Concatenate tensors by rows."""
    first, count = parts[0], sum(part.shape[0] for part in parts)
    assert {part.block.name for part in parts} == {first.block.name}, first.name

    def rows() -> Iterator[np.ndarray]:
        for part in parts:
            yield from part.rows()

    return first._replace(shape=(count, *first.shape[1:]), rows=rows)


def _vector(name: str, array: np.ndarray) -> Written:
    block, plain = BY_NAME["F32"], np.ascontiguousarray(array, np.float32)
    return Written(name, block, plain.shape, lambda: iter([block.quantized(plain)]))


def _order(found: Named, config: ModelConfig) -> np.ndarray | None:
    return None if found.module.order is None else found.module.order(config)


def _runs(count: int, order: np.ndarray | None) -> Iterator[Any]:
    """Yield an index of each block of rows, in the order of writing."""
    for begin in range(0, count, ROWS):
        end = min(begin + ROWS, count)
        yield slice(begin, end) if order is None else order[begin:end]


def _columns(config: ModelConfig, path: str) -> int:
    from jaxllm.models import build, param_shapes
    from jaxllm.weights.paths import flatten

    columns: int = dict(flatten(param_shapes(build(config))))[path].shape[-1]
    return columns


def _write(
    path: Path,
    settings: Mapping[str, Any],
    tensors: list[Written],
    show_progress: bool | None,
) -> None:
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(settings))
    header += b"".join(_text(key) + _value(key, value) for key, value in settings.items())
    offset, infos = 0, []
    for tensor in tensors:
        sizes = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
        infos.append(_text(tensor.name) + sizes + struct.pack("<IQ", tensor.block.number, offset))
        offset += tensor.nbytes + -tensor.nbytes % ALIGNMENT
    header += b"".join(infos)
    header += bytes(-len(header) % ALIGNMENT)
    total = sum(tensor.nbytes for tensor in tensors)
    with writing(path) as file, bytes_bar(f"writing {path.name}", total, show_progress) as advance:
        file.write(header)
        for tensor in tensors:
            done = 0
            for raw in tensor.rows():
                file.write(np.ascontiguousarray(raw).reshape(-1).data)
                done += raw.nbytes
                advance(raw.nbytes)
            assert done == tensor.nbytes, tensor.name
            file.write(bytes(-done % ALIGNMENT))


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(key: str, value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
    if isinstance(value, np.ndarray):
        return struct.pack("<IIQ", 9, _ARRAYS[value.dtype], len(value)) + value.tobytes()
    kind, code = _TYPES[type(value)]
    try:
        return struct.pack("<I", kind) + struct.pack(code, value)
    except struct.error:
        raise ConfigError(f"{key} {value!r:.40} does not fit into its GGUF type") from None
