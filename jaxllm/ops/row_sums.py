"""Sums over the last axis, and the softmax: their bits depend on their own row alone.

XLA adds the numbers of a row in an order that depends on how many rows there are, and its exp has
other bits in vectors than alone. With the native kernels both are always the same; without them
they are XLA's.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.ops import native
from jaxllm.ops.varying_axes import match_varying


def row_sum(x: jax.Array) -> jax.Array:
    """Return the sums over the last axis, `[..., I]` to `[..., 1]`, float32."""
    return _SUM(x.astype(jnp.float32))[..., None]


def logsumexp(x: jax.Array) -> jax.Array:
    """Return the logarithm of the sum of exponentials, `[..., I]` to `[...]`, float32.

    NaN for a row with NaN or +inf, or with -inf only.
    """
    return _LOGSUMEXP(x.astype(jnp.float32))


def softmax(x: jax.Array) -> jax.Array:
    """Return the softmax over the last axis, float32; NaN as for `logsumexp`."""
    return _SOFTMAX(x.astype(jnp.float32))


def log_softmax(x: jax.Array) -> jax.Array:
    """Return the logarithm of the softmax over the last axis, float32; NaN as for `logsumexp`."""
    return x.astype(jnp.float32) - logsumexp(x)[..., None]


def _with_kernel(name: str, plain: Callable[[Any], Any]) -> Callable[[jax.Array], jax.Array]:
    """Return the function with its kernel on CPUs; its derivative is that of `plain`."""

    @jax.custom_batching.custom_vmap
    def kernel(x: jax.Array) -> jax.Array:
        y = native.reduce_rows(name, x.reshape(-1, x.shape[-1]))
        return match_varying(y.reshape(x.shape if y.ndim > 1 else x.shape[:-1]), x)

    @kernel.def_vmap
    def _(size: int, batched: Any, x: jax.Array) -> tuple[jax.Array, bool]:
        return kernel(x), True

    @jax.custom_jvp
    def reduce(x: jax.Array) -> jax.Array:
        if not native.is_enabled() or not x.size:
            return plain(x)
        y: jax.Array = jax.lax.platform_dependent(x, cpu=kernel, default=plain)
        return y

    @reduce.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return reduce(*primals), jax.jvp(plain, primals, tangents)[1]

    return reduce


_SUM = _with_kernel("sum", partial(jnp.sum, axis=-1))
_LOGSUMEXP = _with_kernel("logsumexp", partial(jax.nn.logsumexp, axis=-1))
_SOFTMAX = _with_kernel("softmax", partial(jax.nn.softmax, axis=-1))
