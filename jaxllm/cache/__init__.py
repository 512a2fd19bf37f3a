"""The key/value cache: an immutable pytree, and pure functions that make new ones from it.

kv: the cache, and an empty one. growth: `commit`. write: the one writer of slots. rows: fork,
branch, select, merge. surgery: rewind, cull, compact, move, patch; unread: how far a memory goes
back. eviction: what to cull; pooling: several tokens in one slot. sequences: rows as llama.cpp's
sequences. prefix: what a prompt shares with a cache. files: saved and loaded. show: a row as text.
equal: whether two hold the same.
"""

from jaxllm.cache.eviction import heavy_hitters, segment_in_hand, sinks_and_window
from jaxllm.cache.files import fingerprint, load_cache, save_cache
from jaxllm.cache.growth import commit
from jaxllm.cache.kv import Delta, KVCache, Segment, init_cache
from jaxllm.cache.pooling import pool
from jaxllm.cache.rows import branch, fork, merge_rows, select
from jaxllm.cache.surgery import (
    close_gaps,
    compact,
    drop_range,
    keep,
    patch,
    rewind,
    shift,
    slot_order,
    slots_at,
)

__all__ = [
    "Delta",
    "KVCache",
    "Segment",
    "branch",
    "close_gaps",
    "commit",
    "compact",
    "drop_range",
    "fingerprint",
    "fork",
    "heavy_hitters",
    "init_cache",
    "keep",
    "load_cache",
    "merge_rows",
    "patch",
    "pool",
    "rewind",
    "save_cache",
    "segment_in_hand",
    "select",
    "shift",
    "sinks_and_window",
    "slot_order",
    "slots_at",
]
