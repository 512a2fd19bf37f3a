"""The decoder of most families. Code for a single family is in its own file."""

from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxllm.cache.kv import Segment
from jaxllm.cache.tree import Branches
from jaxllm.config.model import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.decoder_block import Block
from jaxllm.models.decoder_config import DecoderConfig
from jaxllm.models.family import Family, LinearGroup, ParallelLinear
from jaxllm.models.fused_block import FusedBlock, can_fuse, launch_head
from jaxllm.models.layers import (
    NO_PARALLEL,
    Angles,
    AttentionContext,
    ParallelHooks,
    Trace,
    rotary_angles,
)
from jaxllm.models.modules import (
    Embedding,
    RMSNorm,
    select_columns,
    unembed,
)
from jaxllm.models.run_blocks import LayerRunner, run_blocks
from jaxllm.models.sites import NO_EDITS, Edits
from jaxllm.weights.model import Model
from jaxllm.weights.precision import Precision


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
            self._block_class(i, x, context)(
                config=c, precision=p, layer=i, name=f"{self.layers}.{i}"
            )
            for i in range(c.num_hidden_layers)
        ]
        layers, x = run_blocks(blocks, x, context, self.remat, self.runner)
        norm = site("final_norm", context.gather_tokens(self.final_norm(x)))
        logits = self._launch_head(table, select_columns(x, column_B), context)
        if logits is None:
            logits = unembed(c, p, table, select_columns(norm, column_B))
        at_BT = position_BT
        if column_B is not None:
            at_BT = jnp.take_along_axis(position_BT, column_B[:, None], axis=1)
        logits = site("logits", logits, at_BT)
        return Trace(embeddings, layers, norm, logits, site.recorded)

    def _block_class(self, layer: int, x: jax.Array, context: AttentionContext) -> Any:
        """Return the class of a layer. A runner has the layers' parameters in its own form."""
        if self.block is not Block or self.runner is not None or self.is_initializing():
            return self.block
        params = self.variables["params"][f"{self.layers}.{layer}"]
        return FusedBlock if can_fuse(self.config, self.precision, params, x, context) else Block

    def _launch_head(self, table: Any, x: jax.Array, context: AttentionContext) -> jax.Array | None:
        """Return the logits from the last layer's output by one launch, if one computes them."""
        is_plain = type(self).final_norm is Decoder.final_norm and self.runner is None
        if not is_plain or self.is_initializing():
            return None
        params = self.variables["params"]
        return launch_head(self.config, self.precision, params, table, x, context)

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
