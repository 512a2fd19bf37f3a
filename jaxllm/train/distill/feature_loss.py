"""The loss between hidden states of student and teacher, layer by layer.

Layers are numbered as in `Trace.hidden_states`: 0 is the embeddings, i the output of block i, and
the last one comes after the final norm. The loss of a token is the mean squared difference
(TinyBERT, arXiv 1909.10351, eq. 8), or 1 - cosine (DistilBERT, arXiv 1910.01108).

If the widths differ, a learned matrix projects the student's states first. It is trained with the
model, as an extra parameter `distill.LAYER.weight`, `[D teacher, D student]`.
`remove_projections` removes it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config.model import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.ops.products import einsum
from jaxllm.runtime.validation import check_seed
from jaxllm.train.data.rows import IGNORED, Ints
from jaxllm.weights.paths import Params

PARAMS_KEY = "distill"
Distance = Literal["mse", "cosine"]
States = Sequence[jax.Array]


@dataclasses.dataclass(frozen=True)
class HiddenLossConfig:
    """The loss of hidden states.

    Attributes:
      distance: distance between two states.
      pairs: (student layer, teacher layer).
      weight: of the mean over pairs, relative to the loss of the logits.
    """

    distance: Distance = "mse"
    pairs: tuple[tuple[int, int], ...] = ()
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.distance not in get_args(Distance):
            raise ConfigError(
                f"hidden must be {' or '.join(get_args(Distance))}, got {self.distance!r:.40}"
            )
        if not self.weight >= 0:
            raise ConfigError(f"hidden_weight must be at least 0, got {self.weight}")


def even_pairs(student: int, teacher: int) -> tuple[tuple[int, int], ...]:
    """Return a pair for each block of the student: the teacher's layer at the same relative depth.

    student, teacher: numbers of layers.
    """
    return tuple((i, round(i * teacher / student)) for i in range(1, student + 1))


def check_pairs(hidden: HiddenLossConfig, student: ModelConfig, teacher: ModelConfig) -> None:
    """Raise ConfigError for layers that do not exist, and if there is no pair."""
    if not hidden.pairs:
        raise ConfigError("the loss of hidden states needs pairs of layers: got none")
    for pair in hidden.pairs:
        for number, name, config in zip(
            pair, ("student", "teacher"), (student, teacher), strict=True
        ):
            if not 0 <= number <= config.num_hidden_layers:
                raise ConfigError(
                    f"hidden state {number} of the {name} does not exist: there are 0 to"
                    f" {config.num_hidden_layers}"
                )


def with_projections(
    params: Params, hidden: HiddenLossConfig, student: ModelConfig, teacher: ModelConfig, seed: int
) -> Params:
    """Return the student's parameters with a projection for each paired layer, if widths differ.

    Their normal initialization preserves the scale of a state. Raises what `check_pairs` raises.
    """
    check_pairs(hidden, student, teacher)
    if student.hidden_size == teacher.hidden_size:
        return params
    shape = (teacher.hidden_size, student.hidden_size)
    rng, projections = np.random.default_rng(check_seed(seed)), {}
    for layer in dict.fromkeys(layer for layer, _ in hidden.pairs):
        drawn = rng.standard_normal(shape, np.float32) * np.float32(shape[1] ** -0.5)
        projections[str(layer)] = {"weight": jax.device_put(drawn)}
    return {**params, PARAMS_KEY: projections}


def remove_projections(params: Params) -> Params:
    """Return the parameters without the projections."""
    return {path: x for path, x in params.items() if path != PARAMS_KEY}


def hidden_loss(
    hidden: HiddenLossConfig, params: Params, student: States, teacher: States, label_BT: Ints
) -> jax.Array:
    """Return the loss, summed over tokens with a label and averaged over pairs, a float32 scalar.

    params: contain the projections. student, teacher: hidden states `[B, T, D]`.
    """
    counted_BT, total = label_BT != IGNORED, jnp.zeros((), jnp.float32)
    for ours, theirs in hidden.pairs:
        s_BTD = student[ours].astype(jnp.float32)
        t_BTD = jax.lax.stop_gradient(teacher[theirs].astype(jnp.float32))
        if PARAMS_KEY in params:
            weight_DS = params[PARAMS_KEY][str(ours)]["weight"].astype(jnp.float32)
            s_BTD = einsum("BTS,DS->BTD", s_BTD, weight_DS)
        each_BT = _DISTANCES[hidden.distance](s_BTD, t_BTD)
        total += jnp.where(counted_BT, each_BT, 0.0).sum()
    return total / len(hidden.pairs)


def squared_distance(s_BTD: jax.Array, t_BTD: jax.Array) -> jax.Array:
    """Return the mean squared difference of states, `[B, T]`."""
    return ((s_BTD - t_BTD) ** 2).mean(axis=-1)


def cosine_distance(s_BTD: jax.Array, t_BTD: jax.Array) -> jax.Array:
    """Return `1 - cos`, `[B, T]`, as half the squared distance of unit vectors.

    So if both states are equal, value and gradient are exactly 0. Norms below 1e-6 are replaced by
    1e-6, since a state of zeros has no direction.
    """
    return ((_normalize(s_BTD) - _normalize(t_BTD)) ** 2).sum(axis=-1) / 2


def _normalize(x_BTD: jax.Array) -> jax.Array:
    square_BT1 = (x_BTD**2).sum(axis=-1, keepdims=True)
    return x_BTD * jax.lax.rsqrt(jnp.maximum(square_BT1, 1e-12))


_DISTANCES = {"mse": squared_distance, "cosine": cosine_distance}
