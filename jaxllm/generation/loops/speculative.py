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
is its position. Rejected tokens are not written. Nothing is compacted, and the caches are no larger
than those of plain decoding.
"""

from collections.abc import Sequence
from typing import Any, get_args

import jax
import numpy as np
from flax import struct

from jaxllm.cache.kv import KVCache, init_cache
from jaxllm.config.model import ModelConfig
from jaxllm.errors import ConfigError, SamplingError, TokenError
from jaxllm.generation.loops.capacity import initial_text
from jaxllm.generation.loops.draft import (
    NO_DRAFT,
    Acceptance,
    Draft,
    DraftSource,
    PromptLookup,
    catch_up,
    check_draft,
    check_states,
)
from jaxllm.generation.loops.draft_pace import DraftPace
from jaxllm.generation.loops.finish import Finish, check_positions, token_budgets
from jaxllm.generation.loops.rounds import ROUNDS, LoopInputs, LoopPlan, Tails
from jaxllm.generation.loops.rows import (
    FIRST_DRAW,
    Drawn,
    RowState,
    draft_stats,
    join_drawn,
    start_rows,
)
from jaxllm.generation.sampling.sampler import GREEDY, Sampler, check_sampler
from jaxllm.models.inputs import check_longrope_limit, check_model, check_prompts
from jaxllm.ops.padding import bucket_size
from jaxllm.ops.recurrent import drop
from jaxllm.runtime import multihost
from jaxllm.runtime.multihost import to_host
from jaxllm.runtime.validation import check_int
from jaxllm.steps import default_chunk, prefill_checked
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params

_ROUNDS = 32  # in a call of the loop


class SpeculativeResult(struct.PyTreeNode):
    """Result of `speculative_generate`.

    Attributes:
        token_BT: int32 `[B, max_new_tokens]`, -1 after a row's end; includes end-of-text tokens.
        logprob_BT: float32, each token's log-probability under the model, before any processor.
        length_B: Number of generated tokens per row.
        finish_B: A `Finish` per row.
        proposed_B: Draft tokens that the target scored.
        accepted_B: Draft tokens that it accepted.
        drafts_B: Target passes with a draft token of the row.
        rounds_B: Target passes that a row took part in, without the prefill.
        cache: The target's cache, with the prompt and all tokens but each row's last.
        top_token_BTN, top_logprob_BTN: As in `GenerateResult`.
    """

    token_BT: jax.Array
    logprob_BT: jax.Array
    length_B: jax.Array
    finish_B: jax.Array
    proposed_B: jax.Array
    accepted_B: jax.Array
    drafts_B: jax.Array
    rounds_B: jax.Array
    cache: KVCache
    top_token_BTN: jax.Array | None = None
    top_logprob_BTN: jax.Array | None = None


def speculative_generate(
    model: Model,
    params: Params,
    tokens_BT: Any,
    *,
    draft: DraftSource,
    max_new_tokens: int | Sequence[int],
    num_draft_tokens: int = 4,
    sampler: Sampler = GREEDY,
    acceptance: Acceptance = "text",
    seed: int | jax.Array = 0,
    eos_token_ids: Sequence[int] = (),
    lengths_B: Any = None,
    chunk: int | None = None,
    top_logprobs: int = 0,
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
    width = check_int("num_draft_tokens", num_draft_tokens, 1, model.config.position_limit)
    top = check_int("top_logprobs", top_logprobs, 0, model.config.vocab_size)
    chunk = default_chunk() if chunk is None else check_int("chunk", chunk, 1, error=TokenError)
    pairs = [(model, params)] if isinstance(draft, PromptLookup) else [(model, params), draft]
    check_states([one.config for one, _ in pairs], width)
    _check_models([one.config for one, _ in pairs], T, longest)
    for name, (one, _) in zip(("model", "draft"), pairs, strict=False):
        check_longrope_limit(prompt_B, prompt_B + budget_B - 1, one.config, name)
    starts = []
    for one, run_params in pairs:
        cache = init_cache(one, B, bucket_size(T + longest - 1))
        token_BT = np.minimum(tokens_BT, one.config.vocab_size - 1)
        starts.append(
            prefill_checked(one, run_params, cache, token_BT, prompt_B, chunk=chunk, donate=True)
        )
    text_BL, _ = initial_text(None, tokens_BT, prompt_B, T + longest - 1)
    rows = start_rows(text_BL, prompt_B, budget_B, sampler, seed, eos_token_ids)
    plan = LoopPlan(model, _ROUNDS, acceptance=acceptance, top=top)
    rows, first = FIRST_DRAW(top, False, rows, starts[0].logits)
    if isinstance(draft, PromptLookup):
        drafting = Draft(draft, width)
    else:
        cache = starts[1].cache  # its first round runs the prompts' last tokens again
        state = tuple(x and drop(x, rows.context.prompt_B - 1) for x in cache.state)
        drafting = Draft(draft[0], width, draft[1], cache.replace(state=state))
    # What is drawn must not depend on the clock, nor processes differ.
    exact = acceptance == "text" or sampler.greedy
    pace = DraftPace() if exact and not multihost.is_multiprocess() else None
    cache, rows, parts = _write_texts(plan, params, starts[0].cache, rows, drafting, pace)
    parts = [to_host(first), *parts]
    joined, length_B = join_drawn(parts, longest), np.asarray(rows.context.length_B)
    stats = sum(draft_stats(part).sum(axis=(0, 1)) for part in parts)
    rounds_B = sum(part.valid_B[:, 0].sum(axis=0) for part in parts[1:])
    joined |= dict(zip(("proposed", "accepted", "drafts"), np.transpose(stats), strict=True))
    joined |= {"length": length_B - prompt_B, "rounds": rounds_B, "next": length_B - 1}
    arrays = jax.device_put(joined)
    next_B = arrays["next"]
    return SpeculativeResult(
        token_BT=arrays["token_B"],
        logprob_BT=arrays["logprob_B"],
        length_B=arrays["length"],
        finish_B=rows.finish_B,
        proposed_B=arrays["proposed"],
        accepted_B=arrays["accepted"],
        drafts_B=arrays["drafts"],
        rounds_B=arrays["rounds"],
        cache=cache.replace(cursor=next_B.max(), next_position_B=next_B),
        top_token_BTN=arrays.get("top_token_BN"),
        top_logprob_BTN=arrays.get("top_logprob_BN"),
    )


def _write_texts(
    plan: LoopPlan,
    params: Params,
    cache: KVCache,
    rows: RowState,
    draft: Draft,
    pace: DraftPace | None,
) -> tuple[KVCache, RowState, list[Drawn]]:
    """Run rounds until all rows have ended; return the cache, the rows, and what was drawn.

    draft: its cache has the prompts. pace: says when to use it; None: always.
    """
    parts, finish_B = [], np.asarray(rows.finish_B)
    length_B = np.asarray(rows.context.length_B)
    drafted_B = np.asarray(rows.context.prompt_B) - 1  # tokens that the draft has run
    while (running_B := finish_B == Finish.RUNNING).any():
        began, rounds, used = 0.0, plan.rounds, draft
        if pace is not None:
            began, rounds = pace.clock(), min(pace.left, rounds)
            used = draft if pace.drafts else NO_DRAFT
        if used.width:
            needed_B = length_B - 2
            at = np.flatnonzero(running_B).tolist()
            lengths = {row: (int(drafted_B[row]), int(needed_B[row])) for row in at}
            draft, _ = catch_up(draft, rows.context.token_BL, lengths, int(needed_B.sum()))
            used = draft
        tails, rows, _, done, drawn = ROUNDS(
            plan._replace(source=used.source, width=used.width),
            LoopInputs(params, used.params),
            Tails(cache.tail, used.tail, (cache.state, used.state)),
            rows,
            np.int32(rounds),
            np.int32(1),
        )
        cache = cache.replace(tail=tails.target, state=tails.states[0])
        drawn = jax.tree.map(lambda x, done=int(done): x[:done], to_host(drawn))
        parts.append(drawn)
        length_B, finish_B = np.asarray(rows.context.length_B), np.asarray(rows.finish_B)
        if used.width:
            draft, drafted_B = draft.with_written(tails.draft, tails.states[1]), length_B - 2
        if pace is not None:
            ran, written = len(drawn.token_B), int((drawn.token_B >= 0).sum())
            passes = max(int(drawn.valid_B[:, 0].sum()), 1)
            pace.record(ran, written * ran / passes, pace.clock() - began)
    return cache, rows, parts


def _check_models(configs: Sequence[ModelConfig], T: int, longest: int) -> None:
    for name, config in zip(("model", "draft"), configs, strict=False):
        check_positions(T + longest - 1, config, name)
        dynamic = any(rope.rope_type == "dynamic" for rope in config.ropes)
        if dynamic and T + longest - 1 > config.max_position_embeddings:
            raise ConfigError(
                f"the {name} uses dynamic RoPE, whose angles change with every token past position"
                f" {config.max_position_embeddings}, so speculative decoding would not be exact"
            )
