"""Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1), absorbed.

A token's keys and values of all heads are linear functions of one latent vector. So the cache holds
one key head: the rotated dimensions, which all heads share, then the latent. Queries are mapped to
it instead of expanding the keys, and the heads' values are computed from the weighted latents.
"""

import dataclasses
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxllm import ops
from jaxllm.config.model import HeadCount, HiddenSize, Rope
from jaxllm.models import decoder, moe
from jaxllm.models.decoder import Decoder
from jaxllm.models.decoder_config import DecoderConfig
from jaxllm.models.family import Family, LinearGroup
from jaxllm.models.layers import AttentionContext, AttentionOutput, attend
from jaxllm.models.modules import Linear, RMSNorm, get_param, project
from jaxllm.models.moe import GroupedExpertsConfig
from jaxllm.models.sites import SiteRecorder
from jaxllm.ops.products import einsum
from jaxllm.ops.target import is_accelerator
from jaxllm.weights.experts import expert_linears
from jaxllm.weights.precision import Precision
from jaxllm.weights.types.base import WeightBase

INNER_EPS = 1e-6  # of the norms within attention, whatever `norm_eps` is


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig(DecoderConfig):
    """A decoder with latent attention. `head_dim` and `num_key_value_heads` are the cache's.

    Attributes:
        q_lora_rank: The size of the queries' own latent; None: queries have none.
        kv_lora_rank: The size of the latent.
        qk_nope_head_dim, qk_rope_head_dim: The dimensions of a head's queries without and with
            rotation.
        v_head_dim: The size of a head's values.
        attention_bias: Whether the linears to the latents, and the output, have biases.
    """

    q_lora_rank: HiddenSize | None = None
    kv_lora_rank: HiddenSize
    qk_nope_head_dim: HeadCount
    qk_rope_head_dim: HeadCount
    v_head_dim: HeadCount
    attention_bias: bool = False

    def _complaints(self) -> list[str]:
        complaints, size = super()._complaints(), self.kv_lora_rank + self.qk_rope_head_dim
        if (self.num_key_value_heads, self.head_dim) != (1, size):
            complaints.append(
                f"the cache must have one key head of kv_lora_rank + qk_rope_head_dim ({size})"
                f" numbers, got {self.num_key_value_heads} of {self.head_dim}"
            )
        return complaints

    def value_heads(self, layer: int) -> int:
        return 0

    def value_dim(self, layer: int) -> int:
        return self.v_head_dim

    def layer_rope(self, layer: int) -> Rope | None:
        # Rounded up: the product with head_dim is rounded down to an integer.
        share = math.nextafter(self.qk_rope_head_dim / self.head_dim, 1.0)
        return dataclasses.replace(self.rope, partial_rotary_factor=share)

    def _ropes(self) -> tuple[Rope, ...]:
        rope = self.layer_rope(0)
        return () if rope is None else (rope,)

    @property
    def attention_scale(self) -> float:
        scale, rope = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5, self.rope
        if rope.rope_type == "yarn" and rope.mscale_all_dim and (rope.factor or 1) > 1:
            scale *= (0.1 * rope.mscale_all_dim * math.log(rope.factor or 1) + 1) ** 2
        return float(scale)


class HeadLinears(nn.Module):
    """A linear of each head, without bias. features: the number of outputs of a head."""

    precision: Precision
    features: int

    @nn.compact
    def __call__(self, x_BTNI: jax.Array) -> jax.Array:
        """Return float32 `[B, T, N, O]`."""
        B, T, N, columns = x_BTNI.shape
        weight = get_param(self, "weight", N, self.features, columns)
        if is_accelerator() and not isinstance(weight, WeightBase):
            return einsum("BTNI,NOI->BTNO", x_BTNI, weight)
        x_AI = jnp.moveaxis(x_BTNI, 2, 0).reshape(-1, columns)
        head_A = jnp.repeat(jnp.arange(N, dtype=jnp.int32), B * T)
        y_AO = expert_linears(x_AI, (weight,), head_A, int8_inputs=self.precision.int8_inputs)[0]
        return jnp.moveaxis(y_AO.reshape(N, B, T, -1), 0, 2)


class LatentAttention(nn.Module):
    """Attention to latents."""

    config: LatentConfig
    precision: Precision
    layer: int

    @nn.compact
    def __call__(
        self, x: jax.Array, context: AttentionContext, site: SiteRecorder
    ) -> AttentionOutput:
        c, p, bias = self.config, self.precision, self.config.attention_bias
        (B, T, D), rank, wide = x.shape, c.kv_lora_rank, c.qk_rope_head_dim
        features = c.num_attention_heads * (c.qk_nope_head_dim + wide)
        latents = Linear(rank + wide, bias, p, name="kv_a_proj_with_mqa")
        if c.q_lora_rank is None:
            q, latent = project(x, Linear(features, False, p, name="q_proj"), latents)
        else:
            q, latent = project(x, Linear(c.q_lora_rank, bias, p, name="q_a_proj"), latents)
            q = RMSNorm(INNER_EPS, name="q_a_layernorm")(q)
            q = Linear(features, False, p, name="q_b_proj")(q)
        q = q.reshape(B, T, c.num_attention_heads, -1)
        absorbed = HeadLinears(p, rank, name="k_b_proj")(q[..., : c.qk_nope_head_dim])
        # Queries and weighted latents stay float32: expanded keys and values would be rounded once.
        turned = q[..., c.qk_nope_head_dim :].astype(jnp.float32)
        q = jnp.concatenate([turned, absorbed], axis=-1)
        normed = RMSNorm(INNER_EPS, name="kv_a_layernorm")(latent[..., :rank])
        k = jnp.concatenate([latent[..., rank:], normed], axis=-1)[:, :, None]
        q, k = site("attn.q", q), site("attn.k", k)
        rope = c.layer_rope(self.layer)
        assert rope is not None
        angles = context.angles[c.ropes.index(rope)]
        expand = HeadLinears(p, c.v_head_dim, name="v_b_proj")
        return attend(
            context,
            site,
            self.layer,
            ops.rotate(q, *angles),
            ops.rotate(k, *angles),
            k[:, :, :0],
            Linear(D, bias, p, name="o_proj"),
            cache_dtype=p.cache,
            scale=c.attention_scale,
            window=None,
            kind=c.attention_kind(self.layer),
            rope=rope,
            expand=lambda heads: expand(heads[..., wide:]).astype(x.dtype),
        )


class Block(decoder.Block):
    """One layer with latent attention."""

    config: LatentConfig

    def _mixer(self) -> Any:
        return LatentAttention(self.config, self.precision, self.layer, name="self_attn")


class LatentDecoder(Decoder):
    """A decoder with latent attention."""

    block = Block


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentMoEConfig(LatentConfig, GroupedExpertsConfig):
    """A decoder with latent attention and, after some dense layers, experts."""


class MoEBlock(Block, moe.Block):
    """One layer with latent attention, with an MLP or a mixture of experts."""

    config: LatentMoEConfig


class LatentMoEDecoder(Decoder):
    """A decoder with latent attention and experts."""

    block = MoEBlock


def latent_moe_family(config: type[LatentMoEConfig]) -> Family:
    """Return the row of a family with latent attention and experts."""
    row = moe.moe_family(config, LatentMoEDecoder)
    widths = ("intermediate_size", "moe_intermediate_size")
    return dataclasses.replace(latent_family(row), width_fields=widths)


def latent_family(row: Family) -> Family:
    """Return the row of a family with latent attention, from that of its other parts.

    The inputs of `q_b_proj` and of the linears of heads are no sites.
    """
    latent = "self_attn.kv_a_proj_with_mqa"
    groups = (
        *(
            LinearGroup("attn_norm", (query, latent), "attn.output", row.attention_norm)
            for query in ("self_attn.q_proj", "self_attn.q_a_proj")  # a model has one of them
        ),
        LinearGroup("attn.z", ("self_attn.o_proj",), "attn.output", None),
    )
    return dataclasses.replace(
        row, linear_groups=(*groups, *row.linear_groups[2:]), head_linears=()
    )
