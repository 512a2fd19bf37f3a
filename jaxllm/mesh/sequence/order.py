"""Zig-zag order: which device has which tokens, so that causal attention is equal work for all.

A text of T tokens is cut into 2n chunks for n devices. Device i has chunks i and 2n - 1 - i: one
early, one late. Under a causal mask a chunk sees itself and all before it, so each device has
(i + 1) + (2n - i) = 2n + 1 pairs of chunks to compute of 4n, whatever its number; in plain order
the last device would have n times the work of the first.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import ConfigError

T = TypeVar("T")


def padded(columns: int, devices: int) -> int:
    """The least number of columns from `columns` up that zig-zag order can cut."""
    return -(-columns // (2 * devices)) * (2 * devices)


def zigzag(columns: int, devices: int) -> np.ndarray:
    """Which column stands where: `x[:, zigzag(T, n)]`, cut into n equal runs, is zig-zag order.

    Raises ConfigError for columns that are no multiple of 2n.
    """
    if columns % (2 * devices):
        raise ConfigError(
            f"{columns} columns cannot be cut into {2 * devices} chunks for {devices} devices of"
            f" the sequence axis: pad them to {padded(columns, devices)} (position -1)"
        )
    chunks = np.arange(columns, dtype=np.int32).reshape(2 * devices, -1)
    pairs = [(i, 2 * devices - 1 - i) for i in range(devices)]
    return np.concatenate([chunks[list(pair)].reshape(-1) for pair in pairs])


def to_zigzag(x: T, axis: str) -> T:
    """Columns `[B, T / n, ...]` that lie in plain order, inside `shard_map`, in zig-zag order.

    Two exchanges of half the columns each, whatever n is: in either order every device has one
    chunk of an even number and one of an odd.
    """
    even_here, routes = _even_here(axis), _routes(jax.lax.axis_size(axis))

    def move(x: jax.Array) -> jax.Array:
        halves = jnp.split(x, 2, axis=1)
        even, odd = (
            jax.lax.ppermute(half, axis, route) for half, route in zip(halves, routes, strict=True)
        )
        return jnp.concatenate(_swapped(even, odd, unless=even_here), axis=1)

    moved: T = jax.tree.map(move, x)
    return moved


def to_plain(x: T, axis: str) -> T:
    """The way back from `to_zigzag`."""
    even_here, routes = _even_here(axis), _routes(jax.lax.axis_size(axis))

    def move(x: jax.Array) -> jax.Array:
        halves = _swapped(*jnp.split(x, 2, axis=1), unless=even_here)
        back = [
            jax.lax.ppermute(half, axis, [(there, here) for here, there in route])
            for half, route in zip(halves, routes, strict=True)
        ]
        return jnp.concatenate(back, axis=1)

    moved: T = jax.tree.map(move, x)
    return moved


def _even_here(axis: str) -> jax.Array:
    """Whether the early chunk of this device, which has the device's number, is an even one."""
    return jax.lax.axis_index(axis) % 2 == 0


def _swapped(a: jax.Array, b: jax.Array, *, unless: jax.Array) -> list[jax.Array]:
    return [jnp.where(unless, a, b), jnp.where(unless, b, a)]


def _routes(devices: int) -> list[list[tuple[int, int]]]:
    """Of even and of odd chunks: from who has it in plain order to who has it in zig-zag order."""
    last = 2 * devices - 1
    return [
        [(chunk // 2, min(chunk, last - chunk)) for chunk in range(parity, last + 1, 2)]
        for parity in (0, 1)
    ]
