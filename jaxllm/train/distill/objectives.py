"""Objectives of distillation.

Either the teacher runs within the step (`OnlineTeacherLoss`, whose `extra_inputs` is its
parameters), or its outputs were recorded before (`RecordedTeacherLoss`, whose rows are
`DistillRows`). Both return sums and weights as in `train.objective`, so accumulated batches weight
each token equally.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax

from jaxllm.errors import ConfigError
from jaxllm.train.data.rows import Rows
from jaxllm.train.distill.divergences import (
    Compare,
    DistillLossConfig,
    compare_logits,
    distill_loss,
)
from jaxllm.train.distill.feature_loss import HiddenLossConfig, hidden_loss
from jaxllm.train.distill.topk_logits import TopKLogprobs, compare_topk
from jaxllm.train.objective import LossOutput, forward
from jaxllm.weights.paths import Params


class DistillRows(Rows):
    """Rows with the teacher's recorded outputs `[B, T, ...]`."""

    teacher: TopKLogprobs


@dataclasses.dataclass(frozen=True)
class OnlineTeacherLoss:
    """The loss of `DistillLossConfig` with a teacher that runs in each step.

    Needs memory for the teacher's weights and its float32 logits `[B, T, V]`.

    Attributes:
      teacher: its module; its parameters are `extra_inputs` in a call.
      vocab_size: of the common vocabulary.
      hidden: the loss of hidden states, if any.
    """

    teacher: nn.Module
    vocab_size: int
    config: DistillLossConfig
    hidden: HiddenLossConfig | None = None

    def __call__(
        self, model: nn.Module, params: Params, extra_inputs: Any, rows: Rows, key: jax.Array
    ) -> LossOutput:
        student = forward(model, params, rows)
        teacher = jax.lax.stop_gradient(forward(self.teacher, extra_inputs, rows))
        compared = compare_logits(self.vocab_size, self.config.temperature)
        measured = _loss_output(model, student.logits, rows, teacher.logits, compared, self.config)
        if self.hidden is None:
            return measured
        states = student.hidden_states, teacher.hidden_states
        distance = hidden_loss(self.hidden, params, *states, rows.label_BT)
        total = measured.total + self.hidden.weight * distance
        return LossOutput(total, measured.weight, {**measured.extras, "hidden": distance})


@dataclasses.dataclass(frozen=True)
class RecordedTeacherLoss:
    """The loss of `DistillLossConfig` with a teacher's outputs that were recorded at the same
    temperature.

    vocab_size: of the common vocabulary.
    """

    vocab_size: int
    config: DistillLossConfig

    def __call__(
        self, model: nn.Module, params: Params, extra_inputs: Any, rows: Rows, key: jax.Array
    ) -> LossOutput:
        if not isinstance(rows, DistillRows):
            raise ConfigError("the rows have no recorded teacher outputs: use TaughtData")
        compared = compare_topk(self.vocab_size, self.config.temperature)
        logits_BTV = forward(model, params, rows).logits
        return _loss_output(model, logits_BTV, rows, rows.teacher, compared, self.config)


def _loss_output(
    model: nn.Module,
    logits_BTV: jax.Array,
    rows: Rows,
    teacher: Any,
    compare: Compare,
    config: DistillLossConfig,
) -> LossOutput:
    label_BT = jax.numpy.asarray(rows.label_BT)
    found = distill_loss(
        logits_BTV, label_BT, teacher, compare, config, model.num_data_shards(len(label_BT))
    )
    also = {"divergence": found.divergence, "cross_entropy": found.cross_entropy}
    return LossOutput(found.loss, found.tokens, also)
