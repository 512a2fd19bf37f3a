"""Inputs of experts: each expert sees only the calibration tokens that are routed to it."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm import ops
from jaxllm.compress.layers.moments import Moments, check
from jaxllm.compress.layers.stream import BATCH, Stage
from jaxllm.models.experts import MixtureConfig, route
from jaxllm.weights.formats import Weight, dense
from jaxllm.weights.linear import linear
from jaxllm.weights.paths import Params


@dataclasses.dataclass(frozen=True, eq=False)
class Routed:
    """The input tokens of one MoE layer.

    x_RD: float32. expert_Rk: the experts that each token is routed to.
    """

    path: str
    config: MixtureConfig
    x_RD: np.ndarray
    expert_Rk: np.ndarray
    dtype: str

    def count(self, expert: int) -> int:
        """Return the number of tokens routed to an expert."""
        return int((self.expert_Rk == expert).any(axis=1).sum())

    def moments(self, expert: int) -> Moments:
        """Return the input statistics of an expert's gate and up. Raises what `check` raises."""
        return self._folded(expert, ())

    def hidden_moments(self, expert: int, gate: Weight, up: Weight) -> Moments:
        """Return the input statistics of its down, given gate and up `[F, D]`."""
        return self._folded(expert, (dense(gate, self.dtype), dense(up, self.dtype)))

    def _folded(self, expert: int, both: tuple[jax.Array, ...]) -> Moments:
        """Accumulate an expert's statistics.

        Without any token they are those of uncorrelated inputs of equal size, so columns are
        rounded independently.
        """
        columns = both[0].shape[0] if both else self.x_RD.shape[1]
        x_RD = self.x_RD[(self.expert_Rk == expert).any(axis=1)]
        if not len(x_RD):
            ones = jnp.ones(columns)
            return Moments(jnp.float32(1), jnp.eye(columns), ones, ones)
        found, act = Moments.none(columns), self.config.hidden_act
        size = min(BATCH, len(self.x_RD))
        for begin in range(0, len(x_RD), size):
            some = x_RD[begin : begin + size]  # always the same size, to compile once
            some = np.pad(some, ((0, size - len(some)), (0, 0)))
            found = _added(found, jnp.asarray(some, self.dtype), both, act)
        found = found.replace(count=jnp.float32(len(x_RD)))  # without the rows of padding
        return check(found, f"{self.path}.mlp.experts.{expert}")


def routed(stage: Stage, config: MixtureConfig, params: Params) -> Routed:
    """Return the inputs of the layer's experts, computed with these parameters of the layer."""
    x_RD = stage.entries(params, "mlp_norm").reshape(-1, config.hidden_size)
    score_RE = stage.entries(params, "router").reshape(-1, config.num_experts)
    _, expert_Rk = route(jnp.asarray(score_RE), config.num_experts_per_tok, False)
    dtype = stage.model.precision.activations
    return Routed(stage.path, config, x_RD, np.asarray(expert_Rk), dtype)


@partial(jax.jit, static_argnums=3, donate_argnums=0)
def _added(found: Moments, x_RD: jax.Array, both: tuple[jax.Array, ...], act: str) -> Moments:
    if both:
        gate_RF, up_RF = (linear(x_RD, weight).astype(x_RD.dtype) for weight in both)
        x_RD = ops.ACTIVATIONS[act](gate_RF) * up_RF
    return found.add(x_RD)
