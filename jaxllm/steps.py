"""The steps: pure functions from (params, cache, tokens) to (logits, new keys and values).

`forward` reads a cache, `commit` grows one, and everything else is the two of them: one token,
a prompt in chunks. Bad input is refused here, on the host, before anything is dispatched; inside
`jit` the same functions run unchecked.
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.cache.kv import Delta, KVCache, Segment, check_fits, check_usable, extend
from jaxllm.config import ModelConfig
from jaxllm.errors import CacheMismatchError, TokenError
from jaxllm.models.layers import Trace
from jaxllm.weights.paths import Params

Array = Any  # a jax or numpy array, or a tracer of one
Parts = tuple[Segment, ...]


class Output(struct.PyTreeNode):
    """What `forward` returns.

    logits: float32 `[B, T, V]`. delta: what `commit` takes. hidden_states: the embeddings, then
    every block's output (the last after the final norm), `[B, T, D]`; None unless asked for.
    """

    logits: jax.Array
    delta: Delta
    hidden_states: tuple[jax.Array, ...] | None = None


def forward(
    model: nn.Module,
    params: Params,
    cache: KVCache | None,
    tokens_BT: Array,
    *,
    positions_BT: Array | None = None,
    hidden_states: bool = False,
) -> Output:
    """Run tokens against a cache without changing or copying it.

    tokens_BT: integer ids `[B, T]`. positions_BT: absolute positions, -1 for padding, which may
    stand anywhere; by default each row goes on from where the cache ends. cache: None for none.

    Raises TokenError for ids outside the vocabulary, positions outside the model, or arrays of
    another shape; CacheMismatchError for a cache of another model or batch.
    """
    tokens_BT, positions_BT = _checked(model, cache, tokens_BT, positions_BT)
    segments = cache.segments if cache is not None else ()
    return _forward(model, params, segments, tokens_BT, positions_BT, hidden_states)


def decode_step(
    model: nn.Module, params: Params, cache: KVCache, token_B: Array, *, donate: bool = False
) -> tuple[jax.Array, KVCache]:
    """`forward` and `commit` of one token a row: `(logits [B, V], cache)`.

    `cache` stays valid, at the cost of a copy of its tail, unless `donate=True`.

    Raises what `forward` raises, and CapacityError when the cache is full.
    """
    token_B = _as_array(token_B)
    if token_B.ndim != 1:
        raise TokenError(f"decode_step takes one token a row, [B]; got shape {token_B.shape}")
    tokens_BT, positions_BT = _checked(model, cache, token_B[:, None], None)
    check_fits(cache, positions_BT)
    return _grow(_DECODE_STEP, cache, donate, model, params, tokens_BT, positions_BT)


def prefill(
    model: nn.Module,
    params: Params,
    cache: KVCache,
    tokens_BT: Array,
    *,
    lengths_B: Array | None = None,
    positions_BT: Array | None = None,
    chunk: int = 256,
    donate: bool = False,
) -> tuple[jax.Array, KVCache]:
    """Run a prompt in chunks of `chunk` tokens: `(logits [B, V] of each row's last token, cache)`.

    lengths_B: how many tokens of each row are real, the rest is padding on the right; or
    positions_BT `[B, T]`, with -1 for padding anywhere. Every row needs at least one real token.
    Prompts shorter than a chunk are padded to a power of two, so that few programs are compiled.
    `cache` stays valid, at the cost of a copy of its tail, unless `donate=True`.

    Raises what `forward` raises, and CapacityError when the prompt does not fit.
    """
    if chunk < 1:
        raise TokenError(f"chunk must be at least 1, got {chunk}")
    if lengths_B is not None:
        if positions_BT is not None:
            raise TokenError("give lengths_B or positions_BT, not both")
        positions_BT = _positions(cache, np.shape(tokens_BT), lengths_B)
    tokens_BT, positions_BT = _checked(model, cache, tokens_BT, positions_BT)
    check_fits(cache, positions_BT)
    if _is_concrete(positions_BT) and (np.asarray(positions_BT).max(axis=1) < 0).any():
        raise TokenError("prefill: a row without a single real token has no last logits")
    T = tokens_BT.shape[1]
    width = chunk if chunk <= T else min(chunk, max(8, 1 << (T - 1).bit_length()))
    padding = ((0, 0), (0, -T % width))
    tokens_BT = _numpy(tokens_BT).pad(tokens_BT, padding)
    positions_BT = _numpy(positions_BT).pad(positions_BT, padding, constant_values=-1)
    return _grow(_PREFILL, cache, donate, model, params, tokens_BT, positions_BT, width)


def run(
    model: nn.Module,
    params: Params,
    segments: Parts,
    token_BT: jax.Array,
    position_BT: jax.Array,
    *,
    length_B: jax.Array | None = None,
    column_B: jax.Array | None = None,
) -> tuple[Trace, Delta]:
    """The model on checked input: what every step, compiled or not, is made of.

    length_B: the length of the whole text, where these tokens are one chunk of it. column_B: the
    column of each row whose logits are wanted.
    """
    token_BT = jnp.where(position_BT >= 0, token_BT, 0)
    if length_B is None:
        length_B = position_BT.max(axis=1) + 1
    trace = model.apply({"params": params}, token_BT, position_BT, length_B, segments, column_B)
    assert isinstance(trace, Trace)
    return trace, Delta(trace.k, trace.v, position_BT, token_BT)


@partial(jax.jit, static_argnums=(0, 5))
def _forward(
    model: nn.Module,
    params: Params,
    segments: Parts,
    token_BT: jax.Array,
    position_BT: jax.Array,
    hidden_states: bool,
) -> Output:
    trace, delta = run(model, params, segments, token_BT, position_BT)
    return Output(trace.logits, delta, trace.hidden_states if hidden_states else None)


def _decode_step(
    tail: KVCache,
    frozen: Parts,
    model: nn.Module,
    params: Params,
    token_BT: jax.Array,
    position_BT: jax.Array,
) -> tuple[jax.Array, KVCache]:
    trace, delta = run(model, params, (*frozen, tail.tail), token_BT, position_BT)
    return trace.logits[:, 0], extend(tail, delta)


def _prefill(
    tail: KVCache,
    frozen: Parts,
    model: nn.Module,
    params: Params,
    token_BT: jax.Array,
    position_BT: jax.Array,
    width: int,
) -> tuple[jax.Array, KVCache]:
    B = token_BT.shape[0]
    length_B = position_BT.max(axis=1) + 1

    def one(
        carry: tuple[jax.Array, KVCache], chunk: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, KVCache], None]:
        logits_BV, tail = carry
        token_BC, position_BC = chunk
        real_BC = position_BC >= 0
        last_B = jnp.argmax(jnp.where(real_BC, jnp.arange(width), -1), axis=1)
        trace, delta = run(
            model,
            params,
            (*frozen, tail.tail),
            token_BC,
            position_BC,
            length_B=length_B,
            column_B=last_B,
        )
        logits_BV = jnp.where(real_BC.any(axis=1)[:, None], trace.logits[:, 0], logits_BV)
        return (logits_BV, extend(tail, delta)), None

    def chunks(x_BT: jax.Array) -> jax.Array:
        return jnp.moveaxis(x_BT.reshape(B, -1, width), 1, 0)

    logits_BV = jnp.zeros((B, model.config.vocab_size), jnp.float32)
    (logits_BV, tail), _ = jax.lax.scan(
        one, (logits_BV, tail), (chunks(token_BT), chunks(position_BT))
    )
    return logits_BV, tail


def _compiled(step: Any, static: tuple[int, ...]) -> tuple[Any, Any]:
    """The step compiled twice: leaving its cache alone, and writing into it."""
    return (
        jax.jit(step, static_argnums=static),
        jax.jit(step, static_argnums=static, donate_argnums=0),
    )


_DECODE_STEP = _compiled(_decode_step, (2,))
_PREFILL = _compiled(_prefill, (2, 6))


def _grow(
    compiled: tuple[Any, Any], cache: KVCache, donate: bool, *args: Any
) -> tuple[jax.Array, KVCache]:
    """Call a compiled step on the tail; frozen segments go in but not out, so are never copied."""
    tail = cache.replace(frozen=())
    logits_BV, tail = compiled[donate](tail, cache.frozen, *args)
    return logits_BV, tail.replace(frozen=cache.frozen)


def _checked(
    model: nn.Module, cache: KVCache | None, tokens_BT: Array, positions_BT: Array | None
) -> tuple[Any, Any]:
    """Tokens and positions as int32, or the reason why not.

    All preparation is numpy's: an operation of JAX would be compiled for every new length.
    """
    config: ModelConfig = model.config
    tokens_BT, positions_BT = _as_array(tokens_BT), _as_array(positions_BT)
    shape = tokens_BT.shape
    if len(shape) != 2 or 0 in shape:
        raise TokenError(f"tokens must be [B, T], neither of them zero; got shape {shape}")
    if cache is not None:
        check_usable(cache)
        _check_cache(config, cache, shape[0])
    if positions_BT is None:
        positions_BT = _positions(cache, shape, None)
    if positions_BT.shape != shape:
        raise TokenError(f"positions are {positions_BT.shape}, the tokens {shape}")
    for name, x in (("tokens", tokens_BT), ("positions", positions_BT)):
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TokenError(f"{name} must be integers, got {x.dtype}")
    if _is_concrete(tokens_BT) and _is_concrete(positions_BT):
        _check_values(config, np.asarray(tokens_BT), np.asarray(positions_BT))
    return (
        _numpy(tokens_BT).asarray(tokens_BT, np.int32),
        _numpy(positions_BT).asarray(positions_BT, np.int32),
    )


def _check_values(config: ModelConfig, tokens_BT: np.ndarray, positions_BT: np.ndarray) -> None:
    real = positions_BT >= 0
    wrong = real & ((tokens_BT < 0) | (tokens_BT >= config.vocab_size))
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise TokenError(
            f"token id {tokens_BT[row, column]} (row {row}, column {column}) is outside the"
            f" vocabulary of {config.vocab_size}"
        )
    limit = config.position_limit
    if positions_BT.min() < -1 or positions_BT.max() >= limit:
        position = positions_BT.min() if positions_BT.min() < -1 else positions_BT.max()
        raise TokenError(
            f"position {position} is outside the model: positions run from 0 to {limit - 1},"
            " -1 is padding"
        )


def _check_cache(config: ModelConfig, cache: KVCache, batch: int) -> None:
    if cache.batch != batch:
        raise CacheMismatchError(f"the cache has {cache.batch} rows, the tokens {batch}")
    expected = (config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
    for segment in cache.segments:
        got = (len(segment.k), *(segment.k[0].shape[2:] if segment.k else ()))
        if got != expected:
            raise CacheMismatchError(
                f"the cache is of another model: (layers, kv heads, head dim) {got},"
                f" the model's are {expected}"
            )


def _positions(cache: KVCache | None, shape: tuple[int, ...], lengths_B: Array | None) -> Any:
    """Positions that go on from the cache; -1 past each row's length."""
    B, T = shape
    start_B = np.zeros(B, np.int32) if cache is None else cache.next_position_B
    xp = _numpy(start_B, lengths_B)
    column = xp.arange(T, dtype=xp.int32)[None]
    position_BT = xp.asarray(start_B)[:, None] + column
    if lengths_B is None:
        return position_BT
    lengths_B = _as_array(lengths_B)
    if lengths_B.shape != (B,):
        raise TokenError(f"lengths must be [{B}], one a row; got shape {lengths_B.shape}")
    if _is_concrete(lengths_B) and (lengths_B.min() < 1 or lengths_B.max() > T):
        raise TokenError(f"lengths must be from 1 to {T}, got {lengths_B.tolist()}")
    return xp.where(column < xp.asarray(lengths_B)[:, None], position_BT, -1)


def _as_array(x: Any) -> Any:
    """Lists become numpy arrays; jax arrays, tracers and None stay what they are."""
    return x if x is None or isinstance(x, jax.Array) else np.asarray(x)


def _is_concrete(x: Any) -> bool:
    return not isinstance(x, jax.core.Tracer)


def _numpy(*arrays: Any) -> Any:
    """The numpy to compute with: JAX's where anything is traced, the real one elsewhere."""
    return np if all(map(_is_concrete, arrays)) else jnp
