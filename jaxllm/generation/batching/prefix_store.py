"""Beginnings of prompts that are already computed: entries of a prefix cache, and shared texts.

An entry is copied into the row that uses it. A shared text is a frozen segment of the loop's cache,
which rows read in place; they differ in how many of its tokens they see.
"""

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.kv import EMPTY, KVCache, Segment, init_cache
from jaxllm.cache.prefix_cache import Chunk, PrefixCache, cut_chunk, write_chunk
from jaxllm.config.model import ModelConfig
from jaxllm.errors import ConfigError, TokenError
from jaxllm.generation.batching.pages import PageTable, find_slot
from jaxllm.generation.batching.requests import Request
from jaxllm.generation.loops.microbatch import TokenRun
from jaxllm.models.site_inputs import fingerprint
from jaxllm.models.sites import Edits
from jaxllm.runtime.validation import check_int_array
from jaxllm.steps import default_chunk, prefill
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params
from jaxllm.weights.types.lora import NO_ADAPTER, choose_adapters

_STATE_STRIDE = 8  # of a text's chunks, each so manyth keeps its state


class Prefix(NamedTuple):
    """The beginning of a prompt that has run before.

    shared, num_shared: which shared text the row reads, and how many tokens of it. root: what
    entries of the prefix cache depend on besides the text. keys: of the prompt's chunks, from the
    number `first` on. entries: those found. num_run: tokens that need not run; at least one
    remains.
    """

    shared: int
    num_shared: int
    root: Hashable
    keys: Sequence[bytes]
    first: int
    entries: Sequence[Chunk]
    num_run: int


class PrefixStore(NamedTuple):
    """Beginnings of prompts that have run: entries of a prefix cache, texts that all rows read.

    cache, program: a prefix cache, and the number of the loop's model in it; or None. texts: of the
    frozen segments of the loop's cache. multiple: prompts run in chunks of so many tokens; 1 if
    shapes do not change bits.
    """

    config: ModelConfig
    cache: PrefixCache | None
    program: int
    texts: Sequence[np.ndarray]
    multiple: int

    def find(self, request: Request, prompt_T: np.ndarray, edits: Edits) -> Prefix:
        """Return what has run of a prompt."""
        shared, start = self._find_shared(request, prompt_T, edits)
        made_with = () if not edits.edits else tuple(map(int, fingerprint(edits, 1)))
        angles = _angle_length(self.config, prompt_T.size)
        root = (self.program, request.namespace, request.adapter, angles, *made_with)
        if self.cache is None:
            return Prefix(shared, start, root, [], 0, [], start)
        keys, size = self.cache.chunk_keys(root, prompt_T), self.cache.chunk
        first, usable = start // size, (prompt_T.size - 1) // size
        entries = self.cache.find(keys[first:usable])
        while self.config.has_state and entries and not entries[-1].state:
            entries.pop()
        num_run = max(start, (first + len(entries)) * size) if entries else start
        self.cache.count(prompt_T.size, num_run)
        return Prefix(shared, start, root, keys[first:], first, entries, num_run)

    def keep_state(self, cache: KVCache, run: TokenRun, prompt_size: int) -> tuple[Any, ...]:
        """Return a row's state if these tokens end a chunk whose entry keeps it, else ().

        They are the last of a prompt, and each `_STATE_STRIDE`th: a state weighs as much as
        hundreds of tokens.
        """
        if self.cache is None or not cache.state:
            return ()
        chunks, rest = divmod(int(run.position_T[-1]) + 1, self.cache.chunk)
        is_last = chunks == (prompt_size - 1) // self.cache.chunk
        if rest or not (is_last or chunks % _STATE_STRIDE == 0):
            return ()
        return _take_state(cache.state, np.int32(run.rows[0]))

    def add(
        self,
        tail: Segment,
        pages: PageTable | None,
        row: int,
        prefix: Prefix,
        ran: range,
        states: Mapping[int, tuple[Any, ...]] = MappingProxyType({}),
    ) -> None:
        """Add the prompt chunks of a row that these tokens completed.

        states: by position, what `keep_state` returned.
        """
        if self.cache is None:
            return
        size, stop = self.cache.chunk, prefix.first + len(prefix.keys)
        for i in range(ran.start // size, min(ran.stop // size, stop)):
            cut = partial(cut_chunk, tail, *find_slot(pages, row, i * size), size)
            state = states.get((i + 1) * size, ())
            self.cache.add(prefix.keys, i - prefix.first, cut, state)

    def add_answer(self, tail: Segment, pages: PageTable | None, row: int, active: Any) -> None:
        """Add the chunks of a text that has run in a row, beyond those of its prompt.

        Only where a token's keys and values have the bits that they would have in a prompt.
        """
        text_T, num_prompt = active.text_T, active.prompt_T.size
        alike = self.has_same_angles(num_prompt, text_T.size)
        if self.cache is not None and self.multiple == 1 and alike:
            keys = self.cache.chunk_keys(active.prefix.root, text_T)[active.prefix.first :]
            ran = range(num_prompt, text_T.size)
            self.add(tail, pages, row, active.prefix._replace(keys=keys), ran)

    def has_same_angles(self, *lengths: int) -> bool:
        """Whether texts of these lengths have the same rotary angles at equal positions."""
        return len({_angle_length(self.config, length) for length in lengths}) == 1

    def _find_shared(self, request: Request, prompt_T: np.ndarray, edits: Edits) -> tuple[int, int]:
        """Return the shared text that has the most of a prompt's first tokens, and how many."""
        best, most = 0, 0
        if edits.edits or request.adapter not in (None, NO_ADAPTER):
            return best, most
        for i, text_T in enumerate(self.texts):
            size = min(text_T.size, prompt_T.size - 1)
            differs = np.flatnonzero(text_T[:size] != prompt_T[:size])
            count = int(differs[0]) if differs.size else size
            alike = self.has_same_angles(text_T.size, prompt_T.size)
            if alike and count > most:
                best, most = i, count
        return best, most - most % self.multiple


def open_store(
    model: Model,
    params: Params,
    cache: KVCache,
    prefix_cache: PrefixCache | None,
    shared_prefixes: Sequence[Any],
    invariant_rows: bool,
) -> tuple[PrefixStore, KVCache]:
    """Return the store of a serving loop, and its empty cache with the shared texts.

    invariant_rows: whether shapes do not change bits.
    """
    if prefix_cache is not None and not isinstance(prefix_cache, PrefixCache):
        raise ConfigError(f"prefix_cache must be a jaxllm.PrefixCache, got {prefix_cache!r:.60}")
    sums_tokens = model.config.segment_length is None  # recurrent layers
    if cache.state and (shared_prefixes or not (prefix_cache is None or sums_tokens)):
        name = "shared_prefixes" if shared_prefixes else "prefix_cache"
        raise ConfigError(
            f"{name} does not support this model: its layers keep a state of the whole text,"
            f" which cannot be cut into chunks. Serve it without {name}"
        )
    multiple = 1 if invariant_rows or prefix_cache is None else prefix_cache.chunk
    texts = [check_int_array("a shared prefix", ids, TokenError) for ids in shared_prefixes]
    usual = choose_adapters(params, jnp.full(1, NO_ADAPTER, jnp.int32))
    frozen = []
    for text_T in texts:
        alone = init_cache(model, 1, max(text_T.size, 1))
        alone = prefill(
            model, usual, alone, text_T[None], chunk=max(multiple, default_chunk())
        ).cache
        position_BS = np.full((len(cache.tail.position_BS), text_T.size), EMPTY, np.int32)
        frozen.append(alone.tail.replace(position_BS=jax.device_put(position_BS)))
    program = -1
    if prefix_cache is not None:
        sizes = (cache.batch, cache.capacity, *(text_T.tobytes() for text_T in texts))
        program = prefix_cache.program_number(model, params, sizes)
    store = PrefixStore(model.config, prefix_cache, program, texts, multiple)
    return store, cache.replace(frozen=tuple(frozen))


def read_prefix(cache: KVCache, pages: PageTable | None, row: int, prefix: Prefix) -> KVCache:
    """Return the cache in which a cleared row reads what has run: shared tokens, and entries."""
    frozen = [
        segment.replace(
            position_BS=_show_tokens(
                segment.position_BS,
                find_slot(pages, row, 0)[0],
                np.int32(prefix.num_shared if i == prefix.shared else 0),
            )
        )
        for i, segment in enumerate(cache.frozen)
    ]
    tail = cache.tail
    for i, chunk in enumerate(prefix.entries, prefix.first):
        slot = i * chunk.arrays[0].shape[1]
        tail = write_chunk(tail, chunk.arrays, *find_slot(pages, row, slot))
    state = cache.state
    if state and prefix.entries:
        state = _put_state(state, np.int32(row), prefix.entries[-1].state)
    return cache.replace(frozen=tuple(frozen), tail=tail, state=state)


@jax.jit
def _take_state(state: tuple[Any, ...], row: jax.Array) -> tuple[Any, ...]:
    """Return a copy of one row's state, without the row axis."""
    taken: tuple[Any, ...] = jax.tree.map(lambda x: x[row], state)
    return taken


@partial(jax.jit, donate_argnums=0)
def _put_state(state: tuple[Any, ...], row: jax.Array, one: tuple[Any, ...]) -> tuple[Any, ...]:
    written: tuple[Any, ...] = jax.tree.map(lambda x, new: x.at[row].set(new), state, one)
    return written


@partial(jax.jit, donate_argnums=0)
def _show_tokens(position_BS: jax.Array, row: jax.Array, count: jax.Array) -> jax.Array:
    """Return the positions of a shared text in which a row has the first `count` tokens."""
    index_S = jnp.arange(position_BS.shape[1], dtype=jnp.int32)
    return position_BS.at[row].set(jnp.where(index_S < count, index_S, EMPTY))


def _angle_length(config: ModelConfig, length: int) -> tuple[int, bool]:
    """Return what the rotary angles of a text of this length depend on besides positions."""
    border, limit = config.original_context, config.max_position_embeddings
    dynamic = any(rope.rope_type == "dynamic" for rope in config.ropes)
    return max(length - limit, 0) if dynamic else 0, border is not None and length > border
