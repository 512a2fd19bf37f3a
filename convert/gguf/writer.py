"""GGUF writer: a type or a mixture for matrices, and F32 for vectors, like llama.cpp.

Matrices that are already quantized in the same groups keep their integers; all others are rounded
once, a block of rows at a time.
"""

import struct
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxllm.checkpoints.native import Checkpoint, dequantize_checkpoint
from jaxllm.config.model import ModelConfig
from jaxllm.convert.gguf import names
from jaxllm.convert.gguf.blocks import BY_NAME, TensorType
from jaxllm.convert.gguf.header import ALIGNMENT
from jaxllm.convert.gguf.names import MatchedParam
from jaxllm.convert.gguf.settings import write_config
from jaxllm.convert.gguf.tensor_types import FILE_TYPES, KINDS, choose_block
from jaxllm.convert.gguf.tensors import pack_blocks
from jaxllm.convert.gguf.tokenizer_write import dropped_settings, make_tokenizer_keys
from jaxllm.errors import CheckpointError, ConfigError, UnusedSettingsWarning
from jaxllm.files import atomic_file, path_exists
from jaxllm.models import build, param_shapes
from jaxllm.runtime.progress import bytes_bar
from jaxllm.text.formats import TokenizerTree
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.paths import flatten
from jaxllm.weights.types import mxfp4
from jaxllm.weights.types.base import BLOCK_ROWS, Format
from jaxllm.weights.types.block_weight import BLOCK_TYPES
from jaxllm.weights.types.int_weight import IntFormat

QUANTIZATION_VERSION = 2
FULL_COLUMNS = 1 << 10  # columns; a multiple of every block size
_TYPES: dict[type, tuple[int, str]] = {
    bool: (7, "<B"), int: (4, "<I"), float: (6, "<f"), np.int32: (5, "<i")
}  # fmt: skip
_ARRAYS = {np.dtype(np.int32): 5, np.dtype(np.float32): 6, np.dtype(bool): 7}


class OutputTensor(NamedTuple):
    """A tensor to write. rows: yields its bytes, a block of rows at a time."""

    name: str
    block: TensorType
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
    templates: Mapping[str, str] | None = None,
) -> dict[str, int]:
    """Write a GGUF file that llama.cpp loads, atomically.

    Args:
        kind: A name of `KINDS`.
        tokenizer: The tokenizer to include.
        templates: The chat templates to include, by name; the usual one is "default".

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
        spoken = make_tokenizer_keys(
            tokenizer, templates or {}, checkpoint.generation, config.vocab_size
        )
        if dropped := dropped_settings(checkpoint.generation, spoken):
            warnings.warn(
                f"{path}: GGUF has no place for these generation settings: {', '.join(dropped)}."
                " Set them when you generate",
                UnusedSettingsWarning,
                stacklevel=2,
            )
    settings = {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": checkpoint.directory.resolve().stem,
        "general.file_type": FILE_TYPES[kind],
        "general.quantization_version": QUANTIZATION_VERSION,
        **keys,
        **spoken,
    }
    plain = dequantize_checkpoint(checkpoint) if checkpoint.formats else checkpoint
    stored = dict(plain.tensors)
    for layout in reversed(row.layouts):
        stored = layout.write(stored, config)
    tensors, parts = list[OutputTensor](), dict[str, list[tuple[int, OutputTensor]]]()
    replaced = dict[str, str]()
    for match in names.match_paths(row.modules, stored):
        if isinstance(match, str):
            raise ConfigError(f"{match} has no GGUF name")
        tensor = stored[match.path]
        single, columns = tensor.ndim < 2 or match.module.always_float32, tensor.columns
        single |= match.path.endswith(".bias")
        block = BY_NAME["F32"] if single else choose_block(kind, match.name, columns, config)
        if checkpoint.formats.get(match.path) == mxfp4.FORMAT.name and block.dtype is None:
            block = BY_NAME["MXFP4"]  # kept, as in llama.cpp's mixtures
        if not single and block is not choose_block(kind, match.name, FULL_COLUMNS, config):
            replaced[match.name] = block.name
        is_changed = tensor is not plain.tensors.get(match.path)
        held = None if is_changed else _copy_codes(checkpoint, match, block)
        quantized = held or _quantize_tensor(tensor, match, block, config)
        if match.module.row_range is None:
            tensors.append(quantized)
        else:
            parts.setdefault(match.name, []).append((match.module.row_range(config)[0], quantized))
    tensors += [
        _concatenate([quantized for _, quantized in sorted(each, key=lambda part: part[0])])
        for each in parts.values()
    ]
    tensors += [_float_vector(name, vector) for name, vector in divisors.items()]
    _write_file(path, settings, tensors)
    return dict(Counter(replaced.values()))


def check_absent(path: Path) -> None:
    """Raise CheckpointError if a file exists, before any work is done."""
    if path_exists(path):
        raise CheckpointError(f"{path} already exists. Choose a new file name")


def write_arrays(
    path: Path, settings: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
) -> None:
    """Write a small file of float32 arrays."""
    held = [_float_vector(name, array) for name, array in tensors.items()]
    _write_file(path, settings, held, show_progress=False)


def _copy_codes(
    checkpoint: Checkpoint, match: MatchedParam, block: TensorType
) -> OutputTensor | None:
    """Return a leaf unchanged if its numbers are those of the type, else None."""
    leaf: Format | None = BLOCK_TYPES[block.name].format if block.name in BLOCK_TYPES else None
    leaf = mxfp4.FORMAT if block.name == "MXFP4" else leaf
    if leaf is None or checkpoint.formats.get(match.path) != leaf.name:
        return None
    *lead, columns = dict(flatten(param_shapes(build(checkpoint.config))))[match.path].shape
    if columns % block.columns:
        return None
    pieces = [checkpoint.tensors[f"{match.path}{name}"] for name in leaf.array_specs((1, 1))]
    order = _row_order(match, checkpoint.config)

    def rows() -> Iterator[np.ndarray]:
        arrays = [x.read().reshape(-1, x.shape[-1]) for x in pieces]
        for index in _row_slices(len(arrays[0]), order):
            some = [x[index] for x in arrays]
            if isinstance(leaf, IntFormat):
                yield pack_blocks(leaf, some[0], some[1], columns)
            else:
                yield some[0]

    return OutputTensor(match.name, block, (*lead, columns), rows)


def _quantize_tensor(
    tensor: LazyTensor, match: MatchedParam, block: TensorType, config: ModelConfig
) -> OutputTensor:
    order, plus = _row_order(match, config), np.float32(match.module.weight_offset)

    def quantize_rows(part: np.ndarray) -> np.ndarray:
        numbers = part.astype(np.float32) + plus if plus else part
        raw = block.quantize(numbers)
        back = raw if block.dtype is None else raw.view(block.dtype)
        sound = np.isfinite(numbers.astype(np.float32))
        if block.dtype is not None:
            sound &= np.isfinite(back.astype(np.float32))
        else:
            sound &= np.isfinite(block.dequantize(raw))
        if not sound.all():
            wrong = numbers[~sound][0]
            raise CheckpointError(f"{match.path}: {wrong} is not a finite number in {block.name}")
        return raw

    def rows() -> Iterator[np.ndarray]:
        if order is None and tensor.ndim > 1:
            for part in tensor.blocks(BLOCK_ROWS):
                yield quantize_rows(part)
            return
        array = tensor.read().reshape(len(order) if order is not None else 1, -1)
        for index in _row_slices(len(array), order):
            yield quantize_rows(array[index])

    return OutputTensor(match.name, block, tensor.shape, rows)


def _concatenate(parts: list[OutputTensor]) -> OutputTensor:
    """Concatenate tensors by rows."""
    first, count = parts[0], sum(part.shape[0] for part in parts)
    assert {part.block.name for part in parts} == {first.block.name}, first.name

    def rows() -> Iterator[np.ndarray]:
        for part in parts:
            yield from part.rows()

    return first._replace(shape=(count, *first.shape[1:]), rows=rows)


def _float_vector(name: str, array: np.ndarray) -> OutputTensor:
    block, plain = BY_NAME["F32"], np.ascontiguousarray(array, np.float32)
    return OutputTensor(name, block, plain.shape, lambda: iter([block.quantize(plain)]))


def _row_order(match: MatchedParam, config: ModelConfig) -> np.ndarray | None:
    return None if match.module.row_order is None else match.module.row_order(config)


def _row_slices(count: int, order: np.ndarray | None) -> Iterator[Any]:
    """Yield an index of each block of rows, in the order of writing."""
    for begin in range(0, count, BLOCK_ROWS):
        end = min(begin + BLOCK_ROWS, count)
        yield slice(begin, end) if order is None else order[begin:end]


def _write_file(
    path: Path,
    settings: Mapping[str, Any],
    tensors: list[OutputTensor],
    show_progress: bool | None = None,
) -> None:
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(settings))
    header += b"".join(_pack_text(key) + _pack_value(key, value) for key, value in settings.items())
    offset, infos = 0, []
    for tensor in tensors:
        sizes = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
        infos.append(
            _pack_text(tensor.name) + sizes + struct.pack("<IQ", tensor.block.type_id, offset)
        )
        offset += tensor.nbytes + -tensor.nbytes % ALIGNMENT
    header += b"".join(infos)
    header += bytes(-len(header) % ALIGNMENT)
    total = sum(tensor.nbytes for tensor in tensors)
    with (
        atomic_file(path) as file,
        bytes_bar(f"writing {path.name}", total, show_progress) as advance,
    ):
        file.write(header)
        for tensor in tensors:
            done = 0
            for raw in tensor.rows():
                file.write(np.ascontiguousarray(raw).reshape(-1).data)
                done += raw.nbytes
                advance(raw.nbytes)
            assert done == tensor.nbytes, tensor.name
            file.write(bytes(-done % ALIGNMENT))


def _pack_text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _pack_value(key: str, value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _pack_text(value)
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_pack_text, value))
    if isinstance(value, np.ndarray):
        return struct.pack("<IIQ", 9, _ARRAYS[value.dtype], len(value)) + value.tobytes()
    kind, code = _TYPES[type(value)]
    try:
        return struct.pack("<I", kind) + struct.pack(code, value)
    except struct.error:
        raise ConfigError(f"{key} {value!r:.40} does not fit into its GGUF type") from None
