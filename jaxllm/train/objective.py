"""Objectives: pure functions of parameters and rows around the inference forward pass."""

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax

from jaxllm import steps
from jaxllm.models.layers import Trace
from jaxllm.train.data.rows import Rows
from jaxllm.train.losses import cross_entropy
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
      given: further arrays that it needs, an argument of the compiled step.
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
      segments: cache segments that all documents attend to. gather_logits: on a mesh, gather the
      logits of the whole vocabulary on every device. Losses do not
        need it: they sum over sharded logits.
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
