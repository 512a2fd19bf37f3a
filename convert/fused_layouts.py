"""Matrices that are fused in a checkpoint and separate here, split and fused without rounding.

Matrices quantized by GPTQ or AWQ are split (see `quantize`), but not fused.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, islice
from typing import Any, Protocol

import numpy as np

from jaxllm.config.model import ModelConfig
from jaxllm.errors import CheckpointError
from jaxllm.weights.lazy import LazyTensor, concat_tensors, stack_tensors

Tensors = dict[str, LazyTensor]
Span = tuple[int, int]  # first row, end row (exclusive)
_COLUMN_SUFFIXES = (".qweight", ".qzeros", ".scales")  # transposed: last axis O, maybe packed
_ROW_SUFFIXES = (".weight_packed", ".weight_scale", ".weight_zero_point")


class Layout(Protocol):
    """Tensors that a checkpoint arranges differently; names are without the prefix."""

    def matches(self, path: str) -> bool:
        """Return whether this names such a tensor in the checkpoint."""
        ...

    def read(self, tensors: Tensors, config: ModelConfig) -> Tensors:
        """Replace the tensors of the checkpoint by ours; raise CheckpointError for wrong shapes."""
        ...

    def write(self, tensors: Tensors, config: ModelConfig) -> Tensors:
        """Replace our tensors by the checkpoint's."""
        ...


@dataclasses.dataclass(frozen=True)
class FusedLayout:
    """A fused linear in each layer: the rows of several of our linears, concatenated.

    Linears of experts are stacks, of which each matrix is fused.

    Attributes:
        fused, parts: Module paths within a layer.
        rows: The row count of each piece.
        repeats: The number of interleaved runs, each with an equal part of the rows of every piece
            (GPT-NeoX: one run per head).
        pieces: How many pieces follow one another in each part; by default one.
    """

    fused: str
    parts: tuple[str, ...]
    rows: Callable[[Any], tuple[int, ...]]
    repeats: Callable[[Any], int] = lambda config: 1
    pieces: tuple[int, ...] = ()

    def matches(self, path: str) -> bool:
        return self._match(path) is not None

    def read(self, tensors: Tensors, config: ModelConfig) -> Tensors:
        result = Tensors()
        for path, tensor in tensors.items():
            match = self._match(path)
            if match is None:
                result[path] = tensor
                continue
            for name, part in zip(self.parts, self.split_tensor(path, tensor, config), strict=True):
                result[f"{match[1]}{name}{match[2]}"] = part
        return result

    def row_spans(self, config: ModelConfig) -> list[list[Span]]:
        """Return, for each part, its rows in the fused matrix, in our order."""
        rows, runs = self.rows(config), self.repeats(config)
        ends = list(accumulate(rows * runs, lambda end, count: end + count // runs, initial=0))
        turns = range(0, len(ends) - 1, len(rows))
        spans = iter([(ends[j + i], ends[j + i + 1]) for j in turns] for i in range(len(rows)))
        counts = self.pieces or (1,) * len(rows)
        return [[span for each in islice(spans, count) for span in each] for count in counts]

    def split_tensor(self, path: str, tensor: LazyTensor, config: ModelConfig) -> list[LazyTensor]:
        """Split a fused weight, bias, or piece of a quantized weight into its parts.

        Raises CheckpointError for a wrong shape.
        """
        if tensor.ndim == 3 and tensor.shape[0] == getattr(config, "num_experts", None):
            each_expert = [self.split_tensor(path, one, config) for one in tensor.unstack()]
            return [stack_tensors(parts) for parts in zip(*each_expert, strict=True)]
        rows, spans, end = self.rows(config), self.row_spans(config), path[path.rindex(".") :]
        if end == ".g_idx":  # per column, and all have the same columns
            return [tensor] * len(spans)
        axis, total = int(end in _COLUMN_SUFFIXES), sum(rows)
        size = tensor.shape[axis] if tensor.ndim > axis else 0
        is_divisible = all(x * size % total == 0 for each in spans for span in each for x in span)
        if axis and size and is_divisible:
            packed = [[(a * size // total, b * size // total) for a, b in each] for each in spans]
            return [_take_columns(tensor, each) for each in packed]
        if end == ".weight_zero_point" and size and is_divisible:  # packs several rows into a word
            packed = [[(a * size // total, b * size // total) for a, b in each] for each in spans]
            return [concat_tensors([tensor.rows(*span) for span in each]) for each in packed]
        if axis or size != total:
            raise CheckpointError(
                f"{path} has shape {tensor.shape}, but config.json implies {total} rows"
                f" ({' + '.join(map(str, rows))}{', in whole words' if axis else ''})"
            )
        return [concat_tensors([tensor.rows(*span) for span in each]) for each in spans]

    def write(self, tensors: Tensors, config: ModelConfig) -> Tensors:
        result, first = Tensors(), re.compile(_layer_pattern(self.parts[0]))
        for path, tensor in tensors.items():
            match = first.fullmatch(path)
            if match:
                parts = [tensors[f"{match[1]}{name}{match[2]}"] for name in self.parts]
                result[f"{match[1]}{self.fused}{match[2]}"] = self._join_tensors(parts, config)
            elif not any(re.fullmatch(_layer_pattern(name), path) for name in self.parts):
                result[path] = tensor
        return result

    def _join_tensors(self, parts: Sequence[LazyTensor], config: ModelConfig) -> LazyTensor:
        if parts[0].ndim == 3:
            experts = zip(*(part.unstack() for part in parts), strict=True)
            return stack_tensors([self._join_tensors(each, config) for each in experts])
        runs: dict[int, LazyTensor] = {}  # by their first row
        for part, spans in zip(parts, self.row_spans(config), strict=True):
            at = 0
            for begin, end in spans:
                runs[begin] = part.rows(at, at := at + end - begin)
        return concat_tensors([runs[begin] for begin in sorted(runs)])

    def _match(self, path: str) -> re.Match[str] | None:
        pieces = "".join(rf"|\{end}" for end in (*_COLUMN_SUFFIXES, *_ROW_SUFFIXES, ".g_idx"))
        return re.fullmatch(f"{_layer_pattern(self.fused)[:-1]}{pieces})", path)


@dataclasses.dataclass(frozen=True)
class RenamedLayout:
    """Modules that a checkpoint names differently.

    Attributes:
        names: The checkpoint's name of each of our modules or tensors, both with `*` for the layer
            number.
    """

    names: Mapping[str, str]

    def matches(self, path: str) -> bool:
        return _rename(path, {theirs: ours for ours, theirs in self.names.items()}) is not None

    def read(self, tensors: Tensors, config: ModelConfig) -> Tensors:
        back = {theirs: ours for ours, theirs in self.names.items()}
        return {_rename(path, back) or path: tensor for path, tensor in tensors.items()}

    def write(self, tensors: Tensors, config: ModelConfig) -> Tensors:
        return {self.rename(path): tensor for path, tensor in tensors.items()}

    def rename(self, path: str) -> str:
        """Return the checkpoint's path of a tensor."""
        return _rename(path, self.names) or path


def _rename(path: str, names: Mapping[str, str]) -> str | None:
    """Return the path of a renamed tensor, or of one of a renamed module; None for another."""
    number = re.search(r"(?<=layers\.)\d+", path)
    pattern = path if number is None else re.sub(r"(?<=layers\.)\d+", "*", path)
    module, _, end = pattern.rpartition(".")
    if (to := names.get(pattern)) is None:
        if (to := names.get(module)) is None:
            return None
        to = f"{to}.{end}"
    return to if number is None else to.replace("*", number[0])


def _take_columns(tensor: LazyTensor, spans: list[Span]) -> LazyTensor:
    """Return spans of columns of a matrix, concatenated."""

    def read() -> np.ndarray:
        array = tensor.read()
        return np.concatenate([array[:, begin:end] for begin, end in spans], axis=1)

    count = sum(end - begin for begin, end in spans)
    return LazyTensor(tensor.dtype, (tensor.shape[0], count), read, tensor.release)


def _layer_pattern(module: str) -> str:
    """Return a regex of the names of a module's tensors in all layers."""
    return rf"(layers\.\d+\.){re.escape(module)}(\.weight|\.bias)"


def qkv_rows(config: ModelConfig) -> tuple[int, int, int]:
    """Return the row counts of the query, key and value projections."""
    K = config.num_key_value_heads * config.head_dim
    return (config.num_attention_heads * config.head_dim, K, K)


def gate_up_rows(config: ModelConfig) -> tuple[int, int]:
    """Return the row counts of the gate and up projections."""
    return config.intermediate_size, config.intermediate_size


FUSED_GATE_AND_UP = FusedLayout("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"), gate_up_rows)
