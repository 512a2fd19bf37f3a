"""The order of value heads in gated DeltaNet layers.

Hugging Face's files group the value heads of a key head; GGUF has them tiled, so that the key head
of value head i is i mod H. Both can be run (`DeltaNetConfig.value_heads_tiled`).
"""

import dataclasses
import re
from typing import Any

import numpy as np

from jaxllm.convert.fused_layouts import Tensors
from jaxllm.errors import ConfigError
from jaxllm.models.recurrent import DeltaNetConfig
from jaxllm.weights.lazy import LazyTensor

_TENSOR = re.compile(r"(layers\.\d+\.linear_attn\.)(\w+)(\.weight)?")
_WIDE = ("in_proj_qkv", "in_proj_z", "conv1d", "out_proj")  # a row or column for each channel
_NARROW = ("in_proj_b", "in_proj_a", "A_log", "dt_bias")  # one for each head


def tile_value_heads(tensors: Tensors, config: Any) -> Tensors:
    """Reorder value heads from grouped to tiled."""
    return _order_heads(tensors, config, lambda order: order)


@dataclasses.dataclass(frozen=True)
class GroupedValueHeads:
    """The grouped order in files; a model with tiled heads is written in it, too."""

    def matches(self, path: str) -> bool:
        return False

    def read(self, tensors: Tensors, config: Any) -> Tensors:
        return tensors

    def write(self, tensors: Tensors, config: Any) -> Tensors:
        if not config.value_heads_tiled:
            return tensors
        stems = [path.removesuffix("A_log") for path in tensors if path.endswith(".A_log")]
        if any(f"{stem}{name}.weight" not in tensors for stem in stems for name in _WIDE):
            raise ConfigError(
                "tiled value heads (value_heads_tiled) of integer weights cannot be written in the"
                " Hugging Face format, which groups them. Write floats"
            )
        return _order_heads(tensors, config, np.argsort)


def _order_heads(tensors: Tensors, config: DeltaNetConfig, choose: Any) -> Tensors:
    """Return tensors with another order of value heads.

    choose: Converts the number in grouped order of each tiled head's channels.
    """
    H, N = config.linear_num_key_heads, config.linear_num_value_heads
    result = dict(tensors)
    for path, tensor in tensors.items():
        match = _TENSOR.fullmatch(path)
        name = match[2] if match else ""
        if name not in _WIDE + _NARROW:
            continue
        size = config.linear_value_head_dim if name in _WIDE else 1
        order = choose(np.arange(N * size).reshape(H, N // H, size).swapaxes(0, 1).reshape(-1))
        if name == "out_proj":
            result[path] = _take_columns(tensor, order)
            continue
        first = tensor.shape[0] - len(order)  # queries and keys
        result[path] = tensor.take_rows(np.concatenate([np.arange(first), first + order]))
    return result


def _take_columns(tensor: LazyTensor, order: np.ndarray) -> LazyTensor:
    return LazyTensor(tensor.dtype, tensor.shape, lambda: tensor.read()[:, order], tensor.release)
