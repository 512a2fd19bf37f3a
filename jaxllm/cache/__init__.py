"""The key/value cache: an immutable pytree, and pure functions that return new ones.

kv: the cache, and an empty one. growth: `commit`. write: the only code that writes slots. rows:
fork, branch, select, merge. surgery: rewind, cull, compact, move, patch. unread: rewinding a
memory. eviction: what to cull. pooling: several tokens in one slot. sequences: llama.cpp's sequence
operations. prefix: prompt-prefix reuse. files: save and load. show: a row as text. equal: equality.
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
