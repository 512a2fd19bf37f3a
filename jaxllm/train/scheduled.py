"""The next-token loss of a pipelined model, by a schedule of microbatches."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxllm.errors import ConfigError
from jaxllm.mesh import Meshed
from jaxllm.mesh.pipeline.training import Passes, passes, summed_loss
from jaxllm.ops.likelihood import Over
from jaxllm.train.data.rows import IGNORED, Rows
from jaxllm.train.losses import cross_entropy
from jaxllm.train.objective import Measured
from jaxllm.weights.paths import Params


@dataclasses.dataclass(frozen=True)
class Scheduled:
    """`objective.NextToken` for a pipelined model, with the same loss and gradient.

    The schedule limits how many microbatches a stage holds at once (`mesh.pipeline.schedule`).
    """

    schedule: str
    microbatches: int

    def of(self, model: nn.Module) -> Passes:
        """Return how the loss is computed.

        Raises ConfigError for a model without stages, or an unknown schedule.
        """
        if not isinstance(model, Meshed):
            raise ConfigError(f"schedule {self.schedule!r} needs a mesh with stage=2 or more")
        return passes(model, _summed, self.schedule, self.microbatches)

    def __call__(
        self, model: nn.Module, params: Params, given: Any, rows: Rows, key: jax.Array
    ) -> Measured:
        """Raises ConfigError for a model without stages, or rows that do not divide evenly."""
        how = self.of(model)
        counted = (rows.label_BT != IGNORED).sum().astype(jnp.float32)
        return Measured(summed_loss(how, params, rows), counted)


def _summed(logits_BTV: jax.Array, rows: Rows, over: Over) -> jax.Array:
    return cross_entropy(logits_BTV, rows.label_BT, over)[0]
