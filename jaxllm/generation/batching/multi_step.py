"""Multi-step decoding: several tokens for every active row in one compiled loop."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.cache.kv import EMPTY, Segment
from jaxllm.cache.slot_update import NO_SLOT
from jaxllm.generation.batching.batched_sampling import Drawn, Samplers, draw_by_kind
from jaxllm.generation.batching.slots import Microbatch, run_own_slots
from jaxllm.generation.loops.finish import put_rows, take_rows
from jaxllm.generation.sampling.sampler import Context
from jaxllm.models.sites import NO_EDITS, Edits
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params


@partial(jax.jit, static_argnums=(3, 10, 13), donate_argnums=(0, 1, 2))
def decode_burst(
    tail: Segment,
    context: Context,
    samplers: Samplers,
    model: Model,
    params: Params,
    frozen: tuple[Segment, ...],
    row_R: jax.Array | None,
    kind_KR: jax.Array,
    newest_R: jax.Array,
    eos_RE: jax.Array,
    burst: int,
    steps: jax.Array,
    adapter_R: jax.Array | None = None,
    top: int = 0,
    edits: Edits = NO_EDITS,
) -> tuple[jax.Array, Drawn, Segment, Context, Samplers]:
    """Decode up to `steps` tokens for every live row; stop after the step in which a row ends.

    frozen: the cache's other segments. row_R, adapter_R, edits: as in `Microbatch`. kind_KR: kinds
    of samplers; a row without one is not live. steps: at most `burst`, which is static. top: as in
    `draw_by_kind`. Returns the number of steps, `[]`, then the tokens of all steps, `[burst, R]`,
    and the new state.
    """
    live_R = kind_KR.any(axis=0)
    zeros_R = jnp.zeros(live_R.shape, jnp.int32)
    blank = jnp.zeros((burst, *live_R.shape))
    results = Drawn(blank.astype(jnp.int32), blank, blank.astype(bool))
    if top:
        blank = jnp.zeros((*blank.shape, top))
        results = results._replace(top_token_BN=blank.astype(jnp.int32), top_logprob_BN=blank)

    def is_unfinished(carry: Any) -> jax.Array:
        i, ended, *_ = carry
        going: jax.Array = (i < steps) & ~ended
        return going

    def decode_token(carry: Any) -> Any:
        i, _, newest_R, results, tail, context, samplers = carry
        at_R = context.length_B - 1  # the newest token is in the text but has not run
        places = Microbatch(
            row_R=row_R,
            token_RT=newest_R[:, None],
            position_RT=jnp.where(live_R, at_R, EMPTY)[:, None],
            slot_RT=jnp.where(live_R, at_R, NO_SLOT)[:, None],
            length_R=context.length_B,
            column_R=zeros_R,
            member_RB=None,
            adapter_R=adapter_R,
            edits=edits,
        )
        out, tail, _ = run_own_slots(tail, frozen, model, params, places, None, "logits")
        drawn, context, samplers = draw_by_kind(context, samplers, kind_KR, out[:, 0], top)
        results = jax.tree.map(lambda x, new: x.at[i].set(new), results, drawn)
        ends_R = (drawn.token_B[:, None] == eos_RE).any(axis=1) | ~drawn.finite_B
        return i + 1, (live_R & ends_R).any(), drawn.token_B, results, tail, context, samplers

    nothing: Any = (jnp.zeros((), jnp.int32), jnp.zeros((), bool), newest_R, results)
    state = take_rows((context, samplers), row_R)
    loop: Any = jax.lax.while_loop(is_unfinished, decode_token, (*nothing, tail, *state))
    done, _, _, results, tail, *state = loop
    return done, results, tail, *put_rows((context, samplers), row_R, tuple(state))
