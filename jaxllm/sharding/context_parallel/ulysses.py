"""Ulysses (Jacobs et al. 2023, arXiv 2309.14509): exchanges tokens for heads, and back.

Outside of attention each of n devices has 1/n of the tokens; in attention, all tokens of 1/n of the
heads. Between the two exchanges any attention works that treats heads alike. Keys and values stay
sharded by heads, so a cache is sharded as in tensor parallelism.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp

from jaxllm.errors import ConfigError

T = TypeVar("T")


def check_heads(queries: int, keys: int, devices: int, *, cached: bool = False) -> None:
    """Raise ConfigError if heads cannot be split over the devices.

    Args:
        cached: whether the heads go to a cache, which must not replicate them.
    """
    if queries % devices or (keys % devices and (cached or devices % keys)):
        raise ConfigError(
            f"Ulysses exchanges tokens for heads: {queries} query heads and {keys} key heads cannot"
            f" be split over {devices} devices of the sequence axis. Use ring attention, or a"
            " number of devices that divides the heads"
        )


def to_heads(x: T, axis: str) -> T:
    """Exchange `[B, T / n, N, ...]` for `[B, T, N / n, ...]`, inside `shard_map`.

    With fewer heads than devices, which they must divide, each head goes to n / N devices, as the
    query heads of its group do.
    """
    n = jax.lax.axis_size(axis)

    def move(x: jax.Array) -> jax.Array:
        if x.shape[2] < n:
            x = jnp.repeat(x, n // x.shape[2], axis=2)
        return jax.lax.all_to_all(x, axis, split_axis=2, concat_axis=1, tiled=True)

    moved: T = jax.tree.map(move, x)
    return moved


def to_tokens(x: T, axis: str) -> T:
    """Invert `to_heads`, for at least as many heads as devices."""

    def move(x: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(x, axis, split_axis=1, concat_axis=2, tiled=True)

    moved: T = jax.tree.map(move, x)
    return moved


def gather_tokens(x_BT: jax.Array, axis: str) -> jax.Array:
    """All-gather an array by token, `[B, T / n]`, to `[B, T]`."""
    return jax.lax.all_gather(x_BT, axis, axis=1, tiled=True)


def take_heads(x: T, axis: str) -> T:
    """Take from replicated `[B, T, N, ...]` the heads that `to_heads` gives this device."""
    n, device_index = jax.lax.axis_size(axis), jax.lax.axis_index(axis)

    def cut(x: jax.Array) -> jax.Array:
        each = x.shape[2] // n
        return jax.lax.dynamic_slice_in_dim(x, device_index * each, each, axis=2)

    own: T = jax.tree.map(cut, x)
    return own
