"""The loss of the next token by a pipeline schedule, as an objective of training."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.errors import ConfigError
from jaxllm.research.pipeline.one_f_one_b import PipelineLoss, make_pipeline_loss, sum_loss
from jaxllm.train.data.rows import IGNORED, Rows
from jaxllm.train.objective import AxisNames, LossOutput, cross_entropy
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params


@dataclasses.dataclass(frozen=True)
class ScheduledLoss:
    """`objective.NextToken` for a pipelined model, with the same loss and gradient.

    The schedule limits how many microbatches a stage holds at once (`schedule`).
    """

    schedule: str
    microbatches: int

    def pipeline_loss(self, model: Any) -> PipelineLoss:
        """Return how the loss is computed.

        Raises ConfigError for a model without stages, or an unknown schedule.
        """
        return make_pipeline_loss(model, _sum_loss, self.schedule, self.microbatches)

    def __call__(
        self, model: Model, params: Params, extra_inputs: Any, rows: Rows, key: jax.Array
    ) -> LossOutput:
        """Raises ConfigError for a model without stages, or rows that do not divide evenly."""
        how = self.pipeline_loss(model)
        counted = (rows.label_BT != IGNORED).sum().astype(jnp.float32)
        return LossOutput(sum_loss(how, params, rows), counted)


def _sum_loss(logits_BTV: jax.Array, rows: Rows, over: AxisNames) -> jax.Array:
    return cross_entropy(logits_BTV, rows.label_BT, over)[0]


def _make_objective(schedule: str, microbatches: str, model: Any) -> ScheduledLoss:
    """Make the objective of `--objective SCHEDULE:MICROBATCHES`, by default 4 of them.

    Raises:
        ConfigError: for another number, and as `ScheduledLoss.pipeline_loss`.
    """
    if microbatches and not (microbatches.isascii() and microbatches.isdigit()):
        raise ConfigError(
            f"--objective {schedule} needs a number of microbatches, such as {schedule}:4, got"
            f" {microbatches!r:.40}"
        )
    objective = ScheduledLoss(schedule, int(microbatches or 4))
    objective.pipeline_loss(model)
    return objective


one_f_one_b = partial(_make_objective, "1f1b")
gpipe = partial(_make_objective, "gpipe")
