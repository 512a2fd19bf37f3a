"""What to do when a text outgrows its cache: forget something, by a named policy.

Without a policy generation is refused before it begins. Each policy is stated by what the model
then sees, so that a result can be checked: it is that of a run over just those tokens. A policy
that `reads_mass` is given what each slot has received in attention so far, and gives back what the
slots that are left have.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.eviction import heavy_hitters, segment_in_hand, sinks_and_window
from jaxllm.cache.kv import KVCache, back_in_place, init_cache
from jaxllm.cache.pooling import pool, pooled_mass
from jaxllm.cache.surgery import close_gaps, compact, keep, slot_order
from jaxllm.config import ModelConfig
from jaxllm.decode.sampling.sampler import Context
from jaxllm.errors import CapacityError, ConfigError
from jaxllm.shapes import pad_rows
from jaxllm.steps import prefill
from jaxllm.weights.paths import Params


class Full(NamedTuple):
    """What a policy is given: the model, its full cache, each row's text, and the slots' mass
    `[B, S]`, None for a policy that does not read it.
    """

    model: nn.Module
    params: Params
    cache: KVCache
    context: Context
    mass_BS: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Slide:
    """Begin again from the most recent `keep` tokens, at position 0.

    They are run again: what follows is a text that begins with them. For every model, with learned
    positions too. keep: by default half the cache.
    """

    reads_mass: ClassVar[bool] = False

    keep: int | None = None

    def room_for(self, capacity: int) -> int:
        """How many tokens stay. Raises CapacityError where that leaves no room for more."""
        keep = max(1, capacity // 2) if self.keep is None else self.keep
        if not 1 <= keep < capacity:
            raise CapacityError(f"a cache of {capacity} slots cannot slide over {keep} tokens")
        return keep

    def __call__(self, full: Full) -> tuple[KVCache, jax.Array | None]:
        """The cache of each row's last `keep` tokens but for the newest, which is yet to run."""
        cache, length_B = full.cache, np.asarray(full.context.length_B) - 1
        recent_B = np.minimum(self.room_for(cache.capacity), length_B)
        token_BL = np.asarray(full.context.token_BL)
        rows = zip(token_BL, length_B, recent_B, strict=True)
        tokens_BT = pad_rows([row[n - recent : n] for row, n, recent in rows])
        empty = init_cache(full.model, cache.batch, cache.capacity, dtype=cache.dtype)
        _, cache = prefill(
            full.model, full.params, empty, tokens_BT, lengths_B=recent_B, donate=True
        )
        return cache, None


@dataclasses.dataclass(frozen=True)
class SinksAndWindow:
    """Keep the first `sinks` tokens and the last `window` as they are, and close the gap.

    What is left has read what is gone; nothing is run again (Xiao et al. 2024). For models with
    rotary positions. window: by default half the cache.
    """

    reads_mass: ClassVar[bool] = False

    sinks: int = 4
    window: int | None = None

    def room_for(self, capacity: int) -> int:
        """How many tokens stay. Raises CapacityError where that leaves no room for more."""
        window = max(1, capacity // 2 - self.sinks) if self.window is None else self.window
        if window < 1 or self.sinks < 0 or self.sinks + window >= capacity:
            raise CapacityError(
                f"a cache of {capacity} slots cannot keep {self.sinks} sinks and a window of"
                f" {window}"
            )
        return self.sinks + window

    def __call__(self, full: Full) -> tuple[KVCache, jax.Array | None]:
        """The cache without what is between the sinks and the window."""
        capacity = full.cache.capacity
        window = self.room_for(capacity) - self.sinks
        left = sinks_and_window(full.cache, sinks=self.sinks, window=window)
        return compact(close_gaps(left), capacity=capacity), None


@dataclasses.dataclass(frozen=True)
class HeavyHitters:
    """Keep the last `recent` tokens and, of the older ones, the `heavy` most attended to.

    Attention is summed over all layers and heads since a token was read (H2O, Zhang et al. 2023).
    Gaps are closed; what is left has read what is gone, nothing is run again. For models with
    rotary positions. By default a quarter of the cache each.
    """

    reads_mass: ClassVar[bool] = True

    heavy: int | None = None
    recent: int | None = None

    def room_for(self, capacity: int) -> int:
        """How many tokens stay. Raises CapacityError where that leaves no room for more."""
        return sum(self._shares(capacity))

    def _shares(self, capacity: int) -> tuple[int, int]:
        quarter = max(1, capacity // 4)
        heavy, recent = (quarter if n is None else n for n in (self.heavy, self.recent))
        if heavy < 0 or recent < 1 or heavy + recent >= capacity:
            raise CapacityError(
                f"a cache of {capacity} slots cannot keep {heavy} heavy and {recent} recent tokens"
            )
        return heavy, recent

    def __call__(self, full: Full) -> tuple[KVCache, jax.Array | None]:
        """The cache of what is kept, and the mass of its slots."""
        assert full.mass_BS is not None
        capacity = full.cache.capacity
        heavy, recent = self._shares(capacity)
        left = close_gaps(heavy_hitters(full.cache, full.mass_BS, heavy=heavy, recent=recent))
        cache = compact(left, capacity=capacity)
        mass_BS = jnp.take_along_axis(full.mass_BS, slot_order(left)[:, :capacity], axis=1)
        return cache, jnp.where(cache.position_BS >= 0, mass_BS, 0)


@dataclasses.dataclass(frozen=True)
class Segments:
    """Forget the keys and values of finished segments, in models that keep a memory of them.

    Nothing sees those any more: the tokens are those of a cache that holds everything. The cache
    needs more slots than a segment has tokens.
    """

    reads_mass: ClassVar[bool] = False

    def room_for(self, capacity: int) -> int:
        """How many tokens stay at most; the cache's configuration says more (`check_policy`)."""
        return capacity

    def __call__(self, full: Full) -> tuple[KVCache, jax.Array | None]:
        """The cache of the segment in hand."""
        return compact(segment_in_hand(full.cache), capacity=full.cache.capacity), None


@dataclasses.dataclass(frozen=True)
class Pooled:
    """Keep the first `sinks` tokens and the last `recent`, and older ones by `ratio` in a slot.

    The `pooled` newest of such slots stay (`cache.pooling`), so that sinks + pooled * ratio +
    recent tokens are remembered, the older ones dimly. Each token is pooled once. Gaps are closed;
    nothing is run again. For models with rotary positions. pooled: by default a quarter of the
    cache, recent: what makes three quarters with it.
    """

    reads_mass: ClassVar[bool] = False

    ratio: int = 4
    sinks: int = 4
    pooled: int | None = None
    recent: int | None = None

    def room_for(self, capacity: int) -> int:
        """How many slots stay at most. Raises CapacityError where that leaves no room for more."""
        pooled, recent = self._shares(capacity)
        return self.sinks + pooled + recent + self._over

    @property
    def _over(self) -> int:
        """The most tokens that are left over because they fill no slot."""
        return self.ratio - 1

    def _shares(self, capacity: int) -> tuple[int, int]:
        pooled = max(1, capacity // 4) if self.pooled is None else self.pooled
        recent = self.recent
        if recent is None:
            recent = capacity * 3 // 4 - pooled - self.sinks - self._over
        room = self.sinks + pooled + recent + self._over
        if min(self.ratio, pooled, recent) < 1 or self.sinks < 0 or room >= capacity:
            raise CapacityError(
                f"a cache of {capacity} slots cannot keep {self.sinks} sinks, {pooled} slots of"
                f" {self.ratio} tokens each and {recent} recent tokens"
            )
        return pooled, recent

    def __call__(self, full: Full) -> tuple[KVCache, jax.Array | None]:
        """The cache with older tokens pooled, without what is too old, and its slots' mass."""
        capacity, mass_BS = full.cache.capacity, full.mass_BS
        options = {"ratio": self.ratio, "sinks": self.sinks, "recent": self._shares(capacity)[1]}
        cache = pool(full.cache, **options, mass_BS=mass_BS)
        if mass_BS is not None:
            mass_BS = pooled_mass(full.cache, mass_BS, **options)
        too_many_B1 = (cache.length_B - self.room_for(capacity))[:, None]
        rank_1S = jnp.arange(cache.slots, dtype=jnp.int32)[None]
        left = keep(cache, (rank_1S < self.sinks) | (rank_1S >= self.sinks + too_many_B1))
        cache = compact(close_gaps(left), capacity=capacity)
        if mass_BS is not None:
            mass_BS = jnp.take_along_axis(mass_BS, slot_order(left)[:, :capacity], axis=1)
            mass_BS = jnp.where(cache.position_BS >= 0, mass_BS, 0)
        return cache, mass_BS


@dataclasses.dataclass(frozen=True)
class PooledByUse(Pooled):
    """As `Pooled`, a slot's tokens weighted by the attention that each has received so far."""

    reads_mass: ClassVar[bool] = True


Overflow = Slide | SinksAndWindow | HeavyHitters | Segments | Pooled
OVERFLOWS: dict[str, Overflow | None] = {
    "refuse": None,
    "slide": Slide(),
    "sinks": SinksAndWindow(),
    "heavy": HeavyHitters(),
    "segments": Segments(),
    "pooled": Pooled(),
    "pooled-by-use": PooledByUse(),
}


def made_room(overflow: Overflow, full: Full) -> tuple[KVCache, jax.Array | None]:
    """What a policy leaves, where the model has its caches, and the mass of its slots."""
    cache, mass_BS = overflow(full)
    return back_in_place(cache, full.model), mass_BS


def check_policy(config: ModelConfig, capacity: int, overflow: Overflow) -> None:
    """Raise, before anything runs, where a policy is not for this model or so many slots.

    ConfigError for a model that keeps a memory and a policy that moves tokens, or the reverse;
    CapacityError for a cache that is full within a segment.
    """
    length = config.segment_length
    if isinstance(overflow, Segments):
        if length is None:
            raise ConfigError(
                f"overflow 'segments': this {config.model_type} has no segments; use 'slide'"
            )
        if capacity <= length:
            raise CapacityError(
                f"overflow 'segments': a cache of {capacity} slots is full within a segment"
                f" of {length} tokens: make one of {2 * length}"
            )
    elif length is not None and not isinstance(overflow, Slide):
        raise ConfigError(
            "this model's layers keep a memory by segments of positions: tokens cannot be moved."
            " Let finished segments go (overflow 'segments')"
        )
