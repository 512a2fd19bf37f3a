"""Helpers of the cache tests: filled caches, their logits, and runs without a cache."""

import math
from typing import Any

import jax
import numpy as np
import pytest

import jaxllm
from jaxllm.ops import dequantize
from jaxllm.weights.precision import Precision
from tests.tiny_models import random_model

# (family, key/value format): every operation must work for both families and both formats; the
# second pair runs in `make test-full`.
KINDS = [
    pytest.param(("llama", "int8"), id="llama-int8"),
    pytest.param(("gpt2", "float32"), id="gpt2-float32", marks=pytest.mark.full),
]


def lm_of(kind: tuple[str, str], **changes: Any) -> Any:
    """Return a tiny random model and its parameters."""
    family, cache = kind
    return random_model(family, precision=Precision(cache=cache), **changes)


def filled(lm: Any, ids: np.ndarray, capacity: int = 24) -> jaxllm.KVCache:
    """Return a cache that has run these tokens."""
    model, params = lm
    cache = jaxllm.init_cache(model.config, ids.shape[0], capacity, dtype=model.precision.cache)
    return jaxllm.prefill(model, params, cache, ids).cache


def peek(lm: Any, cache: jaxllm.KVCache, token: int = 7) -> np.ndarray:
    """Return the logits after one more token in each row, `[B, V]`."""
    ids = np.full((cache.batch, 1), token)
    return np.asarray(jaxllm.forward(*lm, cache, ids).logits[:, 0])


def fresh(lm: Any, ids: Any, positions: Any = None, token: int = 7) -> np.ndarray:
    """Return the same logits for one row, computed from its text without a cache: `[V]`."""
    row = np.append(ids, token)[None]
    positions = np.arange(row.size) if positions is None else np.asarray(positions)
    # Padding to one length: one compiled program for all texts.
    row = np.pad(row, ((0, 0), (0, 32 - row.size)))
    at = np.pad(positions, (0, 32 - positions.size), constant_values=-1)[None]
    logits = jaxllm.forward(*lm, None, row, positions_BT=at).logits
    return np.asarray(logits[0, positions.size - 1])


def close(ours: Any, theirs: Any, atol: float = 1e-5) -> None:
    """Assert equality within the tolerance for two ways of one computation."""
    scale = max(1.0, float(np.abs(theirs).max()))
    np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), atol=atol * scale)


def rotated(x: np.ndarray, by: float, theta: float) -> np.ndarray:
    """Rotate each pair (x[i], x[i + F]) by `by * theta^(-2i/H)`, in float64."""
    H = x.shape[-1]
    F = H // 2
    out = np.array(x, np.float64)
    for i in range(F):
        angle = by * theta ** (-2 * i / H)
        a, b = x[..., i], x[..., i + F]
        out[..., i] = a * math.cos(angle) - b * math.sin(angle)
        out[..., i + F] = b * math.cos(angle) + a * math.sin(angle)
    return out


def buffers(segment: jaxllm.Segment) -> list[int]:
    """Return the addresses of a segment's keys and values."""
    return [x.unsafe_buffer_pointer() for x in jax.tree.leaves((segment.k, segment.v))]


def entries(cache: jaxllm.KVCache) -> dict[tuple[int, int], bytes]:
    """Map (row, position) to every bit of that token's keys, values and id."""
    found = {}
    for segment in cache.segments:
        arrays = [np.asarray(x) for x in jax.tree.leaves((segment.k, segment.v, segment.token_BS))]
        positions = np.broadcast_to(
            segment.position_BS, (cache.batch, segment.position_BS.shape[1])
        )
        for row, slot in np.argwhere(positions >= 0):
            bits = b"".join(x[min(row, x.shape[0] - 1), slot].tobytes() for x in arrays)
            found[int(row), int(positions[row, slot])] = bits
    return found


def keys(cache: jaxllm.KVCache, row: int = 0) -> np.ndarray:
    """Return the keys of a row in position order, `[layers, n, K, H]`."""
    order = np.argsort(np.asarray(cache.position_BS)[row], kind="stable")
    order = order[np.asarray(cache.position_BS)[row][order] >= 0]
    layers = []
    for layer in range(len(cache.tail.k)):
        parts = [np.asarray(dequantize(s.k[layer])) for s in cache.segments]
        layers.append(np.concatenate([p[min(row, p.shape[0] - 1)] for p in parts])[order])
    return np.stack(layers)
