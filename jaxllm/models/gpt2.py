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
from jaxllm.models.layers import (
    Attended,
    Embedding,
    Layer,
    LayerNorm,
    Linear,
    Mass,
    Trace,
    attended,
    pick,
    unembed,
)
from jaxllm.ops.masked import attend_masked
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
        attention_mass: Mass = False,
        *,
        embeddings_BTD: jax.Array | None = None,
        mask_BTS: jax.Array | None = None,
    ) -> Trace:
        """As `Llama.__call__`; `length_B` is not read. Positions past the table give NaN.

        embeddings_BTD: of the tokens alone; the table of positions is added to them.
        """
        c, p = self.config, self.precision
        x, table = Embedding(c.vocab_size, c.hidden_size, name="wte")(token_BT)
        places, _ = Embedding(c.max_position_embeddings, c.hidden_size, name="wpe")(
            jnp.maximum(position_BT, 0)
        )
        x = x if embeddings_BTD is None else embeddings_BTD
        x = x.astype(p.activations) + places.astype(p.activations)
        embeddings, layers = x, []
        for i in range(c.num_hidden_layers):
            parts = [ops.Part(s.k[i], s.v[i], s.position_BS) for s in segments]
            block = Block(c, p, i, attention_mass, name=f"h.{i}")
            layers.append(block(x, position_BT, parts, mask_BTS))
            x = layers[-1].x
        norm = LayerNorm(c.norm_eps, name="ln_f")(x)
        logits = unembed(c, p, table, pick(norm, column_B))
        return Trace(embeddings, tuple(layers), norm, logits)


class Block(nn.Module):
    config: GPT2Config
    precision: Precision
    layer: int
    attention_mass: Mass

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        position_BT: jax.Array,
        parts: list[ops.Part],
        mask_BTS: jax.Array | None = None,
    ) -> Layer:
        c, p = self.config, self.precision
        normed = LayerNorm(c.norm_eps, name="ln_1")(x)
        attention = Attention(c, p, self.layer, self.attention_mass, name="attn")
        attended = attention(normed, position_BT, parts, mask_BTS)
        x = x + attended.x
        mlp_normed = LayerNorm(c.norm_eps, name="ln_2")(x)
        y = MLP(c, p, name="mlp")(mlp_normed)
        return Layer(normed, attended, mlp_normed, y, x + y)


class Attention(nn.Module):
    config: GPT2Config
    precision: Precision
    layer: int
    attention_mass: Mass

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        position_BT: jax.Array,
        parts: list[ops.Part],
        mask_BTS: jax.Array | None = None,
    ) -> Attended:
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
        if mask_BTS is not None:
            out, mass = attend_masked(q, parts, mask_BTS, scale=scale), None
        else:
            out, mass = attended(q, position_BT, parts, scale, None, self.attention_mass)
        y = Linear(D, True, p, name="c_proj")(out.reshape(B, T, D))
        return Attended(q, k, v, out, y, mass)


class MLP(nn.Module):
    config: GPT2Config
    precision: Precision

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c, p = self.config, self.precision
        inner = ops.ACTIVATIONS[c.hidden_act](Linear(c.intermediate_size, True, p, name="c_fc")(x))
        return Linear(x.shape[-1], True, p, name="c_proj")(inner)
