"""Tensors of latent attention: rotated dimensions in pairs, and the linears of heads in one matrix.

Files have one matrix `kv_b_proj` `[N (nope + v), rank]`, which expands latents to each head's keys
and values. Here it is two stacks: `k_b_proj` `[N, rank, nope]`, transposed since queries are mapped
to latents, and `v_b_proj` `[N, v, rank]`.
"""

import dataclasses
import re
from typing import Any

import numpy as np

from jaxllm.convert.fused_layouts import Tensors
from jaxllm.convert.rotary_pairs import paired_layout, paired_rows
from jaxllm.errors import CheckpointError
from jaxllm.models.latent_attention import LatentConfig
from jaxllm.weights.lazy import LazyTensor

_LAYER = r"(layers\.\d+\.self_attn\.)"
_FUSED = re.compile(_LAYER + r"kv_b_proj\.weight")
_KEYS = re.compile(_LAYER + r"k_b_proj\.weight")
_VALUES = re.compile(_LAYER + r"v_b_proj\.weight")


@dataclasses.dataclass(frozen=True)
class HeadStackLayout:
    """The linears of heads, fused in a file."""

    def matches(self, path: str) -> bool:
        return _FUSED.fullmatch(path) is not None

    def read(self, tensors: Tensors, config: LatentConfig) -> Tensors:
        result, shape = Tensors(), _stack_shape(config)
        heads, rows, rank = shape
        keys = config.qk_nope_head_dim
        for path, tensor in tensors.items():
            if not (match := _FUSED.fullmatch(path)):
                result[path] = tensor
                continue
            if tensor.shape != (heads * rows, rank):
                raise CheckpointError(
                    f"{path} has shape {tensor.shape}, expected {(heads * rows, rank)} by"
                    " config.json"
                )

            def read_keys(tensor: LazyTensor = tensor) -> np.ndarray:
                stack = tensor.read().reshape(shape)[:, :keys]
                return np.ascontiguousarray(stack.swapaxes(1, 2))

            def read_values(tensor: LazyTensor = tensor) -> np.ndarray:
                return np.ascontiguousarray(tensor.read().reshape(shape)[:, keys:])

            k, v = (heads, rank, keys), (heads, rows - keys, rank)
            result[f"{match[1]}k_b_proj.weight"] = LazyTensor(tensor.dtype, k, read_keys)
            result[f"{match[1]}v_b_proj.weight"] = LazyTensor(tensor.dtype, v, read_values)
        return result

    def write(self, tensors: Tensors, config: LatentConfig) -> Tensors:
        result, (heads, rows, rank) = Tensors(), _stack_shape(config)
        for path, tensor in tensors.items():
            if match := _KEYS.fullmatch(path):
                values = tensors[f"{match[1]}v_b_proj.weight"]

                def fuse(k: LazyTensor = tensor, v: LazyTensor = values) -> np.ndarray:
                    stack = np.concatenate([k.read().swapaxes(1, 2), v.read()], axis=1)
                    return stack.reshape(-1, stack.shape[2])

                fused = LazyTensor(tensor.dtype, (heads * rows, rank), fuse)
                result[f"{match[1]}kv_b_proj.weight"] = fused
            elif not _VALUES.fullmatch(path):
                result[path] = tensor
        return result


def _stack_shape(config: LatentConfig) -> tuple[int, int, int]:
    rows = config.qk_nope_head_dim + config.v_head_dim
    return config.num_attention_heads, rows, config.kv_lora_rank


def query_rows(config: Any) -> np.ndarray:
    """Return the order of the rows of queries; a head's rotated dimensions come last."""
    first, width = config.qk_nope_head_dim, config.qk_rope_head_dim
    return paired_rows(config.num_attention_heads, first + width, first, width)


def latent_rows(config: Any) -> np.ndarray:
    """Return the order of the rows of the latent, and of the rotated dimensions after it."""
    rank, width = config.kv_lora_rank, config.qk_rope_head_dim
    return paired_rows(1, rank + width, rank, width)


PAIRED_LATENTS = (
    paired_layout("self_attn.q_proj", query_rows),
    paired_layout("self_attn.q_b_proj", query_rows),
    paired_layout("self_attn.kv_a_proj_with_mqa", latent_rows),
)
