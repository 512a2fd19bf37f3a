"""Mixtures of experts: an MLP of which each token uses a few of many experts.

A router selects experts and weights for each token (Shazeer et al. 2017; Mixtral, Jiang et al.
2024). Expert weights are stacked `[E, O, I]`, multiplied by `weights.experts`. A token's output
does not depend on other tokens in the batch, unless experts have a capacity.
"""

import dataclasses
import math
from typing import Annotated

import flax.linen as nn
import jax
import jax.numpy as jnp
from msgspec import Meta

from jaxllm import ops
from jaxllm.config.model import ModelConfig, Positive
from jaxllm.models import decoder
from jaxllm.models.decoder import Decoder, DecoderConfig
from jaxllm.models.family import Family
from jaxllm.models.layers import AttentionContext
from jaxllm.models.modules import Linear, get_param
from jaxllm.models.sites import SiteRecorder
from jaxllm.ops.row_sums import row_sum, softmax
from jaxllm.weights.experts import expert_linears
from jaxllm.weights.formats import as_weight
from jaxllm.weights.precision import Precision

ExpertCount = Annotated[int, Meta(ge=1, le=1 << 12)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig(DecoderConfig):
    """A decoder with experts.

    Attributes:
        num_experts_per_tok: Experts per token.
        capacity_factor: If not None, each expert takes at most this times its even share of the
            tokens of one call, and drops the rest (`apply_capacity`). For training only.
    """

    num_experts: ExpertCount
    num_experts_per_tok: ExpertCount
    capacity_factor: Positive | None = None

    def _complaints(self) -> list[str]:
        complaints = super()._complaints()
        if not complaints and self.num_experts_per_tok > self.num_experts:
            complaints.append(
                f"num_experts_per_tok ({self.num_experts_per_tok}) exceeds num_experts"
                f" ({self.num_experts})"
            )
        return complaints

    @property
    def expert_size(self) -> int:
        """Hidden channels of an expert."""
        return self.intermediate_size

    @property
    def normalize_topk(self) -> bool:
        """Whether the weights of a token's experts are normalized to sum to 1."""
        return True

    def is_moe_layer(self, layer: int) -> bool:
        """Whether a layer has experts, instead of an MLP."""
        return True


def max_read_fraction(config: ModelConfig, ndim: int, tokens: int = 1) -> float:
    """Return an upper bound on the fraction of a parameter with `ndim` axes that a step reads.

    Less than 1 only for expert stacks, assuming that the `tokens` tokens share no expert.
    """
    if not isinstance(config, MoEConfig) or ndim < 3:
        return 1.0
    return min(1.0, tokens * config.num_experts_per_tok / config.num_experts)


def route(score_TE: jax.Array, count: int, normalize_topk: bool) -> tuple[jax.Array, jax.Array]:
    """Return the weights and numbers of each token's experts, `[T, k]`, best first.

    Ties go to the lower number. The softmax is over all experts, as in transformers. score_TE:
    float32.
    """
    weight_Tk, expert_Tk = jax.lax.top_k(softmax(score_TE), count)
    if normalize_topk:
        weight_Tk = weight_Tk / row_sum(weight_Tk)
    return weight_Tk, expert_Tk


def apply_capacity(expert_Tk: jax.Array, experts: int, factor: float) -> jax.Array:
    """Replace the expert number by -1 where an expert is over capacity.

    The capacity is ceil(factor T k / E). First choices take precedence over second ones, then
    earlier tokens over later ones (GShard, Lepikhin et al. 2020, algorithm 1).
    """
    T, k = expert_Tk.shape
    room = math.ceil(factor * T * k / experts)
    expert_A = expert_Tk.T.reshape(-1)  # all first choices, then all second ones
    taken_AE = jax.nn.one_hot(expert_A, experts, dtype=jnp.int32)
    before_A = ((jnp.cumsum(taken_AE, axis=0) - 1) * taken_AE).sum(axis=-1)
    return jnp.where(before_A < room, expert_A, -1).reshape(k, T).T


class ExpertLinear(nn.Module):
    """One linear of all experts."""

    experts: int
    features: int

    @nn.compact
    def __call__(self, columns: int) -> jax.Array:
        """Return the weights `[E, O, I]`."""
        weight: jax.Array = get_param(self, "weight", self.experts, self.features, columns)
        return weight


class Experts(nn.Module):
    """Gated MLPs, of which each token uses some."""

    config: MoEConfig
    precision: Precision

    @nn.compact
    def __call__(self, x_TD: jax.Array, expert_Tk: jax.Array, weight_Tk: jax.Array) -> jax.Array:
        """Return the weighted sum of the outputs of each token's experts, float32 `[T, D]`.

        expert_Tk: -1 for none.
        """
        c, (T, D), k = self.config, x_TD.shape, expert_Tk.shape[1]
        gate, up = (
            ExpertLinear(c.num_experts, c.expert_size, name=name)(D)
            for name in ("gate_proj", "up_proj")
        )
        down = ExpertLinear(c.num_experts, D, name="down_proj")(c.expert_size)
        local = [as_weight(x).local_experts() for x in (gate, up, down)]
        *inputs, output = (x.stack for x in local)
        int8_inputs = self.precision.int8_inputs

        def run(x_AD: jax.Array, expert_A: jax.Array) -> jax.Array:
            gate_and_up = expert_linears(x_AD, inputs, expert_A, int8_inputs=int8_inputs)
            gate_AF, up_AF = (y.astype(x_AD.dtype) for y in gate_and_up)
            hidden_AF = ops.ACTIVATIONS[c.hidden_act](gate_AF) * up_AF
            return expert_linears(hidden_AF, (output,), expert_A, int8_inputs=int8_inputs)[0]

        x_TD = x_TD.astype(self.precision.activation_dtype(".".join(self.path)))
        # Sort rows by expert, so that the weights of each are read once.
        expert_A = expert_Tk.reshape(-1)
        order_A = jnp.argsort(expert_A, stable=True)
        sorted_AD = local[-1].run(x_TD[order_A // k], expert_A[order_A], run)
        y_TkD = sorted_AD[jnp.argsort(order_A)].reshape(T, k, D)
        # Devices are summed after weighting: one row per token instead of k.
        y_TD = row_sum(jnp.swapaxes(y_TkD * weight_Tk[..., None], 1, 2))[..., 0]
        return local[-1].reduce(y_TD)


class MoE(nn.Module):
    """A router and its experts."""

    config: MoEConfig
    precision: Precision

    @nn.compact
    def __call__(self, x: jax.Array, position_BT: jax.Array, site: SiteRecorder) -> jax.Array:
        """Return the weighted sum of expert outputs. Padding (position -1) uses no expert."""
        c, p = self.config, self.precision
        B, T, D = x.shape
        k, x_TD = c.num_experts_per_tok, x.reshape(-1, D)
        score_TE = Linear(c.num_experts, False, p, out_dtype="float32", name="gate")(x_TD)
        score_TE = site("router", score_TE.reshape(B, T, -1)).reshape(B * T, -1)
        weight_Tk, expert_Tk = route(score_TE, k, c.normalize_topk)
        expert_Tk = jnp.where(position_BT.reshape(-1, 1) >= 0, expert_Tk, -1)
        if c.capacity_factor is not None:
            expert_Tk = apply_capacity(expert_Tk, c.num_experts, c.capacity_factor)
        y_TD = Experts(c, p, name="experts")(x_TD, expert_Tk, weight_Tk)
        # After a reduce-scatter, a device has only its own tokens.
        return site("mlp.output", y_TD.astype(x.dtype).reshape(B, -1, D))


class Block(decoder.Block):
    """One layer, with an MLP or a mixture of experts."""

    config: MoEConfig

    def _mlp(self, x: jax.Array, context: AttentionContext, site: SiteRecorder) -> jax.Array:
        if not self.config.is_moe_layer(self.layer):
            return super()._mlp(x, context, site)
        y: jax.Array = MoE(self.config, self.precision, name="mlp")(x, context.position_BT, site)
        return y


class MoEDecoder(Decoder):
    """A decoder with experts."""

    block = Block


def moe_family(config: type[MoEConfig]) -> Family:
    """Return the row of an MoE family; its dense layers have the linears of an MLP."""
    row = decoder.decoder_family(config, MoEDecoder)
    stacks = (
        m._replace(linear=m.linear.replace("mlp.", "mlp.experts.")) for m in row.channel_linears
    )
    return dataclasses.replace(
        row, router="mlp.gate", channel_linears=(), expert_linears=(*stacks, *row.channel_linears)
    )
