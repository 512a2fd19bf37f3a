"""Layer pruning: drops the layers that change the residual stream least.

Two measures compare the stream before and after. Block influence of single layers is 1 - cos, over
all tokens (ShortGPT, arXiv 2403.03853). The angular distance of a run of n layers is
arccos(cos) / pi, at the last token of each row (arXiv 2403.17887).
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from math import gcd
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from jaxllm import models
from jaxllm.compress.recipe import ModelState, Options, StepContext, StepSpec
from jaxllm.config.model import ModelConfig
from jaxllm.errors import ConfigError, NonFiniteError
from jaxllm.research.pruning.salience import trace
from jaxllm.research.pruning.structured_pruning import (
    AMOUNT,
    SmallerModel,
    count_removed,
    parse_amount,
)
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params

_ROWS = 16  # rows per batch

Ends = Annotated[int, msgspec.Meta(ge=-1)]


class LayerOptions(Options, frozen=True):
    """by: influence of single layers, or angle of a run. first, last: layers at either end that
    are never dropped; -1 as in LLM-Pruner, 4 and 2 of 32.
    """

    by: Literal["influence", "angle"] = "influence"
    first: Ends = -1
    last: Ends = -1


def drop_layers(context: StepContext[LayerOptions]) -> ModelState:
    """Drop the layers that change the residual stream least.

    Raises ConfigError if modules have formats by path, since the remaining layers are renumbered.
    """
    state, options = context.state, context.options
    if any(row.activations or row.output for _, row in state.precision.overrides):
        raise ConfigError("layers cannot be dropped after modules were given formats by path")
    model, layers = state.model, state.config.num_hidden_layers
    count = count_removed(layers, parse_amount(context.argument), "layers")
    first, last = default_ends(layers)
    first = first if options.first < 0 else options.first
    last = last if options.last < 0 else options.last
    if options.by == "influence":
        influence_L = block_influence(model, state.params, context.token_NT)
        keep = keep_most_influential(influence_L, count, first, last)
    else:
        distance_R = angular_distance(model, state.params, context.token_NT, count)
        keep = keep_outside_run(distance_R, count, first, last)
    context.log(f"dropping layers {', '.join(str(i) for i in range(layers) if i not in keep)}")
    config, params = cut_layers(state.config, state.params, keep)
    return dataclasses.replace(state, config=config, params=params)


def cut_layers(config: ModelConfig, params: Params, keep: Sequence[int]) -> SmallerModel:
    """Return the model with only the layers `keep`, in their order.

    Raises ConfigError for missing layers, and if a layer would compute something else at its new
    index (an attention window, or a scale, may depend on the index).
    """
    numbers, count = sorted(set(keep)), config.num_hidden_layers
    if not numbers or numbers[0] < 0 or numbers[-1] >= count:
        raise ConfigError(
            f"layers to keep must be from 0 to {count - 1}, at least one: got {list(keep)}"
        )
    cut = config.with_layers(numbers)
    for place, number in enumerate(numbers):
        if cut.layer_signature(place) != config.layer_signature(number):
            raise ConfigError(
                f"layer {number} of this {config.model_type} cannot become layer {place}: what it"
                " computes depends on its index"
            )
    name = models.get_family(config.model_type).layers
    layers = {f"{name}.{i}": params[f"{name}.{number}"] for i, number in enumerate(numbers)}
    rest = {path: x for path, x in params.items() if not path.startswith(f"{name}.")}
    return cut, {**rest, **layers}


def block_influence(model: Model, params: Params, token_NT: np.ndarray) -> np.ndarray:
    """Return 1 minus the mean cosine of each layer's input and output, `[layers]`.

    token_NT: int32 ids, without padding. Raises NonFiniteError if the model returns NaN or
    infinity.
    """
    return 1 - _cosines(model, params, token_NT, 1).mean(axis=(1, 2))


def angular_distance(model: Model, params: Params, token_NT: np.ndarray, count: int) -> np.ndarray:
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
    removed = sorted(inner, key=lambda layer: influence_L[layer])[:count]
    return [layer for layer in range(len(influence_L)) if layer not in removed]


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


def _cosines(model: Model, params: Params, token_NT: np.ndarray, run_length: int) -> np.ndarray:
    """Return cosines of the stream `run_length` layers apart, float64 `[runs, N, T]`."""
    size = gcd(len(token_NT), _ROWS)
    batches = [jnp.asarray(token_NT[i : i + size]) for i in range(0, len(token_NT), size)]
    parts = [np.asarray(_cosines_of_batch(model, params, x, run_length)) for x in batches]
    cosine_RNT = np.concatenate(parts, axis=1).astype(np.float64)
    if not np.isfinite(cosine_RNT).all():
        raise NonFiniteError(
            "the model returned NaN or infinity: the influence of layers is undefined"
        )
    return cosine_RNT


@partial(jax.jit, static_argnums=(0, 3))
def _cosines_of_batch(
    model: Model, params: Params, token_BT: jax.Array, run_length: int
) -> jax.Array:
    states = trace(model, params, token_BT)
    stream = [
        x.astype(jnp.float32) for x in (states.embeddings, *(layer.x for layer in states.layers))
    ]
    unit = [x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in stream]
    pairs = zip(unit[:-run_length], unit[run_length:], strict=True)
    return jnp.stack([(a * b).sum(axis=-1) for a, b in pairs])


STEP = StepSpec(
    "drop",
    "layers",
    drop_layers,
    "drop the layers that change the residual stream least",
    AMOUNT,
    LayerOptions,
)
