"""GPT-NeoX and Pythia (Black et al. 2022): parallel attention and MLP, partial rotary embedding.

Checkpoints store queries, keys and values as one matrix, interleaved by head; here they are
separate.
"""

import dataclasses
from typing import ClassVar

import flax.linen as nn
import jax

from jaxllm.models.decoder import Decoder
from jaxllm.models.decoder_block import Attention
from jaxllm.models.decoder_config import DecoderConfig
from jaxllm.models.family import Family, LinearGroup, ParallelLinear
from jaxllm.models.layers import AttentionContext, Layer
from jaxllm.models.modules import LayerNorm, UngatedMLP
from jaxllm.weights.precision import Precision


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTNeoXConfig(DecoderConfig):
    """GPT-NeoX. use_parallel_residual: attention and MLP have the same input."""

    model_type: ClassVar[str] = "gpt_neox"

    attention_bias: bool = True
    use_parallel_residual: bool = True

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        return (self.attention_bias, self.attention_bias, True)


class Block(nn.Module):
    """One layer: attention and an MLP, each after a norm, with residual connections."""

    config: GPTNeoXConfig
    precision: Precision
    layer: int

    @nn.compact
    def __call__(self, x: jax.Array, context: AttentionContext) -> Layer:
        c, p = self.config, self.precision
        site = context.site_recorder(self.layer)
        x = site("resid_pre", x)
        normed = context.gather_tokens(LayerNorm(c.norm_eps, name="input_layernorm")(x))
        attention = Attention(c, p, self.layer, out_name="dense", name="attention")
        attended = attention(site("attn_norm", normed), context, site)
        after = site("resid_mid", x + site("attn_out", attended.x))
        read = x if c.use_parallel_residual else after
        normed = context.gather_tokens(LayerNorm(c.norm_eps, name="post_attention_layernorm")(read))
        mlp = UngatedMLP(c, p, ("dense_h_to_4h", "dense_4h_to_h"), name="mlp")
        y = mlp(site("mlp_norm", normed), site)
        x = site("resid_post", after + site("mlp_out", y))
        return Layer(attended, x, site.recorded)


class GPTNeoX(Decoder):
    """The model."""

    config: GPTNeoXConfig
    block = Block
    token_table = "embed_in"

    def final_norm(self, x: jax.Array) -> jax.Array:
        y: jax.Array = LayerNorm(self.config.norm_eps, name="final_layer_norm")(x)
        return y


_QKV = ("attention.q_proj", "attention.k_proj", "attention.v_proj")

FAMILY = Family(
    config=GPTNeoXConfig,
    module=GPTNeoX,
    token_table="embed_in",
    position_table=None,
    embeddings="embed_in",
    layers="layers",
    attention_norm="input_layernorm",
    attention="attention",
    mlp_norm="post_attention_layernorm",
    mlp_down="mlp.dense_4h_to_h",
    norm="final_layer_norm",
    block=Block,
    linear_groups=(
        LinearGroup("attn_norm", _QKV, "attn.output", "input_layernorm"),
        LinearGroup("attn.z", ("attention.dense",), "attn.output", "attention.v_proj"),
        LinearGroup("mlp_norm", ("mlp.dense_h_to_4h",), "mlp.output", "post_attention_layernorm"),
        LinearGroup("mlp.post", ("mlp.dense_4h_to_h",), "mlp.output", None),
    ),
    head_linears=(
        *(ParallelLinear(path, 0) for path in _QKV),
        ParallelLinear("attention.dense", 1),
    ),
    channel_linears=(
        ParallelLinear("mlp.dense_h_to_4h", 0),
        ParallelLinear("mlp.dense_4h_to_h", 1),
    ),
)
