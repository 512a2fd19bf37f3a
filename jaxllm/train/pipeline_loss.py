"""The next-token loss of a pipelined model, by a schedule of microbatches."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.errors import ConfigError
from jaxllm.ops.token_logprobs import AxisNames
from jaxllm.sharding import ShardedModel
from jaxllm.sharding.pipeline.one_f_one_b import PipelineLoss, make_pipeline_loss, sum_loss
from jaxllm.train.data.rows import IGNORED, Rows
from jaxllm.train.losses import cross_entropy
from jaxllm.train.objective import LossOutput
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params


@dataclasses.dataclass(frozen=True)
class ScheduledLoss:
    """`objective.NextToken` for a pipelined model, with the same loss and gradient.

    The schedule limits how many microbatches a stage holds at once (`sharding.pipeline.schedule`).
    """

    schedule: str
    microbatches: int

    def pipeline_loss(self, model: Any) -> PipelineLoss:
        """Return how the loss is computed.

        Raises ConfigError for a model without stages, or an unknown schedule.
        """
        if not isinstance(model, ShardedModel):
            raise ConfigError(f"schedule {self.schedule!r} needs a mesh with stage=2 or more")
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
