"""Attention by cuDNN's fused kernels, on an NVIDIA GPU.

cuDNN knows lengths, not positions: it reads the first slots of a row. Softmax does not depend on
the order of slots, so a row qualifies if its used slots come first, whatever their order. Each
cached part has its own softmax, the new tokens too. `merge` joins them by their float32 log-sum-exp
(Rabe & Staats 2021, section 2).
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.ops.kv_quant import Int8Entries
from jaxllm.ops.target import target

MAX_HEAD = 128
DTYPES = ("bfloat16", "float16")
FORWARD = "dot_product_attention_fwd"  # how the names of cuDNN's primitives begin


@cache
def find_problem() -> str | None:
    """Return why cuDNN cannot be used in this process; None if it can."""
    try:
        _cudnn().check_cudnn_version()
    except (AttributeError, ImportError, RuntimeError) as error:  # or JAX has moved it
        return f"cuDNN: {error}"
    return None


def _cudnn() -> Any:
    # The public function rounds the log-sum-exp to the queries' dtype, which would be the error of
    # the merged weights.
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo


def is_supported(q_BTNH: jax.Array, entries: Sequence[tuple[Any, Any]]) -> bool:
    """Whether cuDNN takes these queries, and these keys and values of each part."""
    H, arrays = q_BTNH.shape[3], [x for pair in entries for x in pair]
    if target() != "cuda" or H > MAX_HEAD or H % 8:
        return False
    if str(q_BTNH.dtype) not in DTYPES:
        return False
    if any(isinstance(x, Int8Entries) or x.dtype != q_BTNH.dtype for x in arrays):
        return False
    return all(x.shape[0] == q_BTNH.shape[0] for x in arrays) and find_problem() is None


def attend_packed(q_BTNH: jax.Array, parts: Sequence[Any], scale: float) -> jax.Array:
    """Attend to the used slots of the cached parts, and causally to the new tokens, the last part.

    In each row, used slots come first; new tokens are in order, padding last. The heads of padding
    are any finite numbers.

    Returns:
        The heads `[B, T, N, H]` in q's dtype.
    """
    cudnn, (B, T, _, _) = _cudnn(), q_BTNH.shape
    *cached, new = parts
    states = []
    for part in cached:
        used_BS = part.position_BS >= 0
        length_B = used_BS.sum(axis=1, dtype=jnp.int32)
        v_BSKH = part.v_BSKH
        if T > 1:  # the last, partly filled tile of a prompt multiplies unused values by zero
            v_BSKH = jnp.where(used_BS[:, :, None, None], v_BSKH, 0)
        out, lse_BNT = cudnn.dot_product_attention(
            q_BTNH,
            part.k_BSKH,
            v_BSKH,
            q_seqlen=jnp.full((B,), T, jnp.int32),
            kv_seqlen=length_B,
            scale=scale,
            mask_type=cudnn.MaskType.PADDING,
            return_residual=True,
        )
        seen_B = length_B > 0  # else the log-sum-exp is 0 or -inf, by the kernel
        out = jnp.where(seen_B[:, None, None, None], out.astype(jnp.float32), 0)
        states.append((out, jnp.where(seen_B[:, None, None], lse_BNT, -jnp.inf)))
    if T == 1:
        states.append(_attend_to_own(q_BTNH, new, scale))
    else:
        out, lse_BNT = attend_causally(q_BTNH, new.k_BSKH, new.v_BSKH, scale)
        states.append((out.astype(jnp.float32), lse_BNT))
    return merge(states).astype(q_BTNH.dtype)


def attend_causally(
    q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Return the heads `[B, T, N, H]` and the log-sum-exp `[B, N, T]` of tokens that attend to
    those before them; with cuDNN's backward pass.
    """
    cudnn = _cudnn()
    output: tuple[jax.Array, jax.Array] = cudnn.dot_product_attention(
        q_BTNH,
        k_BTKH,
        v_BTKH,
        scale=scale,
        mask_type=cudnn.MaskType.CAUSAL,
        return_residual=True,
    )
    return output


def merge(states: Sequence[tuple[jax.Array, jax.Array]]) -> jax.Array:
    """Return the heads of one softmax over several parts, float32 `[B, T, N, H]`.

    states: of each part, its heads, float32 `[B, T, N, H]`, and its log-sum-exp, `[B, N, T]`.
    """
    if len(states) == 1:
        return states[0][0]
    lse_PBNT = jnp.stack([lse for _, lse in states])
    top_1BNT = lse_PBNT.max(axis=0, keepdims=True)
    weight_PBNT = jnp.exp(lse_PBNT - jnp.where(jnp.isneginf(top_1BNT), 0, top_1BNT))
    total_1BNT = weight_PBNT.sum(axis=0, keepdims=True)
    share_PBNT = weight_PBNT / jnp.where(total_1BNT == 0, 1, total_1BNT)
    shares = [jnp.swapaxes(share, 1, 2)[..., None] for share in share_PBNT]
    terms = [share * out for share, (out, _) in zip(shares, states, strict=True)]
    return sum(terms[1:], terms[0])


def _attend_to_own(q_B1NH: jax.Array, new: Any, scale: float) -> tuple[jax.Array, jax.Array]:
    """Return each head's value of its row's one new token, and its score; -inf for padding."""
    group = q_B1NH.shape[2] // new.k_BSKH.shape[2]
    k, v = (jnp.repeat(x.astype(jnp.float32), group, axis=2) for x in (new.k_BSKH, new.v_BSKH))
    score_BN1 = jnp.swapaxes((q_B1NH.astype(jnp.float32) * k).sum(axis=-1) * scale, 1, 2)
    return v, jnp.where(new.position_BS[:, None] >= 0, score_BN1, -jnp.inf)
