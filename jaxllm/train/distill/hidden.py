"""Hidden states that are to be like the teacher's, layer by layer, through a learned projection.

Layers are numbered as `Trace.hidden_states` has them: 0 the embeddings, i what block i puts out,
the last one after the final norm. The loss of a token is the mean square of the differences
(TinyBERT, arXiv 1909.10351, eq. 8), or 1 less the cosine (DistilBERT, arXiv 1910.01108).

Where the widths differ the student's states go through a matrix first. It is trained with the
model, as a parameter of its own beside the model's: `distill.LAYER.weight`, `[D teacher,
D student]`. `without_projections` takes it away from what is kept.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.train.data.rows import IGNORED, Ints
from jaxllm.weights.paths import Params
from jaxllm.whole import check_seed

PLACE = "distill"
By = Literal["mse", "cosine"]
States = Sequence[jax.Array]


@dataclasses.dataclass(frozen=True)
class Hidden:
    """What of the hidden states is learned. by: how two are compared. pairs: layers of the student
    and of the teacher. weight: of the mean over pairs, beside the loss of the logits.
    """

    by: By = "mse"
    pairs: tuple[tuple[int, int], ...] = ()
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.by not in get_args(By):
            raise ConfigError(
                f"hidden states are compared by {' or '.join(get_args(By))}, not {self.by!r:.40}"
            )
        if not self.weight >= 0:
            raise ConfigError(f"the weight of hidden states must be at least 0, got {self.weight}")


def evenly(student: int, teacher: int) -> tuple[tuple[int, int], ...]:
    """Pairs for all blocks of a student of so many layers: each ends where as large a share of the
    teacher's layers has been run.
    """
    return tuple((i, round(i * teacher / student)) for i in range(1, student + 1))


def check(hidden: Hidden, student: ModelConfig, teacher: ModelConfig) -> None:
    """Raise ConfigError for layers that there are not, and where there is no pair."""
    if not hidden.pairs:
        raise ConfigError("name pairs of layers, the student's and the teacher's")
    for pair in hidden.pairs:
        for number, name, config in zip(
            pair, ("student", "teacher"), (student, teacher), strict=True
        ):
            if not 0 <= number <= config.num_hidden_layers:
                raise ConfigError(
                    f"the {name} has hidden states 0 to {config.num_hidden_layers}, not {number}"
                )


def with_projections(
    params: Params, hidden: Hidden, student: ModelConfig, teacher: ModelConfig, seed: int
) -> Params:
    """The student's parameters with a projection for each pair, where the widths differ.

    Drawn from a normal distribution that keeps the size of a state. Raises what `check` raises.
    """
    check(hidden, student, teacher)
    if student.hidden_size == teacher.hidden_size:
        return params
    shape = (teacher.hidden_size, student.hidden_size)
    rng, made = np.random.default_rng(check_seed(seed)), {}
    for layer in dict.fromkeys(layer for layer, _ in hidden.pairs):
        drawn = rng.standard_normal(shape, np.float32) * np.float32(shape[1] ** -0.5)
        made[str(layer)] = {"weight": jax.device_put(drawn)}
    return {**params, PLACE: made}


def without_projections(params: Params) -> Params:
    """The model's own parameters."""
    return {path: x for path, x in params.items() if path != PLACE}


def apart(
    hidden: Hidden, params: Params, student: States, teacher: States, label_BT: Ints
) -> jax.Array:
    """The loss summed over all tokens with a label, and the mean over pairs: a float32 scalar.

    params: where the projections are. student, teacher: hidden states `[B, T, D]`.
    """
    counted_BT, total = label_BT != IGNORED, jnp.zeros((), jnp.float32)
    for ours, theirs in hidden.pairs:
        s_BTD = student[ours].astype(jnp.float32)
        t_BTD = jax.lax.stop_gradient(teacher[theirs].astype(jnp.float32))
        if PLACE in params:
            s_BTD = s_BTD @ params[PLACE][str(ours)]["weight"].astype(jnp.float32).T
        each_BT = _COMPARED[hidden.by](s_BTD, t_BTD)
        total += jnp.where(counted_BT, each_BT, 0.0).sum()
    return total / len(hidden.pairs)


def mean_square(s_BTD: jax.Array, t_BTD: jax.Array) -> jax.Array:
    """`[B, T]`: the mean over a state's numbers."""
    return ((s_BTD - t_BTD) ** 2).mean(axis=-1)


def from_cosine(s_BTD: jax.Array, t_BTD: jax.Array) -> jax.Array:
    """`[B, T]`: `1 - cos`, as half the square of the distance of unit vectors.

    So where both are equal, value and gradient are exactly 0. A state of zeros has no direction:
    its length is taken for no less than 1e-6.
    """
    return ((_unit(s_BTD) - _unit(t_BTD)) ** 2).sum(axis=-1) / 2


def _unit(x_BTD: jax.Array) -> jax.Array:
    square_BT1 = (x_BTD**2).sum(axis=-1, keepdims=True)
    return x_BTD * jax.lax.rsqrt(jnp.maximum(square_BT1, 1e-12))


_COMPARED = {"mse": mean_square, "cosine": from_cosine}
