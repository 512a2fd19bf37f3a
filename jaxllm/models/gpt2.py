"""GPT-2 (Radford et al. 2019), with Hugging Face's parameter names.

Weights are `[out, in]` as everywhere here; the checkpoint's Conv1D matrices are transposed on
loading.
"""

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxllm.config.model import ModelConfig
from jaxllm.models.decoder import Decoder
from jaxllm.models.family import Family, LinearGroup, ParallelLinear
from jaxllm.models.layers import AttentionContext, AttentionOutput, Layer, attend
from jaxllm.models.modules import Embedding, LayerNorm, Linear, UngatedMLP
from jaxllm.models.sites import SiteRecorder
from jaxllm.weights.precision import Precision


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPT2Config(ModelConfig):
    """GPT-2: layer norm, learned absolute positions, ungated MLP, biases everywhere."""

    model_type: ClassVar[str] = "gpt2"

    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False

    @property
    def learns_positions(self) -> bool:
        return True

    @property
    def position_limit(self) -> int:
        """The number of rows of the position table."""
        return self.max_position_embeddings

    def layer_signature(self, layer: int) -> tuple[Any, ...]:
        return (layer if self.scale_attn_by_inverse_layer_idx else 0,)

    def _complaints(self) -> list[str]:
        complaints = super()._complaints()
        if complaints:
            return complaints
        if self.num_key_value_heads != self.num_attention_heads:
            complaints.append("num_key_value_heads must equal num_attention_heads")
        if self.head_dim * self.num_attention_heads != self.hidden_size:
            complaints.append(
                f"hidden_size ({self.hidden_size}) is not num_attention_heads"
                f" ({self.num_attention_heads}) x head_dim ({self.head_dim})"
            )
        return complaints


class Block(nn.Module):
    """One layer: attention and an MLP, each after a norm, with residual connections."""

    config: GPT2Config
    precision: Precision
    layer: int

    @nn.compact
    def __call__(self, x: jax.Array, context: AttentionContext) -> Layer:
        c, p = self.config, self.precision
        site = context.site_recorder(self.layer)
        x = site("resid_pre", x)
        normed = site("attn_norm", context.gather_tokens(LayerNorm(c.norm_eps, name="ln_1")(x)))
        attended = Attention(c, p, self.layer, name="attn")(normed, context, site)
        x = site("resid_mid", x + site("attn_out", attended.x))
        normed = site("mlp_norm", context.gather_tokens(LayerNorm(c.norm_eps, name="ln_2")(x)))
        y = UngatedMLP(c, p, ("c_fc", "c_proj"), name="mlp")(normed, site)
        x = site("resid_post", x + site("mlp_out", y))
        return Layer(attended, x, site.recorded)


class Attention(nn.Module):
    """Attention without rotation: positions were added to the embeddings."""

    config: GPT2Config
    precision: Precision
    layer: int

    @nn.compact
    def __call__(
        self, x: jax.Array, context: AttentionContext, site: SiteRecorder
    ) -> AttentionOutput:
        c, p = self.config, self.precision
        B, T, D = x.shape
        qkv = Linear(3 * D, True, p, name="c_attn")(x)
        q, k, v = jnp.moveaxis(qkv.reshape(B, T, 3, c.num_attention_heads, c.head_dim), 2, 0)
        q, k, v = site("attn.q", q), site("attn.k", k), site("attn.v", v)
        scale = c.head_dim**-0.5 if c.scale_attn_weights else 1.0
        if c.scale_attn_by_inverse_layer_idx:
            scale /= self.layer + 1
        project_out = Linear(D, True, p, name="c_proj")
        cache_options: Any = {"cache_dtype": p.cache, "scale": scale, "window": None}
        return attend(context, site, self.layer, q, k, v, project_out, **cache_options)


class GPT2(Decoder):
    """The model: embeddings of positions are added to those of tokens.

    Positions past the table give NaN.
    """

    config: GPT2Config
    block = Block
    layers = "h"
    token_table = "wte"

    def embed_positions(self, position_BT: jax.Array) -> jax.Array | None:
        c = self.config
        table = Embedding(c.max_position_embeddings, c.hidden_size, name="wpe")
        return table(jnp.maximum(position_BT, 0))[0]

    def final_norm(self, x: jax.Array) -> jax.Array:
        y: jax.Array = LayerNorm(self.config.norm_eps, name="ln_f")(x)
        return y


FAMILY = Family(
    config=GPT2Config,
    module=GPT2,
    token_table="wte",
    position_table="wpe",
    embeddings="embeddings",  # token plus position embeddings
    layers="h",
    attention_norm="ln_1",
    attention="attn",
    mlp_norm="ln_2",
    mlp_down="mlp.c_proj",
    norm="ln_f",
    block=Block,
    linear_groups=(
        LinearGroup("attn_norm", ("attn.c_attn",), "attn.output", "ln_1"),
        LinearGroup("attn.z", ("attn.c_proj",), "attn.output", "attn.c_attn"),
        LinearGroup("mlp_norm", ("mlp.c_fc",), "mlp.output", "ln_2"),
        LinearGroup("mlp.post", ("mlp.c_proj",), "mlp.output", None),
    ),
    head_linears=(
        ParallelLinear("attn.c_attn", 0, fused_parts=3),
        ParallelLinear("attn.c_proj", 1),
    ),
    channel_linears=(ParallelLinear("mlp.c_fc", 0), ParallelLinear("mlp.c_proj", 1)),
)
