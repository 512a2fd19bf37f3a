"""Llama (Touvron et al. 2023) and its family, with Hugging Face's names for the parameters."""

import dataclasses
from typing import ClassVar

import flax.linen as nn
import jax

from jaxllm import ops
from jaxllm.cache.kv import Segment
from jaxllm.config import ModelConfig, Rope, Tokens
from jaxllm.models.family import Family, Member, Site
from jaxllm.models.layers import (
    Angles,
    Attended,
    Embedding,
    Layer,
    Linear,
    Mass,
    RMSNorm,
    Scope,
    Trace,
    angles_of,
    attend,
    pick,
    project,
    run_block,
    unembed,
)
from jaxllm.weights.precision import Precision


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """Llama and its family: RMS norm, rotary positions, gated MLP, grouped-query attention."""

    model_type: ClassVar[str] = "llama"

    rope: Rope
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: Tokens | None = None

    def _complaints(self) -> list[str]:
        complaints = super()._complaints()
        if not complaints and self.head_dim % 2:
            complaints.append(f"head_dim must be even for rotary positions, got {self.head_dim}")
        elif not complaints and self.angles_follow_length and self.head_dim == 2:
            complaints.append("dynamic rotary scaling needs a head_dim above 2")
        elif not complaints and len(self.rope.divisors or ()) not in (0, self.head_dim // 2):
            complaints.append(
                f"rope.divisors are {len(self.rope.divisors or ())}, a head of {self.head_dim} has"
                f" {self.head_dim // 2} pairs"
            )
        return complaints

    @property
    def rotary(self) -> Rope:
        return self.rope

    def window(self, layer: int) -> int | None:
        return self.sliding_window

    @property
    def context_length(self) -> int:
        """Dynamic NTK scaling stretches the trained context by its factor as the text grows."""
        stretch = self.rope.factor if self.rope.rope_type == "dynamic" else 1.0
        return int(self.max_position_embeddings * (stretch or 1.0))


class Llama(nn.Module):
    """The model: a table of tokens, blocks, a norm, and logits.

    remat: see `layers.run_block`.
    """

    config: LlamaConfig
    precision: Precision
    remat: bool = False

    @nn.compact
    def __call__(
        self,
        token_BT: jax.Array,
        position_BT: jax.Array,
        length_B: jax.Array,
        segments: tuple[Segment, ...] = (),
        column_B: jax.Array | None = None,
        attention_mass: Mass = False,
        *,
        embeddings_BTD: jax.Array | None = None,
        angles: Angles | None = None,
        mask_BTS: jax.Array | None = None,
        document_BT: jax.Array | None = None,
    ) -> Trace:
        """Run tokens (ids `[B, T]`, positions `[B, T]`, -1 for padding) against cached segments.

        length_B: length of the text each row belongs to (dynamic rotary scaling alone reads it).
        column_B: the one column of each row whose logits are wanted; None for all.
        attention_mass: whether the trace says what every slot received.
        embeddings_BTD: what stands in for the table's rows of `token_BT`. angles: the cosines and
        sines `[B, T, H/2]` of the new tokens, else computed from their positions. mask_BTS: what
        each query sees of all slots and then the new tokens, as `attend_masked` takes it, in place
        of what positions and the sliding window say; there is no attention mass then.
        """
        c, p = self.config, self.precision
        x, table = Embedding(c.vocab_size, c.hidden_size, name="embed_tokens")(token_BT)
        x = (x if embeddings_BTD is None else embeddings_BTD).astype(p.activations)
        angles = angles or angles_of(c, position_BT, length_B)
        scope = Scope(position_BT, segments, mask_BTS, attention_mass, angles, document_BT)
        embeddings, layers = x, []
        for i in range(c.num_hidden_layers):
            layers.append(run_block(self.block(i), x, scope, self.remat))
            x = layers[-1].x
        norm = RMSNorm(c.norm_eps, name="norm")(x)
        logits = unembed(c, p, table, pick(norm, column_B))
        return Trace(embeddings, tuple(layers), norm, logits)

    def block(self, layer: int) -> nn.Module:
        """The module of a layer: what families that differ there override."""
        return Block(self.config, self.precision, layer, name=f"layers.{layer}")


class Block(nn.Module):
    """One layer: attention and a gated MLP, each after a norm and added to what came in."""

    config: LlamaConfig
    precision: Precision
    layer: int

    @nn.compact
    def __call__(self, x: jax.Array, scope: Scope) -> Layer:
        c, p = self.config, self.precision
        normed = RMSNorm(c.norm_eps, name="input_layernorm")(x)
        attended = self.attention()(normed, scope)
        x = x + attended.x
        mlp_normed = RMSNorm(c.norm_eps, name="post_attention_layernorm")(x)
        hidden, y = MLP(c, p, name="mlp")(mlp_normed)
        return Layer(normed, attended, mlp_normed, hidden, y, x + y)

    def attention(self) -> nn.Module:
        """Likewise."""
        return Attention(self.config, self.precision, self.layer, name="self_attn")


class Attention(nn.Module):
    """Rotary attention whose query heads share key heads in groups."""

    config: LlamaConfig
    precision: Precision
    layer: int

    @nn.compact
    def __call__(self, x: jax.Array, scope: Scope) -> Attended:
        c, p = self.config, self.precision
        B, T, D = x.shape
        assert scope.angles is not None

        def linear(name: str, heads: int) -> Linear:
            return Linear(heads * c.head_dim, c.attention_bias, p, name=name)

        K = c.num_key_value_heads
        heads = {"q_proj": c.num_attention_heads, "k_proj": K, "v_proj": K}
        q, k, v = (
            y.reshape(B, T, -1, c.head_dim)
            for y in project(x, *(linear(*item) for item in heads.items()))
        )
        return attend(
            scope,
            self.layer,
            ops.rotate(q, *scope.angles),
            ops.rotate(k, *scope.angles),
            v,
            Linear(D, c.attention_bias, p, name="o_proj"),
            cache_dtype=p.cache,
            scale=c.head_dim**-0.5,
            window=c.window(self.layer),
        )


class MLP(nn.Module):
    """Two linears side by side, one of them a gate, and a third: its input and its output."""

    config: LlamaConfig
    precision: Precision

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        c, p = self.config, self.precision
        gate, up = project(
            x,
            Linear(c.intermediate_size, c.mlp_bias, p, name="gate_proj"),
            Linear(c.intermediate_size, c.mlp_bias, p, name="up_proj"),
        )
        hidden = ops.ACTIVATIONS[c.hidden_act](gate) * up
        return hidden, Linear(x.shape[-1], c.mlp_bias, p, name="down_proj")(hidden)


FAMILY = Family(
    config=LlamaConfig,
    module=Llama,
    tokens="embed_tokens",
    positions=None,
    embeddings="embed_tokens",
    layers="layers",
    attention_norm="input_layernorm",
    attention="attention",
    mlp_norm="post_attention_layernorm",
    mlp_down="mlp.down_proj",
    norm="norm",
    block=Block,
    sites=(
        Site(
            "attention_norm",
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "attention.x",
            "input_layernorm",
        ),
        Site("attention.heads", ("self_attn.o_proj",), "attention.x", "self_attn.v_proj"),
        Site("mlp_norm", ("mlp.gate_proj", "mlp.up_proj"), "mlp", "post_attention_layernorm"),
        Site("mlp_hidden", ("mlp.down_proj",), "mlp", "mlp.up_proj"),
    ),
    heads=(
        Member("self_attn.q_proj", 0),
        Member("self_attn.k_proj", 0),
        Member("self_attn.v_proj", 0),
        Member("self_attn.o_proj", 1),
    ),
    channels=(Member("mlp.gate_proj", 0), Member("mlp.up_proj", 0), Member("mlp.down_proj", 1)),
    aliases=("mistral",),
)
