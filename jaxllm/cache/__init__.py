"""The key/value cache: an immutable pytree, and pure functions that return new ones.

kv: the cache, and an empty one. commit: `commit`. batch_ops: fork, branch, select, merge. tree:
trees of tokens. operations: rewind, cull, compact, move, patch. state_rewind: rewinding a state.
eviction: what to cull. prefix_reuse: prompt-prefix reuse. prefix_cache: prompt prefixes across
requests. files: save and load. inspection: equality, text.
"""

from jaxllm.cache.batch_ops import branch, fork, merge_rows, select
from jaxllm.cache.commit import commit
from jaxllm.cache.eviction import heavy_hitters, sinks_and_window
from jaxllm.cache.files import fingerprint, load_cache, save_cache
from jaxllm.cache.kv import Delta, KVCache, Segment, init_cache
from jaxllm.cache.operations import (
    close_gaps,
    compact,
    drop_range,
    find_slots,
    keep,
    patch,
    rewind,
    shift,
    slot_order,
)
from jaxllm.cache.prefix_cache import PrefixCache
from jaxllm.cache.state_rewind import Mark, mark
from jaxllm.cache.tree import init_tree

__all__ = [
    "Delta",
    "KVCache",
    "Mark",
    "PrefixCache",
    "Segment",
    "branch",
    "close_gaps",
    "commit",
    "compact",
    "drop_range",
    "find_slots",
    "fingerprint",
    "fork",
    "heavy_hitters",
    "init_cache",
    "init_tree",
    "keep",
    "load_cache",
    "mark",
    "merge_rows",
    "patch",
    "rewind",
    "save_cache",
    "select",
    "shift",
    "sinks_and_window",
    "slot_order",
]
