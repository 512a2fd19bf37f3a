"""Whether cuDNN may read a cache: it reads the first slots of a row, and no positions.

Found by looking at a cache's positions before a program starts, so it cannot be wrong. Inside
`jit`, where nothing can be looked at, attention goes by positions.
"""

import warnings
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.kv import KVCache
from jaxllm.config.model import ModelConfig
from jaxllm.ops import flash
from jaxllm.ops.target import is_accelerator, target
from jaxllm.weights.model import Model

LONG_TEXT = 4096  # tokens from which attention decides how long a GPU takes


def promise_packed(model: Model, cache: KVCache, lengths_B: Any = None) -> Model:
    """Return the model that relies on packed slots (`ops.attend`), if the cache has them and a
    GPU gains from it; else the model as it is.

    lengths_B: of the prompts that are committed first. Unequal ones leave empty slots between a
    prompt and what follows.
    """
    packed = getattr(model, "packed", None)
    if packed is None or target() != "cuda":  # a sharded model has no such promise
        return model
    equal = lengths_B is None or np.unique(np.asarray(lengths_B)).size == 1
    readable = cache.dtype in flash.DTYPES and flash.find_problem() is None
    can_pack = equal and readable and not cache.state and is_packed(cache)
    return model if can_pack == packed else model.clone(packed=can_pack)


def describe_attention(config: ModelConfig, cache_dtype: str) -> str:
    """Return how this process computes attention over a cache."""
    if not is_accelerator():
        return "on the CPU, in blocks of slots"
    problem = _find_problem(config, cache_dtype)
    return "cuDNN where slots are packed" if problem is None else f"XLA, without cuDNN: {problem}"


def warn_without_cudnn(config: ModelConfig, cache_dtype: str, tokens: int) -> None:
    """Warn, once for each reason, that a long text takes longer than a GPU could."""
    if tokens >= LONG_TEXT and target() == "cuda":
        _warn_once(_find_problem(config, cache_dtype))


@cache
def _warn_once(problem: str | None) -> None:
    if problem is not None:
        warnings.warn(
            f"long texts are slower than this GPU allows: attention runs without cuDNN ({problem})",
            stacklevel=4,
        )


def _find_problem(config: ModelConfig, cache_dtype: str) -> str | None:
    """Return why cuDNN cannot read this model's caches, or not those of all layers."""
    if target() != "cuda":
        return "this is no NVIDIA GPU"
    if cache_dtype not in flash.DTYPES:
        return f"the cache is {cache_dtype}, not bfloat16"
    for size in config.head_dims:
        if size > flash.MAX_HEAD or size % 8:
            return f"heads of {size} numbers"
    layers = range(config.num_hidden_layers)
    if any(config.window(i) is not None for i in layers):
        return "layers with a sliding window"
    if getattr(config, "attention_cap", None) is not None:
        return "a soft cap on scores"
    return flash.find_problem()


def is_packed(cache: KVCache) -> bool:
    """Whether in every row the used slots of each segment are its first ones, and the tail's are
    those before the cursor, so that a commit leaves no gap; and no position is beyond the next.
    False inside `jit`.
    """
    if any(isinstance(x, jax.core.Tracer) for x in (cache.cursor, cache.tail.position_BS)):
        return False
    if not cache.frozen and int(cache.cursor) == 0:
        return True
    positions = tuple(segment.position_BS for segment in cache.segments)
    return bool(_are_packed(positions, cache.cursor, cache.next_position_B))


@jax.jit
def _are_packed(
    positions: tuple[jax.Array, ...], cursor: jax.Array, next_position_B: jax.Array
) -> jax.Array:
    *frozen, tail_BS = (position_BS >= 0 for position_BS in positions)
    slots = jnp.arange(tail_BS.shape[1], dtype=jnp.int32)
    packed: jax.Array = (tail_BS == (slots < cursor)[None]).all()
    for position_BS in positions:
        packed &= (position_BS < next_position_B[:, None]).all()
    for used_BS in frozen:
        packed &= (used_BS[:, :-1] >= used_BS[:, 1:]).all()
    return packed
