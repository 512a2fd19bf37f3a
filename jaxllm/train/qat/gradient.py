"""Surrogate gradients of rounding."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


@jax.custom_jvp
def with_derivative(value: jax.Array, surrogate: jax.Array) -> jax.Array:
    """Return `value` with the derivative of `surrogate`, an array of the same shape and dtype."""
    return value


@with_derivative.defjvp
def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return primals[0], tangents[1]


@partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def fake_quantize(
    x: jax.Array, scale: jax.Array, zero: jax.Array, levels: tuple[int, int], factor: float
) -> jax.Array:
    """Return `(clip(round(x / scale) + zero, levels) - zero) * scale`, float32. Its derivative is

    for x: 1 where the code was not clipped, else 0 (straight-through; Bengio et al. 2013);
    for scale: `round(x / scale) - x / scale` there, else the clipped code minus `zero`, all times
    `factor` (LSQ, Esser et al. 2020, equations 2 and 3). The mask is that of PyTorch's
    `_fake_quantize_learnable_per_channel_affine`: clipping is tested after rounding.

    scale, zero: must broadcast with x. A scale of 0 is replaced by 1.
    """
    return (jnp.clip(_unclipped_code(x, scale, zero), *levels) - zero.astype(jnp.float32)) * scale


@fake_quantize.defjvp
def _(levels: tuple[int, int], factor: float, primals: Any, tangents: Any) -> tuple[Any, Any]:
    (x, scale, zero), (dx, dscale, _) = primals, tangents
    wide, middle = _unclipped_code(x, scale, zero), zero.astype(jnp.float32)
    code = jnp.clip(wide, *levels)
    inside = code == wide
    slope = code - middle - jnp.where(inside, _divide_scale(x, scale), 0.0)
    passed = jnp.where(inside, dx.astype(jnp.float32), 0.0)
    return fake_quantize(x, scale, zero, levels, factor), passed + slope * (dscale * factor)


def _divide_scale(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) / jnp.where(scale == 0, 1.0, scale)


def _unclipped_code(x: jax.Array, scale: jax.Array, zero: jax.Array) -> jax.Array:
    """Return the code before clipping, as a float."""
    return jnp.round(_divide_scale(x, scale)) + zero.astype(jnp.float32)
