"""Speculative rejection sampling: accept or resample draft tokens with the target's distribution.

Leviathan et al. 2023, algorithm 1; Chen et al. 2023.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.ops.row_sums import softmax


def accept_or_resample(
    scores_BV: jax.Array, draft_B: jax.Array, q_BV: jax.Array, accept_B: jax.Array, draw_B: Any
) -> tuple[jax.Array, jax.Array]:
    """Return a token distributed as the target's, and whether it is the draft token.

    A draft token x, drawn from q, is accepted with probability min(1, p(x) / q(x)); otherwise the
    token is drawn from the residual. draft_B: -1 for no draft, with q = 0; the token is then drawn
    from p. accept_B, draw_B: random keys.
    """
    p_BV = softmax(scores_BV)
    x_B1 = jnp.maximum(draft_B, 0)[:, None]
    p_B, q_B = (jnp.take_along_axis(law, x_B1, axis=1)[:, 0] for law in (p_BV, q_BV))
    agreed_B = (draft_B >= 0) & (jax.vmap(jax.random.uniform)(accept_B) * q_B < p_B)
    other_B = jax.vmap(jax.random.categorical)(draw_B, jnp.log(residual(p_BV, q_BV)))
    return jnp.where(agreed_B, draft_B, other_B.astype(jnp.int32)), agreed_B


def residual(p_BV: jax.Array, q_BV: jax.Array) -> jax.Array:
    """Return norm(max(p - q, 0)), the distribution after a rejection.

    If rounding leaves no mass, the distributions are equal and the result is p.
    """
    left_BV = jnp.maximum(p_BV - q_BV, 0.0)
    total_B1 = left_BV.sum(axis=1, keepdims=True)
    return jnp.where(total_B1 > 0, left_BV / jnp.where(total_B1 > 0, total_B1, 1.0), p_BV)
