"""The past between two steps: keys and values in fixed shapes, and which slot holds what.

All of it is the host's business, in numpy: an operation of JAX would be compiled for every length.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.errors import CacheMismatchError, CapacityError


@dataclasses.dataclass(frozen=True, eq=False)
class Past:
    """Keys and values of what has been read, and where each slot's token stands.

    k, v: `[B, n, K, H]` a layer, keys rotated; what `FixedShapeRunner` returns has its
    `max_tokens - num_tokens` slots. position_BS: int32 `[B, n]`, negative where the slot is empty;
    every row's tokens go on from its largest. missing: how many tokens the slots had no room for;
    the next call refuses such a past.
    """

    k: tuple[Any, ...]
    v: tuple[Any, ...]
    position_BS: np.ndarray
    missing: int = 0


def empty(config: ModelConfig, dtype: Any, batch: int, capacity: int) -> Past:
    """A past without tokens."""
    shape = (batch, capacity, config.num_key_value_heads, config.head_dim)
    zeros = tuple(np.zeros(shape, dtype) for _ in range(config.num_hidden_layers))
    return Past(zeros, zeros, np.full((batch, capacity), -1, np.int32))


def fitted(past: Past, like: Past, side: str) -> Past:
    """A past with as many slots as `like`, empty ones added on one side.

    Raises CacheMismatchError for a past of another model, batch or number format, CapacityError for
    one with more slots or with tokens missing.
    """
    if past.missing:
        raise CapacityError(
            f"{past.missing} tokens of this past had no room in its"
            f" {past.position_BS.shape[1]} slots: make max_tokens larger"
        )
    position_BS = np.asarray(past.position_BS)
    (B, S), (rows, slots) = like.position_BS.shape, np.shape(position_BS)[:2] or (0, 0)
    if position_BS.ndim != 2 or position_BS.dtype.kind not in "iu" or rows != B:
        raise CacheMismatchError(
            f"the past's positions must be integers [{B}, slots], got {position_BS.dtype}"
            f" {position_BS.shape}"
        )
    for name in ("k", "v"):
        arrays, expected = getattr(past, name), getattr(like, name)
        if len(arrays) != len(expected):
            raise CacheMismatchError(
                f"the past's {name} has {len(arrays)} layers, the model {len(expected)}"
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
            f"the past has {slots} slots; max_tokens - num_tokens leaves room for {S}"
        )
    if slots == S:
        return Past(tuple(past.k), tuple(past.v), position_BS.astype(np.int32))
    width = (S - slots, 0) if side == "left" else (0, S - slots)

    def padded(x: Any) -> np.ndarray:
        return np.pad(np.asarray(x), ((0, 0), width, (0, 0), (0, 0)))

    return Past(
        tuple(padded(x) for x in past.k),
        tuple(padded(x) for x in past.v),
        np.pad(position_BS.astype(np.int32), ((0, 0), width), constant_values=-1),
    )


def place(position_BS: np.ndarray, position_BT: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Where new tokens go: `(slot_BT, the positions after that, tokens without a slot)`.

    Each row's tokens take its empty slots in order; padding (-1) and what finds none get slot S.
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


def past_after(
    past: Past, outputs: Mapping[str, Any], position_BS: np.ndarray, missing: int
) -> Past:
    """The past after a step whose outputs these are."""
    layers = range(len(past.k))
    return Past(
        tuple(outputs[f"present.{i}.key"] for i in layers),
        tuple(outputs[f"present.{i}.value"] for i in layers),
        position_BS,
        missing,
    )
