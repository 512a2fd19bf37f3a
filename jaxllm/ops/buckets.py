"""Tokens grouped into buckets, one for each segment of the text that they touch.

A segment is `position // segment_length`. Rows may begin anywhere in a segment and have padding
anywhere, so one bucket may be another segment in each row.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Buckets(NamedTuple):
    """Where T tokens lie in n buckets of W places.

    Attributes:
        column_BS: int32 `[B, n * W]`, the token of each place; arbitrary if there is none.
        place_BT: int32, the place of each token.
        position_nBW: int32, -1 if there is no token.
        segment_nB: int32, the segment number of each bucket.
    """

    column_BS: jax.Array
    place_BT: jax.Array
    position_nBW: jax.Array
    segment_nB: jax.Array

    def split(self, x_BTX: jax.Array) -> jax.Array:
        """Group token arrays, `[B, T, ...]`, by bucket: `[n, B, W, ...]`."""
        n, B, W = self.position_nBW.shape
        if n * W == 1:
            return x_BTX[None]
        gathered = jnp.take_along_axis(x_BTX, _expand_index(self.column_BS, x_BTX), axis=1)
        return jnp.moveaxis(gathered.reshape(B, n, W, *x_BTX.shape[2:]), 1, 0)

    def join(self, x_nBWX: jax.Array) -> jax.Array:
        """Undo `split`: `[B, T, ...]`; entries of padding are arbitrary."""
        n, B, W = self.position_nBW.shape
        x_BSX = jnp.moveaxis(x_nBWX, 0, 1).reshape(B, n * W, *x_nBWX.shape[3:])
        if n * W == 1:
            return x_BSX
        return jnp.take_along_axis(x_BSX, _expand_index(self.place_BT, x_BSX), axis=1)


def _expand_index(index_BX: jax.Array, x_BSX: jax.Array) -> jax.Array:
    return index_BX.reshape(index_BX.shape + (1,) * (x_BSX.ndim - 2))


def max_segments(tokens: int, segment_length: int) -> int:
    """Return how many segments this number of consecutive tokens can touch."""
    return (tokens + 2 * segment_length - 2) // segment_length


def make_buckets(position_BT: jax.Array, segment_length: int) -> Buckets:
    """Return the buckets of tokens at these positions (-1: padding), consecutive in each row.

    Tokens that touch more than `max_segments` segments are not supported; the caller must check.
    """
    B, T = position_BT.shape
    n, W = max_segments(T, segment_length), min(T, segment_length)
    real_BT = position_BT >= 0
    far = jnp.iinfo(jnp.int32).max
    first_B1 = jnp.where(real_BT, position_BT, far).min(axis=1, keepdims=True)
    first_B1 = jnp.where(first_B1 == far, 0, first_B1)
    first_segment_B1 = first_B1 // segment_length
    bucket_BT = position_BT // segment_length - first_segment_B1
    begins_BT = jnp.maximum((position_BT // segment_length) * segment_length, first_B1)
    place_BT = jnp.where(real_BT, bucket_BT * W + position_BT - begins_BT, n * W)
    row_B1 = jnp.arange(B, dtype=jnp.int32)[:, None]
    column_T = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (B, T))
    column_BS = jnp.zeros((B, n * W), jnp.int32).at[row_B1, place_BT].set(column_T, mode="drop")
    empty_BS = jnp.full((B, n * W), -1, jnp.int32)
    position_BS = empty_BS.at[row_B1, place_BT].set(position_BT, mode="drop")
    segment_nB = first_segment_B1[:, 0][None] + jnp.arange(n, dtype=jnp.int32)[:, None]
    position_nBW = jnp.moveaxis(position_BS.reshape(B, n, W), 1, 0)
    return Buckets(column_BS, jnp.minimum(place_BT, n * W - 1), position_nBW, segment_nB)
