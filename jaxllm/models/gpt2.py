"""GPT-2 (Radford et al. 2019), with Hugging Face's parameter names.

Weights are `[out, in]` as everywhere here; the checkpoint's Conv1D matrices are transposed on
loading.
"""

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxllm import ops
from jaxllm.cache.kv import Segment
from jaxllm.config import ModelConfig
from jaxllm.models.family import Family, Member, Site
from jaxllm.models.layers import (
    ALONE,
    Across,
    Attended,
    Course,
    Layer,
    Mass,
    Scope,
    Trace,
    attend,
    run_blocks,
)
from jaxllm.models.modules import Embedding, LayerNorm, Linear, pick, unembed
from jaxllm.weights.precision import Precision


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPT2Config(ModelConfig):
    """GPT-2: layer norm, learned absolute positions, ungated MLP, biases everywhere."""

    model_type: ClassVar[str] = "gpt2"

    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False

    @property
    def position_limit(self) -> int:
        """The number of rows of the position table."""
        return self.max_position_embeddings

    def computes(self, layer: int) -> tuple[Any, ...]:
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


class GPT2(nn.Module):
    """The model: token and position embeddings, blocks, final norm, and logits.

    remat, course: see `layers.run_blocks`.
    """

    config: GPT2Config
    precision: Precision
    remat: bool = False
    course: Course | None = None

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
        document_BT: jax.Array | None = None,
        across: Across = ALONE,
    ) -> Trace:
        """Run tokens as `Decoder.__call__` does, but ignore `length_B`.

        Positions past the table give NaN.

        embeddings_BTD: of the tokens alone; position embeddings are added.
        """
        c, p = self.config, self.precision
        x, table = Embedding(c.vocab_size, c.hidden_size, name="wte")(token_BT)
        places, _ = Embedding(c.max_position_embeddings, c.hidden_size, name="wpe")(
            jnp.maximum(position_BT, 0)
        )
        x = x if embeddings_BTD is None else embeddings_BTD
        x = x.astype(p.activations) + places.astype(p.activations)
        told: Any = {"document_BT": document_BT, "across": across}
        scope = Scope(position_BT, segments, mask_BTS, attention_mass, **told)
        blocks = [Block(c, p, i, name=f"h.{i}") for i in range(c.num_hidden_layers)]
        embeddings = x
        layers, x = run_blocks(blocks, x, scope, self.remat, self.course)
        norm = scope.whole(LayerNorm(c.norm_eps, name="ln_f")(x))
        logits = unembed(c, p, table, pick(norm, column_B))
        return Trace(embeddings, layers, norm, logits)


class Block(nn.Module):
    """One layer: attention and an MLP, each after a norm, with residual connections."""

    config: GPT2Config
    precision: Precision
    layer: int

    @nn.compact
    def __call__(self, x: jax.Array, scope: Scope) -> Layer:
        c, p = self.config, self.precision
        normed = scope.whole(LayerNorm(c.norm_eps, name="ln_1")(x))
        attended = Attention(c, p, self.layer, name="attn")(normed, scope)
        x = x + attended.x
        mlp_normed = scope.whole(LayerNorm(c.norm_eps, name="ln_2")(x))
        hidden, y = MLP(c, p, name="mlp")(mlp_normed)
        return Layer(normed, attended, mlp_normed, hidden, y, x + y)


class Attention(nn.Module):
    """Attention without rotation: positions were added to the embeddings."""

    config: GPT2Config
    precision: Precision
    layer: int

    @nn.compact
    def __call__(self, x: jax.Array, scope: Scope) -> Attended:
        c, p = self.config, self.precision
        B, T, D = x.shape
        qkv = Linear(3 * D, True, p, name="c_attn")(x)
        q, k, v = jnp.moveaxis(qkv.reshape(B, T, 3, c.num_attention_heads, c.head_dim), 2, 0)
        scale = c.head_dim**-0.5 if c.scale_attn_weights else 1.0
        if c.scale_attn_by_inverse_layer_idx:
            scale /= self.layer + 1
        project_out = Linear(D, True, p, name="c_proj")
        return attend(
            scope, self.layer, q, k, v, project_out, cache_dtype=p.cache, scale=scale, window=None
        )


class MLP(nn.Module):
    """Two linears: returns the input of the second, and its output."""

    config: GPT2Config
    precision: Precision

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        c, p = self.config, self.precision
        hidden = ops.ACTIVATIONS[c.hidden_act](Linear(c.intermediate_size, True, p, name="c_fc")(x))
        return hidden, Linear(x.shape[-1], True, p, name="c_proj")(hidden)


FAMILY = Family(
    config=GPT2Config,
    module=GPT2,
    tokens="wte",
    positions="wpe",
    embeddings="embeddings",  # token plus position embeddings
    layers="h",
    attention_norm="ln_1",
    attention="attn",
    mlp_norm="ln_2",
    mlp_down="mlp.c_proj",
    norm="ln_f",
    block=Block,
    sites=(
        Site("attention_norm", ("attn.c_attn",), "attention.x", "ln_1"),
        Site("attention.heads", ("attn.c_proj",), "attention.x", "attn.c_attn"),
        Site("mlp_norm", ("mlp.c_fc",), "mlp", "ln_2"),
        Site("mlp_hidden", ("mlp.c_proj",), "mlp", None),
    ),
    heads=(Member("attn.c_attn", 0, runs=3), Member("attn.c_proj", 1)),
    channels=(Member("mlp.c_fc", 0), Member("mlp.c_proj", 1)),
)
