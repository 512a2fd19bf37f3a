"""The cache as a value: segments of keys and values, of which the last, the tail, has free slots.

A slot is described by its position, never by its index, so padding, unequal lengths, branches and
gaps need no further bookkeeping. Keys are stored already rotated.
"""

import html
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.cache.inspection import RenderedRows, caches_equal, render_row
from jaxllm.config.model import ModelConfig
from jaxllm.errors import CacheMismatchError, CapacityError, ConfigError, TokenError
from jaxllm.files import check_memory
from jaxllm.ops.compile_cache import CachedJit
from jaxllm.ops.kv_quant import Entries, Int8Entries, cast, concat_slots
from jaxllm.runtime.multihost import is_multiprocess, to_host
from jaxllm.runtime.validation import check_dtype, check_int
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Placement, list_arrays, put
from jaxllm.weights.precision import CACHE_DTYPES
from jaxllm.weights.render import render_table

EMPTY = -1
MAX_SLOTS = (1 << 31) - 1  # row and slot numbers are int32


class Segment(struct.PyTreeNode):
    """Keys and values of some tokens.

    All leaves are `[B or 1, S, ...]`; a leaf with one row is shared by all rows. Where keys are
    shared, a slot has the same position in every row that has it.

    Attributes:
        k: Keys, one `[B or 1, S, K, H]` per layer, an array or `Int8Entries`; K is 0 in a layer
            without attention, or that reads an earlier layer's (`ModelConfig.kv_source`).
        v: Values, likewise; K is also 0 where they are computed from the keys.
        position_BS: int32, absolute. -1 in an empty slot; `cull_mark(p)`, below -1, where a token
            at p was culled. The keys and values of such slots are never attended to.
        token_BS: int32, the token ids.
        patched_BS: bool, True where an edit such as `patch` replaced what `commit` wrote.
    """

    k: tuple[Entries, ...]
    v: tuple[Entries, ...]
    position_BS: jax.Array
    token_BS: jax.Array
    patched_BS: jax.Array


class Delta(Segment):
    """The keys and values that `forward` computed for T new tokens and `commit` writes.

    The same fields as a Segment with S = T; padding tokens have position -1.

    Attributes:
        state: For `KVCache.state`, each layer's new value, or what `ops.recurrent.advance` makes it
            from; padding does not affect it.
        edits_B: As in `KVCache`.
    """

    state: tuple[Any, ...] = ()
    edits_B: Any = None


class TreeDelta(Delta):
    """The nodes of a tree of tokens that continues a cache; a node's number is its slot.

    A node's position follows its parent's. `commit(cache, delta, node)` writes one path. Slots from
    `size` on are free.

    Attributes:
        parent_BS: int32, the number of each node's parent; -1 for a child of the cache's last
            token.
        size: int32 scalar, number of nodes.
        start_B: int32, `KVCache.next_position_B` of the cache that it continues.
    """

    parent_BS: Any = None
    size: Any = None
    start_B: Any = None


class KVCache(struct.PyTreeNode):
    """Frozen segments, shared by reference, and one tail that `commit` extends.

    Attributes:
        config: The model's configuration. Static: part of the type, as shapes are.
        cursor: int32 scalar, the number of tail slots in use. It exceeds `capacity` if a compiled
            loop committed tokens that did not fit; their write was dropped, and the next call from
            Python raises CapacityError.
        next_position_B: int32 `[B]`, the position of each row's next token.
        state: Each layer's state besides keys and values, a pytree of `[B, ...]` of constant
            size (`ModelConfig.state_shape`): of a recurrent layer, or a memory of segments;
            empty for most models. `fork` copies it, `select` and `merge_rows` gather it, cache
            files contain it, `compact` leaves it unchanged. It sums over tokens, so they cannot be
            removed, except by `rewind` within limits: `patch`, `keep`, `drop_range` and culling are
            refused.
        edits_B: A fingerprint of the edits under which each row's keys were computed, uint32 `[B]`,
            0 for none; None if no row was edited (`models.site_inputs`).
        writer: Static, writes the tail if `write_at_cursor` does not (`Model.cache_writer`).
        joined_layers: Static (`Model.joined_layers`).
    """

    config: ModelConfig = struct.field(pytree_node=False)
    frozen: tuple[Segment, ...]
    tail: Segment
    cursor: jax.Array
    next_position_B: jax.Array
    state: tuple[Any, ...] = ()
    edits_B: Any = None
    writer: Any = struct.field(pytree_node=False, default=None)
    joined_layers: tuple[tuple[int | None, ...], ...] = struct.field(pytree_node=False, default=())

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All segments, oldest first."""
        return (*self.frozen, self.tail)

    @property
    def batch(self) -> int:
        """Number of rows."""
        return self.next_position_B.shape[-1]

    @property
    def capacity(self) -> int:
        """Number of tail slots: how many tokens can be committed per row in total."""
        return self.tail.position_BS.shape[-1]

    @property
    def array_layers(self) -> tuple[tuple[int | None, ...], ...]:
        """For each array of keys, the layers whose heads it holds, in order; None: no layer."""
        return self.joined_layers or tuple((i,) for i in range(len(self.tail.k)))

    def unstack_layers(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Split its arrays of keys or values, `[B, S, K, H]`, into one array per layer."""
        layers: dict[int, np.ndarray] = {}
        for numbers, x in zip(self.array_layers, arrays, strict=True):
            parts = zip(numbers, np.split(x, len(numbers), axis=2), strict=True)
            layers |= {number: part for number, part in parts if number is not None}
        return [layers[number] for number in sorted(layers)]

    @property
    def slots(self) -> int:
        """Number of slots of all segments: the S of `position_BS`, masks and attention mass."""
        return sum(s.position_BS.shape[-1] for s in self.segments)

    @property
    def dtype(self) -> str:
        """Dtype of keys and values, in the spelling of `init_cache`."""
        return str(self.tail.k[0].dtype)

    @property
    def position_BS(self) -> jax.Array:
        """Positions of all slots of all segments in order, int32 `[B, S]`; negative: no token."""
        return concat_slots([s.position_BS for s in self.segments], self.batch)

    @property
    def token_BS(self) -> jax.Array:
        """Token ids of all slots of all segments in order, int32 `[B, S]`."""
        return concat_slots([s.token_BS for s in self.segments], self.batch)

    @property
    def patched_BS(self) -> jax.Array:
        """Which slots of all segments, in order, were patched, bool `[B, S]`."""
        return concat_slots([s.patched_BS for s in self.segments], self.batch)

    def tokens(self, row: int = 0) -> list[int]:
        """Return the token ids of a row in order of their positions."""
        check_usable(self)
        row = check_int("row", row, 0, self.batch - 1, CacheMismatchError)
        position_S = to_host(self.position_BS)[row]
        order = np.argsort(position_S, kind="stable")
        return to_host(self.token_BS)[row, order[position_S[order] >= 0]].tolist()

    def show(self, tokenizer: Any) -> RenderedRows:
        """Render each row as text; culled tokens appear as [-...-], patched ones as {+...+}.

        Args:
            tokenizer: Anything with `decode(ids) -> str`.

        Returns:
            A tuple of texts, which prints as lines.
        """
        check_usable(self)
        if not hasattr(tokenizer, "decode"):
            raise TokenError(f"show needs a tokenizer (lm.tokenizer), got {tokenizer!r:.60}")
        arrays = (self.position_BS, self.token_BS, self.patched_BS)
        return RenderedRows(
            render_row(position_S, token_S, patched_S, tokenizer)
            for position_S, token_S, patched_S in zip(*map(to_host, arrays), strict=True)
        )

    def __eq__(self, other: object) -> bool:
        """Whether two caches of one configuration hold the same tokens, keys and values.

        Positions, ids, keys and values are compared slot by slot and bit by bit; empty slots are
        ignored.

        Raises CacheMismatchError if one of the caches was donated.
        """
        if not isinstance(other, KVCache):
            return NotImplemented
        check_usable(self)
        check_usable(other)
        return caches_equal(self, other)

    @property
    def length_B(self) -> jax.Array:
        """Committed tokens per row, int32 `[B]`, without padding and empty slots."""
        counts = [(s.position_BS >= 0).sum(axis=-1, dtype=jnp.int32) for s in self.segments]
        return sum(counts[1:], jnp.broadcast_to(counts[0], (self.batch,)))

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays; shared arrays count once."""
        return count_bytes(self)

    def __repr__(self) -> str:
        model = f"{self.config.model_type}, {len(self.tail.k)} layers, {self.dtype}"
        rows = f"{self.batch} row{'s' * (self.batch != 1)}"
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(self)):
            return f"KVCache({model}: {rows}, capacity {self.capacity}, traced)"
        if _is_donated(self):
            return f"KVCache({model}: {rows}, capacity {self.capacity}, donated)"
        size = (
            f"{self.nbytes / 1e6:.1f} MB" if self.nbytes >= 1e6 else f"{self.nbytes / 1e3:.0f} kB"
        )
        if self.cursor.ndim:
            return f"KVCache({model}: a stack of {self.cursor.shape}, {size})"
        lengths = [str(n) for n in np.asarray(self.length_B)[:8]] + ["..."] * (self.batch > 8)
        frozen = f"{len(self.frozen)} frozen segment{'s' * (len(self.frozen) != 1)}"
        return (
            f"KVCache({model}: {rows} of {', '.join(lengths)} tokens, {frozen},"
            f" tail {int(self.cursor)}/{self.capacity}, {size})"
        )

    def _repr_html_(self) -> str:
        leaves = jax.tree.leaves(self)
        traced = any(isinstance(x, jax.core.Tracer) for x in leaves)
        if traced or _is_donated(self) or self.cursor.ndim:
            return f"<code>{html.escape(repr(self))}</code>"
        rows = []
        for segment in self.segments:
            position_BS = to_host(segment.position_BS)
            counts = (position_BS >= 0).sum(axis=-1)
            shared = f" (one for {self.batch})" if len(counts) < self.batch else ""
            tokens = ", ".join(map(str, counts[:8])) + ", ..." * (len(counts) > 8)
            kind = "tail" if segment is self.tail else "frozen"
            slots = f"{position_BS.shape[-1]:,}"
            size = f"{count_bytes(segment):,}"
            rows.append((kind, f"{len(counts)}{shared}", slots, tokens, size))
        rows.append(("total", "", f"{self.slots:,}", "", f"{self.nbytes:,}"))
        return render_table(repr(self), ("segment", "rows", "slots", "tokens", "bytes"), rows)


def count_bytes(*values: Any) -> int:
    """Return the bytes of all arrays in these pytrees; an array that several share counts once."""
    return sum({id(x): x.nbytes for x in jax.tree.leaves(values)}.values())


def init_cache(
    model: Model | ModelConfig,
    batch: int,
    capacity: int,
    *,
    dtype: str | None = None,
    place: Placement | None = None,
) -> KVCache:
    """Return an empty cache with room for `capacity` tokens in each of `batch` rows.

    It holds `2 * batch * capacity * kv heads * head_dim` numbers for each layer; with latent
    attention, the keys' half of them.

    Args:
        model: The model, or its configuration alone.
        dtype: As for `load`, or "int8", with a float32 scale per token and head. Default: the cache
            dtype of the model's `Precision`; float32 for a configuration.
        place: Maps an array's path (`tail.k.0`, ...) and the array to its device or sharding; None
            for the default device.

    Raises:
        ConfigError: Unknown dtype.
        CapacityError: A size is not a positive integer, or the cache exceeds the machine's memory.
    """
    config, dtype = _resolve_config(model, dtype)
    batch = check_int("a cache's batch", batch, 1, MAX_SLOTS, CapacityError)
    capacity = check_int("a cache's capacity", capacity, 1, MAX_SLOTS, CapacityError)
    check_memory(
        cache_nbytes(config, batch, capacity, dtype),
        f"a cache of {batch:,} rows of {capacity:,} tokens in {dtype}",
    )
    sharded = model if isinstance(model, Model) and model.is_sharded else None
    return put(_EMPTY_CACHE(config, batch, capacity, dtype, sharded), place)


def _empty_cache(
    config: ModelConfig, batch: int, capacity: int, dtype: str, sharded: Model | None
) -> KVCache:
    """Build an empty cache; `sharded`: the model, if it is sharded."""
    layers, width = range(config.num_hidden_layers), config.layer_head_dim
    keys = [(config.kv_heads(i), width(i)) for i in layers]
    values = [(config.value_heads(i), width(i)) for i in layers]
    joined_layers = () if sharded is None else sharded.joined_layers
    if joined_layers:
        heads, size = keys[0]
        keys = values = [(heads * len(numbers), size) for numbers in joined_layers]

    def zeros(sizes: tuple[int, int]) -> Entries:
        shape = (batch, capacity, *sizes)
        if dtype == "int8":
            return Int8Entries(jnp.zeros(shape, jnp.int8), jnp.zeros(shape[:-1], jnp.float32))
        return jnp.zeros(shape, CACHE_DTYPES[dtype])

    cache = KVCache(
        config=config,
        frozen=(),
        tail=Segment(
            k=tuple(map(zeros, keys)),
            v=tuple(map(zeros, values)),
            position_BS=jnp.full((batch, capacity), EMPTY, jnp.int32),
            token_BS=jnp.zeros((batch, capacity), jnp.int32),
            patched_BS=jnp.zeros((batch, capacity), bool),
        ),
        cursor=jnp.zeros((), jnp.int32),
        next_position_B=jnp.zeros((batch,), jnp.int32),
        state=_empty_state(config, batch),
        writer=None if sharded is None else sharded.cache_writer,
        joined_layers=joined_layers,
    )
    return cache if sharded is None else constrain_cache(cache, sharded)


def constrain_cache(cache: KVCache, model: Any) -> KVCache:
    """Constrain a cache to the shardings of its model, inside a compiled program."""
    if not model.is_sharded:
        return cache
    named, structure = list_arrays(cache)
    placed = [
        jax.lax.with_sharding_constraint(x, model.cache_sharding(path, x)) for path, x in named
    ]
    placed_cache: KVCache = jax.tree.unflatten(structure, placed)
    return placed_cache


def replicate_for_host(tree: Any, model: Any) -> Any:
    """Replicate values that the host reads, inside a compiled program of several processes."""
    if not (is_multiprocess() and model.is_sharded):
        return tree
    replicated = model.cache_sharding("", np.zeros(()))
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, replicated), tree)


def reshard_cache(cache: KVCache, model: Any) -> KVCache:
    """Move an edited cache back to its model's shardings; no-op for unsharded models."""
    return put(cache, model.cache_sharding)


_EMPTY_CACHE = CachedJit(_empty_cache, static_argnums=(0, 1, 2, 3, 4))


def _empty_state(config: ModelConfig, batch: int) -> tuple[Any, ...]:
    if not config.has_state:
        return ()
    forms = tuple(config.state_shape(layer) for layer in range(config.num_hidden_layers))
    empty: tuple[Any, ...] = jax.tree.map(lambda x: jnp.zeros((batch, *x.shape), x.dtype), forms)
    return empty


def cache_nbytes(config: ModelConfig, batch: int, capacity: int, dtype: str | None = None) -> int:
    """Return the number of bytes that `init_cache` allocates."""
    dtype = dtype or "float32"
    width, scale = np.dtype(CACHE_DTYPES[dtype]).itemsize, 4 if dtype == "int8" else 0
    marks = 9  # int32 position, int32 token, bool patched
    layers = range(config.num_hidden_layers)
    each = sum(
        (config.kv_heads(i) + config.value_heads(i)) * (width * config.layer_head_dim(i) + scale)
        for i in layers
    )
    states = jax.tree.leaves([config.state_shape(i) for i in layers])
    fixed = sum(x.size * x.dtype.itemsize for x in states)
    return batch * (capacity * (each + marks) + fixed)


def _resolve_config(model: Model | ModelConfig, dtype: str | None) -> tuple[ModelConfig, str]:
    """Return the configuration, and the dtype of keys and values."""
    if isinstance(model, Model):
        config, dtype = model.config, model.precision.cache if dtype is None else dtype
    elif isinstance(model, ModelConfig):
        config = model
    else:
        raise ConfigError(
            "init_cache needs a model or its configuration (lm.model, lm.config), got"
            f" {model!r:.60}"
        )
    return config, check_dtype("cache dtype", "float32" if dtype is None else dtype, "int8")


def cull_mark(position: Any) -> Any:
    """Return the mark of a slot whose token at this position was culled; its own inverse."""
    return -2 - position


def cast_delta(delta: Delta, template: Segment) -> Segment:
    """Return the delta as a segment, cast to the dtypes of another segment."""
    return Segment(
        k=tuple(cast(new, old.dtype) for new, old in zip(delta.k, template.k, strict=True)),
        v=tuple(cast(new, old.dtype) for new, old in zip(delta.v, template.v, strict=True)),
        position_BS=delta.position_BS,
        token_BS=delta.token_BS,
        patched_BS=delta.patched_BS,
    )


def check_usable(cache: KVCache) -> None:
    """Raise unless this is a usable cache: a KVCache, not donated and not overflowed."""
    if not isinstance(cache, KVCache):
        raise CacheMismatchError(f"a cache must be a KVCache (init_cache), got {cache!r:.60}")
    if _is_donated(cache):
        raise CacheMismatchError(
            "this cache was donated to an earlier step (donate=True) and no longer exists."
            " Use the cache that the step returned"
        )
    if isinstance(cache.cursor, jax.core.Tracer):
        return
    if int(cache.cursor) > cache.capacity:
        raise CapacityError(
            f"a compiled loop committed {int(cache.cursor)} tokens to a cache of"
            f" {cache.capacity} slots; the last {int(cache.cursor) - cache.capacity} were dropped."
            " Make the cache larger, or check its capacity before entering the loop"
        )


def _is_donated(cache: KVCache) -> bool:
    """Whether JAX arrays of a cache were deleted. NumPy arrays (pickle, device_get) never are."""
    leaves = (x for x in jax.tree.leaves(cache) if not isinstance(x, jax.core.Tracer))
    return any(isinstance(x, jax.Array) and x.is_deleted() for x in leaves)


def merge_labels(cached_B: Any, new_B: Any) -> Any:
    """Return the fingerprints of a cache after new keys. Raises CacheMismatchError if they differ.

    cached_B, new_B: uint32 `[B]`, 0 for rows without edits; None if no row has any.
    """
    if cached_B is None:
        return new_B
    if not any(isinstance(x, jax.core.Tracer) for x in (cached_B, new_B)):
        old_B, label_B = np.asarray(cached_B), 0 if new_B is None else np.asarray(new_B)
        unlike = np.flatnonzero((old_B != 0) & (old_B != label_B))
        if unlike.size:
            raise CacheMismatchError(
                f"row {unlike[0]} of the cache holds keys that were computed under other edits."
                " Use the same edits, an unedited cache, or declare it with"
                " jaxllm.inside.assign_edits(model, cache, edits)"
            )
    return cached_B if new_B is None else new_B


def check_delta(delta: Any) -> None:
    """Raise CacheMismatchError unless this is a Delta."""
    if isinstance(delta, TreeDelta):
        raise CacheMismatchError("a tree's delta has no one path. Use commit(cache, delta, node)")
    if not isinstance(delta, Delta):
        remedy = ". Give its delta" if hasattr(delta, "delta") else " (forward(...).delta)"
        raise CacheMismatchError(f"delta must be a Delta, got {type(delta).__name__}{remedy}")


def check_mass(cache: KVCache, mass_BS: Any) -> jax.Array:
    """Return attention mass as an array. Raises CacheMismatchError unless it is floats `[B, S]`."""
    if not isinstance(mass_BS, jax.Array):
        try:
            mass_BS = np.asarray(mass_BS)
        except ValueError:
            raise CacheMismatchError(f"attention mass has ragged rows: {mass_BS!r:.60}") from None
    if mass_BS.shape != (cache.batch, cache.slots):
        raise CacheMismatchError(
            f"attention mass has shape {mass_BS.shape}, expected ({cache.batch}, {cache.slots})"
        )
    if not jnp.issubdtype(mass_BS.dtype, jnp.floating):
        raise CacheMismatchError(f"attention mass must be floats, got {mass_BS.dtype}")
    return jnp.asarray(mass_BS, jnp.float32)


def check_no_state(cache: KVCache, what: str) -> None:
    """Raise CacheMismatchError if layers keep a state besides keys and values."""
    if cache.state:
        raise CacheMismatchError(
            f"{what}: this model's layers keep a state of the whole text, from which tokens"
            " cannot be removed. Continue from a cache that was forked before"
        )
