"""Contrastive search (Su et al. 2022): likely tokens whose hidden states are unlike the text's.

The candidates are rows of a `fork` that share the text's cache without copies. One forward pass
scores all of them, and only the best one is committed; `forward` never modifies the cache.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.batch_ops import fork
from jaxllm.cache.commit import commit
from jaxllm.cache.kv import init_cache
from jaxllm.errors import NonFiniteError, SamplingError
from jaxllm.generation.loops.finish import NO_TOKEN, check_positions, pad_eos_ids
from jaxllm.generation.sampling.sampler import (
    GREEDY,
    Context,
    Sampler,
    apply_processors,
    row_keys,
)
from jaxllm.models.inputs import check_longrope_limit
from jaxllm.ops.padding import bucket_size, next_power_of_two, pad_rows, pad_texts
from jaxllm.ops.products import einsum
from jaxllm.ops.row_sums import softmax
from jaxllm.runtime.validation import check_int, is_number
from jaxllm.steps import Output, forward
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params


def contrastive_search(
    model: Model,
    params: Params,
    prompt: Sequence[int],
    *,
    penalty_alpha: float,
    max_new_tokens: int,
    top_k: int = 4,
    eos_token_ids: Sequence[int] = (),
    sampler: Sampler = GREEDY,
) -> list[int]:
    """Continue a prompt until `max_new_tokens` or an end-of-text token, which is included.

    Each token is the one with the best `score` among the `top_k` likeliest.

    Args:
        penalty_alpha: Weight of the penalty, 0 (greedy search) to 1.
        sampler: Its processors change the scores that select the candidates; nothing is drawn.

    Raises:
        SamplingError: For values out of range.
        CapacityError: If the text exceeds the model's positions.
        NonFiniteError: If the scores are not finite.
        JaxllmError: Whatever else `forward` raises.
    """
    top_k = check_int("top_k", top_k, 1, model.config.vocab_size)
    if not is_number(penalty_alpha) or not 0 <= penalty_alpha <= 1:
        raise SamplingError(
            f"penalty_alpha must be a number from 0 to 1, got {penalty_alpha!r:.40}"
        )
    check_int("max_new_tokens", max_new_tokens, 1)
    ends = pad_eos_ids(eos_token_ids)
    room = len(prompt) + max_new_tokens
    check_positions(room, model.config)
    check_longrope_limit(len(prompt), room, model.config)

    width = next_power_of_two(len(prompt), 16)
    size = bucket_size(max(room, width))
    cache = init_cache(model, 1, size)
    token_1T, position_1T = pad_texts([list(prompt)], width=width)
    out = forward(model, params, cache, token_1T, positions_BT=position_1T, hidden_states=True)
    cache = commit(cache, out.delta, donate=True)
    said_SD = jnp.zeros((size, model.config.hidden_size), jnp.float32)
    logits_V, said_SD = _read_prompt(out, said_SD, len(prompt))

    tokens: list[int] = []
    text_L = pad_rows([list(prompt)], width=size, fill=NO_TOKEN)[0]
    sampler, key_B = sampler.begin(1), row_keys(0, 1)
    while len(tokens) < max_new_tokens and (not tokens or tokens[-1] not in ends):
        end = len(prompt) + len(tokens)
        likely_C, token_C = _candidates(logits_V, top_k, sampler, text_L, len(prompt), end, key_B)
        rows = fork(cache, top_k, capacity=1)
        out = forward(model, params, rows, token_C[:, None], hidden_states=True)
        best, score_C, chosen, said_SD = _best_candidate(likely_C, out, said_SD, end, penalty_alpha)
        if not (np.isfinite(score_C) | (np.asarray(likely_C) == 0)).all():
            raise NonFiniteError(f"the scores of token {len(tokens)} are not finite")
        cache, logits_V = commit(cache, chosen.delta, donate=True), chosen.logits
        tokens.append(int(token_C[best]))
        text_L[end] = tokens[-1]
        sampler = sampler.observe(logits_V[None], token_C[best][None])
    return tokens


def score(
    prob_C: jax.Array, hidden_CD: jax.Array, text_SD: jax.Array, penalty_alpha: jax.Array
) -> jax.Array:
    """Return (1 - alpha) * probability - alpha * similarity for each candidate, `[C]`.

    Su et al. 2022, equation 5. The similarity is the largest cosine between the candidate's last
    hidden state and those of all tokens before it. Both are unit vectors, `[C, D]` and `[S, D]`;
    rows of zeros are padding.
    """
    cosine_CS = einsum("CD,SD->CS", hidden_CD, text_SD)
    cosine_CS = jnp.where((text_SD != 0).any(axis=1)[None], cosine_CS, -jnp.inf)
    return (1 - penalty_alpha) * prob_C - penalty_alpha * cosine_CS.max(axis=1)


@partial(jax.jit, static_argnums=1)
def _candidates(
    logits_V: jax.Array,
    top_k: int,
    sampler: Sampler,
    text_L: jax.Array,
    start: Any,
    end: Any,
    key_B: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return probabilities and ids of the likeliest tokens, `[C]` each."""
    start_B, end_B = (jnp.full((1,), x, jnp.int32) for x in (start, end))
    context = Context(text_L[None], start_B, end_B, key_B)
    scores_V = apply_processors(logits_V[None], sampler, context)[0]
    likely_C, token_C = jax.lax.top_k(softmax(scores_V), top_k)
    return likely_C, token_C


@jax.jit
def _read_prompt(out: Output, text_SD: jax.Array, length: Any) -> tuple[jax.Array, jax.Array]:
    """Return the prompt's last logits, and the buffer with its unit hidden states."""
    hidden_TD = _unit_vectors(out)[0]
    real_T1 = jnp.arange(hidden_TD.shape[0])[:, None] < length
    hidden_TD = jnp.where(real_T1, hidden_TD, 0.0)
    text_SD = jax.lax.dynamic_update_slice_in_dim(text_SD, hidden_TD, 0, axis=0)
    return out.logits[0, length - 1], text_SD


@jax.jit
def _best_candidate(
    prob_C: jax.Array, out: Output, text_SD: jax.Array, end: Any, penalty_alpha: Any
) -> tuple[jax.Array, jax.Array, Output, jax.Array]:
    """Return the best candidate, all scores, its output, and the buffer with its hidden state."""
    hidden_CD = _unit_vectors(out)[:, 0]
    score_C = score(prob_C, hidden_CD, text_SD, penalty_alpha)
    score_C = jnp.where(prob_C == 0, -jnp.inf, score_C)  # removed by a processor
    best = jnp.argmax(score_C)
    chosen: Output = out.replace(
        logits=out.logits[best, 0], delta=jax.tree.map(lambda x: x[best][None], out.delta)
    )
    return best, score_C, chosen, text_SD.at[end].set(hidden_CD[best])


def _unit_vectors(out: Output) -> jax.Array:
    """Return the last hidden states as float32 unit vectors `[B, T, D]`."""
    assert out.hidden_states is not None
    x_BTD = out.hidden_states[-1].astype(jnp.float32)
    return x_BTD / jnp.linalg.norm(x_BTD, axis=-1, keepdims=True)
