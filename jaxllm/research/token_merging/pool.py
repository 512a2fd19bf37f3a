"""Token merging: neighboring old slots of a cache become one, without running any tokens.

The mean pooling of the Compressive Transformer (Rae et al. 2020, arXiv 1911.05507, section 3.2),
for rotary models that were not trained for it. Keys rotated by different angles cannot be averaged,
so they are rotated back to position 0, averaged, and rotated to one position. Attention treats a
pooled slot as one slot; it does not count as several tokens.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.cache.kv import MAX_SLOTS, KVCache, check_mass, check_usable
from jaxllm.cache.operations import Ropes, compact, movable_ropes, rerotate_heads, slot_order
from jaxllm.errors import CapacityError, ConfigError
from jaxllm.ops import Entries, cast, dequantize
from jaxllm.runtime.validation import check_int


def pool(
    cache: KVCache, *, ratio: int, sinks: int, recent: int, mass_BS: jax.Array | None = None
) -> KVCache:
    """Merge each `ratio` tokens between the first `sinks` and the last `recent` into one slot.

    A pooled slot holds the means of its neighboring tokens' values and keys, the latter rotated to
    the position of its last token, whose id it takes. It is marked in `KVCache.patched_BS`. Patched
    slots are not pooled again, and a remainder of fewer than `ratio` tokens stays; all slots that
    stay keep their bits. The result has one tail with slots in order of position and gaps in
    positions; `close_gaps` renumbers them. int8 entries are pooled in float32 and rounded once
    more.

    Args:
        mass_BS: Attention received, `[B, S]` over the cache's slots, as for `heavy_hitters`. Means
            are weighted by it; if a whole group received none, its mean is unweighted.

    Raises:
        CapacityError: A number is out of range.
        CacheMismatchError: The mass has another shape.
        ConfigError: Keys cannot be rotated back (learned positions, rotary angles that follow the
            text's length), or the model has long attention.
    """
    check_usable(cache)
    ratio = check_int("ratio", ratio, 1, MAX_SLOTS, CapacityError)
    sinks = check_int("sinks", sinks, 0, MAX_SLOTS, CapacityError)
    recent = check_int("recent", recent, 0, MAX_SLOTS, CapacityError)
    ropes = _pooling_ropes(cache)
    order_BS = slot_order(cache)
    if mass_BS is not None:
        mass_BS = jnp.take_along_axis(check_mass(cache, mass_BS), order_BS, axis=1)
    cache = compact(cache)  # now slot numbers are ranks
    return _pool_groups(cache, ropes, ratio, jnp.int32(sinks), jnp.int32(recent), mass_BS)


def pool_mass(
    cache: KVCache, mass_BS: jax.Array, *, ratio: int, sinks: int, recent: int
) -> jax.Array:
    """Return the attention mass of the slots of `pool(cache, ...)`: sums over their tokens."""
    mass_BS = jnp.take_along_axis(mass_BS, slot_order(cache), axis=1)
    group_BS, _ = _group_tokens(compact(cache), ratio, jnp.int32(sinks), jnp.int32(recent))
    return _sum_by_slot(mass_BS, group_BS)


def _pooling_ropes(cache: KVCache) -> tuple[Ropes, ...]:
    """Return the rotary settings of each array. Raises ConfigError if keys cannot be pooled."""
    config = cache.config
    kinds = {
        kind.kind
        for kind in map(config.attention_kind, range(config.num_hidden_layers))
        if kind and kind.period != 1
    }
    if kinds:
        raise ConfigError(
            f"pool: attention of kind {min(kinds)!r} selects tokens by position, and a pooled slot"
            " has several. Such a model limits its reads without pooling"
        )
    if config.learns_positions:
        raise ConfigError(
            f"pool: {config.model_type} has learned position embeddings, so mean keys would mix"
            " positions. Use slide, which runs the recent tokens again, or heavy hitters within"
            " its context"
        )
    return movable_ropes(cache, 0)


def _group_tokens(
    cache: KVCache, ratio: int, sinks: jax.Array, recent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return each token's new slot, int32 `[B, S]` (S: none), and how many tokens share it.

    The cache is compact: a row's tokens lie in its first slots, in order.
    """
    S, tail = cache.slots, cache.tail
    rank_S = jnp.arange(S, dtype=jnp.int32)[None]
    is_real_BS = tail.position_BS >= 0
    last_B1 = (cache.length_B - recent)[:, None]
    old_BS = is_real_BS & (rank_S >= sinks) & (rank_S < last_B1) & ~tail.patched_BS
    # Number the tokens of each run of old ones; drop the remainder that fills no group.
    before_BS = jax.lax.cummax(jnp.where(old_BS, -1, rank_S), axis=1)
    after_BS = jax.lax.cummin(jnp.where(old_BS, S, rank_S), axis=1, reverse=True)
    number_BS = rank_S - before_BS - 1
    old_BS = old_BS & (number_BS < (after_BS - before_BS - 1) // ratio * ratio)
    begins_BS = is_real_BS & (~old_BS | (number_BS % ratio == 0))
    group_BS = jnp.cumsum(begins_BS, axis=1, dtype=jnp.int32) - 1
    size_BS = jnp.where(old_BS, ratio, 1).astype(jnp.int32)
    return jnp.where(is_real_BS, group_BS, S), size_BS


def _weights(group_BS: jax.Array, size_BS: jax.Array, mass_BS: jax.Array | None) -> jax.Array:
    """Return each token's weight in its slot, float32 `[B, S]`; the sum per slot is one."""
    plain_BS = 1.0 / size_BS.astype(jnp.float32)
    if mass_BS is None:
        return plain_BS
    mass_BS = mass_BS.astype(jnp.float32)
    slot_BS = jnp.minimum(group_BS, mass_BS.shape[1] - 1)
    total_BS = jnp.take_along_axis(_sum_by_slot(mass_BS, group_BS), slot_BS, axis=1)
    return jnp.where(total_BS > 0, mass_BS / jnp.where(total_BS > 0, total_BS, 1.0), plain_BS)


def _sum_by_slot(x_BSX: jax.Array, group_BS: jax.Array) -> jax.Array:
    """Sum by new slot, `[B, S, ...]`; tokens of slot S are dropped."""
    row_B1 = jnp.arange(group_BS.shape[0])[:, None]
    return jnp.zeros_like(x_BSX).at[row_B1, group_BS].add(x_BSX, mode="drop")


def _take_last(x_BSX: jax.Array, group_BS: jax.Array) -> jax.Array:
    """Return the entry of the last token of each new slot, `[B, S, ...]`."""
    S = group_BS.shape[1]
    row_B1 = jnp.arange(group_BS.shape[0])[:, None]
    rank_BS = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32)[None], group_BS.shape)
    last_BS = jnp.zeros_like(group_BS).at[row_B1, group_BS].max(rank_BS, mode="drop")
    index = last_BS.reshape(last_BS.shape + (1,) * (x_BSX.ndim - 2))
    return jnp.take_along_axis(x_BSX, index, axis=1)


@partial(jax.jit, static_argnums=(1, 2))
def _pool_groups(
    cache: KVCache,
    ropes: tuple[Ropes, ...],
    ratio: int,
    sinks: jax.Array,
    recent: jax.Array,
    mass_BS: jax.Array | None,
) -> KVCache:
    tail, S = cache.tail, cache.slots
    group_BS, size_BS = _group_tokens(cache, ratio, sinks, recent)
    weight_BS = _weights(group_BS, size_BS, mass_BS)
    used_B1 = jnp.where(group_BS < S, group_BS + 1, 0).max(axis=1, keepdims=True)
    filled_BS = jnp.arange(S, dtype=jnp.int32)[None] < used_B1
    position_BS = jnp.where(filled_BS, _take_last(tail.position_BS, group_BS), -1)
    pooled_BS = filled_BS & (_take_last(size_BS, group_BS) > 1)

    def mean(entries: Entries, ropes: Ropes) -> Entries:
        x = dequantize(entries).astype(jnp.float32)
        x = jnp.where((group_BS < S)[:, :, None, None], x, 0.0)  # zero times NaN is NaN
        x = rerotate_heads(x, -tail.position_BS, ropes)
        x = _sum_by_slot(x * weight_BS[:, :, None, None], group_BS)
        x = rerotate_heads(x, position_BS, ropes)
        new = cast(x, entries.dtype)

        def choose(new: jax.Array, old: jax.Array) -> jax.Array:
            several = pooled_BS.reshape(pooled_BS.shape + (1,) * (old.ndim - 2))
            return jnp.where(several, new, _take_last(old, group_BS))

        merged: Any = jax.tree.map(choose, new, entries)
        return merged

    return cache.replace(
        tail=tail.replace(
            k=tuple(mean(k, rope) for k, rope in zip(tail.k, ropes, strict=True)),
            v=tuple(mean(v, ()) for v in tail.v),
            position_BS=position_BS,
            token_BS=_take_last(tail.token_BS, group_BS),
            patched_BS=_take_last(tail.patched_BS, group_BS) | pooled_BS,
        ),
        cursor=used_B1.max(),
    )
