"""Load balancing of mixtures of experts in training: the auxiliary loss and expert capacity.

The loss is that of Switch (Fedus et al. 2021, equations 4 to 6): the number of experts times the
sum over experts of (share of routed tokens) x (mean router probability). With k experts per token
it is k if the load is balanced. transformers averages over all layers before it multiplies
("pooled"), so imbalances in different layers can cancel out. The mean of the layers' losses sees
them; `by_layer` selects it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.config.model import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.moe import MoEConfig
from jaxllm.train.data.rows import Rows
from jaxllm.train.jobs import TrainJob
from jaxllm.train.objective import LossOutput, NextToken, forward, next_token_loss
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params


def router_loss(
    scores: Sequence[jax.Array], real_BT: jax.Array, count: int, *, by_layer: bool = False
) -> jax.Array:
    """Return the auxiliary loss, a float32 scalar: of all layers pooled, or the mean over layers.

    Args:
        scores: router logits `[B, T, E]` of each layer with experts.
        real_BT: mask of the tokens that are not padding; only these count.
        count: experts per token.
    """
    used, mean = zip(*(_expert_fractions(x_BTE, real_BT, count) for x_BTE in scores), strict=True)
    used_LE, mean_LE = jnp.stack(used), jnp.stack(mean)
    if not by_layer:
        used_LE, mean_LE = (x.mean(axis=0, keepdims=True) for x in (used_LE, mean_LE))
    return (used_LE * mean_LE).sum(axis=1).mean() * used_LE.shape[1]


def _expert_fractions(
    x_BTE: jax.Array, real_BT: jax.Array, count: int
) -> tuple[jax.Array, jax.Array]:
    """Return the choices per token and the mean probability of each expert, `[E]`."""
    p_BTE = jax.nn.softmax(x_BTE.astype(jnp.float32), axis=-1)
    _, expert_BTk = jax.lax.top_k(p_BTE, count)
    real_BT1 = real_BT[..., None].astype(jnp.float32)
    chosen_BTE = jax.nn.one_hot(expert_BTk, x_BTE.shape[-1]).sum(axis=2)
    tokens = jnp.maximum(real_BT1.sum(), 1.0)
    chosen_E, mean_E = ((x * real_BT1).sum(axis=(0, 1)) / tokens for x in (chosen_BTE, p_BTE))
    return chosen_E, mean_E


@dataclasses.dataclass(frozen=True)
class BalancedLoss:
    """Cross-entropy plus `factor` times the auxiliary loss of the batch, logged as `router`.

    As in transformers, accumulated batches have separate auxiliary losses, averaged over tokens.
    """

    factor: float
    by_layer: bool = False

    def __call__(
        self, model: Model, params: Params, extra_inputs: Any, rows: Rows, key: jax.Array
    ) -> LossOutput:
        trace = forward(model, params, rows, read=("router",))
        total, weight = next_token_loss(model, params, trace, rows.label_BT)
        scores = [layer.sites["router"] for layer in trace.layers if "router" in layer.sites]
        config: Any = model.config
        count = config.num_experts_per_tok
        added = weight * router_loss(scores, rows.position_BT >= 0, count, by_layer=self.by_layer)
        return LossOutput(total + self.factor * added, weight, {"router": added})


def check_experts(config: ModelConfig, factor: float, capacity: float | None) -> None:
    """Raise ConfigError if factor or capacity are out of range, or the model has no experts."""
    if not factor and capacity is None:
        return
    if not isinstance(config, MoEConfig) or not any(
        config.is_moe_layer(i) for i in range(config.num_hidden_layers)
    ):
        raise ConfigError(
            f"router loss and expert capacity need a mixture of experts: this {config.model_type}"
            " has no experts"
        )
    if not 0 <= factor < float("inf"):
        raise ConfigError(f"the factor of the router loss must be finite and >= 0, got {factor}")
    if capacity is not None:
        dataclasses.replace(config, capacity_factor=capacity)


def add_router_loss(
    job: TrainJob, factor: float = 0.0, *, by_layer: bool = False, capacity: float | None = None
) -> TrainJob:
    """Return the job with the auxiliary loss, and with an expert capacity during training.

    The result that the job writes has no capacity limit (`MoEConfig.capacity_factor`).

    Raises ConfigError as `check_experts`, and for losses other than `NextToken`.
    """
    config = job.lm.config
    check_experts(config, factor, capacity)
    if capacity is not None:
        assert isinstance(config, MoEConfig)
        limited = dataclasses.replace(config, capacity_factor=capacity)
        job = dataclasses.replace(
            job, lm=dataclasses.replace(job.lm, model=job.model.clone(config=limited))
        )
    if not factor:
        return job
    if not isinstance(job.objective, NextToken):
        raise ConfigError("the router loss can only be added to the next-token loss")
    return dataclasses.replace(job, objective=BalancedLoss(factor, by_layer))
