"""Policies for texts that outgrow their cache.

Without a policy such a generation raises an error before it starts. Each policy defines which
tokens the model still attends to, so results can be verified against a run over these tokens.
Packages add classes of policies by entry points of the group `jaxllm.overflow_policies`.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.eviction import heavy_hitters, sinks_and_window
from jaxllm.cache.kv import KVCache, init_cache, reshard_cache
from jaxllm.cache.operations import close_gaps, compact, slot_order
from jaxllm.config.model import ModelConfig
from jaxllm.errors import CapacityError, ConfigError, SamplingError
from jaxllm.generation.option_table import overflow_names
from jaxllm.generation.sampling.sampler import Context
from jaxllm.ops.padding import pad_rows
from jaxllm.runtime.plugins import find_plugins
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
class OverflowPolicy:
    """Makes room in a full cache; a subclass, a frozen dataclass, has its sizes as fields.

    With a default for each field, a package can give the class in an entry point of the group
    `jaxllm.overflow_policies`, under the name that selects it.

    Attributes:
        reads_mass: Whether it reads how much attention each slot has received.
        moves_tokens: Whether tokens that stay get other positions without running again.
        long_prompt: What to do with a prompt longer than the cache, if it must not be cut to its
            end.
    """

    reads_mass: ClassVar[bool] = False
    moves_tokens: ClassVar[bool] = True
    long_prompt: ClassVar[str] = ""

    def check(self, config: ModelConfig, capacity: int) -> None:
        """Raise ConfigError or CapacityError if it does not fit the model or the cache size."""
        if self.moves_tokens and config.segment_length is not None:
            usable = [
                name
                for name in overflow_names()
                if (policy := find_policy(name)) is not None and not policy.moves_tokens
            ]
            raise ConfigError(
                "this model has a compressive memory, so cached tokens cannot be moved. Use"
                f" overflow {' or '.join(usable)}"
            )

    def max_kept(self, capacity: int) -> int:
        """Return the maximum number of slots in use after it made room in a cache of this size.

        Raises CapacityError if no slot is freed.
        """
        raise NotImplementedError

    def __call__(self, state: OverflowState) -> tuple[KVCache, jax.Array | None]:
        """Return the cache with free slots, and the attention mass of its slots if it reads it."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Slide(OverflowPolicy):
    """Restart from the most recent `keep` tokens, which are prefilled again from position 0.

    Works with all models, including those with learned positions. keep: default half the cache.
    """

    moves_tokens: ClassVar[bool] = False

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
class SinksAndWindow(OverflowPolicy):
    """Keep the first `sinks` and the last `window` tokens, and close the gap (Xiao et al. 2024).

    Nothing is recomputed: retained entries still depend on evicted tokens. Requires rotary
    positions. window: by default, sinks and window together fill half the cache.
    """

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
class HeavyHitters(OverflowPolicy):
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


OVERFLOWS: dict[str, OverflowPolicy | None] = {
    "refuse": None,
    "slide": Slide(),
    "sinks": SinksAndWindow(),
    "heavy": HeavyHitters(),
}


def find_policy(name: str) -> OverflowPolicy | None:
    """Return a policy by name, also of other packages. Raises SamplingError for an unknown one."""
    if name in OVERFLOWS:
        return OVERFLOWS[name]
    if (entry := find_plugins("overflow_policies").get(name)) is not None:
        policy: OverflowPolicy = entry.load()()
        return policy
    raise SamplingError(
        f"overflow must be one of {', '.join(overflow_names())}, or an `OverflowPolicy`; got"
        f" {name!r:.60}"
    )


def make_room(overflow: OverflowPolicy, state: OverflowState) -> tuple[KVCache, jax.Array | None]:
    """Apply a policy; return the cache, sharded as the model shards caches, and the slots' mass.

    Raises CapacityError if the policy frees no slot.
    """
    cache, mass_BS = overflow(state)
    if int(cache.cursor) >= cache.capacity:
        raise CapacityError(f"{overflow!r:.60} frees none of the cache's {cache.capacity} slots")
    return reshard_cache(cache, state.model), mass_BS
