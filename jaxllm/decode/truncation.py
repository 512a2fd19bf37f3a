"""Processors that look at the scores alone: they sharpen a distribution or cut off its tail."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.decode.sampling import Context, Processor


class Temperature(Processor):
    """Scores divided by the temperature; 0 leaves only the best token (the first of equals)."""

    temperature: Any

    def __call__(self, scores_BV: jax.Array, context: Context | None = None) -> jax.Array:
        t_B1 = column(self.temperature, scores_BV)
        best = jnp.arange(scores_BV.shape[1])[None] == jnp.argmax(scores_BV, axis=1)[:, None]
        cold = jnp.where(best, scores_BV, -jnp.inf)
        return jnp.where(t_B1 == 0, cold, scores_BV / jnp.where(t_B1 == 0, 1.0, t_B1))


class TopK(Processor):
    """The k best tokens and all that tie with the last of them (Fan et al. 2018); 0 is off."""

    top_k: Any

    def __call__(self, scores_BV: jax.Array, context: Context | None = None) -> jax.Array:
        k_B1 = column(self.top_k, scores_BV)
        weight_BV = jnp.ones_like(scores_BV)
        kept = _keep_until(scores_BV, weight_BV, jnp.where(k_B1 == 0, jnp.inf, k_B1))
        return jnp.where(kept, scores_BV, -jnp.inf)


class TopP(Processor):
    """The fewest best tokens whose probabilities reach p (Holtzman et al. 2020).

    1 is off, 0 keeps the best token; tokens that tie with the last one kept stay too.
    """

    top_p: Any

    def __call__(self, scores_BV: jax.Array, context: Context | None = None) -> jax.Array:
        p_B1 = column(self.top_p, scores_BV)
        weight_BV = jax.nn.softmax(scores_BV, axis=-1)
        kept = _keep_until(scores_BV, weight_BV, jnp.where(p_B1 >= 1, jnp.inf, p_B1))
        return jnp.where(kept, scores_BV, -jnp.inf)


def column(value: Any, scores_BV: jax.Array) -> jax.Array:
    """A number, or one a row, as float32 `[B, 1]`."""
    value = jnp.asarray(value, jnp.float32)
    return jnp.broadcast_to(value.reshape(-1, 1), (scores_BV.shape[0], 1))


def _keep_until(scores_BV: jax.Array, weight_BV: jax.Array, limit_B1: jax.Array) -> jax.Array:
    """Keep each token whose strictly better tokens weigh less than the limit, bool `[B, V]`.

    With weights of 1 that is top-k, with probabilities top-p. The best token always stays. The
    lowest score kept is found by bisection over the 2**32 floats: on a CPU twenty times faster
    than sorting a vocabulary of 32,000.
    """
    order_BV = _ordered(scores_BV)

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low_B1, high_B1 = bounds
        middle_B1 = (low_B1 & high_B1) + ((low_B1 ^ high_B1) >> 1)  # no overflow
        above_B1 = jnp.where(order_BV > middle_B1, weight_BV, 0.0).sum(axis=1, keepdims=True)
        enough = above_B1 < limit_B1
        return jnp.where(enough, low_B1, middle_B1 + 1), jnp.where(enough, middle_B1, high_B1)

    lowest = jnp.full_like(order_BV[:, :1], jnp.iinfo(jnp.int32).min)
    best_B1 = order_BV.max(axis=1, keepdims=True)
    threshold_B1, _ = jax.lax.fori_loop(0, 32, halve, (lowest, best_B1))
    return order_BV >= jnp.minimum(threshold_B1, best_B1)


def _ordered(x: jax.Array) -> jax.Array:
    """int32 that compare as the float32 do (IEEE 754's sign and magnitude to two's complement)."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
