"""Texts of any length in a small cache: only keys and values of the current segment stay."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.kv import KVCache, check_usable
from jaxllm.cache.operations import compact, keep_slots
from jaxllm.config.model import ModelConfig
from jaxllm.errors import CapacityError, ConfigError, TokenError
from jaxllm.generation.loops.overflow import OverflowPolicy, OverflowState
from jaxllm.models.inputs import array_namespace, as_array, check_shape
from jaxllm.steps import prefill
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params


def current_segment(cache: KVCache) -> KVCache:
    """Keep the tokens of the current segment, in a model with a memory of earlier segments.

    Outputs do not change: no token attends to keys and values of a finished segment. `compact` then
    needs room for one segment and new tokens only, however long the text.

    Raises:
        ConfigError: For models without such segments.
    """
    check_usable(cache)
    length = cache.config.segment_length
    if length is None:
        raise ConfigError(
            f"this {cache.config.model_type} has no segments: every token attends to all before it"
        )
    begin_B = cache.next_position_B // length * length
    return keep_slots(cache, cache.position_BS >= begin_B[:, None])


@dataclasses.dataclass(frozen=True)
class DropSegments(OverflowPolicy):
    """Evict the keys and values of finished segments, in models with a compressive memory.

    No later token attends to them, so the output equals that of an unbounded cache. The cache needs
    more slots than a segment has tokens.
    """

    moves_tokens: ClassVar[bool] = False
    long_prompt: ClassVar[str] = (
        "Prefill all but its last token with `prefill_in_segments`, then continue from that cache"
    )

    def check(self, config: ModelConfig, capacity: int) -> None:
        """Raise ConfigError without segments, and CapacityError if only one fits."""
        length = config.segment_length
        if length is None:
            raise ConfigError(
                f"overflow 'segments' requires a model with segments, which this"
                f" {config.model_type} does not have. Use 'slide'"
            )
        if capacity <= length:
            raise CapacityError(
                f"the cache has {capacity} slots, expected more than the segment length {length}."
                f" Make one with {2 * length}"
            )

    def max_kept(self, capacity: int) -> int:
        """Return the cache size; `check` compares it with the segment length."""
        return capacity

    def __call__(self, state: OverflowState) -> tuple[KVCache, jax.Array | None]:
        """Return the cache of the current segment."""
        return compact(current_segment(state.cache), capacity=state.cache.capacity), None


def prefill_in_segments(
    model: Model,
    params: Params,
    cache: KVCache,
    tokens_BT: Any,
    *,
    chunk: int | None = None,
    on_chunk: Callable[[int, KVCache], None] = lambda *_: None,
) -> tuple[jax.Array, KVCache]:
    """Prefill texts longer than the cache; return the last tokens' logits `[B, V]` and the cache.

    The result equals that of an unbounded cache: after each piece, the keys and values of finished
    segments, which no later token attends to, are evicted.

    Args:
        cache: Needs more slots than a segment has tokens (twice as many is a good choice) and no
            frozen segments. It stays valid.
        on_chunk: Called after each piece with the number of tokens read per row and the cache,
            which the next piece overwrites.

    Raises:
        ConfigError: If the model has no segments.
        CapacityError: If the cache is too small.
        JaxllmError: Whatever else `prefill` raises.
    """
    check_usable(cache)
    tokens_BT = as_array("tokens", tokens_BT)
    T, length = check_shape(tokens_BT)[1], model.config.segment_length
    left = compact(current_segment(cache), capacity=cache.capacity)
    assert length is not None  # `current_segment` has checked it
    cache = jax.tree.map(jnp.copy, left)  # the caller's buffers must not be donated
    DropSegments().check(model.config, cache.capacity)
    piece = cache.capacity - length
    logits_BV = None
    for start in range(0, T, piece):
        part_BT = tokens_BT[:, start : start + piece]
        count = part_BT.shape[1]
        lengths_B = None
        if start > 0 and count < piece:  # pad the last piece to reuse the compiled program
            part_BT = array_namespace(part_BT).pad(part_BT, ((0, 0), (0, piece - count)))
            lengths_B = np.full(part_BT.shape[0], count)
        logits_BV, cache = prefill(
            model, params, cache, part_BT, lengths_B=lengths_B, chunk=chunk, donate=True
        )
        cache = _DROP_FINISHED(cache)
        on_chunk(start + count, cache)
    if logits_BV is None:
        raise TokenError("tokens must not be empty")
    return logits_BV, cache


def _drop_finished(cache: KVCache) -> KVCache:
    return compact(current_segment(cache))


_DROP_FINISHED = jax.jit(_drop_finished, donate_argnums=0)
