"""Command R7B and Command A (Cohere 2024): attention and MLP read one layer norm, in parallel.

Only layers with a sliding window have rotary positions. The norms have no biases.
"""

import dataclasses
from typing import ClassVar

import flax.linen as nn
import jax

from jaxllm.config.model import Positive
from jaxllm.models.decoder import Decoder, decoder_family
from jaxllm.models.decoder_block import MLP, Attention
from jaxllm.models.hybrid_attention import SlidingRopeConfig
from jaxllm.models.layers import AttentionContext, Layer
from jaxllm.models.modules import LayerNorm
from jaxllm.weights.precision import Precision


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cohere2Config(SlidingRopeConfig):
    """Cohere 2. logit_scale: factor on logits."""

    model_type: ClassVar[str] = "cohere2"
    norms: ClassVar[tuple[str | None, ...]] = ("input_layernorm", None, None, None)
    use_parallel_residual: ClassVar[bool] = True

    attention_bias: bool = False
    logit_scale: Positive = 0.0625

    @property
    def logits_scale(self) -> float:
        return self.logit_scale


class Block(nn.Module):
    """One layer: attention and an MLP after the same norm."""

    config: Cohere2Config
    precision: Precision
    layer: int

    @nn.compact
    def __call__(self, x: jax.Array, context: AttentionContext) -> Layer:
        c, p = self.config, self.precision
        site = context.site_recorder(self.layer)
        x = site("resid_pre", x)
        norm = LayerNorm(c.norm_eps, has_bias=False, name="input_layernorm")
        normed = site("attn_norm", context.gather_tokens(norm(x)))
        attended = Attention(c, p, self.layer, name="self_attn")(normed, context, site)
        x = site("resid_mid", x + site("attn_out", attended.x))
        y = MLP(c, p, c.intermediate_size, name="mlp")(site("mlp_norm", normed), site)
        x = site("resid_post", x + site("mlp_out", site("mlp.output", y)))
        return Layer(attended, x, site.recorded)


class Cohere2(Decoder):
    """The model."""

    config: Cohere2Config
    block = Block

    def final_norm(self, x: jax.Array) -> jax.Array:
        y: jax.Array = LayerNorm(self.config.norm_eps, has_bias=False, name="norm")(x)
        return y


_ROW = decoder_family(Cohere2Config, Cohere2)
# The norm is read by both, so that the scales of one's channels cannot be divided out of it.
FAMILY = dataclasses.replace(
    _ROW,
    linear_groups=tuple(
        g._replace(source=None) if g.input.endswith("_norm") else g for g in _ROW.linear_groups
    ),
)
