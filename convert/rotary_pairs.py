"""Queries and keys of families that rotate neighboring dimensions.

Their files rotate dimensions 2i and 2i + 1 of a head by one angle; here they are i and i + d/2 of
its d rotated dimensions. Rows of the linears are permuted when read, and back when written: scores
are the same, so that attention and its kernels know one order.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from jaxllm.config.model import ModelConfig
from jaxllm.convert.fused_layouts import FusedLayout, Layout, Span, Tensors
from jaxllm.errors import CheckpointError
from jaxllm.weights.lazy import LazyTensor


def paired_rows(heads: int, size: int, first: int, width: int) -> np.ndarray:
    """Return the file's row for each of ours.

    In each of `heads` heads of `size` rows, the `width` rows from `first` on are in pairs.
    """
    row_NH = np.arange(heads * size).reshape(heads, size)
    pairs = row_NH[:, first : first + width].reshape(heads, width // 2, 2)
    row_NH[:, first : first + width] = pairs.swapaxes(1, 2).reshape(heads, width).copy()
    return row_NH.reshape(-1)


def head_rows(heads: str) -> Callable[[Any], np.ndarray]:
    """Return the order of the rows of queries or keys; a head's rotated dimensions come first.

    heads: the config field with the head count.
    """
    return lambda config: paired_rows(
        getattr(config, heads), config.head_dim, 0, config.rope.rotary_dim(config.head_dim)
    )


@dataclasses.dataclass(frozen=True)
class PairedLayout(FusedLayout):
    """A linear with rotary pairs: a fused linear with one part, in another row order.

    file_rows: The file's row for each of ours.
    """

    file_rows: Callable[[Any], np.ndarray] = dataclasses.field(kw_only=True)

    def row_spans(self, config: ModelConfig) -> list[list[Span]]:
        return [[(int(row), int(row) + 1) for row in self.file_rows(config)]]

    def split_tensor(self, path: str, tensor: LazyTensor, config: ModelConfig) -> list[LazyTensor]:
        if not path.endswith((".weight", ".bias")):
            return [tensor]  # see `sort_quantized`
        rows = self.file_rows(config)
        if tensor.shape[:1] != rows.shape:
            raise CheckpointError(
                f"{path} has shape {tensor.shape}, but config.json implies {len(rows)} rows"
            )
        return [tensor.take_rows(rows)]

    def write(self, tensors: Tensors, config: ModelConfig) -> Tensors:
        order = np.argsort(self.file_rows(config))
        return {
            path: tensor.take_rows(order) if self.matches(path) else tensor
            for path, tensor in tensors.items()
        }


def paired_layout(path: str, file_rows: Callable[[Any], np.ndarray]) -> PairedLayout:
    """Return the layout of the linear at `path` of a layer."""
    return PairedLayout(
        path, (path,), lambda config: (len(file_rows(config)),), file_rows=file_rows
    )


PAIRED_QUERIES_AND_KEYS = (
    paired_layout("self_attn.q_proj", head_rows("num_attention_heads")),
    paired_layout("self_attn.k_proj", head_rows("num_key_value_heads")),
)


def sort_quantized(
    tensors: Tensors, config: ModelConfig, layouts: Iterable[Layout]
) -> dict[str, LazyTensor]:
    """Return the tensors with the rows of integer weights, as leaves have them, in our order.

    Files pack several rows into a word, so that they can be sorted only as leaves.
    """
    rows = {x: x.file_rows(config) for x in layouts if isinstance(x, PairedLayout)}
    result = dict(tensors)
    for name, tensor in tensors.items():
        path, _, piece = name.partition(".weight.")
        for layout in (x for x in rows if piece and x.matches(f"{path}.weight")):
            if not piece.endswith("order"):  # of the columns
                result[name] = tensor.take_rows(rows[layout])
    return result


def head_order(config: Any, layouts: Iterable[Layout]) -> Any:
    """Return an index of a checkpoint's head, of queries and keys, that gives our order."""
    if PAIRED_QUERIES_AND_KEYS[0] not in layouts:
        return slice(None)
    return head_rows("num_key_value_heads")(config)[: config.head_dim]
