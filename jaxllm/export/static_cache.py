"""Static KV cache between steps: keys and values with static shapes, and each slot's position.

Runs in numpy on the host, because a JAX operation would compile for every length.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxllm.config.model import ModelConfig
from jaxllm.errors import CacheMismatchError, CapacityError


@dataclasses.dataclass(frozen=True, eq=False)
class StaticCache:
    """Static KV cache.

    Attributes:
        k, v: `[B, n, K, H]` per layer, keys after RoPE; `FixedShapeRunner` returns
            n = `max_tokens - num_tokens` slots.
        position_BS: int32 `[B, n]`, negative for an empty slot; a row continues after its maximum.
        num_missing: Number of tokens that did not fit; the next call rejects such a cache.
    """

    k: tuple[Any, ...]
    v: tuple[Any, ...]
    position_BS: np.ndarray
    num_missing: int = 0


def empty_cache(config: ModelConfig, dtype: Any, batch: int, capacity: int) -> StaticCache:
    """Return an empty cache."""
    shape, layers = (batch, capacity), range(config.num_hidden_layers)
    k, v = (
        tuple(np.zeros((*shape, heads(layer), config.head_dim), dtype) for layer in layers)
        for heads in (config.kv_heads, config.value_heads)
    )
    return StaticCache(k, v, np.full(shape, -1, np.int32))


def pad_cache(past: StaticCache, template: StaticCache, padding: str) -> StaticCache:
    """Pad a past with empty slots on one side, to the number of slots of `template`.

    Raises CacheMismatchError for another model, batch size or dtype, CapacityError for more slots
    or missing tokens.
    """
    if past.num_missing:
        raise CapacityError(
            f"{past.num_missing} tokens of this past did not fit into its"
            f" {past.position_BS.shape[1]} slots. Increase max_tokens"
        )
    position_BS = np.asarray(past.position_BS)
    (B, S), (rows, slots) = template.position_BS.shape, np.shape(position_BS)[:2] or (0, 0)
    if position_BS.ndim != 2 or position_BS.dtype.kind not in "iu" or rows != B:
        raise CacheMismatchError(
            f"the past's positions must be integers [{B}, slots], got {position_BS.dtype}"
            f" {position_BS.shape}"
        )
    for name in ("k", "v"):
        arrays, expected = getattr(past, name), getattr(template, name)
        if len(arrays) != len(expected):
            raise CacheMismatchError(
                f"the past's {name} has {len(arrays)} layers, expected {len(expected)}"
            )
        want = (B, slots, *expected[0].shape[2:])
        for i, x in enumerate(arrays):
            if np.shape(x) != want or x.dtype != expected[0].dtype:
                raise CacheMismatchError(
                    f"the past's {name} of layer {i} must be {expected[0].dtype} {want},"
                    f" got {x.dtype} {np.shape(x)}"
                )
    if slots > S:
        raise CapacityError(
            f"the past has {slots} slots, expected at most max_tokens - num_tokens = {S}"
        )
    position_BS = position_BS.astype(np.int32)
    if slots == S:
        return StaticCache(tuple(past.k), tuple(past.v), position_BS)
    width = (S - slots, 0) if padding == "left" else (0, S - slots)

    def pad_slots(x: Any) -> np.ndarray:
        return np.pad(np.asarray(x), ((0, 0), width, (0, 0), (0, 0)))

    return StaticCache(
        tuple(pad_slots(x) for x in past.k),
        tuple(pad_slots(x) for x in past.v),
        np.pad(position_BS, ((0, 0), width), constant_values=-1),
    )


def assign_slots(
    position_BS: np.ndarray, position_BT: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int]:
    """Assign each row's new tokens to its empty slots in order.

    Returns slots `[B, T]`, S for padding (position -1) and for tokens without a slot; the positions
    of the slots afterwards; and the number of tokens without a slot.
    """
    B, S = position_BS.shape
    slot_BT = np.full(position_BT.shape, S, np.int32)
    after_BS, missing = position_BS.copy(), 0
    for b in range(B):
        real_M = np.flatnonzero(position_BT[b] >= 0)
        free_M = np.flatnonzero(position_BS[b] < 0)[: real_M.size]
        missing += real_M.size - free_M.size
        real_M = real_M[: free_M.size]
        slot_BT[b, real_M] = free_M
        after_BS[b, free_M] = position_BT[b, real_M]
    return slot_BT, after_BS, missing


def make_past(
    past: StaticCache, outputs: Mapping[str, Any], position_BS: np.ndarray, missing: int
) -> StaticCache:
    """Return the past after a step with these outputs."""
    layers = range(len(past.k))
    return StaticCache(
        tuple(outputs[f"present.{i}.key"] for i in layers),
        tuple(outputs[f"present.{i}.value"] for i in layers),
        position_BS,
        missing,
    )
