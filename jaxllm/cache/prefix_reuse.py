"""Prompt-prefix reuse: tokens that a prompt shares with a cache are not run again."""

from collections.abc import Sequence

import numpy as np

from jaxllm.cache.kv import KVCache
from jaxllm.cache.operations import compact, rewind
from jaxllm.cache.state_rewind import rewind_limit
from jaxllm.errors import CacheMismatchError
from jaxllm.ops.padding import bucket_size


def prefix_length(cache: KVCache, tokens: Sequence[int]) -> int:
    """Return the length of the common prefix of `tokens` and the cache's text.

    Raises CacheMismatchError for a cache of several rows, and for one with gaps: its later entries
    attended to tokens that were removed.
    """
    if cache.batch != 1:
        raise CacheMismatchError(f"a prompt needs a cache of one row, got {cache.batch}")
    position_S = np.sort(np.asarray(cache.position_BS)[0])
    position_S = position_S[position_S >= 0]
    if (position_S != np.arange(position_S.size)).any():
        raise CacheMismatchError(
            "the cache has gaps, so it is not the cache of a text. Continue it with jaxllm.generate"
        )
    text = cache.tokens(0)
    pairs = zip(text, tokens, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(text), len(tokens)))


def reuse_prefix(
    cache: KVCache, tokens: Sequence[int], new_tokens: int
) -> tuple[KVCache, list[int]]:
    """Rewind a cache to its common prefix with `tokens`; return it and the remaining tokens.

    At least the last token remains. A model with recurrent layers reads all tokens again if the
    prefix ends before the current chunk. The cache has room for them and `new_tokens` more. Raises
    as `prefix_length`.
    """
    shared = min(prefix_length(cache, tokens), len(tokens) - 1)
    if cache.config.segment_length is None and shared < rewind_limit(cache)[0]:
        shared = 0  # recurrent layers go back to their chunk or to the beginning
    rest = list(tokens[shared:])
    cache = rewind(cache, to=shared)
    if int(cache.cursor) + len(rest) + new_tokens - 1 > cache.capacity:
        cache = compact(cache, capacity=bucket_size(len(tokens) + new_tokens - 1))
    return cache, rest
