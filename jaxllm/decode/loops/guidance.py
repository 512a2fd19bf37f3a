"""Classifier-free guidance (Sanchez et al. 2023): away from what a negative prompt would say.

An example of what batches of unequal prompts make easy: the prompt and the negative prompt are two
rows of one cache, and every token that is chosen is given to both.
"""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.kv import init_cache
from jaxllm.decode.loops.text import NO_TOKEN, check_positions, padded_eos
from jaxllm.decode.sampling.sampler import GREEDY, Context, Sampler, row_keys, sample_next
from jaxllm.errors import NonFiniteError, SamplingError
from jaxllm.inputs import check_border
from jaxllm.shapes import pad_rows
from jaxllm.steps import decode_step, prefill
from jaxllm.weights.paths import Params
from jaxllm.whole import is_number, whole


def guided_generate(
    model: nn.Module,
    params: Params,
    prompt: Sequence[int],
    *,
    guidance_scale: float,
    max_new_tokens: int,
    negative_prompt: Sequence[int] | None = None,
    sampler: Sampler = GREEDY,
    seed: int = 0,
    eos_token_ids: Sequence[int] = (),
) -> list[int]:
    """The tokens that continue a prompt: up to `max_new_tokens`, or to an end of text, included.

    guidance_scale: as in `guide`. negative_prompt: by default the prompt's last token, which is to
    say nothing, as in transformers. sampler: its processors see the guided scores and the prompt's
    row of text.

    Raises SamplingError for an empty prompt or values out of range, CapacityError for a text
    longer than the model's positions, NonFiniteError when a step is not finite, and what `prefill`
    raises.
    """
    pair = [list(prompt), list(prompt)[-1:] if negative_prompt is None else list(negative_prompt)]
    whole("max_new_tokens", max_new_tokens, 1)
    if not all(pair) or not is_number(guidance_scale) or not np.isfinite(guidance_scale):
        raise SamplingError(
            f"guidance needs prompts of at least one token (got {len(pair[0])} and {len(pair[1])})"
            f" and a finite guidance_scale (got {guidance_scale!r:.40})"
        )
    ends = padded_eos(eos_token_ids)
    lengths_B = np.array([len(row) for row in pair])
    room = int(lengths_B.max()) + max_new_tokens - 1
    check_positions(room, model.config)
    check_border(lengths_B, lengths_B + max_new_tokens - 1, model.config)

    cache = init_cache(model, 2, room)
    tokens_BT = pad_rows(pair)
    logits_BV, cache = prefill(model, params, cache, tokens_BT, lengths_B=lengths_B, donate=True)
    text_L = pad_rows(pair[:1], width=len(prompt) + max_new_tokens, fill=NO_TOKEN)[0]
    key_B, sampler, scale = row_keys(seed, 1), sampler.begin(1), jnp.float32(guidance_scale)

    end = start = len(prompt)
    while True:
        if not jnp.isfinite(logits_BV).all():
            raise NonFiniteError(f"the logits of token {end - start} are not finite")
        token_B, sampler = _sample_guided(logits_BV, scale, sampler, text_L, start, end, key_B)
        text_L[end] = token_B[0]
        end += 1
        if end == len(text_L) or text_L[end - 1] in ends:
            return text_L[start:end].tolist()
        both_B = jnp.broadcast_to(token_B, (2,))
        logits_BV, cache = decode_step(model, params, cache, both_B, donate=True)


def guide(wanted_V: jax.Array, unwanted_V: jax.Array, guidance_scale: jax.Array) -> jax.Array:
    """Scores that favour what only the first of two logits favours, `[V]`.

    Sanchez et al. 2023, equation 7, on log-probabilities: unwanted + scale * (wanted - unwanted).
    1 is no guidance, more is more of it, below 1 the second prompt is wanted too.
    """
    wanted_V, unwanted_V = jax.nn.log_softmax(wanted_V), jax.nn.log_softmax(unwanted_V)
    return unwanted_V + guidance_scale * (wanted_V - unwanted_V)


@jax.jit
def _sample_guided(
    logits_BV: jax.Array,
    scale: jax.Array,
    sampler: Sampler,
    text_L: jax.Array,
    start: jax.Array,
    end: jax.Array,
    key_B: jax.Array,
) -> tuple[jax.Array, Sampler]:
    """One token `[1]` from the guided scores."""
    key_B = jax.vmap(jax.random.fold_in, (0, None))(key_B, end)
    start_B, end_B = (jnp.full((1,), x, jnp.int32) for x in (start, end))
    context = Context(text_L[None], start_B, end_B, key_B)
    return sample_next(guide(logits_BV[0], logits_BV[1], scale)[None], sampler, context)
