"""Log-probabilities of given tokens, from logits whose vocabulary may be sharded.

Each device sums over its own vocabulary; devices exchange one number per row (Shoeybi et al. 2019,
arXiv 1909.08053, section 3). Outside `jax.shard_map` the compiler derives this from shardings;
inside, the caller passes the mesh axes.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.ops.row_sums import logsumexp

AxisNames = tuple[str, ...]


def log_likelihood(
    logits_XV: jax.Array, token_X: jax.Array, axis_names: AxisNames = ()
) -> jax.Array:
    """Return the natural log-probability of each row's token, `[..., V]` and `[...]` to `[...]`.

    Args:
        axis_names: Mesh axes over which the columns are sharded in order and evenly, inside
            `jax.shard_map`; columns beyond the vocabulary are -inf.
    """
    if not axis_names:
        return _log_likelihood(logits_XV, token_X)
    top_X = jax.lax.pmax(jax.lax.stop_gradient(logits_XV).max(axis=-1), axis_names)
    sum_X = jax.lax.psum(jnp.exp(logits_XV - top_X[..., None]).sum(axis=-1), axis_names)
    columns = logits_XV.shape[-1]
    at_X = token_X - jax.lax.axis_index(axis_names) * columns
    chosen_X = pick_token(logits_XV, jnp.clip(at_X, 0, columns - 1))
    is_local_X = (at_X >= 0) & (at_X < columns)
    return jax.lax.psum(jnp.where(is_local_X, chosen_X, 0.0), axis_names) - jnp.log(sum_X) - top_X


@jax.custom_jvp
def _log_likelihood(logits_XV: jax.Array, token_X: jax.Array) -> jax.Array:
    return pick_token(logits_XV, token_X) - _logsumexp(logits_XV)


@_log_likelihood.defjvp
def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """The slope of a logit is `[it is the token's] - probability`: one pass, without a scatter."""
    logits_XV, token_X = primals
    total_X = _logsumexp(logits_XV)
    columns = jax.lax.broadcasted_iota(jnp.int32, logits_XV.shape, logits_XV.ndim - 1)
    chosen_XV = (columns == token_X[..., None]).astype(jnp.float32)
    slope_XV = chosen_XV - jnp.exp(logits_XV - total_X[..., None])
    return pick_token(logits_XV, token_X) - total_X, (slope_XV * tangents[0]).sum(axis=-1)


def _logsumexp(logits_XV: jax.Array) -> jax.Array:
    # On several devices logits may be sharded, and XLA gathers the arguments of kernels.
    several = jax.device_count() > 1
    return jax.nn.logsumexp(logits_XV, axis=-1) if several else logsumexp(logits_XV)


def pick_token(logits_XV: jax.Array, token_X: jax.Array) -> jax.Array:
    """Return each row's entry for its token."""
    return jnp.take_along_axis(logits_XV, token_X[..., None], axis=-1)[..., 0]


def map_rows(function: Callable[[Any], Any], arrays: Any, num_shards: int = 1) -> Any:
    """Apply `function` to arrays `[B, ...]` in slices `[among, ...]`; return all, `[B, ...]`.

    Args:
        num_shards: Number of devices over which rows are sharded. Each slice takes one row of each
            device, since a loop over sharded rows would gather them.
    """

    def split_rows(x: jax.Array) -> jax.Array:
        return x.reshape(num_shards, -1, *x.shape[1:]).swapaxes(0, 1)

    def merge_rows(x: jax.Array) -> jax.Array:
        return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])

    return jax.tree.map(merge_rows, jax.lax.map(function, jax.tree.map(split_rows, arrays)))
