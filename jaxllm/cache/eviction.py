"""Eviction policies: which tokens to cull if a cache grows too large. `compact` frees slots."""

import jax
import jax.numpy as jnp

from jaxllm.cache.kv import MAX_SLOTS, KVCache, check_mass, check_no_state, check_usable
from jaxllm.cache.operations import keep
from jaxllm.errors import CapacityError
from jaxllm.runtime.validation import check_int


def sinks_and_window(cache: KVCache, *, sinks: int, window: int) -> KVCache:
    """Keep the first `sinks` positions and the last `window` (Xiao et al. 2024, StreamingLLM).

    `close_gaps` then renumbers the remaining tokens as in that paper.

    Raises:
        CapacityError: For a window below one, and as `keep`.
    """
    check_usable(cache)
    check_no_state(cache, "sinks_and_window")
    sinks = check_int("sinks", sinks, 0, MAX_SLOTS, CapacityError)
    window = check_int("window", window, 1, MAX_SLOTS, CapacityError)
    position_BS = cache.position_BS
    recent = position_BS >= cache.next_position_B[:, None] - window
    return keep(cache, (position_BS < sinks) | recent)


def heavy_hitters(cache: KVCache, mass_BS: jax.Array, *, heavy: int, recent: int) -> KVCache:
    """Keep the last `recent` positions and, of the older tokens, the `heavy` with the most mass.

    Follows H2O (Zhang et al. 2023), but with one choice for all heads, since a slot is one token.

    Args:
        mass_BS: Attention received so far, `[B, S]` over the cache's slots, as `generate` and
            `decode_step` return it.

    Raises:
        CacheMismatchError: The mass has another shape; and as `keep`.
        CapacityError: A number is negative.
    """
    check_usable(cache)
    check_no_state(cache, "heavy_hitters")
    mass_BS = check_mass(cache, mass_BS)
    heavy = check_int("heavy", heavy, 0, MAX_SLOTS, CapacityError)
    recent = check_int("recent", recent, 0, MAX_SLOTS, CapacityError)
    position_BS = cache.position_BS
    recent_BS = position_BS >= cache.next_position_B[:, None] - recent
    old_BS = (position_BS >= 0) & ~recent_BS
    _, best = jax.lax.top_k(jnp.where(old_BS, mass_BS, -jnp.inf), min(heavy, cache.slots))
    heavy_BS = jnp.zeros_like(old_BS).at[jnp.arange(cache.batch)[:, None], best].set(True)
    return keep(cache, recent_BS | (heavy_BS & old_BS))
