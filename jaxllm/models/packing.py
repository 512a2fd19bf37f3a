"""Whether cuDNN may read a cache: it knows how many slots of a row are used, not which.

Found by looking at a cache's positions before a program starts, so it cannot be wrong. Inside
`jit`, where nothing can be looked at, attention goes by positions.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.kv import KVCache
from jaxllm.ops import flash
from jaxllm.ops.target import target
from jaxllm.weights.model import Model


def promise_packed(model: Model, cache: KVCache, lengths_B: Any = None) -> Model:
    """Return the model that relies on packed slots (`ops.attend`), if the cache has them and a
    GPU gains from it; else the model as it is.

    lengths_B: of the prompts that are committed first. Unequal ones leave empty slots between a
    prompt and what follows.
    """
    packed = getattr(model, "packed", None)
    if packed is None or target() != "cuda":  # a sharded model has no such promise
        return model
    equal = lengths_B is None or np.unique(np.asarray(lengths_B)).size == 1
    readable = cache.dtype in flash.DTYPES and flash.find_problem() is None
    now = equal and readable and not cache.memory and is_packed(cache)
    return model if now == packed else model.clone(packed=now)


def is_packed(cache: KVCache) -> bool:
    """Whether in every row the used slots of each segment are its first ones, and the tail's are
    those before the cursor, so that a commit leaves no gap; and no position is beyond the next.
    False inside `jit`.
    """
    if any(isinstance(x, jax.core.Tracer) for x in (cache.cursor, cache.tail.position_BS)):
        return False
    if not cache.frozen and int(cache.cursor) == 0:
        return True
    positions = tuple(segment.position_BS for segment in cache.segments)
    return bool(_are_packed(positions, cache.cursor, cache.next_position_B))


@jax.jit
def _are_packed(
    positions: tuple[jax.Array, ...], cursor: jax.Array, next_position_B: jax.Array
) -> jax.Array:
    *frozen, tail_BS = (position_BS >= 0 for position_BS in positions)
    slots = jnp.arange(tail_BS.shape[1], dtype=jnp.int32)
    packed: jax.Array = (tail_BS == (slots < cursor)[None]).all()
    for position_BS in positions:
        packed &= (position_BS < next_position_B[:, None]).all()
    for used_BS in frozen:
        packed &= (used_BS[:, :-1] >= used_BS[:, 1:]).all()
    return packed
