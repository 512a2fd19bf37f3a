"""Ulysses (Jacobs et al. 2023, arXiv 2309.14509): tokens are exchanged for heads, and back.

Outside of attention each of n devices has 1/n of the tokens; for attention, all tokens of 1/n of
the heads. What is between the two exchanges is any attention that treats heads alike. Keys and
values stay split by heads, so a cache is split as tensor parallelism splits it.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp

from jaxllm.errors import ConfigError

T = TypeVar("T")


def check_heads(queries: int, keys: int, devices: int, *, cached: bool = False) -> None:
    """Raise ConfigError where heads cannot be shared out among so many devices. cached: into a
    cache, of which no head is on two of them.
    """
    if queries % devices or (keys % devices and (cached or devices % keys)):
        raise ConfigError(
            f"Ulysses exchanges tokens for heads: {queries} query heads and {keys} key heads cannot"
            f" be shared out among {devices} devices of the sequence axis. Take ring attention, or"
            " a number of devices that divides the heads"
        )


def to_heads(x: T, axis: str) -> T:
    """`[B, T / n, N, ...]` of all heads as `[B, T, N / n, ...]` of all tokens, inside `shard_map`.

    Fewer heads than devices, which they divide: each goes to n / N devices, as query heads of its
    group do.
    """
    n = jax.lax.axis_size(axis)

    def move(x: jax.Array) -> jax.Array:
        if x.shape[2] < n:
            x = jnp.repeat(x, n // x.shape[2], axis=2)
        return jax.lax.all_to_all(x, axis, split_axis=2, concat_axis=1, tiled=True)

    moved: T = jax.tree.map(move, x)
    return moved


def to_tokens(x: T, axis: str) -> T:
    """The way back from `to_heads`, for as many heads as there are devices or more."""

    def move(x: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(x, axis, split_axis=1, concat_axis=2, tiled=True)

    moved: T = jax.tree.map(move, x)
    return moved


def of_all(x_BT: jax.Array, axis: str) -> jax.Array:
    """What stands beside tokens, `[B, T / n]` of this device, as `[B, T]` of all."""
    return jax.lax.all_gather(x_BT, axis, axis=1, tiled=True)


def own_heads(x: T, axis: str) -> T:
    """Of `[B, T, N, ...]` that all devices have, the heads that `to_heads` gives this one."""
    n, here = jax.lax.axis_size(axis), jax.lax.axis_index(axis)

    def cut(x: jax.Array) -> jax.Array:
        each = x.shape[2] // n
        return jax.lax.dynamic_slice_in_dim(x, here * each, each, axis=2)

    own: T = jax.tree.map(cut, x)
    return own
