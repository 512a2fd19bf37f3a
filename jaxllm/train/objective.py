"""Objectives: pure functions of parameters and rows around the inference forward pass.

A loss is a sum and its divisor, never a mean. Sums of several batches add up; a mean of means would
weight tokens by the size of their batch.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxllm import steps
from jaxllm.errors import ConfigError
from jaxllm.models.layers import Trace
from jaxllm.ops.token_logprobs import AxisNames, log_likelihood
from jaxllm.sharding import ShardedModel
from jaxllm.sharding.pipeline.one_f_one_b import PipelineLoss, make_pipeline_loss, sum_loss
from jaxllm.train.data.rows import IGNORED, Rows
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params


class LossOutput(NamedTuple):
    """Sums over rows, float32 scalars: the loss is `total / weight`.

    extras: further sums by name, divided by the same weight; they are logged, not minimized.
    """

    total: jax.Array
    weight: jax.Array
    extras: dict[str, jax.Array] = {}  # noqa: RUF012  never changed


class Objective(Protocol):
    """A frozen dataclass, whose fields are static in the compiled step.

    Args of a call:
      extra_inputs: further arrays that it needs, an argument of the compiled step.
      key: for its random numbers.
    """

    def __call__(
        self, model: Model, params: Params, extra_inputs: Any, rows: Rows, key: jax.Array
    ) -> LossOutput: ...


def forward(
    model: Model,
    params: Params,
    rows: Rows,
    segments: steps.Segments = (),
    *,
    gather_logits: bool = False,
    **options: Any,
) -> Trace:
    """Run the forward pass over rows whose documents do not attend to each other.

    Models with a compressive memory need one document a row (`Dataset.check`).

    Args:
      segments: cache segments that all documents attend to.
      gather_logits: on a mesh, gather the logits of the whole vocabulary on every device. Losses do
        not need it: they sum over sharded logits.
      options: other arguments of `steps.forward`.
    """
    if model.config.segment_length is None:
        options["document_BT"] = rows.document_BT
    return steps.run_model(
        model if gather_logits else model.with_sharded_logits(),
        params,
        segments,
        rows.token_BT,
        rows.position_BT,
        **options,
    )[0]


@dataclasses.dataclass(frozen=True)
class NextToken:
    """Cross-entropy with the labels, in nats per token."""

    def __call__(
        self, model: Model, params: Params, extra_inputs: Any, rows: Rows, key: jax.Array
    ) -> LossOutput:
        return LossOutput(*cross_entropy(forward(model, params, rows).logits, rows.label_BT))


def log_likelihoods(logits_BTV: jax.Array, label_BT: jax.Array, over: AxisNames = ()) -> jax.Array:
    """Return the log-probability of each label, float32 `[B, T]`; 0 where it is `IGNORED`.

    over: as in `ops.token_logprobs`.
    """
    counted_BT = label_BT != IGNORED
    safe_BT = jnp.where(counted_BT, label_BT, 0)
    found_BT = log_likelihood(logits_BTV.astype(jnp.float32), safe_BT, over)
    return jnp.where(counted_BT, found_BT, 0.0)


def cross_entropy(
    logits_BTV: jax.Array, label_BT: jax.Array, over: AxisNames = ()
) -> tuple[jax.Array, jax.Array]:
    """Return the summed negative log-likelihood in nats, and the number of labels, float32 each.

    A label is the token that follows the token of its column. `IGNORED` labels do not count; if
    there are no others, both results are 0. over: as in `ops.token_logprobs`.
    """
    counted = (label_BT != IGNORED).sum().astype(jnp.float32)
    return -log_likelihoods(logits_BTV, label_BT, over).sum(), counted


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
