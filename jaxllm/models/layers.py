"""Inputs and outputs of layers; `attend` dispatches on the kind of attention."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from jaxllm import ops
from jaxllm.cache.kv import Segment
from jaxllm.cache.tree import Branches
from jaxllm.config.attention_kind import AttentionKind
from jaxllm.config.model import ModelConfig, Rope
from jaxllm.errors import ConfigError
from jaxllm.models.sites import NO_EDITS, WEIGHT_SITES, Edits, SiteRecorder, split_name
from jaxllm.ops.documents import attend_documents
from jaxllm.ops.masked import (
    attend_with_mask,
    attention_scores,
    document_mask,
    softmax_weights,
    weigh_values,
)
from jaxllm.ops.target import is_accelerator

Angles = tuple[jax.Array, jax.Array]  # cosines and sines per token, [B, T, F]


class AttendFunction(Protocol):
    """Attention over a text that is sharded over devices: see `ParallelHooks`."""

    def __call__(
        self,
        q: jax.Array,
        at: jax.Array,
        parts: Sequence[ops.Part],
        document_BT: jax.Array | None,
        *,
        scale: float,
        window: int | None,
        cap: float | None,
        sink_N: jax.Array | None,
    ) -> tuple[jax.Array, ops.Part]:
        """Return the heads `[B, T, N, H]`, and the new keys and values that this device stores.

        parts: what this device has, the new tokens last. Other arguments: see `attend`.
        """


class ParallelHooks(NamedTuple):
    """Hooks for layers whose tokens are sharded over devices.

    Attributes:
        attend: Attention; None: this device has all tokens that its heads need, each in its row.
        gather_tokens: Gathers the tokens of the residual stream between linears; None: not sharded.
        global_sync: Whether attention synchronizes all devices of the mesh, not only those that run
            the same layers.
    """

    attend: AttendFunction | None = None
    gather_tokens: Callable[[jax.Array], jax.Array] | None = None
    global_sync: bool = False


NO_PARALLEL = ParallelHooks()


class AttentionContext(NamedTuple):
    """The keys that new tokens may attend to, the same for every layer.

    Attributes:
        position_BT: int32, of the new tokens, -1 for padding.
        segments: Of the cache, oldest first.
        mask_BTS: The slots, then the new tokens, that each query attends to, as in
            `attend_with_mask`; replaces positions and windows.
        mass: Whether to return the attention mass; none under a mask or with documents.
        angles: Cosines and sines for each of `ModelConfig.ropes`.
        document_BT: int32, the document of each new token, which attends to new tokens of the same
            document only, and to all of the cache.
        state: Each layer's state after earlier text; empty for none.
        hooks: Hooks if tokens are sharded over devices.
        row_B: int32, which row of the segments each row of tokens reads; None: its own.
        branches: The nodes of a tree that each row attends to after the cache; None: no tree.
        edits, read: Changes of activations, and the sites to record in every layer.
        packed: As in `ops.attend`.
        earlier: New keys and values of the layers before this one, if layers share them
            (`ModelConfig.kv_source`).
        layer_embeddings: Each layer's own embeddings of the tokens, `[B, T, P]`; empty for none.
    """

    position_BT: jax.Array
    segments: tuple[Segment, ...] = ()
    mask_BTS: jax.Array | None = None
    mass: bool = False
    angles: tuple[Angles, ...] = ()
    document_BT: jax.Array | None = None
    state: tuple[Any, ...] = ()
    hooks: ParallelHooks = NO_PARALLEL
    row_B: jax.Array | None = None
    branches: Branches | None = None
    edits: Edits = NO_EDITS
    read: frozenset[str] = frozenset()
    packed: bool = False
    earlier: tuple[Any, ...] = ()
    layer_embeddings: tuple[Any, ...] = ()

    def site_recorder(self, layer: int | None) -> SiteRecorder:
        """Return the recorder of a layer's sites; None: of the model's."""
        return SiteRecorder(layer, self.position_BT, self.edits, self.read)

    def gather_tokens(self, x: jax.Array) -> jax.Array:
        """Return the linears' input from the residual stream, `[B, T, D]`, gathered if sharded."""
        return x if self.hooks.gather_tokens is None else self.hooks.gather_tokens(x)


class Unrotated(NamedTuple):
    """What a kind of attention gets besides rotated queries and keys.

    Attributes:
        q, k, v: `[B, T, N, H]` and `[B, T, K, H]`, before rotation and before rounding to the
            cache's dtype.
        params: The kind's `head_params`, `[N]` each.
        state: The layer's; None before a text.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    params: dict[str, jax.Array]
    state: Any


class AttentionOutput(NamedTuple):
    """The output of attention, apart from recorded sites.

    Attributes:
        k, v: `[B, T, K, H]`, in the cache's dtype.
        x: The output projection, `[B, T, D]`.
        mass: Attention received by every slot and new token, float32 `[B, S + T]`; None unless
            requested.
        state: What `commit` takes for `KVCache.state`, if the layer has one.
    """

    k: ops.Entries
    v: ops.Entries
    x: jax.Array
    mass: jax.Array | None = None
    state: Any = None


class Layer(NamedTuple):
    """The output of a block.

    Attributes:
        x: The block's output, including the residual, `[B, T, D]`.
        sites: The arrays of the sites that are read (`sites.LAYER_SITES`).
    """

    attention: AttentionOutput
    x: jax.Array
    sites: dict[str, jax.Array]


class Trace(struct.PyTreeNode):
    """The output of a forward pass; under `jit`, XLA removes unused fields.

    Attributes:
        embeddings, norm: `[B, T, D]`; `norm` is the final norm's output.
        logits: float32 `[B, T, V]`, or `[B, 1, V]` if one column was selected.
        sites: The arrays of the model's own sites that are read (`sites.MODEL_SITES`).
    """

    embeddings: jax.Array
    layers: tuple[Layer, ...]
    norm: jax.Array
    logits: jax.Array
    sites: dict[str, jax.Array] = struct.field(default_factory=dict)

    def read_sites(self, names: Sequence[str]) -> dict[str, jax.Array]:
        """Return the arrays of sites by full name."""
        own = {**self.sites, "final_norm": self.norm, "logits": self.logits}
        arrays = {}
        for name in names:
            layer, site = split_name(name)
            arrays[name] = (own if layer is None else self.layers[layer].sites)[site]
        return arrays

    @property
    def hidden_states(self) -> tuple[jax.Array, ...]:
        """Embeddings, block outputs, and last the final norm, as in transformers."""
        return (self.embeddings, *(layer.x for layer in self.layers[:-1]), self.norm)

    @property
    def k(self) -> tuple[ops.Entries, ...]:
        """Keys, one `[B, T, K, H]` per layer, in the cache's dtype."""
        return tuple(layer.attention.k for layer in self.layers)

    @property
    def v(self) -> tuple[ops.Entries, ...]:
        """Values, one `[B, T, K, H]` per layer, in the cache's dtype."""
        return tuple(layer.attention.v for layer in self.layers)

    @property
    def read_outputs(self) -> tuple[jax.Array, ...]:
        """Outputs of the last cache reads, `[B, T, D]`, which writes wait for.

        Empty if all slots are read before any new key is computed.
        """
        return (self.layers[-1].attention.x,)

    @property
    def state(self) -> tuple[Any, ...]:
        """The layers' states; empty if none has one."""
        states = tuple(layer.attention.state for layer in self.layers)
        return states if any(x is not None for x in states) else ()

    @property
    def attention_mass(self) -> tuple[jax.Array, ...] | None:
        """Attention received by every slot and new token, per layer; None unless requested."""
        mass = [layer.attention.mass for layer in self.layers]
        return tuple(m for m in mass if m is not None) or None


def attend(
    context: AttentionContext,
    site: SiteRecorder,
    layer: int,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    project_out: Callable[[jax.Array], jax.Array],
    *,
    cache_dtype: str,
    scale: float,
    window: int | None,
    cap: float | None = None,
    sink_N: jax.Array | None = None,
    kind: AttentionKind | None = None,
    unrotated: Unrotated | None = None,
    gate: jax.Array | None = None,
    rope: Rope | None = None,
    expand: Callable[[jax.Array], jax.Array] | None = None,
    source: int | None = None,
) -> AttentionOutput:
    """Compute attention of one layer over its cached keys and values, and the new tokens.

    Args:
        q: `[B, T, N, H]`, rotated if the layer uses RoPE.
        k, v: `[B, T, K, H]`, likewise.
        project_out: Output projection, `[B, T, N * H]` to `[B, T, D]`.
        cache_dtype: Dtype of keys and values if there is no cache.
        window: How many of the last positions a query attends to, its own included; None: all.
        cap, sink_N: See `ops.attend`.
        kind: The kind of attention; None: full or windowed.
        unrotated: Further inputs of a kind that has a state or `head_params`.
        gate: `[B, T, N, H]`; the heads are multiplied by its sigmoid.
        rope: The layer's rotary settings, for a `kind`.
        expand: Maps the heads' weighted sums to their values.
        source: The layer whose keys and values it reads; its own have no heads then. None: itself.

    Raises:
        ConfigError: A text sharded over devices with a mask or attention mass; or as the `kind`
            raises it.
    """
    q, k = site("attn.rot_q", q), site("attn.rot_k", k)
    source = layer if source is None else source
    # Values without heads are computed from the keys' weighted sum (`expand`).
    parts = [
        ops.Part(s.k[source], s.k[source] if expand else s.v[source], s.position_BS)
        for s in context.segments
    ]
    # Round new keys and values as the cache will, so that a token attends to the same numbers
    # whether they come from the cache or from the same chunk.
    kept = parts[0].k_BSKH.dtype if parts else jnp.dtype(cache_dtype)
    new_k, new_v = ops.cast(k, kept), ops.cast(v, kept)
    new = ops.Part(new_k, new_k if expand else new_v, context.position_BT)
    if source != layer:
        k_BTKH, v_BTKH = context.earlier[source]
        new = ops.Part(k_BTKH, v_BTKH, context.position_BT)
    tree = context.branches
    if tree is None:
        parts.append(new)
    else:
        path_k = tree.gather(new.k_BSKH, source, "k")
        path_v = path_k if expand else tree.gather(new.v_BSKH, source, "v")
        parts.append(ops.Part(path_k, path_v, tree.position_RP))
    special = (context.hooks.attend, kind, context.document_BT, context.mask_BTS)
    if site.touches(*WEIGHT_SITES) or any(x is not None for x in special):
        parts = list(ops.take_rows(parts, context.row_B))
        context = context._replace(row_B=None)
    mass, state = None, None
    options: Any = {"scale": scale, "cap": cap}
    if context.hooks.attend is not None:
        if context.mask_BTS is not None or context.mass or site.touches(*WEIGHT_SITES):
            raise ConfigError(
                "a text that is sharded over devices (sequence=) supports neither masks nor"
                " attention mass, scores or weights. Use a mesh without sequence"
            )
        at, documents = context.position_BT, context.document_BT
        out, stored = context.hooks.attend(
            q, at, parts, documents, window=window, sink_N=sink_N, **options
        )
        new_k, new_v = stored.k_BSKH, new_v if expand else stored.v_BSKH
    elif kind is not None:
        options |= {"rope": rope, "window": window, "sink_N": sink_N}
        out, mass, state = kind.attend(context, site, q, parts, unrotated, **options)
    else:
        out, mass = _attend_dense(context, site, q, parts, window=window, sink_N=sink_N, **options)
    if gate is not None:
        out = out * jax.nn.sigmoid(gate.astype(jnp.float32)).astype(out.dtype)
    out = site("attn.z", out if expand is None else expand(out))
    if site.reads("attn.result"):
        site("attn.result", _head_outputs(out, project_out))
    x = site("attn.output", project_out(out.reshape(*out.shape[:2], -1)))
    return AttentionOutput(new_k, new_v, x, mass, state)


def _attend_dense(
    context: AttentionContext,
    site: SiteRecorder,
    q: jax.Array,
    parts: list[ops.Part],
    *,
    scale: float,
    window: int | None,
    cap: float | None,
    sink_N: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Return the heads `[B, T, N, H]`, and the attention mass if it is requested.

    Scores and weights exist only if they are read or edited. Reading them leaves the heads as they
    are; if they are edited, the heads are computed from them.
    """
    at, mask_BTS = context.position_BT, context.mask_BTS
    options: Any = {"scale": scale, "window": window, "cap": cap}
    plain = not site.touches(*WEIGHT_SITES) and mask_BTS is None and not context.mass
    if context.document_BT is not None and len(parts) == 1 and plain and is_accelerator():
        k, v = ops.dequantize(parts[0].k_BSKH), ops.dequantize(parts[0].v_BSKH)
        return attend_documents(
            q, at, k, v, context.document_BT, **options, packed=context.packed, sink_N=sink_N
        ), None
    if context.document_BT is not None:
        mask_BTS = document_mask(at, parts, context.document_BT, window=window)
    weight_BNTS = None
    if site.touches(*WEIGHT_SITES):
        score_BNTS = attention_scores(q, at, parts, mask_BTS, scale=scale, window=window, cap=cap)
        weight_BNTS = softmax_weights(site("attn.scores", score_BNTS), sink_N)
        weight_BNTS = site("attn.pattern", weight_BNTS)
    if weight_BNTS is not None and site.edits(*WEIGHT_SITES):
        mass = weight_BNTS.sum(axis=(1, 2)) if context.mass else None
        return weigh_values(weight_BNTS, parts, q.dtype), mass
    if mask_BTS is not None:
        return attend_with_mask(q, parts, mask_BTS, scale=scale, cap=cap, sink_N=sink_N), None
    packed = context.packed and context.branches is None
    options |= {"mass": context.mass, "row_B": context.row_B, "packed": packed, "sink_N": sink_N}
    return ops.attend(q, at, parts, **options)


def _head_outputs(
    heads_BTNH: jax.Array, project_out: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """Return each head's part of the output projection without its bias, `[B, T, N, D]`.

    It projects each head with zeros for the others, so that weights may have any type.
    """
    B, T, N, H = heads_BTNH.shape
    own_NN = jnp.eye(N, dtype=heads_BTNH.dtype)
    each_NBTNH = heads_BTNH[None] * own_NN[:, None, None, :, None]
    y_ATD = project_out(each_NBTNH.reshape(N * B, T, N * H))
    bias_11D = project_out(jnp.zeros((1, 1, N * H), heads_BTNH.dtype))
    return jnp.moveaxis((y_ATD - bias_11D).reshape(N, B, T, -1), 0, 2)


def rotary_angles(
    config: ModelConfig, position_BT: jax.Array, length_B: jax.Array
) -> tuple[Angles, ...]:
    """Return cosines and sines for tokens at these positions, of texts of these lengths."""
    place_BT, segment = position_BT, config.segment_length
    head_dims = {
        config.layer_rope(i): config.layer_head_dim(i) for i in range(config.num_hidden_layers)
    }
    if segment is not None:
        place_BT = jnp.where(position_BT >= 0, position_BT % segment, position_BT)
    return tuple(
        ops.rope_angles(
            rope,
            place_BT,
            length_B,
            head_dim=head_dims[rope],
            max_position_embeddings=config.max_position_embeddings,
        )
        for rope in config.ropes
    )
