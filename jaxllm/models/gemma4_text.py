"""The text models of Gemma 4 (Google 2026): E2B, E4B, 12B, 26B-A4B and 31B.

Layers with full attention have larger heads, and the last layers may read keys and values of
earlier ones. Small models add an embedding of each token to each layer. 26B-A4B has experts beside
each MLP.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
from msgspec import Meta

from jaxllm import ops
from jaxllm.config.model import HeadCount, HiddenSize, Positive, VocabSize
from jaxllm.errors import ConfigError
from jaxllm.models import decoder
from jaxllm.models.decoder import Decoder, decoder_family
from jaxllm.models.decoder_block import Attention
from jaxllm.models.gemma2 import GemmaConfig
from jaxllm.models.hybrid_attention import LocalRopeConfig
from jaxllm.models.layers import AttentionContext
from jaxllm.models.modules import Embedding, Linear, RMSNorm, get_param
from jaxllm.models.moe import ExpertCount, Mixture, MoEConfig, Routing
from jaxllm.models.sites import SiteRecorder

Count = Annotated[int, Meta(ge=0, le=1 << 16)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4Config(LocalRopeConfig, MoEConfig):
    """Gemma 4.

    Attributes:
        global_head_dim, num_global_key_value_heads: Of layers with full attention.
        attention_k_eq_v: Whether the values of these layers are the output of `k_proj`.
        num_kv_shared_layers: How many of the last layers read keys and values of the last layer of
            their type before them.
        use_double_wide_mlp: Whether the MLPs of these layers have twice as many hidden channels.
        hidden_size_per_layer_input: Size of the layers' own embeddings; 0: there are none.
        enable_moe_block: Whether layers also have experts, of moe_intermediate_size hidden channels
            each.
    """

    model_type: ClassVar[str] = "gemma4_text"
    norms: ClassVar[tuple[str | None, ...]] = GemmaConfig.norms
    qk_norm: ClassVar[str | None] = "each head"
    router: ClassVar[str] = "proj"

    global_head_dim: HeadCount
    num_global_key_value_heads: HeadCount
    attention_k_eq_v: bool = False
    num_kv_shared_layers: Count = 0
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: Count = 0
    vocab_size_per_layer_input: VocabSize = 1
    enable_moe_block: bool = False
    num_experts: ExpertCount = 1
    num_experts_per_tok: ExpertCount = 1
    moe_intermediate_size: HiddenSize = 1
    attention_bias: bool = False
    final_logit_softcapping: Positive | None = None

    def _complaints(self) -> list[str]:
        if complaints := super()._complaints():
            return complaints
        complaints = self.rope.complaints(self.global_head_dim)
        if self.num_attention_heads % self.num_global_key_value_heads:
            complaints.append(
                f"num_attention_heads ({self.num_attention_heads}) is not a multiple of"
                f" num_global_key_value_heads ({self.num_global_key_value_heads})"
            )
        if self.rope == self.local_rope and self.head_dim != self.global_head_dim:
            complaints.append("rope and local_rope must differ, since sizes of heads do")
        if not set(self.layer_types) <= set(self.layer_types[: self._own_kv_layers]):
            complaints.append(
                f"num_kv_shared_layers ({self.num_kv_shared_layers}) leaves no layer of a type to"
                " read from"
            )
        if self.hidden_size_per_layer_input and self.vocab_size_per_layer_input < self.vocab_size:
            complaints.append(
                f"vocab_size_per_layer_input ({self.vocab_size_per_layer_input}) is less than"
                f" vocab_size ({self.vocab_size})"
            )
        return complaints

    @property
    def expert_size(self) -> int:
        return self.moe_intermediate_size

    @property
    def shared_expert_size(self) -> int:
        return self.intermediate_size if self.enable_moe_block else 0

    @property
    def routing(self) -> Routing:
        return Routing(count=self.num_experts_per_tok, scales_experts=True)

    def is_moe_layer(self, layer: int) -> bool:
        return self.enable_moe_block

    @property
    def _own_kv_layers(self) -> int:
        return max(0, self.num_hidden_layers - self.num_kv_shared_layers)

    @property
    def links_layers(self) -> bool:
        return bool(self.num_kv_shared_layers or self.hidden_size_per_layer_input)

    def kv_source(self, layer: int) -> int:
        if layer < self._own_kv_layers:
            return layer
        own = self.layer_types[: self._own_kv_layers]
        return max(i for i, kind in enumerate(own) if kind == self.layer_types[layer])

    def kv_heads(self, layer: int) -> int:
        if self.kv_source(layer) != layer:
            return 0
        return (
            self.num_key_value_heads if self.is_sliding(layer) else self.num_global_key_value_heads
        )

    def layer_head_dim(self, layer: int) -> int:
        return self.head_dim if self.is_sliding(layer) else self.global_head_dim

    def mlp_size(self, layer: int) -> int:
        doubled = self.use_double_wide_mlp and layer >= self._own_kv_layers
        return self.intermediate_size * (2 if doubled else 1)

    def layer_template(self, layer: int) -> int:
        forms = [
            (self.layer_types[i], i < self._own_kv_layers) for i in range(self.num_hidden_layers)
        ]
        return forms.index(forms[layer])

    def with_layers(self, indices: Sequence[int]) -> Self:
        """Return the configuration with these layers. Raises ConfigError if layers depend on each
        other or on a table of all layers.
        """
        if self.links_layers:
            raise ConfigError(
                f"layers of this {self.model_type} model cannot be dropped: num_kv_shared_layers"
                " or hidden_size_per_layer_input is not 0, so that they depend on each other"
            )
        return super().with_layers(indices)

    @property
    def attention_scale(self) -> float:
        return 1.0

    @property
    def embedding_scale(self) -> float:
        return float(self.hidden_size**0.5)

    @property
    def logits_cap(self) -> float | None:
        return self.final_logit_softcapping


class Gemma4Attention(Attention):
    """Attention with a norm, without weights, of the values."""

    config: Gemma4Config

    def _linears(self) -> Sequence[Linear]:
        c, layer = self.config, self.layer
        count = 1 if not c.kv_heads(layer) else 3 - (c.attention_k_eq_v and not c.is_sliding(layer))
        return super()._linears()[:count]

    def _split_heads(
        self, terms: Sequence[jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array, None]:
        c, H = self.config, self.config.layer_head_dim(self.layer)
        q, *kv = (y.reshape(*y.shape[:2], -1, H) for y in terms)
        if not kv:
            none = q[:, :, :0]
            return RMSNorm(c.norm_eps, name="q_norm")(q), none, none, None
        v = ops.rms_norm(kv[-1], jnp.ones(H, jnp.float32), eps=c.norm_eps)
        q, k = self._norm_qk(q, kv[0])
        return q, k, v, None


class ParallelMoE(Mixture):
    """Experts that run beside an MLP. A norm precedes their router."""

    config: Gemma4Config

    @nn.compact
    def __call__(
        self, x: jax.Array, normed: jax.Array, position_BT: jax.Array, site: SiteRecorder
    ) -> jax.Array:
        """Return the weighted sum of the experts' outputs. x: What the router reads."""
        scale_D = get_param(self, "scale", x.shape[-1])
        routed = ops.rms_norm(x, scale_D, eps=self.config.norm_eps) * x.shape[-1] ** -0.5
        return self._mix(routed, normed, position_BT, site)


class Block(decoder.Block):
    """A layer that adds its own embeddings of the tokens, and scales its output."""

    config: Gemma4Config

    def _mixer(self) -> Any:
        return Gemma4Attention(self.config, self.precision, self.layer, name="self_attn")

    def _mlp(
        self, x: jax.Array, normed: jax.Array, context: AttentionContext, site: SiteRecorder
    ) -> jax.Array:
        y = super()._mlp(x, normed, context, site)
        if not self.config.enable_moe_block:
            return y
        mixture = ParallelMoE(self.config, self.precision, name="moe")
        read = self._norm("pre_feedforward_layernorm_2", x)
        mixed = mixture(x, read, context.position_BT, site)
        y = self._norm("post_feedforward_layernorm_1", y)
        return y + self._norm("post_feedforward_layernorm_2", mixed)

    def _finish(self, x: jax.Array, context: AttentionContext) -> jax.Array:
        c, p, size = self.config, self.precision, self.config.hidden_size_per_layer_input
        if size:
            gate = Linear(size, False, p, name="per_layer_input_gate")(x)
            own = ops.ACTIVATIONS[c.hidden_act](gate) * context.layer_embeddings[self.layer]
            y = Linear(x.shape[-1], False, p, name="per_layer_projection")(own)
            x = x + self._norm("post_per_layer_input_norm", y)
        return x * get_param(self, "layer_scalar", 1)[0].astype(x.dtype)


class Gemma4Decoder(Decoder):
    """The model. Tokens are also looked up in a table of all layers' embeddings."""

    block = Block

    def embed_layers(self, token_BT: jax.Array, x: jax.Array) -> tuple[jax.Array, ...]:
        c: Any = self.config
        P, L = c.hidden_size_per_layer_input, c.num_hidden_layers
        if not P:
            return ()
        table = Embedding(c.vocab_size_per_layer_input, L * P, name="embed_tokens_per_layer")
        rows = table(token_BT)[0].astype(x.dtype) * jnp.asarray(P**0.5, x.dtype)
        name = "per_layer_model_projection"
        y = Linear(L * P, False, self.precision, name=name)(x) * c.hidden_size**-0.5
        y = y.reshape(*x.shape[:2], L, P)
        y = RMSNorm(c.norm_eps, name="per_layer_projection_norm")(y)
        both = (y + rows.reshape(y.shape)) * 2**-0.5
        return tuple(both[:, :, i] for i in range(L))


_ROW = decoder_family(Gemma4Config, Gemma4Decoder)
FAMILY = dataclasses.replace(
    _ROW,
    router="moe.proj",
    output_scale="layer_scalar",
    # A norm is between the values and `v_proj`.
    linear_groups=tuple(
        group._replace(source=None) if group.input == "attn.z" else group
        for group in _ROW.linear_groups
    ),
)
