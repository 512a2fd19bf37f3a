"""Influence: how much a layer, or a run of layers, changes the residual stream.

Two measures compare the stream before and after. Block influence of single layers is 1 - cos, over
all tokens (ShortGPT, arXiv 2403.03853). The angular distance of a run of n layers is
arccos(cos) / pi, at the last token of each row (arXiv 2403.17887).
"""

from functools import partial
from math import gcd

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.compress.structure.importance import trace
from jaxllm.errors import ConfigError, NonFiniteError
from jaxllm.weights.paths import Params

_ROWS = 16  # rows per batch


def block_influence(model: nn.Module, params: Params, token_NT: np.ndarray) -> np.ndarray:
    """Return 1 minus the mean cosine of each layer's input and output, `[layers]`.

    token_NT: int32 ids, without padding. Raises NonFiniteError if the model returns NaN or
    infinity.
    """
    return 1 - _cosines(model, params, token_NT, 1).mean(axis=(1, 2))


def angular_distance(
    model: nn.Module, params: Params, token_NT: np.ndarray, count: int
) -> np.ndarray:
    """Return the angular distance of each run of `count` layers, `[layers - count + 1]`.

    It is the mean angle between the stream before and after the run at the last token, divided by
    pi, indexed by the run's first layer. Raises ConfigError for a run of none or all layers, and
    what `block_influence` raises.
    """
    if not 1 <= count < model.config.num_hidden_layers:
        raise ConfigError(
            f"run length must be 1 to {model.config.num_hidden_layers - 1} layers: got {count}"
        )
    last = _cosines(model, params, token_NT, count)[:, :, -1]
    return np.asarray(np.arccos(np.clip(last, -1, 1)).mean(axis=1) / np.pi)


def keep_most_influential(influence_L: np.ndarray, count: int, first: int, last: int) -> list[int]:
    """Return the layers that remain without the `count` least influential ones.

    first, last: number of layers at either end that are always kept. Raises ConfigError if too few
    are left to choose from.
    """
    inner = _droppable_layers(len(influence_L), count, first, last)
    gone = sorted(inner, key=lambda layer: influence_L[layer])[:count]
    return [layer for layer in range(len(influence_L)) if layer not in gone]


def keep_outside_run(distance_R: np.ndarray, count: int, first: int, last: int) -> list[int]:
    """Return the layers that remain without the run of `count` layers of least distance.

    distance_R: from `angular_distance`. The rest is as in `keep_most_influential`.
    """
    layers = len(distance_R) + count - 1
    inner = _droppable_layers(layers, count, first, last)
    begin = min(range(inner.start, inner.stop - count + 1), key=lambda layer: distance_R[layer])
    return [layer for layer in range(layers) if not begin <= layer < begin + count]


def default_ends(layers: int) -> tuple[int, int]:
    """Return how many first and last layers LLM-Pruner (arXiv 2305.11627) keeps: 4, 2 of 32."""
    return round(layers * 4 / 32), round(layers * 2 / 32)


def _droppable_layers(layers: int, count: int, first: int, last: int) -> range:
    inner = range(first, layers - last)
    if min(first, last) < 0 or not 0 < count <= len(inner) or count == layers:
        raise ConfigError(
            f"cannot drop {count} of {layers} layers and keep the first {first} and last {last}"
        )
    return inner


def _cosines(model: nn.Module, params: Params, token_NT: np.ndarray, run_length: int) -> np.ndarray:
    """Return cosines of the stream `run_length` layers apart, float64 `[runs, N, T]`."""
    size = gcd(len(token_NT), _ROWS)
    parts = [
        np.asarray(
            _cosines_of_batch(model, params, jnp.asarray(token_NT[i : i + size]), run_length)
        )
        for i in range(0, len(token_NT), size)
    ]
    found = np.concatenate(parts, axis=1).astype(np.float64)
    if not np.isfinite(found).all():
        raise NonFiniteError(
            "the model returned NaN or infinity: the influence of layers is undefined"
        )
    return found


@partial(jax.jit, static_argnums=(0, 3))
def _cosines_of_batch(
    model: nn.Module, params: Params, token_BT: jax.Array, run_length: int
) -> jax.Array:
    ran = trace(model, params, token_BT)
    stream = [x.astype(jnp.float32) for x in (ran.embeddings, *(layer.x for layer in ran.layers))]
    unit = [x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in stream]
    pairs = zip(unit[:-run_length], unit[run_length:], strict=True)
    return jnp.stack([(a * b).sum(axis=-1) for a, b in pairs])
