"""The decoder of most families: rotary attention and a gated MLP, with norms around them.

A family is a configuration: its properties set norms, biases, windows, scales and caps, and a field
of the same name replaces a property. Code for a single family is in its own file.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxllm import ops
from jaxllm.cache.kv import Segment
from jaxllm.cache.tree import Branches
from jaxllm.config.model import ModelConfig, Rope
from jaxllm.errors import ConfigError
from jaxllm.models.family import Family, LinearGroup, ParallelLinear
from jaxllm.models.layers import (
    NO_PARALLEL,
    Angles,
    AttentionContext,
    AttentionOutput,
    Layer,
    ParallelHooks,
    Trace,
    attend,
    rotary_angles,
)
from jaxllm.models.long.infini import MemoryInputs
from jaxllm.models.modules import (
    Embedding,
    Linear,
    RMSNorm,
    get_param,
    project,
    select_columns,
    unembed,
)
from jaxllm.models.run_blocks import LayerRunner, run_blocks
from jaxllm.models.sites import NO_EDITS, Edits, SiteRecorder
from jaxllm.ops import compressive
from jaxllm.weights.model import Model
from jaxllm.weights.precision import Precision


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """A decoder. A family whose arithmetic differs overrides properties.

    Attributes:
        norms: Names of the norms before and after attention, before and after the MLP; None: no
            norm.
        qk_norm: "each head" or "all heads": how queries and keys are normalized before rotation;
            None: not at all.
    """

    norms: ClassVar[tuple[str | None, ...]] = (
        "input_layernorm",
        None,
        "post_attention_layernorm",
        None,
    )
    qk_norm: ClassVar[str | None] = None

    rope: Rope

    def _complaints(self) -> list[str]:
        complaints = super()._complaints()
        if complaints:
            return complaints
        context = self.max_position_embeddings
        complaints = [
            f"Self-Extend's neighbor_window {rope.neighbor_window} must be less than the context of"
            f" {context} tokens, which it extends"
            for rope in self._ropes()
            if (rope.neighbor_window or 0) >= context
        ]
        return complaints + [c for rope in self._ropes() for c in rope.complaints(self.head_dim)]

    def _ropes(self) -> tuple[Rope, ...]:
        """Return all rotary settings, whether or not a layer uses them."""
        return (self.rope,)

    def layer_rope(self, layer: int) -> Rope | None:
        return self.rope

    @property
    def sliding_window(self) -> int | None:
        """Sliding window of all layers in tokens."""
        return None

    def window(self, layer: int) -> int | None:
        return self.sliding_window

    def state_shape(self, layer: int) -> Any:
        kind = self.long_attention(layer)
        if kind is None or kind.kind != "infini":
            return None
        update = kind.update or "linear"
        return compressive.memory_shapes(self.num_key_value_heads, self.head_dim, update)

    @property
    def context_length(self) -> int:
        """The trained context, extended by `dynamic_inputs` NTK scaling (its factor) or
        Self-Extend.
        """
        stretch = self.rope.factor if self.rope.rope_type == "dynamic" else 1.0
        return self.rope.extended_length(int(self.max_position_embeddings * (stretch or 1.0)))

    def with_self_extend(self, group_size: int, neighbor_window: int) -> Self:
        rope = dataclasses.replace(
            self.rope, group_size=group_size, neighbor_window=neighbor_window
        )
        return dataclasses.replace(self, rope=rope)

    @property
    def attention_bias(self) -> bool:
        """Whether queries, keys, values and attention's output have biases."""
        return False

    @property
    def mlp_bias(self) -> bool:
        """Whether the MLP's linears have biases."""
        return False

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        """Whether there are biases on q/k/v, on the attention output, and in the MLP."""
        return (self.attention_bias, self.attention_bias, self.mlp_bias)

    @property
    def gates_attention(self) -> bool:
        """Whether attention's heads are multiplied by the sigmoid of a gate. Each head's gate
        follows its query in the rows of `q_proj`.
        """
        return False

    @property
    def use_qk_norm(self) -> bool:
        """Whether this model has the norms of `qk_norm`; some models of a family may lack them."""
        return True

    @property
    def attention_scale(self) -> float:
        """Factor on attention scores."""
        return float(self.head_dim**-0.5)

    @property
    def attention_cap(self) -> float | None:
        """Soft cap on attention scores."""
        return None

    @property
    def attention_sinks(self) -> bool:
        """Whether each query head has a sink (`sink_N` of `ops.attend`)."""
        return False

    def query_growth(self, layer: int) -> tuple[float, int] | None:
        """Return beta and L if the layer's queries grow with their position p, else None.

        They are multiplied by 1 + beta ln(1 + floor(p / L)) (Llama 4's temperature of attention).
        """
        return None

    @property
    def residual_scale(self) -> float:
        """Factor on each sublayer's output before it is added to the stream."""
        return 1.0


class Sinks(nn.Module):
    """A score of each query head."""

    heads: int

    @nn.compact
    def __call__(self) -> jax.Array:
        """Return the scores, `[N]`."""
        score_N: jax.Array = get_param(self, "weight", self.heads)
        return score_N


class Attention(nn.Module):
    """Rotary grouped-query attention. out_name: name of the output projection."""

    config: DecoderConfig
    precision: Precision
    layer: int
    out_name: str = "o_proj"

    @nn.compact
    def __call__(
        self, x: jax.Array, context: AttentionContext, site: SiteRecorder
    ) -> AttentionOutput:
        c, p = self.config, self.precision
        D, bias = x.shape[-1], c.biases[1]
        q, k, v, gate = self._split_heads(project(x, *self._linears()))
        rope = c.layer_rope(self.layer)
        q, k, v = site("attn.q", q), site("attn.k", k), site("attn.v", v)
        kind, memory_inputs = c.long_attention(self.layer), None
        if kind is not None and kind.kind == "infini":
            gate_N = get_param(self, "memory_gate", c.num_attention_heads)
            memory = context.state[self.layer] if context.state else None
            memory_inputs = MemoryInputs(q, k, v, gate_N, memory)
        if rope is not None:
            angles = context.angles[c.ropes.index(rope)]
            q, k = ops.rotate(q, *angles), ops.rotate(k, *angles)
        if (growth := c.query_growth(self.layer)) is not None:
            beta, length = growth
            steps_BT = jnp.maximum(context.position_BT, 0) // length
            grown_BT = 1 + beta * jnp.log1p(steps_BT.astype(jnp.float32))
            q = q * grown_BT[..., None, None].astype(q.dtype)
        sink_N = Sinks(c.num_attention_heads, name="sinks")() if c.attention_sinks else None
        return attend(
            context,
            site,
            self.layer,
            q,
            k,
            v,
            Linear(D, bias, p, name=self.out_name),
            cache_dtype=p.cache,
            scale=c.attention_scale,
            window=c.window(self.layer),
            cap=c.attention_cap,
            sink_N=sink_N,
            kind=kind,
            memory_inputs=memory_inputs,
            gate=gate,
            self_extend=rope if rope is not None and rope.is_self_extended else None,
            source=c.kv_source(self.layer),
        )

    def _linears(self) -> Sequence[Linear]:
        """Return the linears that read the layer's input."""
        c, K = self.config, self.config.kv_heads(self.layer)
        heads = {
            "q_proj": c.num_attention_heads * (1 + c.gates_attention),
            "k_proj": K,
            "v_proj": K,
        }
        size = c.layer_head_dim(self.layer)
        return [
            Linear(n * size, c.biases[0], self.precision, name=name) for name, n in heads.items()
        ]

    def _split_heads(
        self, terms: Sequence[jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Return queries, keys and values before rotation, and the gate, each `[B, T, *, H]`.

        terms: Of each linear. Norms of all heads at once come before the heads are split.
        """
        c, (q, k, v) = self.config, terms
        if c.qk_norm == "all heads":
            q, k = self._norm_qk(q, k)
        q, k, v = (y.reshape(*y.shape[:2], -1, c.head_dim) for y in (q, k, v))
        gate = None
        if c.gates_attention:
            q, gate = q[:, :, 0::2], q[:, :, 1::2]
        if c.qk_norm == "each head" and c.use_qk_norm:
            q, k = self._norm_qk(q, k)
        return q, k, v, gate

    def _norm_qk(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, ...]:
        c = self.config
        return tuple(
            RMSNorm(c.norm_eps, c.norm_weight_offset, name=name)(y)
            for name, y in (("q_norm", q), ("k_norm", k))
        )


class MLP(nn.Module):
    """Gated MLP. width: the number of its hidden channels."""

    config: DecoderConfig
    precision: Precision
    width: int

    @nn.compact
    def __call__(self, x: jax.Array, site: SiteRecorder) -> jax.Array:
        c, p = self.config, self.precision
        bias = c.biases[2]
        gate, up = project(
            x,
            Linear(self.width, bias, p, name="gate_proj"),
            Linear(self.width, bias, p, name="up_proj"),
        )
        gate = site("mlp.pre", gate)
        hidden = site("mlp.post", ops.ACTIVATIONS[c.hidden_act](gate) * up)
        return Linear(x.shape[-1], bias, p, name="down_proj")(hidden)


class Block(nn.Module):
    """One layer: attention and a gated MLP with residual connections, and norms around them."""

    config: DecoderConfig
    precision: Precision
    layer: int

    @nn.compact
    def __call__(self, x: jax.Array, context: AttentionContext) -> Layer:
        before, after, before_mlp, after_mlp = self.config.norms
        site = context.site_recorder(self.layer)
        x = site("resid_pre", x)
        normed = site("attn_norm", context.gather_tokens(self._norm(before, x)))
        attended = self._mixer()(normed, context, site)
        y = self._scale_residual(self._norm(after, attended.x))
        x = site("resid_mid", x + site("attn_out", y))
        normed = site("mlp_norm", context.gather_tokens(self._norm(before_mlp, x)))
        y = self._scale_residual(self._norm(after_mlp, self._mlp(x, normed, context, site)))
        x = site("resid_post", self._finish(x + site("mlp_out", y), context))
        return Layer(attended, x, site.recorded)

    def _finish(self, x: jax.Array, context: AttentionContext) -> jax.Array:
        """Return the output of the layer from the stream after its MLP."""
        return x

    def _mixer(self) -> Any:
        """Return the module that mixes tokens: attention."""
        return Attention(self.config, self.precision, self.layer, name="self_attn")

    def _mlp(
        self, x: jax.Array, normed: jax.Array, context: AttentionContext, site: SiteRecorder
    ) -> jax.Array:
        """Return the MLP's output. x: The stream before its norm."""
        mlp = MLP(self.config, self.precision, self.config.mlp_size(self.layer), name="mlp")
        return site("mlp.output", mlp(normed, site))

    def _norm(self, name: str | None, x: jax.Array) -> jax.Array:
        if name is None:
            return x
        normed: jax.Array = RMSNorm(
            self.config.norm_eps, self.config.norm_weight_offset, name=name
        )(x)
        return normed

    def _scale_residual(self, y: jax.Array) -> jax.Array:
        scale = self.config.residual_scale
        return y if scale == 1 else y * scale


class Decoder(Model, nn.Module):
    """The model: token embedding, blocks, final norm, and logits.

    Attributes:
        block: The class of its layers.
        layers: Name of the layers, without their number.
        token_table: Name of the embedding table.
        remat, runner: See `run_blocks`.
        packed: A promise about the caches and tokens that it is given, as in `ops.attend`
            (`packing.promise_packed`).
    """

    config: ModelConfig
    precision: Precision
    remat: bool = False
    runner: LayerRunner | None = None
    packed: bool = False

    block: ClassVar[type[nn.Module]] = Block
    layers: ClassVar[str] = "layers"
    token_table: ClassVar[str] = "embed_tokens"

    @nn.compact
    def __call__(
        self,
        token_BT: jax.Array,
        position_BT: jax.Array,
        length_B: jax.Array,
        segments: tuple[Segment, ...] = (),
        column_B: jax.Array | None = None,
        attention_mass: bool = False,
        *,
        embeddings_BTD: jax.Array | None = None,
        angles: tuple[Angles, ...] | None = None,
        mask_BTS: jax.Array | None = None,
        document_BT: jax.Array | None = None,
        state: tuple[Any, ...] = (),
        hooks: ParallelHooks = NO_PARALLEL,
        row_B: jax.Array | None = None,
        branches: Branches | None = None,
        edits: Edits = NO_EDITS,
        read: frozenset[str] = frozenset(),
    ) -> Trace:
        """Run tokens (ids `[B, T]`, positions `[B, T]`, -1 for padding) against cached segments.

        Args:
            length_B: Length of the text of each row, for rotary settings that depend on it.
            column_B: The one column of each row to compute logits for; None: all.
            attention_mass: Whether the trace contains the attention that every slot received.
            embeddings_BTD: Replaces the embeddings of `token_BT`; a position's is still added.
            angles: Cosines and sines of the new tokens for each of `ModelConfig.ropes`, each `[B,
                T, F]`; None: computed from positions.
            mask_BTS: The slots, then the new tokens, that each query attends to, as in
                `attend_with_mask`. Replaces positions and sliding window; excludes attention mass.
            document_BT, state, hooks, row_B, branches, edits, read: See `AttentionContext`.
        """
        c, p = self.config, self.precision
        x, table = Embedding(c.vocab_size, c.hidden_size, name=self.token_table)(token_BT)
        x = (x if embeddings_BTD is None else embeddings_BTD).astype(p.activations)
        angles = rotary_angles(c, position_BT, length_B) if angles is None else angles
        args = (mask_BTS, attention_mass, angles, document_BT, state, hooks, row_B, branches)
        context = AttentionContext(position_BT, segments, *args, edits, read, self.packed)
        site, scale = context.site_recorder(None), c.embedding_scale
        x = site("embed", x if scale == 1 else x * jnp.asarray(scale, x.dtype))
        places = self.embed_positions(position_BT)
        own = self.embed_layers(token_BT, x)
        if own and embeddings_BTD is not None:
            raise ConfigError(
                f"{c.model_type} looks each token up in every layer (hidden_size_per_layer_input):"
                " inputs must be tokens, not embeddings"
            )
        context = context._replace(layer_embeddings=own)
        embeddings = x = x if places is None else x + site("pos_embed", places.astype(x.dtype))
        blocks = [
            self.block(config=c, precision=p, layer=i, name=f"{self.layers}.{i}")
            for i in range(c.num_hidden_layers)
        ]
        layers, x = run_blocks(blocks, x, context, self.remat, self.runner)
        norm = site("final_norm", context.gather_tokens(self.final_norm(x)))
        logits = unembed(c, p, table, select_columns(norm, column_B))
        at_BT = position_BT
        if column_B is not None:
            at_BT = jnp.take_along_axis(position_BT, column_B[:, None], axis=1)
        logits = site("logits", logits, at_BT)
        return Trace(embeddings, layers, norm, logits, site.recorded)

    def embed_positions(self, position_BT: jax.Array) -> jax.Array | None:
        """Return the learned embeddings of positions, `[B, T, D]`; None: there are none."""
        return None

    def embed_layers(self, token_BT: jax.Array, x: jax.Array) -> tuple[jax.Array, ...]:
        """Return each layer's own embeddings (`AttentionContext`). x: The model's embeddings."""
        return ()

    def final_norm(self, x: jax.Array) -> jax.Array:
        """Apply the final norm to the last layer's output."""
        c: Any = self.config
        y: jax.Array = RMSNorm(c.norm_eps, c.norm_weight_offset, name="norm")(x)
        return y


def decoder_family(
    config: type[DecoderConfig],
    module: type[Decoder] = Decoder,
    embeddings: str = "embed_tokens",
) -> Family:
    """Return the row of a family of this kind.

    embeddings: name of their activation; "embeddings" if they are not the output of the module
    `embed_tokens` in transformers.
    """
    before, _, before_mlp, _ = config.norms
    return Family(
        config=config,
        module=module,
        token_table="embed_tokens",
        position_table=None,
        embeddings=embeddings,
        layers="layers",
        attention_norm=before,
        attention="attention",
        mlp_norm=before_mlp,
        mlp_down="mlp.down_proj",
        norm="norm",
        block=module.block,
        linear_groups=(
            LinearGroup(
                "attn_norm",
                tuple(f"self_attn.{x}_proj" for x in "qkv"),
                "attn.output",
                before,
            ),
            LinearGroup("attn.z", ("self_attn.o_proj",), "attn.output", "self_attn.v_proj"),
            LinearGroup("mlp_norm", ("mlp.gate_proj", "mlp.up_proj"), "mlp.output", before_mlp),
            LinearGroup("mlp.post", ("mlp.down_proj",), "mlp.output", "mlp.up_proj"),
        ),
        head_linears=(
            *(ParallelLinear(f"self_attn.{x}_proj", 0, kv_heads_only=x != "q") for x in "qkv"),
            ParallelLinear("self_attn.o_proj", 1),
        ),
        channel_linears=(
            ParallelLinear("mlp.gate_proj", 0),
            ParallelLinear("mlp.up_proj", 0),
            ParallelLinear("mlp.down_proj", 1),
        ),
        head_norms=(
            (
                ParallelLinear("self_attn.q_norm", 0),
                ParallelLinear("self_attn.k_norm", 0, kv_heads_only=True),
            )
            if config.qk_norm == "all heads"
            else ()
        ),
    )
