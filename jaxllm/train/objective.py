"""What is made small: a pure function of parameters and rows, around the pass that generates."""

import dataclasses
from typing import Any, NamedTuple, Protocol

import flax.linen as nn
import jax

from jaxllm import steps
from jaxllm.models.layers import Trace
from jaxllm.train.data.rows import Rows
from jaxllm.train.losses import cross_entropy
from jaxllm.weights.paths import Params, for_sums


class Measured(NamedTuple):
    """Sums over rows, float32 scalars: the loss is `total / weight`, of all rows together.

    also: further sums by name, divided by the same weight, to be shown and not made small.
    """

    total: jax.Array
    weight: jax.Array
    also: dict[str, jax.Array] = {}  # noqa: RUF012  never changed


class Objective(Protocol):
    """A frozen dataclass: what it says is static in the compiled step.

    given: the arrays that it needs beside the parameters, an argument of the compiled step. key:
    for what it draws.
    """

    def __call__(
        self, model: nn.Module, params: Params, given: Any, rows: Rows, key: jax.Array
    ) -> Measured: ...


def run(
    model: nn.Module,
    params: Params,
    rows: Rows,
    segments: steps.Segments = (),
    *,
    whole: bool = False,
    **asked: Any,
) -> Trace:
    """The forward pass over rows whose documents do not see each other.

    segments: of a cache that all of them see. whole: whether each device of a mesh is to have the
    logits of all tokens, and not its part of the vocabulary, which does for sums. asked: what else
    `steps.run` takes. Models that keep a memory have one document in a row (`Dataset.check`).
    """
    if model.config.segment_length is None:
        asked["document_BT"] = rows.document_BT
    return steps.run(
        model if whole else for_sums(model),
        params,
        segments,
        rows.token_BT,
        rows.position_BT,
        **asked,
    )[0]


@dataclasses.dataclass(frozen=True)
class NextToken:
    """Cross-entropy with the labels, in nats a token."""

    def __call__(
        self, model: nn.Module, params: Params, given: Any, rows: Rows, key: jax.Array
    ) -> Measured:
        return Measured(*cross_entropy(run(model, params, rows).logits, rows.label_BT))
