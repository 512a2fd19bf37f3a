"""Recurrent layers in GGUF: convolutions as matrices, decays as numbers, value heads tiled."""

import dataclasses
import math

import numpy as np

from jaxllm.config.model import ModelConfig
from jaxllm.convert.fused_layouts import Tensors
from jaxllm.convert.value_heads import tile_value_heads
from jaxllm.errors import CheckpointError
from jaxllm.models.mamba2 import Mamba2Config
from jaxllm.models.recurrent import DeltaNetConfig
from jaxllm.weights.lazy import LazyTensor

_CONVOLUTION, _DECAY = (".conv1d.weight", ".conv.conv.weight"), ".A_log"
_MATRICES = (".mamba.A_log", ".mamba.D", ".mamba.norm.weight")
_GATE = ".shared_expert_gate.weight"  # a vector in some files


@dataclasses.dataclass(frozen=True)
class RecurrentLayout:
    """Convolutions `[X, L]` for `[X, 1, L]`, and -exp(A_log) for A_log.

    Vectors of Mamba-2 layers are matrices: `[N, 1]`, and `[G, X / G]` of norms of groups.

    Attributes:
        tiles: Whether value heads are tiled.
    """

    tiles: bool = True

    def matches(self, path: str) -> bool:
        return path.endswith((*_CONVOLUTION, _DECAY))

    def read(self, tensors: Tensors, config: ModelConfig) -> Tensors:
        result = dict(tensors)
        for path, x in tensors.items():
            if path.endswith(_CONVOLUTION):
                result[path] = _reshape(x, (x.shape[0], 1, *x.shape[1:]))
            elif path.endswith(_DECAY):
                result[path] = x.map_blocks(np.dtype(np.float32), _take_logarithm)
            elif path.endswith(_GATE) and x.ndim == 1:
                result[path] = _reshape(x, (1, *x.shape))
            if path.endswith(_MATRICES):
                result[path] = _reshape(result[path], (math.prod(x.shape),))
        return result

    def write(self, tensors: Tensors, config: ModelConfig) -> Tensors:
        result = dict(tensors)
        if self.tiles and isinstance(config, DeltaNetConfig) and not config.value_heads_tiled:
            result = tile_value_heads(result, config)
        for path, x in result.items():
            if path.endswith(_CONVOLUTION):
                result[path] = _reshape(x, (x.shape[0], x.shape[-1]))
            elif path.endswith(_DECAY):
                result[path] = x.map_blocks(
                    np.dtype(np.float32), lambda y, _: -np.exp(y.astype(np.float32))
                )
            if path.endswith(_MATRICES) and isinstance(config, Mamba2Config):
                rows = config.mamba_n_groups if path.endswith(".weight") else config.mamba_n_heads
                result[path] = _reshape(result[path], (rows, x.shape[0] // rows))
        return result


def _reshape(tensor: LazyTensor, shape: tuple[int, ...]) -> LazyTensor:
    return LazyTensor(tensor.dtype, shape, lambda: tensor.read().reshape(shape), tensor.release)


def _take_logarithm(decay: np.ndarray, _: int) -> np.ndarray:
    if not (decay < 0).all():
        raise CheckpointError("ssm_a must be negative: -exp(A_log)")
    logarithm: np.ndarray = np.log(-decay.astype(np.float32))
    return logarithm
