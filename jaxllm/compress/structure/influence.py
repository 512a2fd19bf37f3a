"""Influence: how much a layer, or a run of layers, changes the stream that goes through it.

Two measures, between the stream x_l before a layer and after it: block influence of single layers,
1 - cos, over all tokens (ShortGPT, arXiv 2403.03853), and the angle of a run of n layers,
arccos(cos) / pi, at the last token of each row (arXiv 2403.17887).
"""

from functools import partial
from math import gcd

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.compress.structure.salience import trace
from jaxllm.errors import ConfigError, NonFiniteError
from jaxllm.weights.paths import Params

_ROWS = 16  # at once


def block_influence(model: nn.Module, params: Params, token_NT: np.ndarray) -> np.ndarray:
    """1 less the mean cosine of what comes into each layer and what comes out, `[layers]`.

    token_NT: int32 ids, whole rows. Raises NonFiniteError where the model makes NaN of them.
    """
    return 1 - _cosines(model, params, token_NT, 1).mean(axis=(1, 2))


def angular_distance(
    model: nn.Module, params: Params, token_NT: np.ndarray, count: int
) -> np.ndarray:
    """The mean angle, as a share of a half turn, by which each run of `count` layers turns the
    stream at the last token: `[layers - count + 1]`, by the first layer of the run.

    Raises ConfigError for a run of no layer or of all, and what `block_influence` raises.
    """
    if not 1 <= count < model.config.num_hidden_layers:
        raise ConfigError(
            f"a run is of 1 to {model.config.num_hidden_layers - 1} layers, got {count}"
        )
    last = _cosines(model, params, token_NT, count)[:, :, -1]
    return np.asarray(np.arccos(np.clip(last, -1, 1)).mean(axis=1) / np.pi)


def without_least(influence_L: np.ndarray, count: int, first: int, last: int) -> list[int]:
    """The layers that stay when the `count` of least influence go, all at once.

    first, last: how many at either end stay whatever their influence. Raises ConfigError where too
    few are left to choose from.
    """
    inner = _inner(len(influence_L), count, first, last)
    gone = sorted(inner, key=lambda layer: influence_L[layer])[:count]
    return [layer for layer in range(len(influence_L)) if layer not in gone]


def without_run(distance_R: np.ndarray, count: int, first: int, last: int) -> list[int]:
    """The layers that stay when the run of `count` layers that turns the stream least goes.

    distance_R: as `angular_distance` gives it. The rest is as in `without_least`.
    """
    layers = len(distance_R) + count - 1
    inner = _inner(layers, count, first, last)
    begin = min(range(inner.start, inner.stop - count + 1), key=lambda layer: distance_R[layer])
    return [layer for layer in range(layers) if not begin <= layer < begin + count]


def kept_at_ends(layers: int) -> tuple[int, int]:
    """How many first and last layers LLM-Pruner (arXiv 2305.11627) leaves alone: 4 and 2 of 32."""
    return round(layers * 4 / 32), round(layers * 2 / 32)


def _inner(layers: int, count: int, first: int, last: int) -> range:
    inner = range(first, layers - last)
    if min(first, last) < 0 or not 0 < count <= len(inner) or count == layers:
        raise ConfigError(
            f"{count} of {layers} layers cannot go while the first {first} and the last {last} stay"
        )
    return inner


def _cosines(model: nn.Module, params: Params, token_NT: np.ndarray, apart: int) -> np.ndarray:
    """Of the stream before and after each run of `apart` layers, float64 `[runs, N, T]`."""
    size = gcd(len(token_NT), _ROWS)
    parts = [
        np.asarray(_cosines_of(model, params, jnp.asarray(token_NT[i : i + size]), apart))
        for i in range(0, len(token_NT), size)
    ]
    found = np.concatenate(parts, axis=1).astype(np.float64)
    if not np.isfinite(found).all():
        raise NonFiniteError("the model makes NaN or infinity of the text: no influence of layers")
    return found


@partial(jax.jit, static_argnums=(0, 3))
def _cosines_of(model: nn.Module, params: Params, token_BT: jax.Array, apart: int) -> jax.Array:
    ran = trace(model, params, token_BT)
    stream = [x.astype(jnp.float32) for x in (ran.embeddings, *(layer.x for layer in ran.layers))]
    unit = [x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in stream]
    pairs = zip(unit[:-apart], unit[apart:], strict=True)
    return jnp.stack([(a * b).sum(axis=-1) for a, b in pairs])
