"""GPT-2 (Radford et al. 2019), with Hugging Face's names for the parameters.

Weights are `[out, in]` as everywhere here; the checkpoint's Conv1D matrices are transposed on
loading.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxllm import ops
from jaxllm.cache.kv import Segment
from jaxllm.config import GPT2Config
from jaxllm.models.layers import Attended, Embedding, LayerNorm, Linear, Trace, pick, unembed
from jaxllm.weights.precision import Precision


class GPT2(nn.Module):
    config: GPT2Config
    precision: Precision

    @nn.compact
    def __call__(
        self,
        token_BT: jax.Array,
        position_BT: jax.Array,
        length_B: jax.Array,
        segments: tuple[Segment, ...] = (),
        column_B: jax.Array | None = None,
        attention_mass: bool = False,
    ) -> Trace:
        """As `Llama.__call__`; `length_B` is not read. Positions past the table give NaN."""
        c, p = self.config, self.precision
        x, table = Embedding(c.vocab_size, c.hidden_size, name="wte")(token_BT)
        places, _ = Embedding(c.max_position_embeddings, c.hidden_size, name="wpe")(
            jnp.maximum(position_BT, 0)
        )
        x = x.astype(p.activations) + places.astype(p.activations)
        hidden_states, layers = [x], []
        for i in range(c.num_hidden_layers):
            parts = [ops.Part(s.k[i], s.v[i], s.position_BS) for s in segments]
            x, attended = Block(c, p, i, attention_mass, name=f"h.{i}")(x, position_BT, parts)
            hidden_states.append(x)
            layers.append(attended)
        hidden_states[-1] = x = LayerNorm(c.norm_eps, name="ln_f")(x)
        logits = unembed(c, p, table, pick(x, column_B))
        return Trace.of(logits, hidden_states, layers)


class Block(nn.Module):
    config: GPT2Config
    precision: Precision
    layer: int
    attention_mass: bool

    @nn.compact
    def __call__(
        self, x: jax.Array, position_BT: jax.Array, parts: list[ops.Part]
    ) -> tuple[jax.Array, Attended]:
        c, p = self.config, self.precision
        normed = LayerNorm(c.norm_eps, name="ln_1")(x)
        attention = Attention(c, p, self.layer, self.attention_mass, name="attn")
        attended = attention(normed, position_BT, parts)
        x = x + attended.x
        normed = LayerNorm(c.norm_eps, name="ln_2")(x)
        return x + MLP(c, p, name="mlp")(normed), attended


class Attention(nn.Module):
    config: GPT2Config
    precision: Precision
    layer: int
    attention_mass: bool

    @nn.compact
    def __call__(self, x: jax.Array, position_BT: jax.Array, parts: list[ops.Part]) -> Attended:
        c, p = self.config, self.precision
        B, T, D = x.shape
        qkv = Linear(3 * D, True, p, name="c_attn")(x)
        q, k, v = jnp.moveaxis(qkv.reshape(B, T, 3, c.num_attention_heads, c.head_dim), 2, 0)
        kept = parts[0].k_BSKH.dtype if parts else jnp.dtype(p.cache)  # as in llama.py
        k, v = ops.keep_as(k, kept), ops.keep_as(v, kept)
        scale = c.head_dim**-0.5 if c.scale_attn_weights else 1.0
        if c.scale_attn_by_inverse_layer_idx:
            scale /= self.layer + 1
        parts = [*parts, ops.Part(k, v, position_BT)]
        out, mass = ops.attend(
            q, position_BT, parts, scale=scale, window=None, mass=self.attention_mass
        )
        return Attended(Linear(D, True, p, name="c_proj")(out.reshape(B, T, D)), k, v, mass)


class MLP(nn.Module):
    config: GPT2Config
    precision: Precision

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c, p = self.config, self.precision
        inner = ops.ACTIVATIONS[c.hidden_act](Linear(c.intermediate_size, True, p, name="c_fc")(x))
        return Linear(x.shape[-1], True, p, name="c_proj")(inner)
