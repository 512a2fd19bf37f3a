"""What layers compute, and what they are told: `attend` is the socket of attention's kinds."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from jaxllm import ops
from jaxllm.cache.kv import Segment
from jaxllm.config import ModelConfig, Rope
from jaxllm.errors import ConfigError
from jaxllm.longer import LongAttention
from jaxllm.models.long import KINDS
from jaxllm.models.long.infini import Beside
from jaxllm.ops.extended import attend_extended
from jaxllm.ops.masked import attend_masked, attention_weights, within_documents

Angles = tuple[jax.Array, jax.Array]  # cosines and sines of each token, [B, T, F]
Mass = bool | Literal["heads"]  # none, summed over queries and heads, or each one's weights


class Attend(Protocol):
    """Attention of a text of which other devices have some: see `Across`."""

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
    ) -> tuple[jax.Array, ops.Part]:
        """The heads `[B, T, N, H]`, and of the new tokens' keys and values what is kept here.

        parts: what this device has, the new tokens last. The rest: see `attend`.
        """


class Across(NamedTuple):
    """What is done together with other devices, which have some of the tokens too.

    attend: attention; None: this device has all that its heads need. whole: gives the tokens of
    all, of the stream between linears, of which a device has some; None: it has them all. at_once:
    whether attention waits for every device of the mesh, not for some who run the same layers.
    """

    attend: Attend | None = None
    whole: Callable[[jax.Array], jax.Array] | None = None
    at_once: bool = False


ALONE = Across()


class Scope(NamedTuple):
    """What new tokens may attend to: the same for every layer.

    position_BT: int32, of the new tokens, -1 for padding. segments: of the cache, oldest first.
    mask_BTS: what each query sees of all slots and then the new tokens, as `attend_masked` takes
    it, in place of what positions and windows say. document_BT: int32, which document each new
    token is of: it sees new tokens of its own alone, and all of the cache. mass: what to say of the
    weights; nothing under a mask or with documents. angles: what queries and keys are turned by,
    for each of `ModelConfig.ropes`. memory: what each layer keeps of the text before; empty for
    none. across: what is done together with other devices.
    """

    position_BT: jax.Array
    segments: tuple[Segment, ...] = ()
    mask_BTS: jax.Array | None = None
    mass: Mass = False
    angles: tuple[Angles, ...] = ()
    document_BT: jax.Array | None = None
    memory: tuple[Any, ...] = ()
    across: Across = ALONE

    def whole(self, x: jax.Array) -> jax.Array:
        """What linears read of the stream, `[B, T, D]`."""
        return x if self.across.whole is None else self.across.whole(x)


class Attended(NamedTuple):
    """What attention computes, in order.

    q: `[B, T, N, H]`, after rotation. k, v: `[B, T, K, H]`, as the cache keeps them. heads: the
    weighted sums of values, `[B, T, N, H]`. x: the same after the output projection, `[B, T, D]`.
    mass: what every slot and new token received, float32 `[B, S + T]`, or what each head of each
    query gave them, `[B, N, T, S + T]`; None unless asked for. memory: after these tokens, in kinds
    that keep one.
    """

    q: jax.Array
    k: ops.Entries
    v: ops.Entries
    heads: jax.Array
    x: jax.Array
    mass: jax.Array | None
    memory: Any = None


class Layer(NamedTuple):
    """What a block computes, in order, each `[B, T, D]`; x: its output, with both parts added.

    mlp_hidden: the input of the MLP's last linear, `[B, T, F]`: with `attention_norm`, `mlp_norm`
    and `attention.heads` the inputs of all linears are here, as calibration needs them. A mixture
    of experts has none: each of its experts sees tokens of its own.
    memory: what the layer keeps of the text so far, `[B, ...]` (`ModelConfig.memory`). router: in
    a mixture of experts, each token's score for each, float32 `[B, T, E]`.
    """

    attention_norm: jax.Array
    attention: Attended
    mlp_norm: jax.Array
    mlp_hidden: jax.Array | None
    mlp: jax.Array
    x: jax.Array
    memory: Any = None
    router: jax.Array | None = None


class Trace(struct.PyTreeNode):
    """All that a model computes for some tokens; a jitted caller pays only for what it keeps.

    embeddings, norm (the final one): `[B, T, D]`. logits: float32 `[B, T, V]`, or `[B, 1, V]` where
    one column was picked.
    """

    embeddings: jax.Array
    layers: tuple[Layer, ...]
    norm: jax.Array
    logits: jax.Array

    @property
    def hidden_states(self) -> tuple[jax.Array, ...]:
        """Embeddings, each block's output, the last after the final norm, as transformers has."""
        return (self.embeddings, *(layer.x for layer in self.layers[:-1]), self.norm)

    @property
    def k(self) -> tuple[ops.Entries, ...]:
        """The keys, one `[B, T, K, H]` a layer, as the cache keeps them."""
        return tuple(layer.attention.k for layer in self.layers)

    @property
    def v(self) -> tuple[ops.Entries, ...]:
        """The values, likewise."""
        return tuple(layer.attention.v for layer in self.layers)

    @property
    def reads(self) -> tuple[jax.Array, ...]:
        """What is made of the last slots that are read, `[B, T, D]`; empty where all are read
        before any new key is there.
        """
        return (self.layers[-1].attention.x,)

    @property
    def memory(self) -> tuple[Any, ...]:
        """What the layers keep beside keys and values; empty where none of them does."""
        kept = tuple(layer.memory for layer in self.layers)
        return kept if any(x is not None for x in kept) else ()

    @property
    def attention_mass(self) -> tuple[jax.Array, ...] | None:
        """What every slot and new token received in each layer; None unless asked for."""
        mass = [layer.attention.mass for layer in self.layers]
        return tuple(m for m in mass if m is not None) or None


def attend(
    scope: Scope,
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
    kind: LongAttention | None = None,
    beside: Beside | None = None,
    extended: Rope | None = None,
) -> Attended:
    """Softmax attention of one layer over what the cache holds of it, and the new tokens.

    q: `[B, T, N, H]`, k and v: `[B, T, K, H]`, all rotated where they are. project_out: of the
    heads, `[B, T, N * H]` to `[B, T, D]`. cache_dtype: the cache's format where there is no cache.
    window: how many of the last positions a query sees, itself included; None for all. cap: see
    `ops.attend`. kind: of attention that is not dense, a row of `long.KINDS`. beside: what more a
    kind that keeps a memory is given. extended: the layer's rotary settings where they are
    Self-Extend's; not both.

    Raises ConfigError for Self-Extend under a mask, with documents, or with each head's weights;
    for a text on many devices with a mask or mass.
    """
    parts = [ops.Part(s.k[layer], s.v[layer], s.position_BS) for s in scope.segments]
    # New keys and values are rounded as the cache will round them, so that a token attends to the
    # same numbers whether they come from the cache or from the same chunk.
    kept = parts[0].k_BSKH.dtype if parts else jnp.dtype(cache_dtype)
    new = ops.Part(ops.cast(k, kept), ops.cast(v, kept), scope.position_BT)
    parts.append(new)
    mask_BTS = scope.mask_BTS
    if scope.across.attend is not None:
        at, documents = scope.position_BT, scope.document_BT
        if mask_BTS is not None or scope.mass is not False:
            raise ConfigError(
                "a text that is split over devices (sequence=) runs by positions alone, and says no"
                " attention mass: use a mesh without sequence for masks and mass"
            )
        out, new = scope.across.attend(q, at, parts, documents, scale=scale, window=window, cap=cap)
        x = project_out(out.reshape(*out.shape[:2], -1))
        return Attended(q, new.k_BSKH, new.v_BSKH, out, x, None)
    if kind is not None:
        attend_long = KINDS[kind.kind]
        out, mass, memory = attend_long(kind, scope, q, parts, beside, scale=scale, cap=cap)
        x = project_out(out.reshape(*out.shape[:2], -1))
        return Attended(q, new.k_BSKH, new.v_BSKH, out, x, mass, memory)
    if extended is not None and (mask_BTS is not None or scope.document_BT is not None):
        raise ConfigError(
            "Self-Extend (group_size, neighbor_window) runs by positions alone: no mask, no packed"
            " documents, no exported graph. Use the model without it there"
        )
    if scope.document_BT is not None:
        mask_BTS = within_documents(scope.position_BT, parts, scope.document_BT, window=window)
    if mask_BTS is not None:
        out, mass = attend_masked(q, parts, mask_BTS, scale=scale, cap=cap), None
    elif extended is not None:
        if scope.mass == "heads":
            raise ConfigError("attention_weights are not there with Self-Extend; attention_mass is")
        at, summed = scope.position_BT, scope.mass is True
        out, mass = attend_extended(
            q, at, parts, rope=extended, scale=scale, window=window, cap=cap, mass=summed
        )
    else:
        at, summed = scope.position_BT, scope.mass is True
        out, mass = ops.attend(q, at, parts, scale=scale, window=window, cap=cap, mass=summed)
        if scope.mass == "heads":
            mass = attention_weights(q, at, parts, scale=scale, window=window, cap=cap)
    x = project_out(out.reshape(*out.shape[:2], -1))
    return Attended(q, new.k_BSKH, new.v_BSKH, out, x, mass)


class Course(Protocol):
    """How layers are run one after another, where that is not all of them here and now: a frozen
    dataclass, since it is a field of models.
    """

    def __call__(
        self, blocks: Sequence[nn.Module], x: jax.Array, scope: Scope, remat: bool
    ) -> tuple[tuple[Layer, ...], jax.Array]: ...


def run_blocks(
    blocks: Sequence[nn.Module],
    x: jax.Array,
    scope: Scope,
    remat: bool,
    course: Course | None = None,
) -> tuple[tuple[Layer, ...], jax.Array]:
    """What each layer computes of a text, and what the last one puts out.

    remat: what a layer computes is computed again where its gradient needs it, and not kept until
    then.
    """
    if course is not None:
        return course(blocks, x, scope, remat)
    layers = list[Layer]()
    for block in blocks:
        layers.append(_run_again(block, x, scope) if remat else block(x, scope))
        x = layers[-1].x
    return tuple(layers), x


def _run_again(block: nn.Module, x: jax.Array, scope: Scope) -> Layer:
    again = nn.remat(lambda module, x: module(x, scope), prevent_cse=True)
    layer: Layer = again(block, x)
    return layer


def angles_of(
    config: ModelConfig, position_BT: jax.Array, length_B: jax.Array
) -> tuple[Angles, ...]:
    """What tokens at these positions, of texts of these lengths, are turned by: see `Scope`."""
    place_BT, segment = position_BT, config.segment_length
    if segment is not None:
        place_BT = jnp.where(position_BT >= 0, position_BT % segment, position_BT)
    return tuple(
        ops.rope_angles(
            rope,
            place_BT,
            length_B,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
        )
        for rope in config.ropes
    )
