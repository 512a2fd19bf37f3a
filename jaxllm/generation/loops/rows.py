"""Rows of text while tokens are drawn: their state, and the draw of one token for each."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.generation.loops.finish import (
    NO_TOKEN,
    Finish,
    finish_reasons,
    pad_eos_ids,
    select_rows,
    set_column,
)
from jaxllm.generation.sampling.sampler import (
    Context,
    Sampler,
    apply_processors,
    as_row_keys,
    draw_next,
)
from jaxllm.generation.sampling.stacked import RowSampler
from jaxllm.ops.compile_cache import CachedJit
from jaxllm.ops.row_sums import log_softmax
from jaxllm.ops.token_logprobs import pick_token
from jaxllm.runtime.multihost import to_host


class RowState(struct.PyTreeNode):
    """State of rows, apart from their cache.

    Attributes:
        context: Texts, of which the last token has not run, and random keys; each draw folds the
            text's length into its row's key.
        samplers: One for all rows; or several stacked ones, of which each row uses one.
        finish_B: A `Finish` per row.
        limit_B: Length at which a text ends.
        eos_BE: Ids that end a text, padded with -1.
        retry_B: Rows whose last pass was not finite, perhaps because of a rejected draft token:
            they repeat it without a draft.
    """

    context: Context
    samplers: tuple[Any, ...]
    finish_B: jax.Array
    limit_B: jax.Array
    eos_BE: jax.Array
    retry_B: jax.Array


class Drawn(NamedTuple):
    """One draw of every row, `[B]`; loops stack them, `[rounds, columns, B]`.

    Attributes:
        token_B: -1 for a row that drew none.
        logprob_B: Log-probability under the model, before any processor.
        valid_B: Whether the row took part; its logits may not have been finite.
        finish_B: A `Finish` per row.
        draft_B: The draft's proposal for this token, or -1.
        top_token_BN, top_logprob_BN: The N likeliest tokens, if requested.
        processed_B: Log-probability after all processors, if requested.
    """

    token_B: Any
    logprob_B: Any
    valid_B: Any
    finish_B: Any
    draft_B: Any
    top_token_BN: Any = None
    top_logprob_BN: Any = None
    processed_B: Any = None

    def brief(self) -> "Drawn":
        """Return the log-probabilities alone."""
        return self._replace(token_B=None, valid_B=None, finish_B=None, draft_B=None)


# Returns a token for each row, the next samplers, and the processed scores or None, from the rows,
# the kinds of their samplers, the rows that draw, and logits.
Choice = tuple[jax.Array, tuple[Any, ...], Any]
Choose = Callable[[RowState, "jax.Array | None", jax.Array, jax.Array], Choice]


def start_rows(
    token_BL: np.ndarray,
    length_B: np.ndarray,
    budget_B: np.ndarray,
    sampler: Sampler,
    seed: int | jax.Array,
    eos_token_ids: Sequence[int],
) -> RowState:
    """Return rows with these texts, `[B, L]`, which may grow by `budget_B` tokens."""
    B = length_B.size
    arrays: Any = (
        token_BL,
        length_B,
        np.full(B, Finish.RUNNING, np.int32),
        length_B + budget_B,
        np.tile(pad_eos_ids(eos_token_ids), (B, 1)),
        np.zeros(B, bool),
    )
    text_BL, start_B, *rest = jax.device_put(arrays)
    context = Context(text_BL, start_B, start_B, as_row_keys(seed, B))
    return RowState(context, (sampler.begin(B),), *rest)


def live_rows(rows: RowState, kind_KB: jax.Array | None) -> jax.Array:
    """Return which rows draw tokens, bool `[B]`."""
    running_B = rows.finish_B == Finish.RUNNING
    return running_B if kind_KB is None else running_B & kind_KB.any(axis=0)


def position_keys(context: Context) -> jax.Array:
    """Return each row's key of the next position. A position that is drafted again reuses it."""
    return jax.vmap(jax.random.fold_in)(context.key_B, context.length_B)


def draw(
    rows: RowState,
    kind_KB: jax.Array | None,
    live_B: jax.Array,
    logits_BV: jax.Array,
    finite_B: jax.Array,
    *,
    top: int = 0,
    wants_top: jax.Array | None = None,
    processed: bool = False,
    choose: Choose | None = None,
) -> tuple[RowState, Drawn, Any]:
    """Draw a token for each live row and append it, unless its logits are not finite.

    Args:
        kind_KB: Which rows use which of stacked samplers; None: all use the one sampler.
        finite_B: Whether all logits of a row are finite.
        top: Number of likeliest tokens to return.
        wants_top: Whether to find them, bool; None: always.
        processed: Whether to return the log-probabilities after processors, of one sampler.
        choose: Draws the tokens, by default with the rows' samplers.

    Returns:
        The next state, what was drawn, and the scores as `choose` returns them.
    """
    context, grows_B = rows.context, live_B & finite_B
    token_B, samplers, scores_BV = (choose or choose_tokens)(rows, kind_KB, grows_B, logits_BV)
    if kind_KB is None:
        logprob_BV = log_softmax(logits_BV)
    else:
        # Without kernels XLA fuses log_softmax with some models' heads, which changes its bits; it
        # does not fuse across a conditional.
        logprob_BV = jax.lax.cond(live_B.any(), log_softmax, jnp.zeros_like, logits_BV)
    length_B = context.length_B + grows_B.astype(jnp.int32)
    finish_B = finish_reasons(token_B, length_B, rows.limit_B, rows.eos_BE, finite_B)
    finish_B = jnp.where(live_B, finish_B, rows.finish_B)
    token_BL = set_column(context.token_BL, context.length_B, token_B, grows_B)
    drawn = Drawn(
        jnp.where(grows_B, token_B, NO_TOKEN),
        pick_token(logprob_BV, token_B),
        live_B,
        finish_B,
        jnp.full_like(token_B, NO_TOKEN),
    )
    if top:
        find = partial(jax.lax.top_k, k=top)
        if wants_top is None:
            best_BN, token_BN = find(logprob_BV)
        else:
            none = jax.tree.map(jnp.zeros_like, jax.eval_shape(find, logprob_BV))
            best_BN, token_BN = jax.lax.cond(wants_top, find, lambda _: none, logprob_BV)
        drawn = drawn._replace(top_token_BN=token_BN, top_logprob_BN=best_BN)
    if processed:
        drawn = drawn._replace(processed_B=pick_token(log_softmax(scores_BV), token_B))
    context = context.replace(token_BL=token_BL, length_B=length_B)
    return rows.replace(context=context, samplers=samplers, finish_B=finish_B), drawn, scores_BV


def choose_tokens(
    rows: RowState,
    kind_KB: jax.Array | None,
    grows_B: jax.Array,
    logits_BV: jax.Array,
    key_B: jax.Array | None = None,
) -> Choice:
    """Draw with each row's sampler and the key of its position, or `key_B`."""
    context = rows.context.replace(key_B=position_keys(rows.context) if key_B is None else key_B)
    if kind_KB is None:
        (sampler,) = rows.samplers
        scores_BV = apply_processors(logits_BV, sampler, context)
        token_B, after = draw_next(scores_BV, sampler, context)
        return token_B, (select_rows(grows_B, after, sampler),), scores_BV
    token_B, then = jnp.zeros(grows_B.shape, jnp.int32), []
    for sampler, uses_B in zip(rows.samplers, kind_KB & grows_B[None], strict=True):
        drawn_B, after = jax.lax.cond(
            uses_B.any(), _draw_some, _draw_none, uses_B, sampler, logits_BV, context
        )
        token_B = jnp.where(uses_B, drawn_B, token_B)
        then.append(after)
    return token_B, tuple(then), None


def _draw_some(
    uses_B: jax.Array, sampler: RowSampler, logits_BV: jax.Array, context: Context
) -> tuple[jax.Array, RowSampler]:
    token_B, after = sampler.draw(uses_B, logits_BV, context)
    selected: RowSampler = select_rows(uses_B, after, sampler)
    return token_B, selected


def _draw_none(
    uses_B: jax.Array, sampler: RowSampler, logits_BV: jax.Array, context: Context
) -> tuple[jax.Array, RowSampler]:
    return jnp.zeros(uses_B.shape, jnp.int32), sampler


def _draw_first(
    top: int, processed: bool, rows: RowState, logits_BV: jax.Array
) -> tuple[RowState, Drawn]:
    """Draw the tokens after the prompts, as one column of one round."""
    live_B, finite_B = live_rows(rows, None), jnp.isfinite(logits_BV).all(axis=1)
    rows, drawn, _ = draw(rows, None, live_B, logits_BV, finite_B, top=top, processed=processed)
    return rows, jax.tree.map(lambda x: x[None, None], drawn)


FIRST_DRAW = CachedJit(_draw_first, static_argnums=(0, 1))


def draft_stats(drawn: Drawn) -> np.ndarray:
    """Return what each column adds to the numbers of `DraftStats`, `[rounds, columns, B, 3]`."""
    proposed = np.zeros(drawn.token_B.shape, np.int32)
    proposed[:, 0] = np.where(drawn.valid_B[:, 0], (drawn.draft_B >= 0).sum(axis=1), 0)
    accepted = drawn.valid_B & (drawn.draft_B >= 0) & (drawn.draft_B == drawn.token_B)
    return np.stack([proposed, accepted, proposed > 0], axis=-1)


def new_tokens(context: Context, before_B: np.ndarray, rounds: int) -> np.ndarray:
    """Return the tokens of a loop's rounds, `[rounds, 1, B]`, from texts that had `before_B`."""
    at_BN = before_B[:, None] + np.arange(rounds)[None]
    token_BN = np.take_along_axis(to_host(context.token_BL), at_BN, axis=1)
    token_BN = np.where(at_BN < np.asarray(context.length_B)[:, None], token_BN, NO_TOKEN)
    return token_BN.T[:, None]


def join_drawn(parts: Sequence[Drawn], width: int) -> dict[str, np.ndarray]:
    """Return the tokens of each row in order, `[B, width]`, and what belongs to them, by field.

    parts: on the host, each `[rounds, columns, B]`. Places after a row's end hold -1, and 0 for
    numbers.
    """

    def flat(name: str) -> np.ndarray:
        shapes = [x.reshape(-1, *x.shape[2:]) for part in parts for x in [getattr(part, name)]]
        return np.concatenate(shapes)

    token_NB = flat("token_B")
    step_M, row_M = np.nonzero(token_NB >= 0)
    place_M = (np.cumsum(token_NB >= 0, axis=0) - 1)[step_M, row_M]
    joined = {}
    for name in Drawn._fields:
        if any(getattr(part, name) is None for part in parts):
            continue
        x = flat(name)
        blank = NO_TOKEN if "token" in name else 0
        joined[name] = np.full((x.shape[1], width, *x.shape[2:]), blank, x.dtype)
        joined[name][row_M, place_M] = x[step_M, row_M]
    return joined
