"""Classifier-free guidance (Sanchez et al. 2023): steer generation away from a negative prompt.

The prompt and the negative prompt are two rows of one cache; each chosen token is appended to both.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.kv import init_cache
from jaxllm.errors import NonFiniteError, SamplingError
from jaxllm.generation.loops.finish import NO_TOKEN, check_positions, pad_eos_ids
from jaxllm.generation.sampling.sampler import GREEDY, Context, Sampler, row_keys, sample_next
from jaxllm.models.inputs import check_longrope_limit
from jaxllm.ops.padding import bucket_size, pad_rows
from jaxllm.ops.row_sums import log_softmax
from jaxllm.runtime.validation import check_int, is_number
from jaxllm.steps import decode_step, prefill
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params


def generate_with_guidance(
    model: Model,
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
    """Continue a prompt until `max_new_tokens` or an end-of-text token, which is included.

    Args:
        guidance_scale: See `apply_guidance`.
        negative_prompt: By default the prompt's last token, as in transformers.
        sampler: Its processors receive the guided scores and the text of the prompt's row.

    Raises:
        SamplingError: For an empty prompt or values out of range.
        CapacityError: If the text exceeds the model's positions.
        NonFiniteError: If the logits are not finite.
        JaxllmError: Whatever else `prefill` raises.
    """
    pair = [list(prompt), list(prompt)[-1:] if negative_prompt is None else list(negative_prompt)]
    check_int("max_new_tokens", max_new_tokens, 1)
    if not all(pair) or not is_number(guidance_scale) or not np.isfinite(guidance_scale):
        raise SamplingError(
            f"guidance needs prompts of at least one token (got {len(pair[0])} and {len(pair[1])})"
            f" and a finite guidance_scale (got {guidance_scale!r:.40})"
        )
    ends = pad_eos_ids(eos_token_ids)
    lengths_B = np.array([len(row) for row in pair])
    room = int(lengths_B.max()) + max_new_tokens - 1
    check_positions(room, model.config)
    check_longrope_limit(lengths_B, lengths_B + max_new_tokens - 1, model.config)

    cache = init_cache(model, 2, bucket_size(room))
    tokens_BT = pad_rows(pair)
    out = prefill(model, params, cache, tokens_BT, lengths_B=lengths_B, donate=True)
    text_L = pad_rows(pair[:1], width=bucket_size(room + 1), fill=NO_TOKEN)[0]
    key_B, sampler, scale = row_keys(seed, 1), sampler.begin(1), jnp.float32(guidance_scale)

    end = start = len(prompt)
    while True:
        if not jnp.isfinite(out.logits).all():
            raise NonFiniteError(f"the logits of token {end - start} are not finite")
        token_B, sampler = _sample_with_guidance(
            out.logits, scale, sampler, text_L, start, end, key_B
        )
        text_L[end] = token_B[0]
        end += 1
        if end == start + max_new_tokens or text_L[end - 1] in ends:
            return text_L[start:end].tolist()
        both_B = jnp.broadcast_to(token_B, (2,))
        out = decode_step(model, params, out.cache, both_B, donate=True)


def apply_guidance(
    wanted_V: jax.Array, unwanted_V: jax.Array, guidance_scale: jax.Array
) -> jax.Array:
    """Return guided scores `[V]`: unwanted + scale * (wanted - unwanted), on log-probabilities.

    Sanchez et al. 2023, equation 7. A scale of 1 is no guidance; above 1 moves away from the
    negative prompt, below 1 towards it.
    """
    wanted_V, unwanted_V = log_softmax(wanted_V), log_softmax(unwanted_V)
    return unwanted_V + guidance_scale * (wanted_V - unwanted_V)


@jax.jit
def _sample_with_guidance(
    logits_BV: jax.Array,
    scale: jax.Array,
    sampler: Sampler,
    text_L: jax.Array,
    start: jax.Array,
    end: jax.Array,
    key_B: jax.Array,
) -> tuple[jax.Array, Sampler]:
    """Sample one token `[1]` from the guided scores."""
    key_B = jax.vmap(jax.random.fold_in, (0, None))(key_B, end)
    start_B, end_B = (jnp.full((1,), x, jnp.int32) for x in (start, end))
    context = Context(text_L[None], start_B, end_B, key_B)
    return sample_next(apply_guidance(logits_BV[0], logits_BV[1], scale)[None], sampler, context)
