"""Objectives of distillation.

Either the teacher runs within the step (`FromTeacher`, whose `given` is its parameters), or its
outputs were recorded before (`FromBuckets`, whose rows are `Taught`). Both return sums and weights
as in `train.objective`, so accumulated batches weight each token equally.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax

from jaxllm.errors import ConfigError
from jaxllm.train.data.rows import Rows
from jaxllm.train.distill.buckets import Buckets, of_buckets
from jaxllm.train.distill.divergences import Compared, Mix, learned, of_logits
from jaxllm.train.distill.hidden import Hidden, apart
from jaxllm.train.objective import Measured, run
from jaxllm.weights.paths import Params, among_of


class Taught(Rows):
    """Rows with the teacher's recorded outputs `[B, T, ...]`."""

    told: Buckets


@dataclasses.dataclass(frozen=True)
class FromTeacher:
    """The loss of `Mix` with a teacher that runs in each step.

    Needs memory for the teacher's weights and its float32 logits `[B, T, V]`.

    Attributes:
      teacher: its module; its parameters are `given` in a call.
      size: of the common vocabulary.
      hidden: the loss of hidden states, if any.
    """

    teacher: nn.Module
    size: int
    mix: Mix
    hidden: Hidden | None = None

    def __call__(
        self, model: nn.Module, params: Params, given: Any, rows: Rows, key: jax.Array
    ) -> Measured:
        student = run(model, params, rows)
        teacher = jax.lax.stop_gradient(run(self.teacher, given, rows))
        compared = of_logits(self.size, self.mix.temperature)
        measured = _measured(model, student.logits, rows, teacher.logits, compared, self.mix)
        if self.hidden is None:
            return measured
        states = student.hidden_states, teacher.hidden_states
        distance = apart(self.hidden, params, *states, rows.label_BT)
        total = measured.total + self.hidden.weight * distance
        return Measured(total, measured.weight, {**measured.also, "hidden": distance})


@dataclasses.dataclass(frozen=True)
class FromBuckets:
    """The loss of `Mix` with a teacher's outputs that were recorded at the same temperature.

    size: of the common vocabulary.
    """

    size: int
    mix: Mix

    def __call__(
        self, model: nn.Module, params: Params, given: Any, rows: Rows, key: jax.Array
    ) -> Measured:
        if not isinstance(rows, Taught):
            raise ConfigError("the rows have no recorded teacher outputs: use TaughtData")
        compared = of_buckets(self.size, self.mix.temperature)
        logits_BTV = run(model, params, rows).logits
        return _measured(model, logits_BTV, rows, rows.told, compared, self.mix)


def _measured(
    model: nn.Module, logits_BTV: jax.Array, rows: Rows, told: Any, compared: Compared, mix: Mix
) -> Measured:
    label_BT = jax.numpy.asarray(rows.label_BT)
    found = learned(logits_BTV, label_BT, told, compared, mix, among_of(model, len(label_BT)))
    also = {"divergence": found.divergence, "cross_entropy": found.cross_entropy}
    return Measured(found.loss, found.tokens, also)
