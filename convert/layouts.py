"""Matrices that are one in a checkpoint and several here, read and written without a change."""

import dataclasses
import re
from collections.abc import Callable
from itertools import accumulate
from typing import Protocol

from jaxllm.config import ModelConfig
from jaxllm.errors import CheckpointError
from jaxllm.weights.lazy import LazyTensor, joined

Tensors = dict[str, LazyTensor]


class Layout(Protocol):
    """Tensors that lie otherwise in a checkpoint than here; names are without the prefix."""

    def knows(self, path: str) -> bool:
        """Whether this is the name of such a tensor there."""
        ...

    def read(self, tensors: Tensors, config: ModelConfig) -> Tensors:
        """With ours in place of theirs. Raises CheckpointError for shapes that do not fit."""
        ...

    def write(self, tensors: Tensors, config: ModelConfig) -> Tensors:
        """With theirs in place of ours."""
        ...


@dataclasses.dataclass(frozen=True)
class Fused:
    """A linear of each layer that is several of ours, one below the other.

    theirs, ours: modules' paths within a layer. rows: how many each of ours has. runs: how often
    they take turns, with an equal share of their rows each time (GPT-NeoX: once a head).
    """

    theirs: str
    ours: tuple[str, ...]
    rows: Callable[[ModelConfig], tuple[int, ...]]
    runs: Callable[[ModelConfig], int] = lambda config: 1

    def knows(self, path: str) -> bool:
        return self._found(path) is not None

    def read(self, tensors: Tensors, config: ModelConfig) -> Tensors:
        made, rows, runs = Tensors(), self.rows(config), self.runs(config)
        for path, tensor in tensors.items():
            found = self._found(path)
            if found is None:
                made[path] = tensor
                continue
            if not tensor.shape or tensor.shape[0] != sum(rows):
                raise CheckpointError(
                    f"{path} has shape {tensor.shape}, config.json makes it {sum(rows)} rows"
                    f" ({' + '.join(map(str, rows))})"
                )
            ends = list(accumulate(rows * runs, lambda end, count: end + count // runs, initial=0))
            for i, name in enumerate(self.ours):
                made[f"{found[1]}{name}{found[2]}"] = joined(
                    [tensor.rows(*ends[j : j + 2]) for j in range(i, len(ends) - 1, len(rows))]
                )
        return made

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
        return re.fullmatch(_within(self.theirs), path)


def _shares(parts: list[LazyTensor], run: int, runs: int) -> list[LazyTensor]:
    """Of each its rows in one of so many equal runs."""
    sizes = [part.shape[0] // runs for part in parts]
    return [part.rows(run * n, (run + 1) * n) for part, n in zip(parts, sizes, strict=True)]


def _within(module: str) -> str:
    """The names of a module's tensors in all layers."""
    return rf"(layers\.\d+\.){re.escape(module)}(\.weight|\.bias)"


def heads_of(config: ModelConfig) -> tuple[int, int, int]:
    """The rows of queries, keys and values."""
    K = config.num_key_value_heads * config.head_dim
    return (config.num_attention_heads * config.head_dim, K, K)
