"""Mixtures of experts: an MLP of which each token uses a few of many experts.

A router selects experts and weights for each token (Shazeer et al. 2017; Mixtral, Jiang et al.
2024). Expert weights are stacked `[E, O, I]`, multiplied by `weights.experts`. A token's output
does not depend on other tokens in the batch, unless experts have a capacity.
"""

import dataclasses
import math
from typing import Annotated, Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from msgspec import Meta

from jaxllm import ops
from jaxllm.config.model import HiddenSize, ModelConfig, Positive
from jaxllm.models import decoder
from jaxllm.models.decoder import Decoder
from jaxllm.models.decoder_block import MLP
from jaxllm.models.decoder_config import DecoderConfig
from jaxllm.models.family import Family, LinearGroup
from jaxllm.models.layers import AttentionContext
from jaxllm.models.modules import Linear, get_param
from jaxllm.models.sites import SiteRecorder
from jaxllm.ops.row_sums import row_sum, softmax
from jaxllm.weights.experts import expert_linears
from jaxllm.weights.formats import as_weight
from jaxllm.weights.precision import Precision

SHARED_GATE = "mlp.shared_expert_gate"
ExpertCount = Annotated[int, Meta(ge=1, le=1 << 12)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
    """How a router's scores select the experts of a token, and weight them.

    Attributes:
        count: Experts per token.
        uses_sigmoid: Whether an expert's weight is the sigmoid of its score, instead of the softmax
            over all experts.
        has_bias: Whether learned numbers are added to the weights for the selection only
            (DeepSeek-AI 2024, arXiv 2412.19437, section 2.1.2).
        groups, top_groups: Experts are in this many groups of equal size, of which only the
            `top_groups` with the largest sums of their best take part.
        best_of_group: How many of a group's best are summed.
        normalized: Whether the weights of a token are divided by their sum plus `eps`.
        scale: Factor on the weights.
        scales_experts: Whether the weights are also multiplied by a learned number of each expert.
    """

    count: int
    uses_sigmoid: bool = False
    has_bias: bool = False
    groups: int = 1
    top_groups: int = 1
    best_of_group: int = 2
    normalized: bool = True
    eps: float = 0.0
    scale: float = 1.0
    scales_experts: bool = False

    def complaints(self, experts: int) -> list[str]:
        """Return what is invalid for this number of experts."""
        if self.groups == 1:
            return []
        if experts % self.groups or experts == self.groups:
            return [f"{experts} experts cannot be in {self.groups} groups of at least two each"]
        if not self.count * self.groups <= experts * self.top_groups <= experts * self.groups:
            return [
                f"{self.count} experts per token cannot come from {self.top_groups} of"
                f" {self.groups} groups of {experts // self.groups} experts"
            ]
        return []


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig(DecoderConfig):
    """A decoder with experts.

    Attributes:
        num_experts_per_tok: Experts per token.
        capacity_factor: If not None, each expert takes at most this times its even share of the
            tokens of one call, and drops the rest (`apply_capacity`). For training only.
        router: Name of the router.
    """

    router: ClassVar[str] = "gate"

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
        return complaints or self.routing.complaints(self.num_experts)

    @property
    def expert_size(self) -> int:
        """Hidden channels of an expert."""
        return self.intermediate_size

    @property
    def shared_expert_size(self) -> int:
        """Hidden channels of the expert that every token uses; 0: there is none."""
        return 0

    @property
    def gates_shared_expert(self) -> bool:
        """Whether a learned sigmoid of the input multiplies the shared expert's output."""
        return False

    @property
    def routing(self) -> Routing:
        """How a token's experts are selected and weighted."""
        return Routing(count=self.num_experts_per_tok)

    @property
    def expert_bias(self) -> bool:
        """Whether the router and the experts have biases."""
        return False

    @property
    def clamped_swiglu(self) -> tuple[float, float] | None:
        """Alpha and limit if an expert's hidden channels are `clamp_swiglu`, else None."""
        return None

    def is_moe_layer(self, layer: int) -> bool:
        """Whether a layer has experts, instead of an MLP."""
        return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseLayersConfig(MoEConfig):
    """A decoder with experts in some layers.

    Attributes:
        mlp_layer_types: Which layers have experts ("sparse"), of moe_intermediate_size hidden
            channels each; the others have an MLP of intermediate_size.
    """

    per_layer_fields: ClassVar[tuple[str, ...]] = ("mlp_layer_types",)

    moe_intermediate_size: HiddenSize
    norm_topk_prob: bool
    mlp_layer_types: tuple[Literal["sparse", "dense"], ...]

    @property
    def expert_size(self) -> int:
        return self.moe_intermediate_size

    @property
    def routing(self) -> Routing:
        return Routing(count=self.num_experts_per_tok, normalized=self.norm_topk_prob)

    def is_moe_layer(self, layer: int) -> bool:
        return self.mlp_layer_types[layer] == "sparse"

    def layer_template(self, layer: int) -> int:
        kinds = list(zip(*(getattr(self, name) for name in self.per_layer_fields), strict=True))
        return kinds.index(kinds[layer])

    def layer_signature(self, layer: int) -> tuple[Any, ...]:
        """Return whether the layer has experts in place of `form`; otherwise as the base class."""
        return (self.is_moe_layer(layer), *super().layer_signature(layer)[1:])


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedExpertsConfig(SparseLayersConfig):
    """A sigmoid router with a bias selects from groups; one expert is shared (DeepSeek-V3).

    Attributes:
        n_group, topk_group, routed_scaling_factor: `Routing.groups`, `top_groups` and `scale`.
        n_shared_experts: The shared expert's size in that of the others.
    """

    n_group: ExpertCount
    topk_group: ExpertCount
    n_shared_experts: ExpertCount
    routed_scaling_factor: Positive

    @property
    def shared_expert_size(self) -> int:
        return self.n_shared_experts * self.moe_intermediate_size

    @property
    def routing(self) -> Routing:
        return Routing(
            count=self.num_experts_per_tok,
            uses_sigmoid=True,
            has_bias=True,
            groups=self.n_group,
            top_groups=self.topk_group,
            normalized=self.norm_topk_prob,
            eps=1e-20,
            scale=self.routed_scaling_factor,
        )


def max_read_fraction(config: ModelConfig, ndim: int, tokens: int = 1) -> float:
    """Return an upper bound on the fraction of a parameter with `ndim` axes that a step reads.

    Less than 1 only for expert stacks, assuming that the `tokens` tokens share no expert.
    """
    if not isinstance(config, MoEConfig) or ndim < 3:
        return 1.0
    return min(1.0, tokens * config.num_experts_per_tok / config.num_experts)


def route(
    score_TE: jax.Array, routing: Routing, bias_E: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return the weights and numbers of each token's experts, `[T, k]`, best first.

    Ties go to the lower number. score_TE: float32. bias_E: float32, added for the selection.
    """
    r = routing
    weight_TE = jax.nn.sigmoid(score_TE) if r.uses_sigmoid else softmax(score_TE)
    rank_TE = weight_TE if bias_E is None else weight_TE + bias_E[None]
    if r.groups > 1:
        rank_TE = _keep_groups(rank_TE, r)
    _, expert_Tk = jax.lax.top_k(rank_TE, r.count)
    weight_Tk = jnp.take_along_axis(weight_TE, expert_Tk, axis=1)
    if r.normalized:
        weight_Tk = weight_Tk / (row_sum(weight_Tk) + r.eps)
    return weight_Tk if r.scale == 1 else weight_Tk * r.scale, expert_Tk


def _keep_groups(rank_TE: jax.Array, r: Routing) -> jax.Array:
    """Replace the numbers of all but the best groups by -inf."""
    rank_TGe = rank_TE.reshape(len(rank_TE), r.groups, -1)
    best_TG = jax.lax.top_k(rank_TGe, r.best_of_group)[0].sum(axis=-1)
    group_Tt = jax.lax.top_k(best_TG, r.top_groups)[1]
    kept_TG = jax.nn.one_hot(group_Tt, r.groups, dtype=bool).any(axis=1)
    return jnp.where(kept_TG[..., None], rank_TGe, -jnp.inf).reshape(rank_TE.shape)


def clamp_swiglu(gate: jax.Array, up: jax.Array, alpha: float, limit: float) -> jax.Array:
    """Return `(up + 1) gate sigmoid(alpha gate)`, of a gate up to `limit` and `up` within it."""
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(alpha * gate)


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
    bias: bool

    @nn.compact
    def __call__(self, columns: int) -> tuple[Any, Any]:
        """Return the weights `[E, O, I]` and the biases `[E, O]`."""
        weight = get_param(self, "weight", self.experts, self.features, columns)
        return weight, get_param(self, "bias", self.experts, self.features) if self.bias else None


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
        sizes = {"gate_proj": (c.expert_size, D), "up_proj": (c.expert_size, D)}
        sizes["down_proj"] = (D, c.expert_size)
        terms = [
            ExpertLinear(c.num_experts, rows, c.expert_bias, name=name)(columns)
            for name, (rows, columns) in sizes.items()
        ]
        local = [as_weight(weight).local_experts() for weight, _ in terms]
        *inputs, output = (x.stack for x in local)
        *input_biases, output_bias = (
            None if bias is None else as_weight(bias).local_experts().stack for _, bias in terms
        )
        int8_inputs = self.precision.int8_inputs

        def run(x_AD: jax.Array, expert_A: jax.Array) -> jax.Array:
            gate_and_up = expert_linears(
                x_AD, inputs, expert_A, biases=input_biases, int8_inputs=int8_inputs
            )
            gate_AF, up_AF = (y.astype(x_AD.dtype) for y in gate_and_up)
            if c.clamped_swiglu is None:
                hidden_AF = ops.ACTIVATIONS[c.hidden_act](gate_AF) * up_AF
            else:
                hidden_AF = clamp_swiglu(gate_AF, up_AF, *c.clamped_swiglu)
            return expert_linears(
                hidden_AF, (output,), expert_A, biases=(output_bias,), int8_inputs=int8_inputs
            )[0]

        x_TD = x_TD.astype(self.precision.activation_dtype(".".join(self.path)))
        # Sort rows by expert, so that the weights of each are read once.
        expert_A = expert_Tk.reshape(-1)
        order_A = jnp.argsort(expert_A, stable=True)
        sorted_AD = local[-1].run(x_TD[order_A // k], expert_A[order_A], run)
        y_TkD = sorted_AD[jnp.argsort(order_A)].reshape(T, k, D)
        # Devices are summed after weighting: one row per token instead of k.
        y_TD = row_sum(jnp.swapaxes(y_TkD * weight_Tk[..., None], 1, 2))[..., 0]
        return local[-1].reduce(y_TD)


class SelectionBias(nn.Module):
    """The numbers that are added to the experts' weights for the selection, always float32."""

    experts: int

    @nn.compact
    def __call__(self) -> jax.Array:
        """Return them, `[E]`."""
        bias: jax.Array = get_param(self, "bias", self.experts)
        return bias


class Mixture(nn.Module):
    """A router and its experts."""

    config: MoEConfig
    precision: Precision

    def _mix(
        self, routed: jax.Array, x: jax.Array, position_BT: jax.Array, site: SiteRecorder
    ) -> jax.Array:
        """Return the weighted sum of the routed experts' outputs. Padding (position -1) uses none.

        routed: What the router reads.
        """
        c, p = self.config, self.precision
        B, T, D = x.shape
        x_ND = x.reshape(-1, D)
        router = Linear(c.num_experts, c.expert_bias, p, out_dtype="float32", name=c.router)
        score_NE = router(routed.reshape(-1, D))
        score_NE = site("router", score_NE.reshape(B, T, -1)).reshape(B * T, -1)
        bias_E = SelectionBias(c.num_experts, name="selection")() if c.routing.has_bias else None
        weight_Nk, expert_Nk = route(score_NE, c.routing, bias_E)
        if c.routing.scales_experts:
            weight_Nk = weight_Nk * get_param(self, "per_expert_scale", c.num_experts)[expert_Nk]
        expert_Nk = jnp.where(position_BT.reshape(-1, 1) >= 0, expert_Nk, -1)
        if c.capacity_factor is not None:
            expert_Nk = apply_capacity(expert_Nk, c.num_experts, c.capacity_factor)
        y_ND = Experts(c, p, name="experts")(x_ND, expert_Nk, weight_Nk)
        # After a reduce-scatter, a device has only its own tokens.
        return y_ND.astype(x.dtype).reshape(B, -1, D)


class MoE(Mixture):
    """A router and its experts, and the expert that every token uses."""

    @nn.compact
    def __call__(self, x: jax.Array, position_BT: jax.Array, site: SiteRecorder) -> jax.Array:
        """Return the weighted sum of expert outputs."""
        c, p = self.config, self.precision
        y = self._mix(x, x, position_BT, site)
        if c.shared_expert_size:
            shared = MLP(c, p, c.shared_expert_size, name="shared_experts")(x, site)
            if c.gates_shared_expert:
                gate = Linear(1, False, p, name="shared_expert_gate")(x)
                shared = jax.nn.sigmoid(gate) * shared
            y = y + shared
        return site("mlp.output", y)


class Block(decoder.Block):
    """One layer, with an MLP or a mixture of experts."""

    config: MoEConfig

    def _mlp(
        self, x: jax.Array, normed: jax.Array, context: AttentionContext, site: SiteRecorder
    ) -> jax.Array:
        if not self.config.is_moe_layer(self.layer):
            return super()._mlp(x, normed, context, site)
        mixture = MoE(self.config, self.precision, name="mlp")
        y: jax.Array = mixture(normed, context.position_BT, site)
        return y


class MoEDecoder(Decoder):
    """A decoder with experts."""

    block = Block


def moe_family(
    config: type[MoEConfig], module: type[Decoder] = MoEDecoder, gates: tuple[str, ...] = ()
) -> Family:
    """Return the row of an MoE family; its dense layers have the linears of an MLP.

    gates: `SHARED_GATE` if the shared expert has a gate.
    """
    row = decoder.decoder_family(config, module)
    experts, shared = (
        tuple(
            m._replace(linear=m.linear.replace("mlp.", f"mlp.{name}.")) for m in row.channel_linears
        )
        for name in ("experts", "shared_experts")
    )
    gate, up, down = (m.linear for m in shared)
    return dataclasses.replace(
        row,
        router=f"mlp.{config.router}",
        linear_groups=(
            *row.linear_groups,
            # The norm before it is read by the router, too.
            LinearGroup("mlp_norm", (gate, up, *gates), "mlp.output", None),
            LinearGroup("mlp.post", (down,), "mlp.output", up),
        ),
        channel_linears=(),
        expert_linears=(*experts, *shared, *row.channel_linears),
    )
