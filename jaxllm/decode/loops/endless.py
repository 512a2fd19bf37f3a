"""Reading a text of any length through a cache of a few segments, in models with a memory."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.eviction import segment_in_hand
from jaxllm.cache.kv import KVCache, check_usable
from jaxllm.cache.surgery import compact
from jaxllm.errors import CapacityError, TokenError
from jaxllm.inputs import as_array, numpy_for, shape_of
from jaxllm.steps import prefill
from jaxllm.weights.paths import Params


def read_through(
    model: nn.Module,
    params: Params,
    cache: KVCache,
    tokens_BT: Any,
    *,
    chunk: int = 256,
    each: Callable[[int, KVCache], None] = lambda *_: None,
) -> tuple[jax.Array, KVCache]:
    """`prefill` of texts longer than the cache: `(logits [B, V] of the last tokens, cache)`.

    The numbers are those of a cache that holds everything: after each piece keys and values of
    finished segments, which nothing sees any more, leave it. cache: of more slots than a segment
    has, without frozen segments; twice as many are good. It stays valid. each: told after each
    piece how many tokens of a row are read, and the cache, which the next piece writes over.

    Raises ConfigError for models without segments, CapacityError for a cache that is too small, and
    what `prefill` raises.
    """
    check_usable(cache)
    tokens_BT = as_array("tokens", tokens_BT)
    T, length = shape_of(tokens_BT)[1], model.config.segment_length
    left = compact(segment_in_hand(cache), capacity=cache.capacity)
    cache = jax.tree.map(jnp.copy, left)  # what the caller's cache has too is not to be used up
    if cache.capacity <= length:
        raise CapacityError(
            f"a cache of {cache.capacity} slots holds no more than a segment of {length} tokens:"
            f" make one of {2 * length}"
        )
    piece = cache.capacity - length
    logits_BV = None
    for start in range(0, T, piece):
        part_BT = tokens_BT[:, start : start + piece]
        count = part_BT.shape[1]
        lengths_B = None
        if start > 0 and count < piece:  # the last one: of the others' shape, and their program
            part_BT = numpy_for(part_BT).pad(part_BT, ((0, 0), (0, piece - count)))
            lengths_B = np.full(part_BT.shape[0], count)
        logits_BV, cache = prefill(
            model, params, cache, part_BT, lengths_B=lengths_B, chunk=chunk, donate=True
        )
        cache = _LEFT(cache)
        each(start + count, cache)
    if logits_BV is None:
        raise TokenError("read_through: there are no tokens to read")
    return logits_BV, cache


def _left(cache: KVCache) -> KVCache:
    return compact(segment_in_hand(cache))


_LEFT = jax.jit(_left, donate_argnums=0)
