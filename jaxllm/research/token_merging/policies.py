"""Policies for a full cache that merge its older tokens."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxllm.cache.kv import KVCache
from jaxllm.cache.operations import close_gaps, compact, keep, slot_order
from jaxllm.errors import CapacityError
from jaxllm.generation.loops.overflow import OverflowPolicy, OverflowState
from jaxllm.research.token_merging.pool import pool, pool_mass


@dataclasses.dataclass(frozen=True)
class PoolOlder(OverflowPolicy):
    """Keep the first `sinks` and last `recent` tokens; average older ones, `ratio` to a slot.

    The `pooled_slots` newest averaged slots are retained (see `pool`), so the cache
    represents sinks + pooled * ratio + recent tokens. Each token is averaged once. Gaps are closed;
    nothing is recomputed. Requires rotary positions. pooled_slots: by default a quarter of the
    cache. recent: by default, so that at most three quarters of the cache stay in use.
    """

    ratio: int = 4
    sinks: int = 4
    pooled_slots: int | None = None
    recent: int | None = None

    def max_kept(self, capacity: int) -> int:
        """Return the maximum number of slots retained, or raise CapacityError if none is freed."""
        pooled, recent = self._split_capacity(capacity)
        return self.sinks + pooled + recent + self._max_leftover

    @property
    def _max_leftover(self) -> int:
        """Maximum number of older tokens left unpooled because they do not fill a slot."""
        return self.ratio - 1

    def _split_capacity(self, capacity: int) -> tuple[int, int]:
        pooled = max(1, capacity // 4) if self.pooled_slots is None else self.pooled_slots
        recent = self.recent
        if recent is None:
            recent = capacity * 3 // 4 - pooled - self.sinks - self._max_leftover
        room = self.sinks + pooled + recent + self._max_leftover
        if min(self.ratio, pooled, recent) < 1 or self.sinks < 0 or room >= capacity:
            raise CapacityError(
                f"a cache of {capacity} slots cannot keep {self.sinks} sinks, {pooled} slots of"
                f" {self.ratio} tokens each and {recent} recent tokens"
            )
        return pooled, recent

    def __call__(self, state: OverflowState) -> tuple[KVCache, jax.Array | None]:
        """Pool older tokens and evict the oldest pooled slots; return the slots' mass too."""
        capacity, mass_BS = state.cache.capacity, state.mass_BS
        options = {
            "ratio": self.ratio,
            "sinks": self.sinks,
            "recent": self._split_capacity(capacity)[1],
        }
        cache = pool(state.cache, **options, mass_BS=mass_BS)
        if mass_BS is not None:
            mass_BS = pool_mass(state.cache, mass_BS, **options)
        too_many_B1 = (cache.length_B - self.max_kept(capacity))[:, None]
        rank_1S = jnp.arange(cache.slots, dtype=jnp.int32)[None]
        left = keep(cache, (rank_1S < self.sinks) | (rank_1S >= self.sinks + too_many_B1))
        cache = compact(close_gaps(left), capacity=capacity)
        if mass_BS is not None:
            mass_BS = jnp.take_along_axis(mass_BS, slot_order(left)[:, :capacity], axis=1)
            mass_BS = jnp.where(cache.position_BS >= 0, mass_BS, 0)
        return cache, mass_BS


@dataclasses.dataclass(frozen=True)
class PoolByAttention(PoolOlder):
    """`PoolOlder`, with each token weighted by the attention that it has received so far."""

    reads_mass: ClassVar[bool] = True
