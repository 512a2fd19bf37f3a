"""Normalization over the last axis, computed in float32 for every input dtype."""

import jax
import jax.numpy as jnp


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
    wide = x.astype(jnp.float32)
    if mean is None:
        mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(mean + eps)
    weight = _broadcast_last(weight_D, x)
    return (wide * scale * (weight + weight_offset if weight_offset else weight)).astype(x.dtype)


def layer_norm(x: jax.Array, weight_D: jax.Array, bias_D: jax.Array, *, eps: float) -> jax.Array:
    """Return layer norm, in x's dtype (Ba et al. 2016, eq. 4).

    That is `(x - mean) / sqrt(var + eps) * weight + bias`.
    """
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + eps)
    return (centred * scale * _broadcast_last(weight_D, x) + _broadcast_last(bias_D, x)).astype(
        x.dtype
    )


def _broadcast_last(vector_D: jax.Array, x: jax.Array) -> jax.Array:
    return vector_D.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
