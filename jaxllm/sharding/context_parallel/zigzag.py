"""Zigzag order: assigns tokens to devices so that causal attention is equal work for all.

A text of T tokens is cut into 2n chunks for n devices. Device i has chunks i and 2n - 1 - i: one
early, one late. Under a causal mask a chunk attends to itself and to all before it, so every device
computes (i + 1) + (2n - i) = 2n + 1 of its 4n pairs of chunks. In plain order the last device would
have n times the work of the first.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import ConfigError

T = TypeVar("T")


def pad_length(columns: int, devices: int) -> int:
    """Round `columns` up to a length that zigzag order can cut."""
    return -(-columns // (2 * devices)) * (2 * devices)


def zigzag(columns: int, devices: int) -> np.ndarray:
    """Return the permutation to zigzag order: `x[:, zigzag(T, n)]`, cut into n equal parts.

    Raises:
        ConfigError: for columns that are not a multiple of 2n.
    """
    if columns % (2 * devices):
        raise ConfigError(
            f"columns must be a multiple of {2 * devices} for {devices} devices of the sequence"
            f" axis, got {columns}. Pad them to {pad_length(columns, devices)} (position -1)"
        )
    chunks = np.arange(columns, dtype=np.int32).reshape(2 * devices, -1)
    pairs = [(i, 2 * devices - 1 - i) for i in range(devices)]
    return np.concatenate([chunks[list(pair)].reshape(-1) for pair in pairs])


def to_zigzag(x: T, axis: str) -> T:
    """Move columns `[B, T / n, ...]` from plain to zigzag order, inside `shard_map`.

    This takes two exchanges of half the columns each, for any n: in both orders every device has
    one even and one odd chunk.
    """
    even_here, routes = _is_even_device(axis), _routes(jax.lax.axis_size(axis))

    def move(x: jax.Array) -> jax.Array:
        halves = jnp.split(x, 2, axis=1)
        even, odd = (
            jax.lax.ppermute(half, axis, route) for half, route in zip(halves, routes, strict=True)
        )
        return jnp.concatenate(_swap_unless(even, odd, unless=even_here), axis=1)

    moved: T = jax.tree.map(move, x)
    return moved


def to_plain(x: T, axis: str) -> T:
    """Invert `to_zigzag`."""
    even_here, routes = _is_even_device(axis), _routes(jax.lax.axis_size(axis))

    def move(x: jax.Array) -> jax.Array:
        halves = _swap_unless(*jnp.split(x, 2, axis=1), unless=even_here)
        back = [
            jax.lax.ppermute(half, axis, [(source, target) for target, source in route])
            for half, route in zip(halves, routes, strict=True)
        ]
        return jnp.concatenate(back, axis=1)

    moved: T = jax.tree.map(move, x)
    return moved


def _is_even_device(axis: str) -> jax.Array:
    """Return whether this device's early chunk, which has the device's number, is even."""
    return jax.lax.axis_index(axis) % 2 == 0


def _swap_unless(a: jax.Array, b: jax.Array, *, unless: jax.Array) -> list[jax.Array]:
    return [jnp.where(unless, a, b), jnp.where(unless, b, a)]


def _routes(devices: int) -> list[list[tuple[int, int]]]:
    """Return pairs (device in plain order, in zigzag order), for even and for odd chunks."""
    last = 2 * devices - 1
    return [
        [(chunk // 2, min(chunk, last - chunk)) for chunk in range(parity, last + 1, 2)]
        for parity in (0, 1)
    ]
