"""Attention among new tokens of several documents, with its own backward pass: no score matrix.

Scores exist for a block of keys at a time, and are computed again in the backward pass, which needs
a query's log-sum-exp and `D`, the sum of its output times that output's slope (Dao et al. 2022,
FlashAttention, algorithms 2 and 4). For accelerators; on a CPU `attend_with_mask` is faster.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxllm.ops import flash
from jaxllm.ops.attention import (
    MAX_SCORES,
    Part,
    Queries,
    absorb,
    add_sink,
    empty_softmax,
    finite_or_zero,
    normalize_output,
    scores,
    visible,
)
from jaxllm.ops.kv_quant import dequantize
from jaxllm.ops.products import einsum
from jaxllm.ops.varying_axes import match_varying

ATTENTION_NAME = "attention"  # of what the backward pass needs, for checkpointing


class Rules(NamedTuple):
    """As for `ops.attend`."""

    scale: float
    window: int | None
    cap: float | None


class Tokens(NamedTuple):
    """Position and document of each token, int32 `[B, T]`."""

    position_BT: jax.Array
    document_BT: jax.Array


def attend_documents(
    q_BTNH: jax.Array,
    position_BT: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    document_BT: jax.Array,
    *,
    scale: float,
    window: int | None,
    cap: float | None,
    packed: bool,
    sink_N: jax.Array | None = None,
) -> jax.Array:
    """Return the heads `[B, T, N, H]` of new tokens, which attend to those of their document.

    packed: whether a row is one document from its first column on, then padding: then cuDNN
    computes it, where it can. Padding's heads are then any finite numbers, else zeros.
    """
    packed = packed and window is None and cap is None and sink_N is None
    if packed and flash.is_supported(q_BTNH, [(k_BTKH, v_BTKH)]):
        return flash.attend_causally(q_BTNH, k_BTKH, v_BTKH, scale)[0]
    tokens, rules = Tokens(position_BT, document_BT), Rules(scale, window, cap)
    return _attend(q_BTNH, k_BTKH, v_BTKH, sink_N, tokens, rules)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, sink_N: Any, tokens: Tokens, rules: Rules
) -> jax.Array:
    return _forward(q, k, v, sink_N, tokens, rules)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, sink_N: Any, tokens: Tokens, rules: Rules
) -> Any:
    new = Part(k, v, tokens.position_BT)
    queries = Queries.from_heads(q, tokens.position_BT, [new], **rules._asdict())

    def step(state: Any, block: tuple[Part, jax.Array]) -> tuple[Any, None]:
        part, document_BS = block
        return absorb(state, queries, part, _visible(tokens, part, document_BS, rules))

    start = match_varying(empty_softmax(queries), q, k, v)
    state, _ = _scan_blocks(step, start, q, k, v, tokens)
    state = add_sink(state, sink_N)
    out_BTNH = checkpoint_name(normalize_output(state, q.dtype), ATTENTION_NAME)
    lse_BKGT = checkpoint_name(state.lse_BKGT, ATTENTION_NAME)
    return out_BTNH, (q, k, v, sink_N, tokens, out_BTNH, lse_BKGT)


def _backward(rules: Rules, saved: Any, slope_BTNH: jax.Array) -> Any:
    q, k, v, sink_N, tokens, out_BTNH, lse_BKGT = saved
    B, T, N, H = q.shape
    K = k.shape[2]
    new = Part(k, v, tokens.position_BT)
    queries = Queries.from_heads(q, tokens.position_BT, [new], **rules._asdict())
    slope_BTKGH = slope_BTNH.reshape(B, T, K, N // K, H)
    product = slope_BTNH.astype(jnp.float32) * out_BTNH.astype(jnp.float32)
    d_BKGT = jnp.moveaxis(product.sum(axis=-1).reshape(B, T, K, N // K), 1, 3)

    def step(q_slope: jax.Array, block: tuple[Part, jax.Array]) -> tuple[jax.Array, Any]:
        part, document_BS = block
        seen = _visible(tokens, part, document_BS, rules)
        score = scores(queries, part, seen)
        weight = jnp.exp(score - finite_or_zero(lse_BKGT)[..., None])  # 0 where not visible
        by_weight = einsum("BTKGH,BSKH->BKGTS", slope_BTKGH, dequantize(part.v_BSKH))
        by_score = weight * (by_weight - d_BKGT[..., None])
        if rules.cap is not None:
            capped = jnp.where(seen[:, None, None], score / rules.cap, 0)
            by_score = by_score * (1 - capped**2)
        weight, by_score = weight.astype(q.dtype), by_score.astype(q.dtype)
        q_slope += einsum("BKGTS,BSKH->BTKGH", by_score, dequantize(part.k_BSKH))
        k_slope = einsum("BKGTS,BTKGH->BSKH", by_score, queries.q_BTKGH)
        v_slope = einsum("BKGTS,BTKGH->BSKH", weight, slope_BTKGH)
        return q_slope, (k_slope, v_slope)

    sink_slope = None
    if sink_N is not None:  # its value is 0
        sink_1KG1 = sink_N.astype(jnp.float32).reshape(1, K, N // K, 1)
        by_sink_KG = -(jnp.exp(sink_1KG1 - lse_BKGT) * d_BKGT).sum(axis=(0, 3))
        sink_slope = by_sink_KG.reshape(N).astype(sink_N.dtype)
    start = match_varying(jnp.zeros((B, T, K, N // K, H), jnp.float32), q, k, v)
    q_slope, pieces = _scan_blocks(step, start, q, k, v, tokens)
    k_slope, v_slope = (jnp.moveaxis(x, 0, 1).reshape(B, -1, K, H)[:, : k.shape[1]] for x in pieces)
    return (
        (rules.scale * q_slope).reshape(q.shape).astype(q.dtype),
        (rules.scale * k_slope).astype(k.dtype),
        v_slope.astype(v.dtype),
        sink_slope,
        None,
    )


_attend.defvjp(_forward, _backward)


def _visible(tokens: Tokens, part: Part, document_BS: jax.Array, rules: Rules) -> jax.Array:
    same = tokens.document_BT[:, :, None] == document_BS[:, None, :]
    return same & visible(tokens.position_BT, part.position_BS, window=rules.window)


def _scan_blocks(
    step: Callable[..., Any], state: Any, q: jax.Array, k: jax.Array, v: jax.Array, tokens: Tokens
) -> tuple[Any, Any]:
    """Scan over blocks of keys: `step(state, (part, document_BS))`; missing keys are padding."""
    (B, T), N = tokens.position_BT.shape, q.shape[2]
    count = max(1, -(-B * T * N * T // MAX_SCORES))
    size = -(-T // count)

    def cut(x: jax.Array, fill: int) -> jax.Array:
        rest = [(0, 0), (0, count * size - T), *[(0, 0)] * (x.ndim - 2)]
        blocks = jnp.pad(x, rest, constant_values=fill).reshape(B, count, size, *x.shape[2:])
        return jnp.moveaxis(blocks, 1, 0)

    part = Part(cut(k, 0), cut(v, 0), cut(tokens.position_BT, -1))
    return jax.lax.scan(step, state, (part, cut(tokens.document_BT, -1)))
