"""Drafts: tokens that a model, or the text itself, proposes after each row's text.

A draft model has its own cache. There, a token's slot is its position. Tokens that were
written without the draft are missing from it. `catch_up` runs them; `propose_tokens` expects all
but the last two. Its state, if the model has recurrent layers, is that after these tokens.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.commit import commit_state
from jaxllm.cache.kv import EMPTY, KVCache, Segment, cast_delta
from jaxllm.config.model import ModelConfig
from jaxllm.errors import ConfigError, SamplingError
from jaxllm.generation.loops.finish import NO_TOKEN, put_rows, select_rows, take_rows
from jaxllm.generation.loops.microbatch import (
    MAX_BATCHED_RUN,
    Microbatch,
    TokenRun,
    pack_microbatch,
    run_microbatch,
    run_tokens,
    split_microbatches,
)
from jaxllm.generation.loops.rows import (
    Choice,
    RowState,
    choose_tokens,
    draw,
    live_rows,
    position_keys,
)
from jaxllm.generation.sampling.sampler import Context, apply_processors
from jaxllm.models.inputs import check_model
from jaxllm.ops.recurrent import CHUNK, RecurrentState, map_rows
from jaxllm.ops.row_sums import softmax
from jaxllm.ops.slot_update import NO_SLOT, write_slots
from jaxllm.runtime.multihost import to_host
from jaxllm.runtime.validation import check_int
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params

Acceptance = Literal["text", "distribution"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptLookup:
    """Draft the tokens that followed the latest earlier occurrence of the last tokens.

    Attributes:
        ngram: maximum number of last tokens to match; shorter matches, down to one token, are used
            if there is no longer one.

    Raises:
        SamplingError: If below 1.
    """

    ngram: int = 3

    def __post_init__(self) -> None:
        check_int("ngram", self.ngram, 1)


DraftSource = tuple[Model, Params] | PromptLookup


class Draft(NamedTuple):
    """A source of up to `width` proposals per row; a model has parameters and a cache."""

    source: Model | PromptLookup | None = None
    width: int = 0
    params: Params | None = None
    cache: KVCache | None = None

    @property
    def tail(self) -> Segment | None:
        return None if self.cache is None else self.cache.tail

    @property
    def state(self) -> tuple[Any, ...]:
        return () if self.cache is None else self.cache.state

    def with_written(self, tail: Segment | None, state: tuple[Any, ...]) -> "Draft":
        if self.cache is None:
            return self
        return self._replace(cache=self.cache.replace(tail=tail, state=state))


NO_DRAFT = Draft()


class DraftStats(NamedTuple):
    """Numbers of draft tokens that the model scored and accepted, and of drafts."""

    proposed: int = 0
    accepted: int = 0
    drafts: int = 0

    def plus(self, *others: "DraftStats | None") -> "DraftStats":
        """Return the sums."""
        return DraftStats(*map(sum, zip(self, *filter(None, others), strict=True)))


NO_DRAFTS = DraftStats()


def check_draft(draft: Any) -> None:
    """Raise SamplingError unless this is a draft."""
    if isinstance(draft, PromptLookup):
        return
    if not isinstance(draft, tuple | list) or len(draft) != 2:
        raise SamplingError(
            f"draft must be (model, params) or a PromptLookup, got {type(draft).__name__}. For"
            " an LM, pass (lm.model, lm.params)"
        )
    check_model(*draft)


def check_states(configs: Sequence[ModelConfig], width: int) -> None:
    """Raise ConfigError for states that drafts cannot follow.

    configs: the model's, and that of the draft if it is a model. width: tokens per proposal.
    """
    for name, config in zip(("model", "draft"), configs, strict=False):
        shapes = [config.state_shape(i) for i in range(config.num_hidden_layers)]
        if not all(isinstance(x, RecurrentState | None) for x in shapes):
            raise ConfigError(
                f"speculation does not support the memory of segments that the {name} has: it"
                " cannot forget rejected tokens"
            )
        if config.has_state and width >= CHUNK:
            raise ConfigError(
                f"the {name} has recurrent layers, which support drafts of fewer than {CHUNK}"
                f" tokens, got {width}"
            )


def check_draft_vocabulary(target: Any, draft: Any) -> None:
    """Raise SamplingError unless a draft LM has the vocabulary of an LM.

    Embeddings of one tokenizer may have different numbers of rows without a token.
    """
    sizes = target.model.config.vocab_size, draft.model.config.vocab_size
    tokenizer, other = target.tokenizer, draft.tokenizer
    if len({*sizes}) == 1 or (tokenizer and other and not tokenizer.unlike_ids(other)):
        return
    raise SamplingError(
        f"the draft's vocabulary has {sizes[1]} tokens, expected {sizes[0]}. Use a draft"
        " with the model's tokenizer"
    )


def catch_up(
    draft: Draft, token_BL: jax.Array, lengths: Mapping[int, tuple[int, int]], chunk: int
) -> tuple[Draft, dict[int, int]]:
    """Run up to `chunk` tokens of rows' texts that the draft model lacks.

    lengths: by row, how many first tokens of its text the model has run, and how many it needs.
    Returns the draft, and how many it has run then.
    """
    if not isinstance(draft.source, Model):
        return draft, {row: needed for row, (_, needed) in lengths.items()}
    assert draft.cache is not None and draft.params is not None
    cache, text_BL, ran, runs = draft.cache, None, {}, []
    for row, (start, needed) in lengths.items():
        ran[row] = stop = min(needed, start + chunk)
        chunk -= stop - start
        if stop > start:
            text_BL = to_host(token_BL) if text_BL is None else text_BL
            at_T = np.arange(start, stop)
            token_T = np.minimum(text_BL[row, at_T], draft.source.config.vocab_size - 1)
            runs.append(TokenRun((row,), at_T, token_T, at_T, at_T, at_T < 0, stop))
    if not runs:
        return draft, ran
    end_B = np.full(cache.batch, cache.capacity, np.int32)
    end_B[[run.rows[0] for run in runs]] = [run.position_T[0] for run in runs]
    cache = cache.replace(tail=cut_rows(cache.tail, None, end_B))
    limit = sum(run.index_T.size for run in runs)
    for group in split_microbatches(runs, limit, alone=MAX_BATCHED_RUN):
        places, _ = pack_microbatch(group, cache.batch, invariant_rows=True)
        _, cache, _ = run_microbatch(draft.source, draft.params, cache, places)
    return draft._replace(cache=cache), ran


def propose_tokens(
    source: Model | PromptLookup,
    params: Params | None,
    tail: Segment | None,
    state: tuple[Any, ...],
    width: int,
    row_R: jax.Array | None,
    rows: RowState,
    uses_KR: jax.Array | None,
    size: int,
    acceptance: Acceptance,
) -> tuple[jax.Array, jax.Array | None, Segment | None, tuple[Any, ...]]:
    """Propose `width` tokens in each row, or fewer and then -1.

    A draft model draws with the keys that the target uses at these positions, on copies of the
    sampler and the text. row_R: as in `Microbatch`. size: the number of the target's logits.
    state: of these rows.

    Returns:
        The tokens `[R, width]`, the distributions that they were drawn from, `[width, R, V]`, if
        they are needed, the draft's tail, and what `commit_state` makes its state from: the last
        two tokens and all proposals but the last, of which any first part can be committed.
    """
    if isinstance(source, PromptLookup):
        return look_up_draft(rows.context, source.ngram, width), None, tail, ()
    assert tail is not None and params is not None
    tail = cut_rows(tail, row_R, rows.context.length_B - 2)
    resamples = by_rejection(rows, acceptance)

    def choose(rows: RowState, uses_KR: Any, grows_R: jax.Array, logits_RV: jax.Array) -> Choice:
        key_R = _split(position_keys(rows.context))[0] if resamples else None
        return choose_tokens(rows, uses_KR, grows_R, logits_RV, key_R)

    def draft_token(carry: Any, new: int) -> Any:
        """Run the last `new` tokens; draw the next one."""
        tail, state, rows = carry
        length_R = rows.context.length_B
        live_R = live_rows(rows, uses_KR) & (length_R < rows.limit_B - 1)
        position_RT = length_R[:, None] + jnp.arange(-new, 0, dtype=jnp.int32)[None]
        places = Microbatch(
            row_R=row_R,
            token_RT=last_tokens(rows.context, new),
            position_RT=jnp.where(live_R[:, None], position_RT, EMPTY),
            slot_RT=jnp.where(live_R[:, None], position_RT, NO_SLOT),
            length_R=length_R,
            column_R=jnp.full_like(length_R, new - 1),
        )
        out, delta, waits, _ = run_tokens(source, params, (tail,), state, places)
        state = commit_state(delta.state, delta.position_BS, waits)
        new_RT = cast_delta(delta, tail)
        tail = write_slots(tail, new_RT, places.slot_RT, row_R, wait_for=waits)
        finite_R, logits_RV = jnp.isfinite(out[:, 0]).all(axis=1), fit_logits(out[:, 0], size)
        rows, drawn, scores = draw(rows, uses_KR, live_R, logits_RV, finite_R, choose=choose)
        made = (drawn.token_B, softmax(scores) if resamples else None)
        return (tail, state, rows), made, delta.state

    def draft_next(carry: Any, _: None) -> Any:
        carry, made, pending = draft_token(carry, 1)
        return carry, (made, [x and x.rows for x in pending])

    def join(first: jax.Array, rest_K: jax.Array, axis: int) -> jax.Array:
        return jnp.concatenate([first, jnp.moveaxis(rest_K.squeeze(axis + 1), 0, axis)], axis)

    # The last token but one has not run if all proposals were accepted.
    carry, first, pending = draft_token((tail, state, rows), 2)
    (tail, *_), (rest, rows_K) = jax.lax.scan(draft_next, carry, length=width - 1)
    token_KR, q_KRV = jax.tree.map(lambda x, y: jnp.concatenate([x[None], y]), first, rest)
    pairs = zip(pending, rows_K, strict=True)
    ran = tuple(x and x.replace(rows=map_rows(join, x.rows, later_K)) for x, later_K in pairs)
    return token_KR.T, q_KRV, tail, ran


def look_up_draft(text: Context, ngram: int, width: int) -> jax.Array:
    """Return `width` tokens after the best earlier match of each text's end, or -1: `[B, width]`.

    The best match is the longest, up to `ngram` tokens; ties go to the latest. A continuation that
    reaches the end of the text repeats periodically.
    """
    token_BL, end_B1 = text.token_BL, text.length_B[:, None]
    at = jnp.arange(token_BL.shape[1], dtype=jnp.int32)[None]
    same_BL = jnp.broadcast_to(at < end_B1 - 1, token_BL.shape)
    matched_BL = jnp.zeros_like(token_BL)
    for back in range(ngram):  # compare the tokens `back` before here and `back` before the end
        before = jnp.pad(token_BL, ((0, 0), (back, 0)), constant_values=NO_TOKEN)
        wanted_B1 = jnp.take_along_axis(token_BL, jnp.maximum(end_B1 - 1 - back, 0), axis=1)
        same_BL &= (before[:, : token_BL.shape[1]] == wanted_B1) & (at >= back)
        matched_BL += same_BL.astype(jnp.int32)
    score_BL = jnp.where(matched_BL > 0, matched_BL * token_BL.shape[1] + at, NO_TOKEN)
    match_B1 = jnp.argmax(score_BL, axis=1, keepdims=True).astype(jnp.int32)
    period_B1 = jnp.maximum(end_B1 - 1 - match_B1, 1)
    ahead = jnp.arange(width, dtype=jnp.int32)[None]
    copied_BK = jnp.take_along_axis(token_BL, match_B1 + 1 + ahead % period_B1, axis=1)
    return jnp.where((matched_BL > 0).any(axis=1, keepdims=True), copied_BK, NO_TOKEN)


def last_tokens(text: Context, n: int) -> jax.Array:
    """Return the last n tokens of each text, `[B, n]`."""
    at_BN = text.length_B[:, None] + jnp.arange(-n, 0, dtype=jnp.int32)[None]
    return jnp.take_along_axis(text.token_BL, jnp.maximum(at_BN, 0), axis=1)


def fit_logits(logits_BV: jax.Array, size: int) -> jax.Array:
    """Return a draft's logits with the target's number of rows; a row that it lacks gets -inf."""
    missing = size - logits_BV.shape[1]
    padding = ((0, 0), (0, max(missing, 0)))
    return jnp.pad(logits_BV[:, :size], padding, constant_values=-jnp.inf)


@partial(jax.jit, donate_argnums=0)
def cut_rows(tail: Segment, row_R: jax.Array | None, end_R: jax.Array) -> Segment:
    """Remove the tokens of rows from a position on."""
    position_RS = take_rows(tail.position_BS, row_R)
    cut_RS = jnp.where(position_RS < end_R[:, None], position_RS, EMPTY)
    return tail.replace(position_BS=put_rows(tail.position_BS, row_R, cut_RS))


def by_rejection(rows: RowState, acceptance: Acceptance) -> bool:
    """Return whether draft tokens are accepted or redrawn by `accept_or_resample`."""
    return acceptance == "distribution" and not rows.samplers[0].greedy


def choose_or_resample(draft_B: jax.Array, q_BV: jax.Array | None) -> Any:
    """Return a `Choose` that accepts draft tokens by their probability under the target.

    q_BV: the distributions that they were drawn from; None if nothing else was possible.
    """

    def choose(
        rows: RowState, kind_KB: jax.Array | None, grows_B: jax.Array, logits_BV: jax.Array
    ) -> Choice:
        (sampler,) = rows.samplers
        _, accept_B, draw_B = _split(position_keys(rows.context))
        scores_BV = apply_processors(logits_BV, sampler, rows.context.replace(key_B=draw_B))
        law_BV = jax.nn.one_hot(draft_B, scores_BV.shape[1]) if q_BV is None else q_BV
        law_BV = jnp.where(draft_B[:, None] >= 0, law_BV, 0.0)
        token_B = accept_or_resample(scores_BV, draft_B, law_BV, accept_B, draw_B)
        after = sampler.observe(scores_BV, token_B)
        return token_B, (select_rows(grows_B, after, sampler),), scores_BV

    return choose


def accept_or_resample(
    scores_BV: jax.Array,
    draft_B: jax.Array,
    q_BV: jax.Array,
    accept_B: jax.Array,
    draw_B: jax.Array,
) -> jax.Array:
    """Return a token with the distribution softmax(scores): the draft's, or another.

    Leviathan et al. 2023, algorithm 1; Chen et al. 2023. A row without a draft token (-1) has q = 0
    and draws from its scores. accept_B, draw_B: random keys.
    """
    p_BV = softmax(scores_BV)
    x_B1 = jnp.maximum(draft_B, 0)[:, None]
    p_B, q_B = (jnp.take_along_axis(law, x_B1, axis=1)[:, 0] for law in (p_BV, q_BV))
    agreed_B = (draft_B >= 0) & (jax.vmap(jax.random.uniform)(accept_B) * q_B < p_B)
    other_B = jax.vmap(jax.random.categorical)(draw_B, jnp.log(residual(p_BV, q_BV)))
    return jnp.where(agreed_B, draft_B, other_B.astype(jnp.int32))


def residual(p_BV: jax.Array, q_BV: jax.Array) -> jax.Array:
    """Return norm(max(p - q, 0)), the distribution after a rejection.

    If rounding leaves no mass, the distributions are equal and the result is p.
    """
    left_BV = jnp.maximum(p_BV - q_BV, 0.0)
    total_B1 = left_BV.sum(axis=1, keepdims=True)
    return jnp.where(total_B1 > 0, left_BV / jnp.where(total_B1 > 0, total_B1, 1.0), p_BV)


def _split(key_B: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return keys to draft, to accept and to draw a token."""
    key_B3 = jax.vmap(lambda key: jax.random.split(key, 3))(key_B)
    return key_B3[:, 0], key_B3[:, 1], key_B3[:, 2]
