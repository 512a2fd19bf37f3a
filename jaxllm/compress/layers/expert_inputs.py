"""Inputs of experts: each expert sees only the calibration tokens that are routed to it."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm import ops
from jaxllm.compress.layers.input_stats import InputStats, check_finite
from jaxllm.compress.layers.layerwise import BATCH, LayerInputs
from jaxllm.models.moe import MoEConfig, route
from jaxllm.weights.formats import Weight, to_dense
from jaxllm.weights.linear import linear
from jaxllm.weights.paths import Params


@dataclasses.dataclass(frozen=True, eq=False)
class ExpertInputs:
    """The input tokens of one MoE layer.

    x_RD: float32. expert_Rk: the experts that each token is routed to.
    """

    path: str
    config: MoEConfig
    x_RD: np.ndarray
    expert_Rk: np.ndarray
    dtype: str

    def count_tokens(self, expert: int) -> int:
        """Return the number of tokens routed to an expert."""
        return int((self.expert_Rk == expert).any(axis=1).sum())

    def stats(self, expert: int) -> InputStats:
        """Return the input statistics of an expert's gate and up. Raises what `check_finite`
        raises.
        """
        return self._accumulate(expert, ())

    def hidden_stats(self, expert: int, gate: Weight, up: Weight) -> InputStats:
        """Return the input statistics of its down, given gate and up `[F, D]`."""
        return self._accumulate(expert, (to_dense(gate, self.dtype), to_dense(up, self.dtype)))

    def _accumulate(self, expert: int, gate_up: tuple[jax.Array, ...]) -> InputStats:
        """Accumulate an expert's statistics.

        Without any token they are those of uncorrelated inputs of equal size, so columns are
        rounded independently.
        """
        columns = gate_up[0].shape[0] if gate_up else self.x_RD.shape[1]
        x_RD = self.x_RD[(self.expert_Rk == expert).any(axis=1)]
        if not len(x_RD):
            ones = jnp.ones(columns)
            return InputStats(jnp.float32(1), jnp.eye(columns), ones, ones)
        found, act = InputStats.empty(columns), self.config.hidden_act
        size = min(BATCH, len(self.x_RD))
        for begin in range(0, len(x_RD), size):
            some = x_RD[begin : begin + size]  # always the same size, to compile once
            some = np.pad(some, ((0, size - len(some)), (0, 0)))
            found = _add_batch(found, jnp.asarray(some, self.dtype), gate_up, act)
        found = found.replace(count=jnp.float32(len(x_RD)))  # without the rows of padding
        return check_finite(found, f"{self.path}.mlp.experts.{expert}")


def collect_expert_inputs(layer: LayerInputs, config: MoEConfig, params: Params) -> ExpertInputs:
    """Return the inputs of the layer's experts, computed with these parameters of the layer."""
    x_RD = layer.trace_entry(params, "mlp_norm").reshape(-1, config.hidden_size)
    score_RE = layer.trace_entry(params, "router").reshape(-1, config.num_experts)
    _, expert_Rk = route(jnp.asarray(score_RE), config.num_experts_per_tok, False)
    dtype = layer.model.precision.activations
    return ExpertInputs(layer.path, config, x_RD, np.asarray(expert_Rk), dtype)


@partial(jax.jit, static_argnums=3, donate_argnums=0)
def _add_batch(
    stats: InputStats, x_RD: jax.Array, gate_up: tuple[jax.Array, ...], act: str
) -> InputStats:
    if gate_up:
        gate_RF, up_RF = (linear(x_RD, weight).astype(x_RD.dtype) for weight in gate_up)
        x_RD = ops.ACTIVATIONS[act](gate_RF) * up_RF
    return stats.add(x_RD)
