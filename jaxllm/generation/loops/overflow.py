"""Eviction policies for texts that outgrow their cache.

Without a policy such a generation raises an error before it starts. Each policy defines which
tokens the model still attends to, so results can be verified against a run over these tokens. A
policy that `reads_mass` receives the attention mass of each slot so far, and returns that of the
slots it retains.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.eviction import current_segment, heavy_hitters, sinks_and_window
from jaxllm.cache.kv import KVCache, init_cache, reshard_cache
from jaxllm.cache.operations import close_gaps, compact, keep, slot_order
from jaxllm.cache.token_merging import pool, pool_mass
from jaxllm.config.model import ModelConfig
from jaxllm.errors import CapacityError, ConfigError
from jaxllm.generation.sampling.sampler import Context
from jaxllm.ops.padding import pad_rows
from jaxllm.steps import prefill
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params


class OverflowState(NamedTuple):
    """Input of a policy: model, full cache, each row's text, and the slots' attention mass.

    mass_BS: `[B, S]`, or None if the policy does not read it.
    """

    model: Model
    params: Params
    cache: KVCache
    context: Context
    mass_BS: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Slide:
    """Restart from the most recent `keep` tokens, which are prefilled again from position 0.

    Works with all models, including those with learned positions. keep: default half the cache.
    """

    reads_mass: ClassVar[bool] = False

    keep: int | None = None

    def max_kept(self, capacity: int) -> int:
        """Return the number of tokens retained, or raise CapacityError if no slot is freed."""
        keep = max(1, capacity // 2) if self.keep is None else self.keep
        if not 1 <= keep < capacity:
            raise CapacityError(f"a cache of {capacity} slots cannot keep {keep} tokens and slide")
        return keep

    def __call__(self, state: OverflowState) -> tuple[KVCache, jax.Array | None]:
        """Return a cache of each row's last `keep` tokens before the newest, which has not run."""
        cache, length_B = state.cache, np.asarray(state.context.length_B) - 1
        recent_B = np.minimum(self.max_kept(cache.capacity), length_B)
        token_BL = np.asarray(state.context.token_BL)
        rows = zip(token_BL, length_B, recent_B, strict=True)
        tokens_BT = pad_rows([row[n - recent : n] for row, n, recent in rows])
        empty = init_cache(state.model, cache.batch, cache.capacity, dtype=cache.dtype)
        _, cache = prefill(
            state.model, state.params, empty, tokens_BT, lengths_B=recent_B, donate=True
        )
        return cache, None


@dataclasses.dataclass(frozen=True)
class SinksAndWindow:
    """Keep the first `sinks` and the last `window` tokens, and close the gap (Xiao et al. 2024).

    Nothing is recomputed: retained entries still depend on evicted tokens. Requires rotary
    positions. window: by default, sinks and window together fill half the cache.
    """

    reads_mass: ClassVar[bool] = False

    sinks: int = 4
    window: int | None = None

    def max_kept(self, capacity: int) -> int:
        """Return the number of tokens retained, or raise CapacityError if no slot is freed."""
        window = max(1, capacity // 2 - self.sinks) if self.window is None else self.window
        if window < 1 or self.sinks < 0 or self.sinks + window >= capacity:
            raise CapacityError(
                f"a cache of {capacity} slots cannot keep {self.sinks} sinks and a window of"
                f" {window}"
            )
        return self.sinks + window

    def __call__(self, state: OverflowState) -> tuple[KVCache, jax.Array | None]:
        """Evict the tokens between the sinks and the window."""
        capacity = state.cache.capacity
        window = self.max_kept(capacity) - self.sinks
        left = sinks_and_window(state.cache, sinks=self.sinks, window=window)
        return compact(close_gaps(left), capacity=capacity), None


@dataclasses.dataclass(frozen=True)
class HeavyHitters:
    """Keep the last `recent` tokens and the `heavy` older ones with the most attention (H2O).

    Attention is summed over all layers, heads and steps since the token was read (Zhang et al.
    2023). Gaps are closed. Nothing is recomputed: retained entries still depend on evicted tokens.
    Requires rotary positions. heavy, recent: by default a quarter of the cache each.
    """

    reads_mass: ClassVar[bool] = True

    heavy: int | None = None
    recent: int | None = None

    def max_kept(self, capacity: int) -> int:
        """Return the number of tokens retained, or raise CapacityError if no slot is freed."""
        return sum(self._split_capacity(capacity))

    def _split_capacity(self, capacity: int) -> tuple[int, int]:
        quarter = max(1, capacity // 4)
        heavy, recent = (quarter if n is None else n for n in (self.heavy, self.recent))
        if heavy < 0 or recent < 1 or heavy + recent >= capacity:
            raise CapacityError(
                f"a cache of {capacity} slots cannot keep {heavy} heavy and {recent} recent tokens"
            )
        return heavy, recent

    def __call__(self, state: OverflowState) -> tuple[KVCache, jax.Array | None]:
        """Return the cache of retained tokens, and the attention mass of its slots."""
        assert state.mass_BS is not None
        capacity = state.cache.capacity
        heavy, recent = self._split_capacity(capacity)
        left = close_gaps(heavy_hitters(state.cache, state.mass_BS, heavy=heavy, recent=recent))
        cache = compact(left, capacity=capacity)
        mass_BS = jnp.take_along_axis(state.mass_BS, slot_order(left)[:, :capacity], axis=1)
        return cache, jnp.where(cache.position_BS >= 0, mass_BS, 0)


@dataclasses.dataclass(frozen=True)
class DropSegments:
    """Evict the keys and values of finished segments, in models with a compressive memory.

    No later token attends to them, so the output equals that of an unbounded cache. The cache needs
    more slots than a segment has tokens.
    """

    reads_mass: ClassVar[bool] = False

    def max_kept(self, capacity: int) -> int:
        """Return the cache size; `check_policy` checks it against the segment length."""
        return capacity

    def __call__(self, state: OverflowState) -> tuple[KVCache, jax.Array | None]:
        """Return the cache of the current segment."""
        return compact(current_segment(state.cache), capacity=state.cache.capacity), None


@dataclasses.dataclass(frozen=True)
class PoolOlder:
    """Keep the first `sinks` and last `recent` tokens; average older ones, `ratio` to a slot.

    The `pooled_slots` newest averaged slots are retained (see `cache.token_merging`), so the cache
    represents sinks + pooled * ratio + recent tokens. Each token is averaged once. Gaps are closed;
    nothing is recomputed. Requires rotary positions. pooled_slots: by default a quarter of the
    cache.
    recent: by default, so that at most three quarters of the cache stay in use.
    """

    reads_mass: ClassVar[bool] = False

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


OverflowPolicy = Slide | SinksAndWindow | HeavyHitters | DropSegments | PoolOlder
OVERFLOWS: dict[str, OverflowPolicy | None] = {
    "refuse": None,
    "slide": Slide(),
    "sinks": SinksAndWindow(),
    "heavy": HeavyHitters(),
    "segments": DropSegments(),
    "pooled": PoolOlder(),
    "pooled-by-use": PoolByAttention(),
}


def make_room(overflow: OverflowPolicy, state: OverflowState) -> tuple[KVCache, jax.Array | None]:
    """Apply a policy; return the cache, sharded as the model shards caches, and the slots' mass."""
    cache, mass_BS = overflow(state)
    return reshard_cache(cache, state.model), mass_BS


def check_policy(config: ModelConfig, capacity: int, overflow: OverflowPolicy) -> None:
    """Raise if a policy does not fit the model or the cache size.

    Raises:
        ConfigError: If a policy moves tokens of a model with a compressive memory, or needs
            segments that the model does not have.
        CapacityError: If the cache does not hold more than one segment.
    """
    length = config.segment_length
    if isinstance(overflow, DropSegments):
        if length is None:
            raise ConfigError(
                f"overflow 'segments' requires a model with segments, which this"
                f" {config.model_type} does not have. Use 'slide'"
            )
        if capacity <= length:
            raise CapacityError(
                f"overflow 'segments': the cache has {capacity} slots, expected more than the"
                f" segment length {length}. Make one with {2 * length}"
            )
    elif length is not None and not isinstance(overflow, Slide):
        raise ConfigError(
            "this model has a compressive memory, so cached tokens cannot be moved. Use overflow"
            " 'segments' to evict finished segments"
        )
