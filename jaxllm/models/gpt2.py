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
from jaxllm.config.model import ModelConfig
from jaxllm.models.family import Family, LinearGroup, ParallelLinear
from jaxllm.models.layers import (
    NO_PARALLEL,
    AttentionContext,
    AttentionOutput,
    Layer,
    LayerRunner,
    MassMode,
    ParallelHooks,
    Trace,
    attend,
    run_blocks,
)
from jaxllm.models.modules import Embedding, LayerNorm, Linear, select_columns, unembed
from jaxllm.weights.model import Model
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


class GPT2(Model, nn.Module):
    """The model: token and position embeddings, blocks, final norm, and logits.

    remat, runner: see `layers.run_blocks`.
    """

    config: GPT2Config
    precision: Precision
    remat: bool = False
    runner: LayerRunner | None = None

    @nn.compact
    def __call__(
        self,
        token_BT: jax.Array,
        position_BT: jax.Array,
        length_B: jax.Array,
        segments: tuple[Segment, ...] = (),
        column_B: jax.Array | None = None,
        attention_mass: MassMode = False,
        *,
        embeddings_BTD: jax.Array | None = None,
        mask_BTS: jax.Array | None = None,
        document_BT: jax.Array | None = None,
        hooks: ParallelHooks = NO_PARALLEL,
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
        told: Any = {"document_BT": document_BT, "hooks": hooks}
        scope = AttentionContext(position_BT, segments, mask_BTS, attention_mass, **told)
        blocks = [Block(c, p, i, name=f"h.{i}") for i in range(c.num_hidden_layers)]
        embeddings = x
        layers, x = run_blocks(blocks, x, scope, self.remat, self.runner)
        norm = scope.gather_tokens(LayerNorm(c.norm_eps, name="ln_f")(x))
        logits = unembed(c, p, table, select_columns(norm, column_B))
        return Trace(embeddings, layers, norm, logits)


class Block(nn.Module):
    """One layer: attention and an MLP, each after a norm, with residual connections."""

    config: GPT2Config
    precision: Precision
    layer: int

    @nn.compact
    def __call__(self, x: jax.Array, scope: AttentionContext) -> Layer:
        c, p = self.config, self.precision
        normed = scope.gather_tokens(LayerNorm(c.norm_eps, name="ln_1")(x))
        attended = Attention(c, p, self.layer, name="attn")(normed, scope)
        x = x + attended.x
        mlp_normed = scope.gather_tokens(LayerNorm(c.norm_eps, name="ln_2")(x))
        hidden, y = MLP(c, p, name="mlp")(mlp_normed)
        return Layer(normed, attended, mlp_normed, hidden, y, x + y)


class Attention(nn.Module):
    """Attention without rotation: positions were added to the embeddings."""

    config: GPT2Config
    precision: Precision
    layer: int

    @nn.compact
    def __call__(self, x: jax.Array, scope: AttentionContext) -> AttentionOutput:
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
        LinearGroup("attention_norm", ("attn.c_attn",), "attention.x", "ln_1"),
        LinearGroup("attention.heads", ("attn.c_proj",), "attention.x", "attn.c_attn"),
        LinearGroup("mlp_norm", ("mlp.c_fc",), "mlp", "ln_2"),
        LinearGroup("mlp_hidden", ("mlp.c_proj",), "mlp", None),
    ),
    head_linears=(
        ParallelLinear("attn.c_attn", 0, fused_parts=3),
        ParallelLinear("attn.c_proj", 1),
    ),
    channel_linears=(ParallelLinear("mlp.c_fc", 0), ParallelLinear("mlp.c_proj", 1)),
)
