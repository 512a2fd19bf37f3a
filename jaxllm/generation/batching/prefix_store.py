"""The prefix cache of a serving loop: which prompts share entries, and what goes into them."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from jaxllm.cache.kv import KVCache, Segment
from jaxllm.cache.prefix_cache import PrefixCache, cut_chunk
from jaxllm.config.model import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.generation.batching.requests import Request
from jaxllm.models.site_inputs import fingerprint
from jaxllm.models.sites import Edits
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params


class PrefixStore(NamedTuple):
    """A prefix cache, and the number of the loop's model in it."""

    cache: PrefixCache
    program: int

    def find(
        self, config: ModelConfig, request: Request, prompt_T: np.ndarray, edits: Edits
    ) -> tuple[list[bytes], list[Segment]]:
        """Return the keys of the prompt's chunks, and the entries found.

        At least one token remains to run.
        """
        made_with = () if not edits.edits else tuple(map(int, fingerprint(edits, 1)))
        root = (self.program, request.adapter, _angle_length(config, prompt_T.size), *made_with)
        keys = self.cache.chunk_keys(root, prompt_T, request.namespace, request.public_prefix)
        usable = (prompt_T.size - 1) // self.cache.chunk
        return keys, self.cache.find(keys[:usable], prompt_T.size)

    def add(self, tail: Segment, row: int, keys: Sequence[bytes], ran: range) -> None:
        """Add the prompt chunks of a row that these tokens completed. keys: of its chunks."""
        size = self.cache.chunk
        for i in range(ran.start // size, min(ran.stop // size, len(keys))):
            at = np.int32(row), np.int32(i * size)
            self.cache.add(keys, i, partial(cut_chunk, tail, *at, size))


def open_store(
    prefix_cache: PrefixCache | None, model: Model, params: Params, cache: KVCache
) -> PrefixStore | None:
    """Return the store of a serving loop with this empty cache; None without a prefix cache."""
    if prefix_cache is None:
        return None
    if not isinstance(prefix_cache, PrefixCache):
        raise ConfigError(f"prefix_cache must be a jaxllm.PrefixCache, got {prefix_cache!r:.60}")
    if cache.memory:
        raise ConfigError(
            "prefix_cache does not support this model: its layers keep a memory of the whole text,"
            " which cannot be cut into chunks. Serve it without prefix_cache"
        )
    sizes = (cache.batch, cache.capacity)
    return PrefixStore(prefix_cache, prefix_cache.program_number(model, params, sizes))


def _angle_length(config: ModelConfig, length: int) -> tuple[int, bool]:
    """Return what the rotary angles of a text of this length depend on besides positions."""
    border, limit = config.original_context, config.max_position_embeddings
    dynamic = any(rope.rope_type == "dynamic" for rope in config.ropes)
    return max(length - limit, 0) if dynamic else 0, border is not None and length > border
