"""Validation of step inputs on the host: tokens, positions, lengths, and the cache's model.

Inside `jit` the same functions return tracers unchecked. Inputs are prepared with NumPy, because a
JAX operation would be compiled for every new length.
"""

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.kv import KVCache, check_usable
from jaxllm.config.model import ModelConfig
from jaxllm.errors import CacheMismatchError, CapacityError, ConfigError, TokenError
from jaxllm.runtime.validation import check_int_array, check_token_ids
from jaxllm.weights.model import Model
from jaxllm.weights.paths import check_params

Array = Any  # a jax or numpy array, or a tracer of one


def check_model(model: Any, params: Any, *, any_head: bool = False) -> None:
    """Raise ConfigError unless these are a model and its parameters, in this order.

    any_head: whether logits of a score head will do, which are not those of tokens.
    """
    if not isinstance(model, Model):
        remedy = "Build one with jaxllm.build(config), or use lm.model"
        if hasattr(model, "model") and hasattr(model, "params"):
            remedy = "Pass lm.model and lm.params, not the LM"
        elif isinstance(params, Model):
            remedy = "Pass the model first, then its parameters"
        got = "a dict" if isinstance(model, Mapping) else f"{model!r:.60}"
        raise ConfigError(f"model must be a model, got {got}. {remedy}")
    if not any_head:
        check_predicts_tokens(model.config)
    check_params(params)


def check_predicts_tokens(config: ModelConfig) -> None:
    """Raise ConfigError for a model without an output matrix."""
    if config.score is not None:
        raise ConfigError(
            "this model has no output matrix, so it predicts no tokens. Use embed or, if it has a"
            " score head, classify or rerank"
        )


def check_inputs(
    model: Model,
    cache: KVCache | None,
    tokens_BT: Array,
    positions_BT: Array | None,
    *,
    is_tree: bool = False,
) -> tuple[Any, Any]:
    """Return checked tokens and positions as int32. Raises as the steps do.

    is_tree: whether the tokens are nodes, so that positions need not be in order.
    """
    config: ModelConfig = model.config
    tokens_BT = as_array("tokens", tokens_BT)
    if positions_BT is not None:
        positions_BT = as_array("positions", positions_BT)
    shape = check_shape(tokens_BT)
    if cache is not None:
        check_usable(cache)
        check_cache(config, cache, shape[0])
    if positions_BT is None:
        positions_BT = next_positions(cache, shape, None)
    if positions_BT.shape != shape:
        raise TokenError(
            f"positions must have the shape of the tokens, {shape}, got {positions_BT.shape}"
        )
    for name, x in (("tokens", tokens_BT), ("positions", positions_BT)):
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TokenError(f"{name} must be integers, got {x.dtype}")
    if config.has_state and not is_tree and is_concrete(positions_BT):
        _check_order(config, np.asarray(positions_BT), cache)
    if is_concrete(tokens_BT) and is_concrete(positions_BT):
        check_token_ranges(config, np.asarray(tokens_BT), np.asarray(positions_BT))
        if cache is not None and is_concrete(cache.cursor):
            check_rope_continuation(config, cache, positions_BT)
    return (
        array_namespace(tokens_BT).asarray(tokens_BT, np.int32),
        array_namespace(positions_BT).asarray(positions_BT, np.int32),
    )


def check_token_ranges(
    config: ModelConfig, tokens_BT: np.ndarray, positions_BT: np.ndarray
) -> None:
    """Raise TokenError for an id outside the vocabulary or a position out of range."""
    check_token_ids(tokens_BT, config.vocab_size, real_X=positions_BT >= 0)
    limit = config.position_limit
    if positions_BT.min() < -1 or positions_BT.max() >= limit:
        position = positions_BT.min() if positions_BT.min() < -1 else positions_BT.max()
        raise TokenError(
            f"position {position} is out of range: expected 0 to {limit - 1}, or -1 for padding"
        )


def check_cache(config: ModelConfig, cache: KVCache, batch: int) -> None:
    """Raise CacheMismatchError for a cache of another model or number of rows."""
    if cache.batch != batch:
        raise CacheMismatchError(f"the cache has {cache.batch} rows, the tokens have {batch}")
    if cache.config != config:
        own_config, cache_config = config.to_dict(), cache.config.to_dict()
        differ = [name for name in own_config if own_config[name] != cache_config.get(name)]
        raise CacheMismatchError(
            f"the cache belongs to another model: {differ[0]} is {cache_config.get(differ[0])!r},"
            f" expected {own_config[differ[0]]!r}"
        )


def _check_order(config: ModelConfig, positions_BT: np.ndarray, cache: KVCache | None) -> None:
    """Raise TokenError unless positions are consecutive, as a model with a state requires."""
    for row, position_T in enumerate(positions_BT):
        real = position_T[position_T >= 0]
        jumps = np.flatnonzero(np.diff(real) != 1)
        if jumps.size:
            raise TokenError(
                f"row {row}: position {real[jumps[0] + 1]} follows {real[jumps[0]]}, but this"
                " model's layers keep a state and must read tokens in order"
            )
        if real.size and cache is not None and is_concrete(cache.next_position_B):
            next_ = int(cache.next_position_B[row])
            skips = real[0] > next_ and config.segment_length is None
            if real[0] < next_ or skips:
                raise TokenError(
                    f"row {row}: position {real[0]} is already in the model's state, expected at"
                    f" least {next_}. Rewind the cache, or use one forked earlier"
                    if not skips
                    else f"row {row}: position {real[0]} does not follow the text, expected {next_}"
                )


def check_longrope_limit(
    begin_B: Any, end_B: Any, config: ModelConfig, model_name: str = "model"
) -> None:
    """Raise CapacityError if a text grows across the limit between LongRoPE's two factor lists.

    begin_B, end_B: per row, the number of tokens when it first enters the cache, and the number run
    in the end. Cached keys were rotated with one list and would meet queries of the other.
    """
    if (border := config.original_context) is None:
        return
    rows = np.broadcast_arrays(np.atleast_1d(begin_B), np.atleast_1d(end_B))
    for begin, end in zip(*(row.tolist() for row in rows), strict=True):
        if begin <= border < end:
            raise CapacityError(
                f"the {model_name}'s LongRoPE uses different frequencies beyond {border} tokens,"
                " and"
                f" cached keys cannot be re-rotated: a text of {begin} tokens cannot grow to {end}."
                f" Generate at most {max(border - begin, 0) + 1} new tokens, begin with more than"
                f" {border} tokens, or set short_factor to long_factor in config.json, to treat all"
                " texts as long ones"
            )


def rescales_rope(begin_B: Any, end_B: Any, config: ModelConfig) -> bool:
    """Return whether dynamic NTK scaling rotates new tokens by other angles than cached ones.

    begin_B, end_B: as for `check_longrope_limit`.
    """
    if all(rope.rope_type != "dynamic" for rope in config.ropes):
        return False
    beyond_B = (np.asarray(end_B) > begin_B) & (np.asarray(end_B) > config.max_position_embeddings)
    return bool(beyond_B.any())


def warn_dynamic_ntk(begin_B: Any, end_B: Any, config: ModelConfig) -> None:
    """Warn if `rescales_rope` is true. Call it when a text runs, not when it is only checked."""
    if rescales_rope(begin_B, end_B, config):
        warnings.warn(
            "the model's rotary angles change with every token beyond"
            f" {config.max_position_embeddings} (dynamic NTK), but cached keys keep their angles,"
            " as in transformers: logits differ from those of one pass over the text. Recompute"
            " the text, or bound it with an overflow policy",
            stacklevel=2,
        )


def check_rope_continuation(config: ModelConfig, cache: KVCache, positions_BT: Any) -> None:
    """Apply `check_longrope_limit` and `warn_dynamic_ntk` to tokens that continue a cache."""
    if not config.rope_depends_on_length:
        return
    held_B = np.asarray(cache.next_position_B)
    end_B = np.maximum(held_B, np.asarray(positions_BT).max(axis=1) + 1)
    begin_B = np.where(held_B > 0, held_B, end_B)
    check_longrope_limit(begin_B, end_B, config)
    warn_dynamic_ntk(begin_B, end_B, config)


def next_positions(cache: KVCache | None, shape: tuple[int, ...], lengths_B: Array | None) -> Any:
    """Return positions `[B, T]` that continue the cache, with -1 beyond each row's length."""
    B, T = shape
    start_B = np.zeros(B, np.int32) if cache is None else cache.next_position_B
    xp = array_namespace(start_B, lengths_B)
    column = xp.arange(T, dtype=xp.int32)[None]
    position_BT = xp.asarray(start_B)[:, None] + column
    if lengths_B is None:
        return position_BT
    lengths_B = as_array("lengths", lengths_B)
    if not jnp.issubdtype(lengths_B.dtype, jnp.integer):
        raise TokenError(f"lengths must be integers, got {lengths_B.dtype}")
    if lengths_B.shape != (B,):
        raise TokenError(f"lengths must be [{B}], one per row, got shape {lengths_B.shape}")
    if is_concrete(lengths_B) and (lengths_B.min() < 1 or lengths_B.max() > T):
        raise TokenError(f"lengths must be from 1 to {T}, got {lengths_B.tolist()}")
    return xp.where(column < xp.asarray(lengths_B)[:, None], position_BT, -1)


class CheckedPrompts(NamedTuple):
    """Prompts whose ids are of the vocabulary: int32 `[B, T]`, padded with 0, and lengths `[B]`."""

    tokens_BT: np.ndarray
    lengths_B: np.ndarray


def check_prompts(config: ModelConfig, tokens_BT: Any, lengths_B: Any) -> CheckedPrompts:
    """Return checked prompts; `CheckedPrompts` are returned as they are.

    lengths_B: None if there is no padding. Raises TokenError unless the tokens are `[B, T]` ids of
    the vocabulary, and for lengths that do not match them.
    """
    if isinstance(tokens_BT, CheckedPrompts):
        return tokens_BT
    tokens_BT = check_int_array("tokens", as_array("tokens", tokens_BT), TokenError)
    position_BT = next_positions(None, check_shape(tokens_BT), lengths_B)
    real_BT = position_BT >= 0
    check_token_ids(tokens_BT, config.vocab_size, real_X=real_BT)
    tokens_BT = np.where(real_BT, tokens_BT, 0).astype(np.int32)
    return CheckedPrompts(tokens_BT, real_BT.sum(axis=1, dtype=np.int32))


def check_shape(tokens_BT: Any) -> tuple[int, ...]:
    shape: tuple[int, ...] = tokens_BT.shape
    if len(shape) != 2 or 0 in shape:
        remedy = ". Wrap a single row: [ids]" * (len(shape) == 1)
        raise TokenError(f"tokens must be a non-empty [B, T], got shape {shape}{remedy}")
    return shape


def as_array(name: str, x: Any) -> Any:
    """Convert lists to NumPy arrays; return JAX arrays and tracers unchanged."""
    if isinstance(x, jax.Array):
        return x
    try:
        return np.asarray(x)
    except ValueError:
        remedy = ". Pad the rows on the right and pass their lengths as lengths_B" * (
            name == "tokens"
        )
        raise TokenError(f"{name} must be an array, got ragged rows: {x!r:.60}{remedy}") from None
    except (TypeError, RuntimeError) as error:  # a tensor of another library, on a GPU
        raise TokenError(f"{name} must be an array: {error!s:.200}") from None


def as_vectors(x: Any, axes: str, size: int) -> np.ndarray:
    """Return embeddings, `[axes, size]` (for example `[B, T, size]`), as float32."""
    vectors, shape = np.asarray(as_array("embeddings", x)), f"[{axes}, {size}]"
    if vectors.ndim != axes.count(",") + 2 or vectors.shape[-1] != size or 0 in vectors.shape:
        raise TokenError(f"embeddings must be a non-empty {shape}, got shape {vectors.shape}")
    if not jnp.issubdtype(vectors.dtype, jnp.floating):
        raise TokenError(f"embeddings must be floats, got {vectors.dtype}")
    return vectors.astype(np.float32)


def is_concrete(x: Any) -> bool:
    return not isinstance(x, jax.core.Tracer)


def array_namespace(*arrays: Any) -> Any:
    """Return `jax.numpy` if any array is traced, else NumPy."""
    return np if all(map(is_concrete, arrays)) else jnp
