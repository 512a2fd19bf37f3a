"""Token budgets, finish reasons and text buffers, shared by all generation loops."""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.kv import MAX_SLOTS
from jaxllm.config.model import ModelConfig
from jaxllm.errors import CapacityError, SamplingError
from jaxllm.generation.option_table import MAX_TOKENS
from jaxllm.runtime.validation import check_int, check_int_array

_EOS_MULTIPLE = 8  # end-of-text ids are padded to a multiple of this, to avoid recompilation
NO_TOKEN = -1


class Finish(IntEnum):
    """Why a row ended."""

    RUNNING = 0
    EOS = 1
    LENGTH = 2
    NON_FINITE = 3
    STOP = 4
    CANCELLED = 5


def pad_eos_ids(eos_token_ids: Sequence[int]) -> np.ndarray:
    """Return end-of-text ids as int32 `[E]`, padded with -1 so that new shapes are rare.

    Raises SamplingError for anything but a list of ids.
    """
    if not isinstance(eos_token_ids, list | tuple | range | np.ndarray | jax.Array):
        raise SamplingError(f"eos_token_ids must be a list of token ids, got {eos_token_ids!r:.60}")
    ids = [check_int("an end-of-text id", x, 0, MAX_SLOTS) for x in eos_token_ids]
    slots = _EOS_MULTIPLE * max(1, -(-len(ids) // _EOS_MULTIPLE))
    return np.array([*ids, *[NO_TOKEN] * (slots - len(ids))], np.int32)


def token_budgets(max_new_tokens: Any, rows: int) -> np.ndarray:
    """Return each row's limit of new tokens, int32 `[B]`."""
    budget = check_int_array("max_new_tokens", max_new_tokens, SamplingError)
    if budget.shape not in ((), (rows,)) or budget.min() < 1 or budget.max() > MAX_TOKENS:
        raise SamplingError(
            f"max_new_tokens must be a whole number from 1 to {MAX_TOKENS}, or one for each of"
            f" {rows} rows, got {max_new_tokens!r:.60}"
        )
    return np.broadcast_to(budget.astype(np.int32), (rows,))


def check_positions(tokens: int, config: ModelConfig, model_name: str = "model") -> None:
    """Raise CapacityError if a text of this many run tokens exceeds the model's positions."""
    if tokens > (limit := config.position_limit):
        raise CapacityError(
            f"{tokens} tokens of prompt and continuation do not fit into {limit} positions of"
            f" the {model_name}. Shorten the prompt or max_new_tokens"
        )


def set_column(x_BL: jax.Array, at_B: jax.Array, new_B: jax.Array, where_B: jax.Array) -> jax.Array:
    """Set column `at_B` to `new_B` in the rows of `where_B`; x may have axes after L."""
    at_B = jnp.where(where_B, at_B, x_BL.shape[1])  # past the end: dropped
    return x_BL.at[jnp.arange(at_B.shape[0]), at_B].set(new_B, mode="drop")


def take_rows(x: Any, row_R: jax.Array | None) -> Any:
    """Return these rows of a pytree; None: all, in order."""
    if row_R is None:
        return x
    return jax.tree.map(lambda x: x.at[row_R].get(mode="clip"), x)


def put_rows(x: Any, row_R: jax.Array | None, new: Any) -> Any:
    """Return the pytree with these rows replaced; rows that do not exist are dropped."""
    if row_R is None:
        return new
    return jax.tree.map(lambda x, new: x.at[row_R].set(new, mode="drop"), x, new)


def select_rows(rows_B: jax.Array, new: Any, old: Any) -> Any:
    """Take these rows from the new tree and the others from the old; other leaves are the new."""

    def pick(x: jax.Array, y: jax.Array) -> jax.Array:
        if x is y or x.ndim == 0 or x.shape[0] != rows_B.shape[0]:
            return x
        return jnp.where(rows_B.reshape(-1, *[1] * (x.ndim - 1)), x, y)

    return jax.tree.map(pick, new, old)


def finish_reasons(
    token_B: jax.Array,
    length_B: jax.Array,
    limit_B: jax.Array,
    eos_BE: jax.Array,
    finite_B: jax.Array,
) -> jax.Array:
    """Return why rows end with their newest token, a `Finish` `[B]`; RUNNING if they continue.

    length_B: text length with the token, at most limit_B. finite_B: whether its logits are finite.
    """
    finish_B = jnp.where(length_B >= limit_B, Finish.LENGTH, Finish.RUNNING)
    finish_B = jnp.where(is_eos(token_B[:, None], eos_BE)[:, 0], Finish.EOS, finish_B)
    return jnp.where(finite_B, finish_B, Finish.NON_FINITE)


def mask_draft(draft_BK: jax.Array, room_B: jax.Array, ends_BK: jax.Array) -> jax.Array:
    """Mask draft tokens after a row's limit, a missing token, or an end of text.

    room_B: how many there may be. ends_BK: which of them end the text.
    """
    column = jnp.arange(draft_BK.shape[1], dtype=jnp.int32)[None]
    ended_BK = jnp.pad(ends_BK, ((0, 0), (1, 0)))[:, :-1]
    wrong_BK = (draft_BK < 0) | (column >= room_B[:, None]) | ended_BK
    return jnp.where(jnp.cumsum(wrong_BK, axis=1, dtype=jnp.int32) == 0, draft_BK, NO_TOKEN)


def is_eos(token_BT: jax.Array, eos_BE: jax.Array) -> jax.Array:
    """Return which tokens end their row's text; -1 in either array is padding."""
    return (token_BT[:, :, None] == eos_BE[:, None]).any(axis=2) & (token_BT >= 0)
