"""Prefix cache across requests: a store of keys and values, found by the text that made them.

Entries are chunks of tokens of one row. A chunk's key is a hash of all tokens up to its end, so an
entry depends only on its own text, and is found only with all entries before it. `serve` computes
it with the same bits whether entries are found or not.
"""

import dataclasses
import hashlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.kv import MAX_SLOTS, Segment
from jaxllm.errors import CapacityError
from jaxllm.ops import native
from jaxllm.runtime.validation import check_int
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params

_MIN_CHUNK = 8  # the least width of a prompt's program (`pack_microbatch`)


@dataclasses.dataclass(frozen=True)
class PrefixCacheStats:
    """Counters of a prefix cache.

    Attributes:
        queried_tokens: Prompt tokens of all requests.
        hit_tokens: Prompt tokens that were in the cache, so that they did not run.
        entries: Chunks held.
        nbytes: Bytes held.
        evictions: Chunks dropped so far.
    """

    queried_tokens: int
    hit_tokens: int
    entries: int
    nbytes: int
    evictions: int


class Chunk(NamedTuple):
    """A chunk of one row (`cut_chunk`). state: `KVCache.state` after it, if it is kept."""

    arrays: tuple[jax.Array, ...]
    state: tuple[Any, ...] = ()


@dataclasses.dataclass
class _Entry:
    """A chunk, and how many entries continue its text."""

    chunk: Chunk
    parent: bytes | None
    nbytes: int
    children: int = 0


class PrefixCache:
    """A store of prompt chunks for `serve`, bounded by bytes; safe to use from several threads.

    The least recently used entry without children is evicted first, so every entry can be reached.
    Entries are device arrays that are never donated. They are found only with the model, weights
    and sizes that made them, so several models may share a store.
    """

    def __init__(self, max_bytes: int, chunk: int = 128) -> None:
        """Create an empty store.

        Args:
            max_bytes: Limit of the bytes held. 0 holds nothing.
            chunk: Tokens per entry: a smaller one finds more of a text. Where a row's bits depend
                on the shape of a computation (`has_invariant_rows`), prompts run in chunks of this
                size, and a larger one is faster.

        Raises:
            CapacityError: A size is not an integer in its range.
        """
        self.max_bytes = check_int("max_bytes", max_bytes, 0, error=CapacityError)
        self.chunk = check_int("chunk", chunk, _MIN_CHUNK, MAX_SLOTS, CapacityError)
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first
        self._programs: list[tuple[Hashable, list[weakref.ref[jax.Array]]]] = []
        self._nbytes = self._queried = self._hit = self._evictions = 0

    def program_number(self, model: Model, params: Params, sizes: Hashable) -> int:
        """Return the number of a model with weights and sizes: equal only if all are the same.

        Weights are compared by identity, which reads none of them.
        """
        leaves, structure = jax.tree.flatten(params)
        form = (model, structure, sizes, native.isa() if native.is_enabled() else None)
        with self._lock:
            for number, (known, refs) in enumerate(self._programs):
                if known == form and all(ref() is x for ref, x in zip(refs, leaves, strict=True)):
                    return number
            self._programs.append((form, [weakref.ref(x) for x in leaves]))
            return len(self._programs) - 1

    def chunk_keys(self, root: Hashable, token_T: np.ndarray) -> list[bytes]:
        """Return the keys of a text's full chunks.

        Args:
            root: Values that entries depend on besides the text; each needs a `repr`.
        """
        key, keys = hashlib.sha256(repr(root).encode()).digest(), []
        tokens = token_T.astype("<i4")
        for end in range(self.chunk, tokens.size + 1, self.chunk):
            key = hashlib.sha256(key + tokens[end - self.chunk : end].tobytes()).digest()
            keys.append(key)
        return keys

    def find(self, keys: Sequence[bytes]) -> list[Chunk]:
        """Return the entries of the longest leading part of `keys` that is held."""
        with self._lock:
            chunks = []
            for key in keys:
                if key not in self._entries:
                    break
                chunks.append(self._entries[key].chunk)
            for key in reversed(keys[: len(chunks)]):  # parents stay longer than children
                self._entries.move_to_end(key)
            return chunks

    def count(self, queried_tokens: int, hit_tokens: int) -> None:
        """Count the tokens of a prompt, and those of them that were found."""
        with self._lock:
            self._queried += queried_tokens
            self._hit += hit_tokens

    def add(
        self,
        keys: Sequence[bytes],
        index: int,
        cut: Callable[[], tuple[jax.Array, ...]],
        state: tuple[Any, ...] = (),
    ) -> None:
        """Add the entry `keys[index]`, or its state, if it is missing and its parent is held.

        Args:
            cut: Returns the entry; called only if it is needed, and without the lock.
            state: After the chunk.
        """
        key, parent = keys[index], keys[index - 1] if index else None

        def is_wanted() -> bool:
            held = self._entries
            is_new = key not in held or (bool(state) and not held[key].chunk.state)
            return is_new and (parent is None or parent in held) and self.max_bytes > 0

        with self._lock:
            if not is_wanted():
                return
        chunk = Chunk(cut(), state)
        nbytes = sum(x.nbytes for x in jax.tree.leaves(chunk))
        with self._lock:
            if not is_wanted() or nbytes > self.max_bytes:
                return
            old = self._entries.get(key)
            self._entries[key] = _Entry(chunk, parent, nbytes, old.children if old else 0)
            self._nbytes += nbytes - (old.nbytes if old else 0)
            if parent is not None and old is None:
                self._entries[parent].children += 1
            while self._nbytes > self.max_bytes:
                self._evict()

    def stats(self) -> PrefixCacheStats:
        """Return the counters."""
        with self._lock:
            return PrefixCacheStats(
                self._queried, self._hit, len(self._entries), self._nbytes, self._evictions
            )

    def _evict(self) -> None:
        """Drop the least recently used entry without children."""
        key = next(key for key, entry in self._entries.items() if not entry.children)
        entry = self._entries.pop(key)
        self._nbytes -= entry.nbytes
        self._evictions += 1
        if entry.parent is not None:
            self._entries[entry.parent].children -= 1


@partial(jax.jit, static_argnums=3)
def cut_chunk(tail: Segment, row: jax.Array, slot: jax.Array, chunk: int) -> tuple[jax.Array, ...]:
    """Return a copy of `chunk` slots of a row from `slot` on.

    Arrays `[N, chunk, ...]`, one for each shape and type: the leaves of the tail that have it.
    """
    groups: dict[Hashable, list[jax.Array]] = {}
    for x in jax.tree.leaves(tail):
        start: Any = (row, slot, *[0] * (x.ndim - 2))
        part = jax.lax.dynamic_slice(x, start, (1, chunk, *x.shape[2:]))
        groups.setdefault((x.shape[2:], x.dtype), []).append(part)
    return tuple(map(jnp.concatenate, groups.values()))


@partial(jax.jit, donate_argnums=0)
def write_chunk(
    tail: Segment, arrays: tuple[jax.Array, ...], row: jax.Array, slot: jax.Array
) -> Segment:
    """Return the tail with a chunk in the slots of a row from `slot` on; written in place."""
    leaves, structure = jax.tree.flatten(tail)
    kinds = dict.fromkeys((x.shape[2:], x.dtype) for x in leaves)
    parts = {kind: iter(array[:, None]) for kind, array in zip(kinds, arrays, strict=True)}

    def write(old: jax.Array, new: jax.Array) -> jax.Array:
        dtype = old.dtype
        if dtype.itemsize == 2:  # XLA:CPU would rewrite a whole bfloat16 array
            old, new = (jax.lax.bitcast_convert_type(x, jnp.uint16) for x in (old, new))
        old = jax.lax.dynamic_update_slice(old, new, (row, slot, *[0] * (old.ndim - 2)))
        return jax.lax.bitcast_convert_type(old, dtype) if dtype.itemsize == 2 else old

    written = [write(x, next(parts[x.shape[2:], x.dtype])) for x in leaves]
    result: Segment = jax.tree.unflatten(structure, written)
    return result
