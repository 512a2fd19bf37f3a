"""Old tokens pooled: neighbouring slots of a cache become one, and nothing is run or trained again.

The mean pooling of the Compressive Transformer (Rae et al. 2020, arXiv 1911.05507, section 3.2) for
models with rotary positions, which were not trained for it. A mean of keys that were turned by
different angles is no key, so they are turned back to position 0, averaged, and turned to one
position. A pooled slot is one slot to attention: what it stands for is not counted c times.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.cache.kv import MOST_SLOTS, KVCache, check_mass, check_usable
from jaxllm.cache.surgery import Ropes, compact, movable_ropes, slot_order, turn_heads
from jaxllm.errors import CapacityError, ConfigError
from jaxllm.ops import Entries, cast, dense
from jaxllm.whole import whole


def pool(
    cache: KVCache, *, ratio: int, sinks: int, recent: int, mass_BS: jax.Array | None = None
) -> KVCache:
    """Each `ratio` neighbouring tokens between the first `sinks` and the last `recent` as one slot.

    A slot has the mean of its tokens' values and of their keys, which are turned to the position of
    the last of them, whose id it takes too; it is marked as patched (`KVCache.patched_BS`). What
    was patched already is not pooled again, and fewer than `ratio` tokens that are left over stay
    as they are, as all others do, bit for bit. The tokens lie in one tail without gaps in slots,
    in the order of their positions; `close_gaps` numbers them anew. int8 entries are pooled in
    float32 and rounded once more.

    mass_BS: attention that each slot received, `[B, S]` over the cache's slots, as for
    `heavy_hitters`: the mean is weighted by it, so that a slot stands most for what was used most;
    the plain mean where none of a group received any.

    Raises CapacityError for numbers out of range, CacheMismatchError for a mass of another shape,
    ConfigError for models whose keys cannot be turned back: learned positions, and rotary settings
    that follow the text's length.
    """
    check_usable(cache)
    ratio = whole("ratio", ratio, 1, MOST_SLOTS, CapacityError)
    sinks = whole("sinks", sinks, 0, MOST_SLOTS, CapacityError)
    recent = whole("recent", recent, 0, MOST_SLOTS, CapacityError)
    ropes = _poolable(cache)
    order_BS = slot_order(cache)
    if mass_BS is not None:
        mass_BS = jnp.take_along_axis(check_mass(cache, mass_BS), order_BS, axis=1)
    cache = compact(cache)  # slots are ranks now
    return _pooled(cache, ropes, ratio, jnp.int32(sinks), jnp.int32(recent), mass_BS)


def pooled_mass(
    cache: KVCache, mass_BS: jax.Array, *, ratio: int, sinks: int, recent: int
) -> jax.Array:
    """What the slots of `pool(cache, ...)` have received: the sums of what their tokens have."""
    mass_BS = jnp.take_along_axis(mass_BS, slot_order(cache), axis=1)
    group_BS, _ = _groups(compact(cache), ratio, jnp.int32(sinks), jnp.int32(recent))
    return _sum(mass_BS, group_BS)


def _poolable(cache: KVCache) -> tuple[Ropes, ...]:
    """What each array's keys are turned by. Raises ConfigError where they cannot be turned back."""
    config = cache.config
    kinds = {
        kind.kind for kind in map(config.long_attention, range(config.num_hidden_layers)) if kind
    }
    if kinds:
        raise ConfigError(
            f"pool: attention of kind {min(kinds)!r} finds tokens by their positions, and a slot of"
            " several has none of its own. Such a model bounds what it reads by itself"
        )
    if not config.ropes:
        raise ConfigError(
            f"pool: {config.model_type} adds a learned vector of its position to every token,"
            " and the keys' means would be of several positions at once. Use slide, which runs the"
            " recent tokens again, or heavy hitters within its context"
        )
    return movable_ropes(cache, 0)


def _groups(
    cache: KVCache, ratio: int, sinks: jax.Array, recent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The slot that each slot's token goes to, int32 `[B, S]`, S for none; how many share it.

    The cache is compact: a row's tokens lie in its first slots, in order.
    """
    S, tail = cache.slots, cache.tail
    rank_S = jnp.arange(S, dtype=jnp.int32)[None]
    there_BS = tail.position_BS >= 0
    last_B1 = (cache.length_B - recent)[:, None]
    old_BS = there_BS & (rank_S >= sinks) & (rank_S < last_B1) & ~tail.patched_BS
    # Each run of old tokens by itself: its tokens' numbers, and those that fill no group.
    before_BS = jax.lax.cummax(jnp.where(old_BS, -1, rank_S), axis=1)
    after_BS = jax.lax.cummin(jnp.where(old_BS, S, rank_S), axis=1, reverse=True)
    number_BS = rank_S - before_BS - 1
    old_BS = old_BS & (number_BS < (after_BS - before_BS - 1) // ratio * ratio)
    begins_BS = there_BS & (~old_BS | (number_BS % ratio == 0))
    group_BS = jnp.cumsum(begins_BS, axis=1, dtype=jnp.int32) - 1
    size_BS = jnp.where(old_BS, ratio, 1).astype(jnp.int32)
    return jnp.where(there_BS, group_BS, S), size_BS


def _weights(group_BS: jax.Array, size_BS: jax.Array, mass_BS: jax.Array | None) -> jax.Array:
    """Each token's share in its slot, float32 `[B, S]`; those of one slot add up to one."""
    plain_BS = 1.0 / size_BS.astype(jnp.float32)
    if mass_BS is None:
        return plain_BS
    mass_BS = mass_BS.astype(jnp.float32)
    total_BS = _take(_sum(mass_BS, group_BS), group_BS)
    return jnp.where(total_BS > 0, mass_BS / jnp.where(total_BS > 0, total_BS, 1.0), plain_BS)


def _sum(x_BSX: jax.Array, group_BS: jax.Array) -> jax.Array:
    """Sums by slot, `[B, S, ...]`; what goes to slot S is dropped."""
    row_B1 = jnp.arange(group_BS.shape[0])[:, None]
    return jnp.zeros_like(x_BSX).at[row_B1, group_BS].add(x_BSX, mode="drop")


def _take(x_BS: jax.Array, group_BS: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x_BS, jnp.minimum(group_BS, x_BS.shape[1] - 1), axis=1)


def _last(x_BSX: jax.Array, group_BS: jax.Array) -> jax.Array:
    """What the last token of each slot has, `[B, S, ...]`."""
    S = group_BS.shape[1]
    row_B1 = jnp.arange(group_BS.shape[0])[:, None]
    rank_BS = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32)[None], group_BS.shape)
    last_BS = jnp.zeros_like(group_BS).at[row_B1, group_BS].max(rank_BS, mode="drop")
    index = last_BS.reshape(last_BS.shape + (1,) * (x_BSX.ndim - 2))
    return jnp.take_along_axis(x_BSX, index, axis=1)


@partial(jax.jit, static_argnums=(1, 2))
def _pooled(
    cache: KVCache,
    ropes: tuple[Ropes, ...],
    ratio: int,
    sinks: jax.Array,
    recent: jax.Array,
    mass_BS: jax.Array | None,
) -> KVCache:
    tail, head_dim, S = cache.tail, cache.config.head_dim, cache.slots
    group_BS, size_BS = _groups(cache, ratio, sinks, recent)
    weight_BS = _weights(group_BS, size_BS, mass_BS)
    used_B1 = jnp.where(group_BS < S, group_BS + 1, 0).max(axis=1, keepdims=True)
    filled_BS = jnp.arange(S, dtype=jnp.int32)[None] < used_B1
    position_BS = jnp.where(filled_BS, _last(tail.position_BS, group_BS), -1)
    pooled_BS = filled_BS & (_last(size_BS, group_BS) > 1)

    def mean(entries: Entries, ropes: Ropes) -> Entries:
        x = dense(entries).astype(jnp.float32)
        x = jnp.where((group_BS < S)[:, :, None, None], x, 0.0)  # zero times NaN is NaN
        x = turn_heads(x, -tail.position_BS, ropes, head_dim)
        x = _sum(x * weight_BS[:, :, None, None], group_BS)
        x = turn_heads(x, position_BS, ropes, head_dim)
        new = cast(x, entries.dtype)

        def chosen(new: jax.Array, old: jax.Array) -> jax.Array:
            several = pooled_BS.reshape(pooled_BS.shape + (1,) * (old.ndim - 2))
            return jnp.where(several, new, _last(old, group_BS))

        found: Any = jax.tree.map(chosen, new, entries)
        return found

    return cache.replace(
        tail=tail.replace(
            k=tuple(mean(k, rope) for k, rope in zip(tail.k, ropes, strict=True)),
            v=tuple(mean(v, ()) for v in tail.v),
            position_BS=position_BS,
            token_BS=_last(tail.token_BS, group_BS),
            patched_BS=_last(tail.patched_BS, group_BS) | pooled_BS,
        ),
        cursor=used_B1.max(),
    )
