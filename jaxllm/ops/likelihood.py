"""Log-probabilities of given tokens, of logits that devices may each have a part of.

Where the vocabulary is divided, each device sums over its own tokens, and they tell each other
numbers of a row alone (Shoeybi et al. 2019, arXiv 1909.08053, section 3). Outside `jax.shard_map`
the compiler makes that of these functions and of an array's sharding; inside it they are told the
axes of the mesh.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Over = tuple[str, ...]


def log_likelihood(logits_XV: jax.Array, token_X: jax.Array, over: Over = ()) -> jax.Array:
    """The natural log-probability of each row's token, `[..., V]` and `[...]` to `[...]`.

    over: axes of a mesh, inside `jax.shard_map`, whose devices have as many columns each, one after
    the other; those beyond the vocabulary's end are -inf.
    """
    if not over:
        return picked(logits_XV, token_X) - jax.nn.logsumexp(logits_XV, axis=-1)
    top_X = jax.lax.pmax(jax.lax.stop_gradient(logits_XV).max(axis=-1), over)
    sum_X = jax.lax.psum(jnp.exp(logits_XV - top_X[..., None]).sum(axis=-1), over)
    columns = logits_XV.shape[-1]
    at_X = token_X - jax.lax.axis_index(over) * columns
    chosen_X = picked(logits_XV, jnp.clip(at_X, 0, columns - 1))
    mine_X = (at_X >= 0) & (at_X < columns)
    return jax.lax.psum(jnp.where(mine_X, chosen_X, 0.0), over) - jnp.log(sum_X) - top_X


def picked(logits_XV: jax.Array, token_X: jax.Array) -> jax.Array:
    """Each row's entry for its token."""
    return jnp.take_along_axis(logits_XV, token_X[..., None], axis=-1)[..., 0]


def map_rows(function: Callable[[Any], Any], arrays: Any, among: int = 1) -> Any:
    """`function` of arrays `[B, ...]` a few rows at a time, `[among, ...]`, and what it gives of
    all, `[B, ...]`.

    among: the devices that have rows of their own, B / among of them: one of each is computed with
    at once. A loop over rows that are divided would gather them.
    """

    def taken(x: jax.Array) -> jax.Array:
        return x.reshape(among, -1, *x.shape[1:]).swapaxes(0, 1)

    def back(x: jax.Array) -> jax.Array:
        return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])

    return jax.tree.map(back, jax.lax.map(function, jax.tree.map(taken, arrays)))
