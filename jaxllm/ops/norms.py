"""Normalization over the last axis, computed in float32 for every input dtype.

With the native kernels a row's bits depend on the row alone. XLA adds in another order for other
numbers of rows, and fuses norms with what follows, which rounds in other places.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxllm.ops import native
from jaxllm.ops.varying_axes import match_varying


class _Rules(NamedTuple):
    eps: float
    weight_offset: float = 0.0
    centered: bool = False


def rms_norm(
    x: jax.Array,
    weight_D: jax.Array,
    *,
    eps: float,
    weight_offset: float = 0.0,
    mean: jax.Array | None = None,
) -> jax.Array:
    """Return `x / sqrt(mean(x^2) + eps) * weight`, in x's dtype (Zhang & Sennrich 2019, eq. 4).

    Args:
        weight_offset: Added to the weights in float32 (Gemma stores weights minus 1).
        mean: Mean of squares, `[..., 1]`, if x is a shard of the normalized axis.
    """
    rules = _Rules(eps, weight_offset)
    if mean is None:
        return _normalize(rules, x, weight_D, None)
    return _plain(rules, x, weight_D, None, mean)


def layer_norm(
    x: jax.Array, weight_D: jax.Array, bias_D: jax.Array | None, *, eps: float
) -> jax.Array:
    """Return layer norm, in x's dtype (Ba et al. 2016, eq. 4).

    That is `(x - mean) / sqrt(var + eps) * weight`, plus the bias if there is one.
    """
    return _normalize(_Rules(eps, centered=True), x, weight_D, bias_D)


def _plain(
    rules: _Rules,
    x: jax.Array,
    weight_D: jax.Array,
    bias_D: jax.Array | None,
    mean: jax.Array | None = None,
) -> jax.Array:
    wide = x.astype(jnp.float32)
    if rules.centered:
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    if mean is None:
        mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    weight = _broadcast_last(weight_D, x)
    weight = weight + rules.weight_offset if rules.weight_offset else weight
    y = wide * jax.lax.rsqrt(mean + rules.eps) * weight
    return (y if bias_D is None else y + _broadcast_last(bias_D, x)).astype(x.dtype)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _normalize(
    rules: _Rules, x: jax.Array, weight_D: jax.Array, bias_D: jax.Array | None
) -> jax.Array:
    plain = partial(_plain, rules)
    if not native.is_enabled() or not x.size:
        return plain(x, weight_D, bias_D)

    @jax.custom_batching.custom_vmap
    def kernel(x: jax.Array, weight_D: jax.Array, bias_D: jax.Array | None) -> jax.Array:
        x_RD = x.reshape(-1, x.shape[-1])
        x_RD = x_RD if x.dtype == jnp.bfloat16 else x_RD.astype(jnp.float32)
        y_RD = native.normalize(x_RD, weight_D, bias_D, **rules._asdict())
        return match_varying(y_RD.reshape(x.shape).astype(x.dtype), x, weight_D, bias_D)

    @kernel.def_vmap
    def _(size: int, batched: Any, x: jax.Array, *weights: Any) -> tuple[jax.Array, bool]:
        if any(jax.tree.leaves(batched[1:])):
            axes = jax.tree.map(lambda b: 0 if b else None, tuple(batched))
            return jax.vmap(plain, in_axes=axes)(x, *weights), True
        return kernel(x, *weights), True

    y: jax.Array = jax.lax.platform_dependent(x, weight_D, bias_D, cpu=kernel, default=plain)
    return y


@_normalize.defjvp
def _(rules: _Rules, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _normalize(rules, *primals), jax.jvp(partial(_plain, rules), primals, tangents)[1]


def _broadcast_last(vector_D: jax.Array, x: jax.Array) -> jax.Array:
    return vector_D.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
