"""Drafts of a serving loop: tokens that a model, or the text itself, proposes in every row.

A draft model has a cache with the loop's rows. It may lack tokens of a text: those that ran while
other rows had prompts. `catch_up` runs them; `propose_tokens` expects all but the last two.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.kv import EMPTY, KVCache, Segment, init_cache
from jaxllm.cache.slot_update import NO_SLOT
from jaxllm.errors import ConfigError
from jaxllm.generation.batching.batched_sampling import Samplers, draw_by_kind
from jaxllm.generation.batching.slots import (
    ALONE,
    Microbatch,
    TokenRun,
    pack_microbatch,
    run_microbatch,
    run_own_slots,
    split_microbatches,
)
from jaxllm.generation.loops.finish import NO_TOKEN, put_rows, take_rows
from jaxllm.generation.loops.prompt_lookup import PromptLookup, last_tokens, look_up_draft
from jaxllm.generation.loops.speculative import check_draft, fit_logits
from jaxllm.generation.sampling.sampler import Context
from jaxllm.models.invariance import has_invariant_rows
from jaxllm.runtime.multihost import to_host
from jaxllm.runtime.validation import check_int
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params

DraftSource = tuple[Model, Params] | PromptLookup


class Draft(NamedTuple):
    """What proposes up to `width` tokens in each row; a model has parameters and a cache."""

    source: Model | PromptLookup | None = None
    width: int = 0
    params: Params | None = None
    cache: KVCache | None = None

    @property
    def tail(self) -> Segment | None:
        return None if self.cache is None else self.cache.tail

    def with_tail(self, tail: Segment | None) -> "Draft":
        return self if self.cache is None else self._replace(cache=self.cache.replace(tail=tail))


NO_DRAFT = Draft()


def open_draft(
    source: DraftSource | None, width: int, model: Model, params: Params, cache: KVCache
) -> Draft:
    """Return the draft of a serving loop with this empty cache.

    Raises:
        SamplingError: For no tokens to propose.
        ConfigError: If the texts would not be those without a draft, or exceed its positions.
    """
    if source is None:
        return NO_DRAFT
    check_draft(source)
    config, slots = model.config, min(cache.capacity, model.config.position_limit)
    width = check_int("draft_tokens", width, 1, config.position_limit)
    if not has_invariant_rows(model, params):
        raise ConfigError(
            "draft needs a model whose bits do not depend on how many tokens run at once"
            " (load(..., invariant=True) and the native kernels; docs/guarantees.md)"
        )
    if any(x.rope_type == "dynamic" for x in config.ropes) and (
        slots > config.max_position_embeddings
    ):
        raise ConfigError(
            "draft does not support dynamic RoPE, whose angles change with every token, beyond"
            f" position {config.max_position_embeddings}. Serve with a smaller capacity"
        )
    if isinstance(source, PromptLookup):
        return Draft(source, width)
    drafter, its_params = source
    its_cache = init_cache(drafter, cache.batch, cache.capacity)
    if drafter.is_sharded or its_cache.memory:
        raise ConfigError("a draft model of serve cannot be sharded, or keep a memory of the text")
    if (limit := drafter.config.position_limit) < slots:
        raise ConfigError(
            f"the draft has {limit} positions, fewer than the {slots} of a row. Serve with"
            f" capacity={limit}"
        )
    return Draft(drafter, width, its_params, its_cache)


def catch_up(
    draft: Draft,
    token_BL: jax.Array,
    lengths: Mapping[int, tuple[int, int]],
    chunk: int,
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
    for group in split_microbatches(runs, sum(run.index_T.size for run in runs), alone=ALONE):
        places, _ = pack_microbatch(group, cache.batch, few_rows=True)
        _, cache, _ = run_microbatch(draft.source, draft.params, cache, places, donate=True)
    return draft._replace(cache=cache), ran


def propose_tokens(
    source: Model | PromptLookup,
    params: Params | None,
    tail: Segment | None,
    width: int,
    row_R: jax.Array | None,
    context: Context,
    samplers: Samplers,
    kind_KR: jax.Array,
    limit_R: jax.Array,
    size: int,
) -> tuple[jax.Array, Segment | None]:
    """Propose `width` tokens in each row, or fewer and then -1; return `[R, width]`, and the tail.

    A draft model draws with the keys that the target uses at these positions, on copies of the
    sampler and the text. row_R: as in `Microbatch`. limit_R: length at which the text ends. size:
    the number of the target's logits.
    """
    if isinstance(source, PromptLookup):
        return look_up_draft(context, source.ngram, width), tail
    assert tail is not None and params is not None
    tail = cut_rows(tail, row_R, context.length_B - 2)

    def draft_token(carry: Any, new: int) -> Any:
        """Run the last `new` tokens; draw the next one."""
        tail, context, samplers = carry
        live_R = kind_KR.any(axis=0) & (context.length_B < limit_R - 1)
        position_RT = context.length_B[:, None] + jnp.arange(-new, 0, dtype=jnp.int32)[None]
        places = Microbatch(
            row_R=row_R,
            token_RT=last_tokens(context, new),
            position_RT=jnp.where(live_R[:, None], position_RT, EMPTY),
            slot_RT=jnp.where(live_R[:, None], position_RT, NO_SLOT),
            length_R=context.length_B,
            column_R=jnp.full_like(context.length_B, new - 1),
            member_RB=None,
        )
        out, tail, _ = run_own_slots(tail, (), source, params, places, None, "logits")
        logits_RV, mine_KR = fit_logits(out[:, 0], size), kind_KR & live_R[None]
        drawn, *state = draw_by_kind(context, samplers, mine_KR, logits_RV)
        good_R = live_R & jnp.isfinite(out[:, 0]).all(axis=1)
        return (tail, *state), jnp.where(good_R, drawn.token_B, NO_TOKEN)

    # The last token but one has not run if all proposals were accepted.
    carry, first_R = draft_token((tail, context, samplers), 2)
    (tail, *_), rest_KR = jax.lax.scan(
        lambda carry, _: draft_token(carry, 1), carry, length=width - 1
    )
    return jnp.concatenate([first_R[None], rest_KR]).T, tail


@partial(jax.jit, donate_argnums=0)
def cut_rows(tail: Segment, row_R: jax.Array | None, end_R: jax.Array) -> Segment:
    """Remove the tokens of rows from a position on."""
    position_RS = take_rows(tail.position_BS, row_R)
    cut_RS = jnp.where(position_RS < end_R[:, None], position_RS, EMPTY)
    return tail.replace(position_BS=put_rows(tail.position_BS, row_R, cut_RS))
