"""The key/value cache: an immutable pytree, and pure functions that make new ones from it."""

from jaxllm.cache.kv import Delta, KVCache, Segment, commit, init_cache
from jaxllm.cache.surgery import branch, compact, fork, keep, rewind, select

__all__ = [
    "Delta",
    "KVCache",
    "Segment",
    "branch",
    "commit",
    "compact",
    "fork",
    "init_cache",
    "keep",
    "rewind",
    "select",
]
