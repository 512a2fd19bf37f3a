"""A stand-in for cuDNN's attention, as measured on an H100: lengths, not positions.

Rows without keys give zeros, and a log-sum-exp of 0 for several queries, -inf for one; values in
unused slots may reach rows with a partly filled tile.
"""

import enum
from typing import Any

import jax
import jax.numpy as jnp


class MaskType(enum.Enum):
    NO_MASK, PADDING, CAUSAL = range(3)


def check_cudnn_version() -> int:
    return 90000


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    q_seqlen: Any = None,
    kv_seqlen: Any = None,
    scale: float,
    mask_type: MaskType,
    return_residual: bool,
) -> tuple[jax.Array, jax.Array]:
    assert return_residual and query.dtype == key.dtype == value.dtype
    (B, T, N, H), (S, K) = query.shape, key.shape[1:3]
    q = query.reshape(B, T, K, N // K, H).astype(jnp.float32)
    score = scale * jnp.einsum("BTKGH,BSKH->BKGTS", q, key.astype(jnp.float32))
    seen = jnp.ones((B, T, S), bool)
    if mask_type == MaskType.CAUSAL:
        seen = jnp.broadcast_to(jnp.arange(T)[:, None] >= jnp.arange(S)[None], seen.shape)
    elif mask_type == MaskType.PADDING:
        seen = jnp.broadcast_to((jnp.arange(S)[None] < kv_seqlen[:, None])[:, None], seen.shape)
    some = seen.any(axis=2)[:, None, None]
    score = jnp.where(seen[:, None, None], score, -jnp.inf)
    lse = jnp.where(some, jax.nn.logsumexp(score, axis=-1), -jnp.inf if T == 1 else 0.0)
    weight = jnp.where(seen[:, None, None], jnp.exp(score - lse[..., None]), 0.0)
    if T == 1:  # exact: it does not read unused slots
        value = jnp.where(seen.any(axis=1)[:, :, None, None], value, 0)
    out = jnp.einsum("BKGTS,BSKH->BTKGH", weight, value.astype(jnp.float32))
    return out.reshape(B, T, N, H).astype(query.dtype), lse.reshape(B, N, T)
