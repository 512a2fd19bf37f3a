"""What to do when a text outgrows its cache: forget something, by a named policy.

Without a policy generation is refused before it begins. Each policy is stated by what the model
then sees, so that a result can be checked: it is that of a run over just those tokens. A policy
that `reads_mass` is given what each slot has received in attention so far, and gives back what the
slots that are left have.
"""

import dataclasses
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.eviction import heavy_hitters, sinks_and_window
from jaxllm.cache.kv import KVCache, init_cache
from jaxllm.cache.surgery import close_gaps, compact, slot_order
from jaxllm.decode.sampling.sampler import Context
from jaxllm.errors import CapacityError
from jaxllm.steps import prefill
from jaxllm.weights.paths import Params


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

    def __call__(
        self,
        model: nn.Module,
        params: Params,
        cache: KVCache,
        context: Context,
        mass_BS: jax.Array | None,
    ) -> tuple[KVCache, jax.Array | None]:
        """The cache of each row's last `keep` tokens but for the newest, which is yet to run."""
        length_B = np.asarray(context.length_B) - 1
        kept_B = np.minimum(self.room_for(cache.capacity), length_B)
        column = np.arange(kept_B.max())
        index_BT = (length_B - kept_B)[:, None] + np.minimum(column[None], kept_B[:, None] - 1)
        tokens_BT = np.take_along_axis(np.asarray(context.token_BL), index_BT, axis=1)
        empty = init_cache(model.config, cache.batch, cache.capacity, dtype=cache.dtype)
        return prefill(model, params, empty, tokens_BT, lengths_B=kept_B, donate=True)[1], None


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

    def __call__(
        self,
        model: nn.Module,
        params: Params,
        cache: KVCache,
        context: Context,
        mass_BS: jax.Array | None,
    ) -> tuple[KVCache, jax.Array | None]:
        """The cache without what is between the sinks and the window."""
        window = self.room_for(cache.capacity) - self.sinks
        left = sinks_and_window(cache, sinks=self.sinks, window=window)
        return compact(close_gaps(left), capacity=cache.capacity), None


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

    def __call__(
        self,
        model: nn.Module,
        params: Params,
        cache: KVCache,
        context: Context,
        mass_BS: jax.Array | None,
    ) -> tuple[KVCache, jax.Array | None]:
        """The cache of what is kept, and the mass of its slots."""
        assert mass_BS is not None
        heavy, recent = self._shares(cache.capacity)
        left = close_gaps(heavy_hitters(cache, mass_BS, heavy=heavy, recent=recent))
        kept = compact(left, capacity=cache.capacity)
        gathered_BS = jnp.take_along_axis(mass_BS, slot_order(left)[:, : cache.capacity], axis=1)
        return kept, jnp.where(kept.position_BS >= 0, gathered_BS, 0)


Overflow = Slide | SinksAndWindow | HeavyHitters
OVERFLOWS: dict[str, Overflow | None] = {
    "refuse": None,
    "slide": Slide(),
    "sinks": SinksAndWindow(),
    "heavy": HeavyHitters(),
}
