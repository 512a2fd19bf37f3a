"""Matrices that are fused in a checkpoint and separate here, split and fused without rounding.

Matrices quantized by GPTQ or AWQ are split (see `quantized`), but not fused.
"""

import dataclasses
import re
from collections.abc import Callable
from itertools import accumulate
from typing import Protocol

import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.errors import CheckpointError
from jaxllm.weights.lazy import LazyTensor, joined

Tensors = dict[str, LazyTensor]
Span = tuple[int, int]  # first row, end row (exclusive)
_BY_COLUMN = (".qweight", ".qzeros", ".scales")  # transposed: last axis O, maybe packed
_BY_ROW = (".weight_packed", ".weight_scale", ".weight_zero_point")


class Layout(Protocol):
    """Tensors that a checkpoint arranges differently; names are without the prefix."""

    def knows(self, path: str) -> bool:
        """Return whether this names such a tensor in the checkpoint."""
        ...

    def read(self, tensors: Tensors, config: ModelConfig) -> Tensors:
        """Replace the checkpoint's tensors by ours; raise CheckpointError for wrong shapes."""
        ...

    def write(self, tensors: Tensors, config: ModelConfig) -> Tensors:
        """Replace our tensors by the checkpoint's."""
        ...


@dataclasses.dataclass(frozen=True)
class Fused:
    """A fused linear in each layer: the rows of several of our linears, concatenated.

    Attributes:
        theirs, ours: Module paths within a layer.
        rows: The row count of each of ours.
        runs: The number of interleaved runs, each with an equal part of the rows of every one of
            ours (GPT-NeoX: one run per head).
    """

    theirs: str
    ours: tuple[str, ...]
    rows: Callable[[ModelConfig], tuple[int, ...]]
    runs: Callable[[ModelConfig], int] = lambda config: 1

    def knows(self, path: str) -> bool:
        return self._found(path) is not None

    def read(self, tensors: Tensors, config: ModelConfig) -> Tensors:
        made = Tensors()
        for path, tensor in tensors.items():
            found = self._found(path)
            if found is None:
                made[path] = tensor
                continue
            for name, part in zip(self.ours, self.apart(path, tensor, config), strict=True):
                made[f"{found[1]}{name}{found[2]}"] = part
        return made

    def spans(self, config: ModelConfig) -> list[list[Span]]:
        """Return, for each of ours, its rows in the fused matrix, in our order."""
        rows, runs = self.rows(config), self.runs(config)
        ends = list(accumulate(rows * runs, lambda end, count: end + count // runs, initial=0))
        turns = range(0, len(ends) - 1, len(rows))
        return [[(ends[j + i], ends[j + i + 1]) for j in turns] for i in range(len(rows))]

    def apart(self, path: str, tensor: LazyTensor, config: ModelConfig) -> list[LazyTensor]:
        """Split a fused weight, bias, or piece of a quantized weight into ours.

        Raises CheckpointError for a wrong shape.
        """
        rows, spans, end = self.rows(config), self.spans(config), path[path.rindex(".") :]
        if end == ".g_idx":  # per column, and all have the same columns
            return [tensor] * len(rows)
        axis, total = int(end in _BY_COLUMN), sum(rows)
        size = tensor.shape[axis] if tensor.ndim > axis else 0
        whole = all(x * size % total == 0 for each in spans for span in each for x in span)
        if axis and size and whole:
            ours = [[(a * size // total, b * size // total) for a, b in each] for each in spans]
            return [_columns(tensor, each) for each in ours]
        if end == ".weight_zero_point" and size and whole:  # packs several rows into a word
            ours = [[(a * size // total, b * size // total) for a, b in each] for each in spans]
            return [joined([tensor.rows(*span) for span in each]) for each in ours]
        if axis or size != total:
            raise CheckpointError(
                f"{path} has shape {tensor.shape}, but config.json implies {total} rows"
                f" ({' + '.join(map(str, rows))}{', in whole words' if axis else ''})"
            )
        return [joined([tensor.rows(*span) for span in each]) for each in spans]

    def write(self, tensors: Tensors, config: ModelConfig) -> Tensors:
        made, first, runs = Tensors(), re.compile(_within(self.ours[0])), self.runs(config)
        for path, tensor in tensors.items():
            found = first.fullmatch(path)
            if found:
                parts = [tensors[f"{found[1]}{name}{found[2]}"] for name in self.ours]
                made[f"{found[1]}{self.theirs}{found[2]}"] = joined(
                    [part for run in range(runs) for part in _shares(parts, run, runs)]
                )
            elif not any(re.fullmatch(_within(name), path) for name in self.ours):
                made[path] = tensor
        return made

    def _found(self, path: str) -> re.Match[str] | None:
        pieces = "".join(rf"|\{end}" for end in (*_BY_COLUMN, *_BY_ROW, ".g_idx"))
        return re.fullmatch(f"{_within(self.theirs)[:-1]}{pieces})", path)


def _columns(tensor: LazyTensor, spans: list[Span]) -> LazyTensor:
    """Return spans of columns of a matrix, concatenated."""

    def read() -> np.ndarray:
        whole = tensor.read()
        return np.concatenate([whole[:, begin:end] for begin, end in spans], axis=1)

    count = sum(end - begin for begin, end in spans)
    return LazyTensor(tensor.dtype, (tensor.shape[0], count), read, tensor.release)


def _shares(parts: list[LazyTensor], run: int, runs: int) -> list[LazyTensor]:
    """Return each matrix's rows in one of `runs` equal runs."""
    sizes = [part.shape[0] // runs for part in parts]
    return [part.rows(run * n, (run + 1) * n) for part, n in zip(parts, sizes, strict=True)]


def _within(module: str) -> str:
    """Return a regex of the names of a module's tensors in all layers."""
    return rf"(layers\.\d+\.){re.escape(module)}(\.weight|\.bias)"


def heads_of(config: ModelConfig) -> tuple[int, int, int]:
    """Return the row counts of the query, key and value projections."""
    K = config.num_key_value_heads * config.head_dim
    return (config.num_attention_heads * config.head_dim, K, K)
