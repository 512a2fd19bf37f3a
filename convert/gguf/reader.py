"""GGUF files, split or not, opened as checkpoints.

As with every format, one error lists all complaints, before weights are read.
"""

import dataclasses
import math
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.checkpoints.native import (
    GGUF_FORMAT,
    Checkpoint,
    check_special_ids,
    check_tensors,
    native_precision,
)
from jaxllm.config.model import ModelConfig
from jaxllm.convert.gguf import names
from jaxllm.convert.gguf.architecture import GGUFArchitecture
from jaxllm.convert.gguf.header import GGUFHeader, TensorInfo, is_gguf, read_header
from jaxllm.convert.gguf.more_types import MORE_TYPES
from jaxllm.convert.gguf.names import MatchedParam
from jaxllm.convert.gguf.rotary import DIVISOR_TENSORS
from jaxllm.convert.gguf.settings import find_architecture, read_config, unknown_keys
from jaxllm.convert.gguf.tensors import GGUFTensor
from jaxllm.convert.gguf.tokenizer_read import find_ends
from jaxllm.convert.gptq_awq import make_rules
from jaxllm.convert.tables import is_unread
from jaxllm.errors import CheckpointError, LargerWeightsWarning
from jaxllm.files import path_inside
from jaxllm.models import build, param_shapes
from jaxllm.weights.formats import can_stack
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.paths import flatten
from jaxllm.weights.precision import Override, Precision

_PART_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
MAX_PARTS = 1 << 12


def recognizes(path: Path) -> bool:
    """Return whether `path` is a GGUF file, by its first bytes."""
    return path.is_file() and is_gguf(path)


def open_gguf(path: Path, *, strict: bool = False) -> Checkpoint:
    """Open a GGUF file, or all parts of a split one by any part, with lazy tensors.

    Args:
        strict: As for `read_config`.

    Raises:
        ConfigError, CheckpointError: With everything that is wrong.
    """
    headers = read_parts(path)
    first = headers[0]
    stored = {name: (h, entry) for h in headers for name, entry in h.tensor_infos.items()}
    entries: Mapping[str, TensorInfo] = {name: entry for name, (_, entry) in stored.items()}
    architecture, row = find_architecture(first)
    known = [name for name in DIVISOR_TENSORS if name in stored and row.uses_rope]
    divisors = {name: _read_divisors(name, *stored[name]) for name in known}
    config = read_config(first, entries, divisors, strict=strict)
    tensors: dict[str, LazyTensor] = {}
    formats: dict[str, str] = {}
    blocks: dict[str, LazyTensor] = {}
    complaints: list[str] = []
    quantizable = _quantizable_paths(config, row)
    end = first.settings[f"{architecture}.block_count"]  # with layers of further tokens
    unread = [name for name in stored if config.num_hidden_layers <= _block_number(name) < end]
    model = [name for name in stored if name not in {*divisors, *unread}]
    for match in names.match_names(row.modules, model):
        if isinstance(match, str):
            complaints.append(f"{match} is not part of this model")
            continue
        if is_unread(match.path, config):
            continue
        header, entry = stored[match.name]
        placed = _locate_tensor(header, entry, match, config, complaints)
        exact = match.path not in quantizable or match.module.always_float32
        leaf = None if exact else placed.to_leaf()
        single = leaf is not None and len(placed.shape) == 3 and not can_stack(leaf[0].name)
        if leaf is None or single:  # stacks of experts lack some formats: exact floats
            tensors[match.path] = placed.to_plain()
        else:
            formats[match.path] = leaf[0].name
            tensors |= {f"{match.path}{piece}": tensor for piece, tensor in leaf[1].items()}
            if (mapped := placed.to_blocks()) is not None:
                blocks[match.path] = mapped
    for layout in row.layouts:
        tensors = layout.read(tensors, config)
    check_tensors(tensors, config, str(path), formats, complaints)
    _warn_larger(path, entries.values())
    precision = _precision(tensors, formats, config)
    generation = check_special_ids(_read_special_ids(first), f"{path}")
    return Checkpoint(
        path,
        config,
        tensors,
        generation,
        precision,
        formats,
        file_format=GGUF_FORMAT,
        ignored=unknown_keys(first),
        blocks=blocks,
        settings=first.settings,
    )


def _block_number(name: str) -> int:
    """Return the number of the block that a tensor belongs to; -1 for none."""
    number = re.match(r"blk\.(\d{1,4})\.", name)
    return int(number[1]) if number else -1


def _warn_larger(path: Path, infos: Iterable[TensorInfo]) -> None:
    """Warn if tensors take more memory than in the file."""
    sizes = {row.name: row.bytes_per_weight for row in MORE_TYPES}
    large = [info for info in infos if info.block.name in sizes]
    if large:
        stored = sum(info.nbytes for info in large)
        held = sum(math.prod(info.shape) * sizes[info.block.name] for info in large)
        names = ", ".join(sorted({info.block.name for info in large}))
        warnings.warn(
            f"{path}: weights of type {names} become int8, or float32 for Q2_K:"
            f" {stored / 1e6:,.0f} MB of the file take {held / 1e6:,.0f} MB of memory",
            LargerWeightsWarning,
            stacklevel=4,
        )


def read_parts(path: Path) -> list[GGUFHeader]:
    """Return the headers of a file's parts, in order; one header if it is not split.

    Raises CheckpointError for missing parts and for parts that do not belong together.
    """
    header = read_header(path)
    count, number = (header.settings.get(key, 0) for key in ("split.count", "split.no"))
    if type(count) is not int or type(number) is not int or count < 2:
        return [header]
    named = _PART_NAME.fullmatch(path.name)
    if named is None or int(named["count"]) != count or int(named["number"]) != number + 1:
        raise CheckpointError(
            f"{path}: the name does not match its header, part {number + 1} of {count}: expected a"
            f" name ending in -{number + 1:05}-of-{count:05}.gguf, and all parts in one directory"
        )
    if count > MAX_PARTS:
        raise CheckpointError(f"{path} has {count:,} parts, expected at most {MAX_PARTS:,}")
    parts = []
    for i in range(count):
        name = f"{named['stem']}-{i + 1:05}-of-{count:05}.gguf"
        parts.append(header if i == number else read_header(path_inside(path.parent, name)))
        split = [parts[-1].settings.get(key) for key in ("split.no", "split.count")]
        if split != [i, count]:
            raise CheckpointError(f"{path.parent / name}: split.no and split.count are {split}")
    seen: dict[str, Path] = {}
    for part in parts:
        for name in part.tensor_infos:
            if name in seen:
                raise CheckpointError(f"{part.path}: {name!r:.80} is also in {seen[name].name}")
            seen[name] = part.path
    total = parts[0].settings.get("split.tensors.count", len(seen))
    if total != len(seen):
        raise CheckpointError(
            f"{path}: the parts have {len(seen)} tensors, expected {total} (split.tensors.count)"
        )
    return parts


def _locate_tensor(
    header: GGUFHeader,
    entry: TensorInfo,
    match: MatchedParam,
    config: ModelConfig,
    complaints: list[str],
) -> GGUFTensor:
    """Return a tensor with its rows in our order."""
    order, plus = match.module.row_order, match.module.weight_offset
    if match.module.row_range is not None:
        begin, end, total = match.module.row_range(config)
        *stack, rows = entry.shape[:-1] or entry.shape  # a vector's numbers are rows
        if rows != total:
            complaints.append(f"{match.name} has shape {entry.shape}, expected {total} rows")
            return GGUFTensor(header.buffer, entry)
        firsts = np.arange(math.prod(stack))[:, None] * total
        return GGUFTensor(header.buffer, entry, (firsts + np.arange(begin, end)).ravel())
    if order is None:
        return GGUFTensor(header.buffer, entry, weight_offset=plus)
    back = order(config)
    if entry.shape[0] != len(back):
        complaints.append(f"{match.name} has {entry.shape[0]} rows, expected {len(back)}")
        return GGUFTensor(header.buffer, entry, weight_offset=plus)
    return GGUFTensor(header.buffer, entry, np.argsort(back), plus)


def _quantizable_paths(config: ModelConfig, row: GGUFArchitecture) -> set[str]:
    """Return the paths of matrices that may be quantized: all but learned positions."""
    shapes = flatten(param_shapes(build(config)))
    kept = f"{row.family.position_table}.weight"
    return {
        path
        for path, leaf in shapes
        if len(leaf.shape) > 1 and path.endswith(".weight") and path != kept
    }


def _precision(
    tensors: Mapping[str, LazyTensor], formats: Mapping[str, str], config: ModelConfig
) -> Precision:
    """Return the precision of the file's weights: one format, and rules for the others."""
    paths = dict(flatten(param_shapes(build(config))))
    precision = native_precision({path: tensors[path] for path in paths if path in tensors})
    others = {
        path: tensors[path].dtype.name
        for path in paths
        if path in tensors and tensors[path].dtype.name != precision.weights
    }
    overrides = tuple(
        (regex, Override(weights=str(name))) for regex, name in make_rules(others, paths)
    )
    return dataclasses.replace(
        precision, quantize=make_rules(formats, paths) or None, overrides=overrides
    )


def _read_divisors(name: str, header: GGUFHeader, entry: TensorInfo) -> np.ndarray:
    if len(entry.shape) != 1 or entry.block.dtype is None:
        raise CheckpointError(f"{header.path}: {name} is not an unquantized vector")
    return np.asarray(GGUFTensor(header.buffer, entry).to_plain().read(), np.float32)


def _read_special_ids(header: GGUFHeader) -> dict[str, Any]:
    """Return the special ids, as generation_config.json has them."""
    ends = find_ends(header.settings)
    ids = {
        "bos_token_id": header.settings.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": header.settings.get("tokenizer.ggml.padding_token_id"),
    }
    return {name: value for name, value in ids.items() if value is not None}
