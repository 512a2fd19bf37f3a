"""Speculative decoding: a draft proposes several tokens, and the target scores them in one pass.

The text is that of plain decoding with the same seed, sampled or greedy: draft and target draw with
the random key of the position, and a draft token is accepted if the target draws it too (Daliri et
al. 2024, arXiv 2408.07978: shared noise makes that likely). So the text does not depend on the
draft. A pass over several tokens may round logits differently than single-token passes, and a token
that is won by less than that may differ; with `Precision.invariant` it cannot.

The other rule, "distribution" (Leviathan et al. 2023, algorithm 1; Chen et al. 2023), accepts a few
more draft tokens. Sampled tokens then have the target's distribution after its processors, but each
draft gives another text.

A draft that does not pay for its passes is left off for a while (`draft_pace`). Text is the same;
with "distribution" it would be another, so there the draft is always used.

Rows accept different numbers of tokens and cannot share a cursor, so in these caches a token's slot
is its position. Each row writes at the end of its own text and overwrites rejected tokens. Nothing
is compacted, and the caches are no larger than those of plain decoding.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.cache.edit import rewind
from jaxllm.cache.kv import Delta, KVCache, cast_delta, init_cache
from jaxllm.cache.slot_update import write_slots
from jaxllm.config.model import ModelConfig
from jaxllm.errors import ConfigError, SamplingError
from jaxllm.generation.loops.draft_pace import DraftPace
from jaxllm.generation.loops.finish import (
    NO_TOKEN,
    Finish,
    check_positions,
    finish_reasons,
    is_eos,
    mask_draft,
    pad_eos_ids,
    select_rows,
    token_budgets,
)
from jaxllm.generation.loops.prompt_lookup import (
    PromptLookup,
    TextState,
    last_tokens,
    look_up_draft,
)
from jaxllm.generation.loops.rejection_sampling import accept_or_resample
from jaxllm.generation.sampling.sampler import (
    GREEDY,
    Context,
    Sampler,
    apply_processors,
    as_row_keys,
    check_sampler,
    sample_next,
)
from jaxllm.models.inputs import check_longrope_limit, check_model, check_prompts
from jaxllm.ops.padding import bucket_size
from jaxllm.ops.row_sums import softmax
from jaxllm.runtime import multihost
from jaxllm.runtime.multihost import to_host
from jaxllm.runtime.validation import check_int
from jaxllm.steps import prefill, run_model
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params

_CATCH_UP = 16  # tokens that a draft model runs at once of those written without it


class DraftStats(NamedTuple):
    """Draft tokens that the model scored, those that it accepted, and the drafts they were in."""

    proposed: int = 0
    accepted: int = 0
    drafts: int = 0

    def plus(self, *others: "DraftStats | None") -> "DraftStats":
        """Return the sums."""
        return DraftStats(*map(sum, zip(self, *filter(None, others), strict=True)))


NO_DRAFTS = DraftStats()


class SpeculativeResult(struct.PyTreeNode):
    """Result of `speculative_generate`.

    Attributes:
        token_BT: int32 `[B, max_new_tokens]`, -1 after a row's end; includes end-of-text tokens.
        length_B: Number of generated tokens per row.
        finish_B: A `Finish` per row.
        proposed_B: Draft tokens that the target scored.
        accepted_B: Draft tokens that it accepted.
        drafts_B: Target passes with a draft token of the row.
        rounds_B: Target passes that a row took part in, without the prefill.
        cache: The target's cache, with the prompt and all tokens but each row's last.
    """

    token_BT: jax.Array
    length_B: jax.Array
    finish_B: jax.Array
    proposed_B: jax.Array
    accepted_B: jax.Array
    drafts_B: jax.Array
    rounds_B: jax.Array
    cache: KVCache


Acceptance = Literal["text", "distribution"]


class LoopInputs(struct.PyTreeNode):
    """Loop inputs: each row's prompt length, maximum length and random key; end-of-text ids.

    acceptance: As in `speculative_generate`.
    """

    prompt_B: jax.Array
    limit_B: jax.Array
    key_B: jax.Array
    eos_E: jax.Array
    acceptance: Acceptance = struct.field(pytree_node=False)

    def context(self, text: TextState, key_B: jax.Array) -> Context:
        return Context(text.token_BL, self.prompt_B, text.length_B, key_B)

    def position_keys(self, position_B: jax.Array) -> jax.Array:
        """Return each row's key at a position, as plain decoding uses it.

        A position that is drafted again reuses its key; nothing kept depends on the rejected draft.
        """
        return jax.vmap(jax.random.fold_in)(self.key_B, position_B)


class RoundState(struct.PyTreeNode):
    """State at the start of a round.

    caches: the target's, which holds the text but its last token, and the draft model's, which
    lacks one more if all of its proposals were accepted. retry_B: rows whose last pass was not
    finite; because a rejected draft token may have caused that, they repeat it without a draft.
    """

    text: TextState
    caches: list[KVCache]
    retry_B: jax.Array
    proposed_B: jax.Array
    accepted_B: jax.Array
    drafts_B: jax.Array
    rounds_B: jax.Array


def speculative_generate(
    model: Model,
    params: Params,
    tokens_BT: Any,
    *,
    draft: tuple[Model, Params] | PromptLookup,
    max_new_tokens: int | Sequence[int],
    num_draft_tokens: int = 4,
    sampler: Sampler = GREEDY,
    acceptance: Acceptance = "text",
    seed: int | jax.Array = 0,
    eos_token_ids: Sequence[int] = (),
    lengths_B: Any = None,
    chunk: int | None = None,
) -> SpeculativeResult:
    """Continue each prompt `[B, T]` as `generate` does, in fewer passes over the target's weights.

    Only new shapes, models and values of num_draft_tokens compile.

    Args:
        draft: A model with the same tokenizer and its parameters, in any format and precision, or
            a `PromptLookup`. The embedding may have other rows past the tokenizer's ids.
        num_draft_tokens: Maximum number of tokens to propose per target pass.
        sampler: Applies to both models.
        acceptance: "text": the text of `generate` with the same seed. "distribution": sampled
            tokens have the same distribution, and a few more draft tokens are accepted.
        Others as for `generate`.

    Raises:
        SamplingError: For something else as a draft, or numbers below 1.
        CapacityError: If the text exceeds either model's positions.
        ConfigError: If dynamic RoPE would change a model's angles with the text's length.
        JaxllmError: Whatever else `prefill` raises.
    """
    check_model(model, params)
    check_sampler(sampler)
    if acceptance not in get_args(Acceptance):
        raise SamplingError(f"acceptance must be 'text' or 'distribution', got {acceptance!r:.40}")
    check_draft(draft)
    tokens_BT, prompt_B = check_prompts(model.config, tokens_BT, lengths_B)
    B, T = tokens_BT.shape
    budget_B = token_budgets(max_new_tokens, B)
    longest = int(budget_B.max())
    num_draft_tokens = check_int(
        "num_draft_tokens", num_draft_tokens, 1, model.config.position_limit
    )
    pairs = [(model, params)] if isinstance(draft, PromptLookup) else [(model, params), draft]
    _check_models([one.config for one, _ in pairs], T, longest)
    for name, (one, _) in zip(("model", "draft"), pairs, strict=False):
        check_longrope_limit(prompt_B, prompt_B + budget_B - 1, one.config, name)
    starts = [
        prefill(
            one,
            its_params,
            init_cache(one, B, bucket_size(T + longest - 1)),
            np.minimum(tokens_BT, one.config.vocab_size - 1),
            lengths_B=prompt_B,
            chunk=chunk,
            donate=True,
        )
        for one, its_params in pairs
    ]
    token_BL = np.full((B, bucket_size(T + longest)), NO_TOKEN, np.int32)
    token_BL[:, :T] = np.where(np.arange(T)[None] < prompt_B[:, None], tokens_BT, NO_TOKEN)
    eos_E = pad_eos_ids(eos_token_ids)
    limit_B, running_B = prompt_B + budget_B, np.full(B, Finish.RUNNING, np.int32)
    arrays = jax.device_put((token_BL, prompt_B, limit_B, eos_E, running_B))
    token_BL, start_B, limit_B, eos_E, running_B = arrays
    loop_inputs = LoopInputs(start_B, limit_B, as_row_keys(seed, B), eos_E, acceptance)
    text = TextState(token_BL, start_B, running_B, sampler.begin(B))
    end = _begin(loop_inputs, text, starts[0].logits, [start.cache for start in starts])
    # What is drawn must not depend on the clock, nor processes differ.
    exact = acceptance == "text" or sampler.greedy
    pace = DraftPace() if exact and not multihost.is_multiprocess() else None
    source = draft if isinstance(draft, PromptLookup) else draft[0]
    all_params = [its_params for _, its_params in pairs]
    before = _progress(end)
    while before.running:
        drafts, count = (True, longest) if pace is None else (pace.drafts, pace.left)
        began = 0.0 if pace is None else pace.clock()
        end = _run_rounds(
            model, source, num_draft_tokens, all_params, loop_inputs, end, drafts, np.int32(count)
        )
        now = _progress(end)
        if pace is not None:
            rows = (now.rows - before.rows) / (now.rounds - before.rounds)
            tokens = (now.tokens - before.tokens) / rows
            pace.record(now.rounds - before.rounds, tokens, pace.clock() - began)
        before = now
    at_BT = prompt_B[:, None] + np.arange(longest)[None]
    return SpeculativeResult(
        jax.device_put(np.take_along_axis(np.asarray(end.text.token_BL), at_BT, axis=1)),
        jax.device_put(np.asarray(end.text.length_B) - prompt_B),
        end.text.finish_B,
        end.proposed_B,
        end.accepted_B,
        end.drafts_B,
        end.rounds_B,
        end.caches[0],
    )


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


def check_draft_vocabulary(target: Any, draft: Any) -> None:
    """Raise SamplingError unless a draft LM has the vocabulary of an LM.

    Embeddings of one tokenizer may have different numbers of rows without a token.
    """
    sizes = target.model.config.vocab_size, draft.model.config.vocab_size
    ours, its = target.tokenizer, draft.tokenizer
    if len({*sizes}) == 1 or (ours and its and not ours.unlike_ids(its)):
        return
    raise SamplingError(
        f"the draft's vocabulary has {sizes[1]} tokens, expected {sizes[0]}. Use a draft"
        " with the model's tokenizer"
    )


def fit_logits(logits_BV: jax.Array, size: int) -> jax.Array:
    """Return a draft's logits with the target's number of rows; a row that it lacks gets -inf."""
    missing = size - logits_BV.shape[1]
    padding = ((0, 0), (0, max(missing, 0)))
    return jnp.pad(logits_BV[:, :size], padding, constant_values=-jnp.inf)


class _Progress(NamedTuple):
    """Whether a row runs, and sums over the rows: their rounds and tokens; rounds of any row."""

    running: bool
    rounds: int
    rows: int
    tokens: int


def _progress(state: RoundState) -> _Progress:
    finish_B, rounds_B, length_B = to_host(
        (state.text.finish_B, state.rounds_B, state.text.length_B)
    )
    running = bool((finish_B == Finish.RUNNING).any())
    return _Progress(running, int(rounds_B.max()), int(rounds_B.sum()), int(length_B.sum()))


def _check_models(configs: Sequence[ModelConfig], T: int, longest: int) -> None:
    for name, config in zip(("model", "draft"), configs, strict=False):
        check_positions(T + longest - 1, config, name)
        dynamic = any(rope.rope_type == "dynamic" for rope in config.ropes)
        if dynamic and T + longest - 1 > config.max_position_embeddings:
            raise ConfigError(
                f"the {name} uses dynamic RoPE, whose angles change with every token past position"
                f" {config.max_position_embeddings}, so speculative decoding would not be exact"
            )


@partial(jax.jit, donate_argnums=3)
def _begin(
    inputs: LoopInputs, text: TextState, logits_BV: jax.Array, caches: list[KVCache]
) -> RoundState:
    """Choose the first token from the prompt's logits."""
    zeros_B = jnp.zeros_like(text.length_B)
    nothing_BT = jnp.full_like(zeros_B, NO_TOKEN)[:, None]
    text, _ = _accept_tokens(inputs, text, zeros_B == 0, logits_BV[:, None], nothing_BT, None)
    return RoundState(text, caches, zeros_B > 0, zeros_B, zeros_B, zeros_B, zeros_B)


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=5)
def _run_rounds(
    model: Model,
    draft: Model | PromptLookup,
    width: int,
    params: list[Params],
    inputs: LoopInputs,
    start: RoundState,
    drafts: jax.Array,
    count: jax.Array,
) -> RoundState:
    """Run up to `count` rounds, until all rows end. drafts: whether these use the draft."""

    def is_unfinished(carry: tuple[jax.Array, RoundState]) -> jax.Array:
        done, state = carry
        return (done < count) & (state.text.finish_B == Finish.RUNNING).any()

    def run_round(carry: tuple[jax.Array, RoundState]) -> tuple[jax.Array, RoundState]:
        done, state = carry
        return done + 1, _run_round(model, draft, width, params, inputs, state, drafts)

    return jax.lax.while_loop(is_unfinished, run_round, (jnp.zeros((), jnp.int32), start))[1]


def _run_round(
    model: Model,
    draft: Model | PromptLookup,
    width: int,
    params: list[Params],
    inputs: LoopInputs,
    state: RoundState,
    drafts: jax.Array,
) -> RoundState:
    """Propose up to `width` tokens per row, score them in one pass, and keep the accepted ones."""
    text, cache = state.text, state.caches[0]
    running_B = text.finish_B == Finish.RUNNING
    room_B = jnp.where(running_B & ~state.retry_B, inputs.limit_B - text.length_B - 1, 0)
    room_B = jnp.where(drafts, room_B, 0)
    if isinstance(draft, PromptLookup):
        rest, draft_BK, q_KBV = [], look_up_draft(text, draft.ngram, width), None
    else:

        def propose(cache: KVCache) -> Any:
            size = model.config.vocab_size
            return _propose_tokens(draft, params[1], width, inputs, text, cache, room_B, size)

        def propose_nothing(cache: KVCache) -> Any:
            _, token, q = jax.eval_shape(propose, cache)
            nothing = jnp.full(token.shape, NO_TOKEN, token.dtype)
            return cache, nothing, None if q is None else jnp.zeros(q.shape, q.dtype)

        its_cache, draft_BK, q_KBV = jax.lax.cond(drafts, propose, propose_nothing, state.caches[1])
        rest = [its_cache]
    draft_BK = mask_draft(draft_BK, room_B, is_eos(draft_BK, inputs.eos_E))
    token_BT = jnp.concatenate([last_tokens(text, 1), draft_BK], axis=1)
    real_BT = (token_BT >= 0) & running_B[:, None]
    column = jnp.arange(-1, width, dtype=jnp.int32)[None]
    position_BT = jnp.where(real_BT, text.length_B[:, None] + column, -1)

    def run_columns(token_BT: jax.Array, position_BT: jax.Array) -> tuple[jax.Array, Delta]:
        trace, delta, _ = run_model(model, params[0], cache.segments, token_BT, position_BT)
        return trace.logits, delta

    def run_first_column(token_BT: jax.Array, position_BT: jax.Array) -> tuple[jax.Array, Delta]:
        padding = ((0, 0), (0, width))
        return jax.tree.map(
            lambda x: jnp.pad(x, (*padding, *[(0, 0)] * (x.ndim - 2))),
            run_columns(token_BT[:, :1], position_BT[:, :1]),
        )

    # Empty columns cost as much as others.
    logits_BTV, delta = jax.lax.cond(
        real_BT[:, 1:].any(), run_columns, run_first_column, token_BT, position_BT
    )
    delta = delta.replace(position_BS=position_BT)
    finite_B = (jnp.isfinite(logits_BTV).all(axis=2) | ~real_BT).all(axis=1)
    alone_B = running_B & ~finite_B & real_BT[:, 1]
    text, accepted_B = _accept_tokens(
        inputs, text, running_B & ~alone_B, logits_BTV, draft_BK, q_KBV
    )
    next_B = jnp.where(running_B, text.length_B - 1, cache.next_position_B)
    # Rejected tokens leave the draft's cache now: it may not draft in the next round.
    rest = [rewind(one, to=jnp.minimum(one.next_position_B, next_B)) for one in rest]
    return RoundState(
        text,
        [rewind(_write_delta(cache, delta), to=next_B), *rest],
        alone_B,
        state.proposed_B + (draft_BK >= 0).sum(axis=1, dtype=jnp.int32),
        state.accepted_B + accepted_B,
        state.drafts_B + (draft_BK[:, 0] >= 0).astype(jnp.int32),
        state.rounds_B + running_B.astype(jnp.int32),
    )


def _accept_tokens(
    inputs: LoopInputs,
    text: TextState,
    rows_B: jax.Array,
    logits_BTV: jax.Array,
    draft_BK: jax.Array,
    q_KBV: jax.Array | None,
) -> tuple[TextState, jax.Array]:
    """Append accepted draft tokens and one target token; return the number of accepted tokens.

    The target's own token replaces the first rejected one, or follows the last accepted one.
    q_KBV: the distributions that draft tokens were drawn from.
    """
    logits_TBV = jnp.moveaxis(logits_BTV, 1, 0)
    after = logits_TBV.shape[0] - draft_BK.shape[1]  # columns without a draft token
    draft_TB = jnp.pad(draft_BK.T, ((0, after), (0, 0)), constant_values=NO_TOKEN)
    q_TBV = None if q_KBV is None else jnp.pad(q_KBV, ((0, after), (0, 0), (0, 0)))

    def accept_column(
        carry: tuple[TextState, jax.Array], column: Any
    ) -> tuple[tuple[TextState, jax.Array], jax.Array]:
        text, alive_B = carry
        logits_BV, draft_B, q_BV = column
        key_B = inputs.position_keys(text.length_B)
        if inputs.acceptance == "text" or text.sampler.greedy:
            token_B, after = sample_next(logits_BV, text.sampler, inputs.context(text, key_B))
            agreed_B = token_B == draft_B
        else:
            _, accept_B, draw_B = _split(key_B)
            context = inputs.context(text, draw_B)
            scores_BV = apply_processors(logits_BV, text.sampler, context)
            if q_BV is None:
                q_BV = jax.nn.one_hot(draft_B, scores_BV.shape[1])
            q_BV = jnp.where(draft_B[:, None] >= 0, q_BV, 0.0)
            token_B, agreed_B = accept_or_resample(scores_BV, draft_B, q_BV, accept_B, draw_B)
            after = text.sampler.observe(scores_BV, token_B)
        finite_B = jnp.isfinite(logits_BV).all(axis=1)
        taken_B = alive_B & finite_B
        memory = select_rows(taken_B, after, text.sampler)
        text = text.append(token_B, taken_B).replace(sampler=memory)
        finish_B = finish_reasons(token_B, text.length_B, inputs.limit_B, inputs.eos_E, finite_B)
        text = text.replace(finish_B=jnp.where(alive_B, finish_B, text.finish_B))
        agreed_B &= taken_B
        return (text, agreed_B & (text.finish_B == Finish.RUNNING)), agreed_B

    (text, _), agreed_TB = jax.lax.scan(
        accept_column, (text, rows_B), (logits_TBV, draft_TB, q_TBV)
    )
    return text, agreed_TB.sum(axis=0, dtype=jnp.int32)


def _propose_tokens(
    model: Model,
    params: Params,
    width: int,
    inputs: LoopInputs,
    text: TextState,
    cache: KVCache,
    room_B: jax.Array,
    size: int,
) -> tuple[KVCache, jax.Array, jax.Array | None]:
    """Propose tokens with a draft model, -1 if its logits are not finite. size: the target's rows.

    Returns the draft's cache, the tokens, and the distributions that they were drawn from.
    """
    running_B, start_B = text.finish_B == Finish.RUNNING, text.length_B

    def draft_token(
        cache: KVCache, text: TextState, token_BT: jax.Array, position_BT: jax.Array
    ) -> Any:
        last_B = jnp.full_like(start_B, token_BT.shape[1] - 1)
        trace, delta, _ = run_model(
            model, params, cache.segments, token_BT, position_BT, column_B=last_B
        )
        logits_BV, key_B = trace.logits[:, 0], inputs.position_keys(text.length_B)
        good_B = jnp.isfinite(logits_BV).all(axis=1) & (position_BT[:, -1] >= 0)
        logits_BV = fit_logits(logits_BV, size)
        exact = inputs.acceptance == "text" or text.sampler.greedy
        context = inputs.context(text, key_B if exact else _split(key_B)[0])
        scores_BV = apply_processors(logits_BV, text.sampler, context)
        token_B, after = sample_next(logits_BV, text.sampler, context)
        token_B = jnp.where(good_B, token_B, NO_TOKEN)
        memory = select_rows(good_B, after, text.sampler)
        text = text.append(token_B, good_B).replace(sampler=memory)
        q_BV = None if exact else softmax(scores_BV)
        return (_write_delta(cache, delta), text, token_B), (token_B, q_BV)

    def draft_next(carry: Any, i: jax.Array) -> Any:
        cache, text, token_B = carry
        position_B = jnp.where((token_B >= 0) & (i < room_B), start_B + i - 1, -1)
        return draft_token(cache, text, token_B[:, None], position_B[:, None])

    def is_behind(cache: KVCache) -> jax.Array:
        return (running_B & (cache.next_position_B < start_B - 2)).any()

    def catch_up(cache: KVCache) -> KVCache:
        """Run tokens that were written without the draft."""
        at_BT = cache.next_position_B[:, None] + jnp.arange(_CATCH_UP, dtype=jnp.int32)[None]
        token_BT = jnp.take_along_axis(text.token_BL, at_BT, axis=1, mode="clip")
        there_BT = running_B[:, None] & (at_BT < start_B[:, None] - 2)
        column_B = jnp.zeros_like(start_B)
        _, delta, _ = run_model(
            model, params, cache.segments, token_BT, jnp.where(there_BT, at_BT, -1),
            column_B=column_B,
        )  # fmt: skip
        return _write_delta(cache, delta)

    # Rerun the last token but one too: it has not run if all proposals were accepted.
    to_B = jnp.where(running_B, start_B - 2, cache.next_position_B)
    cache = rewind(cache, to=jnp.minimum(to_B, cache.next_position_B))
    cache = jax.lax.while_loop(is_behind, catch_up, cache)
    position_BT = start_B[:, None] + jnp.array([[-2, -1]], jnp.int32)
    position_BT = jnp.where(running_B[:, None], position_BT, -1)
    carry, first = draft_token(cache, text, last_tokens(text, 2), position_BT)
    (cache, *_), rest = jax.lax.scan(draft_next, carry, jnp.arange(1, width, dtype=jnp.int32))
    token_KB, q_KBV = jax.tree.map(lambda x, y: jnp.concatenate([x[None], y]), first, rest)
    return cache, token_KB.T, q_KBV


def _write_delta(cache: KVCache, delta: Delta) -> KVCache:
    """Write each token of the delta to the slot with the index of its position."""
    slot_BT = jnp.where(delta.position_BS >= 0, delta.position_BS, cache.capacity)
    tail = write_slots(cache.tail, cast_delta(delta, cache.tail), slot_BT)
    next_B = jnp.maximum(cache.next_position_B, delta.position_BS.max(axis=1) + 1)
    return cache.replace(tail=tail, cursor=next_B.max(), next_position_B=next_B)


def _split(key_B: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return keys to draft, to accept and to draw a token."""
    key_B3 = jax.vmap(lambda key: jax.random.split(key, 3))(key_B)
    return key_B3[:, 0], key_B3[:, 1], key_B3[:, 2]
