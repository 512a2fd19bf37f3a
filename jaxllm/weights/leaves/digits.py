"""Codes of 2, 3 and 4 bits in bytes, and the product of one row with them where they lie.

A row is stored in whole chunks of 128 columns, column i of a chunk so:

4 bits  64 bytes: byte 16 b + j holds columns 32 b + j (low four bits) and 32 b + j + 16 (high).
2 bits  32 bytes: byte j holds columns j, j + 32, j + 64 and j + 96, from the lowest two bits up.
3 bits  48 bytes: 32 as those of 2 bits, with the two lower bits of each code, and then 16 with the
        upper one: byte k holds columns k, k + 16, ... k + 112, from the lowest bit up.

So a byte's codes lie a whole group of 32 apart (of 4 bits, half of one), and what reads them needs
shifts by constants only.
"""

from typing import Any

import jax
import jax.numpy as jnp

CHUNK = 128  # columns of a row are stored in whole chunks; the kernels walk by them
HALF = 16  # of 4 bits: columns i and i + 16 of each 32 share a byte
QUARTER = 32  # of 2 bits: columns i, i + 32, i + 64 and i + 96 of a chunk share a byte


def packed(codes: Any, bits: int) -> Any:
    """Codes uint8 `[..., I']`, I' in whole chunks, as bytes `[..., I' bits / 8]`.

    Of an array of numpy it makes one of numpy, of any of JAX one of JAX.
    """
    lead, of = codes.shape[:-1], codes.__array_namespace__()
    if bits == 8:
        return codes
    if bits == 4:
        low, high = of.moveaxis(codes.reshape(*lead, -1, 2, HALF), -2, 0)
        return (low | (high << 4)).reshape(*lead, -1)
    lower = _gathered((codes & 3).reshape(*lead, -1, 4, QUARTER), 2)
    if bits == 2:
        return lower.reshape(*lead, -1)
    upper = _gathered((codes >> 2).reshape(*lead, -1, 8, HALF), 1)
    return of.concat([lower, upper], axis=-1).reshape(*lead, -1)


def unpacked(data: jax.Array, bits: int) -> jax.Array:
    """The codes of bytes: what `packed` took."""
    return (
        data
        if bits == 8
        else jnp.stack(parts(data, bits), axis=-2).reshape(
            *data.shape[:-1], data.shape[-1] * 8 // bits
        )
    )


def parts(data: jax.Array, bits: int) -> list[jax.Array]:
    """The codes by their place in a byte, each uint8 `[..., B, W]`: with an axis of places between,
    `[..., B, places, W]`, they are in the order of the columns.
    """
    lead = data.shape[:-1]
    if bits == 4:
        byte = data.reshape(*lead, -1, HALF)
        return [byte & 15, byte >> 4]
    if bits == 2:
        byte = data.reshape(*lead, -1, QUARTER)
        return [(byte >> shift) & 3 for shift in range(0, 8, 2)]
    chunk = data.reshape(*lead, -1, QUARTER + HALF)
    lower, upper = chunk[..., :QUARTER], chunk[..., QUARTER:]
    upper = jnp.concatenate([upper, upper >> 1], axis=-1)  # of columns j, and of j + 16
    return [((lower >> s) & 3) | (((upper >> s) & 1) << 2) for s in range(0, 8, 2)]


def _gathered(codes: Any, bits: int) -> Any:
    """Codes `[..., places, W]` of so many bits as bytes `[..., W]`, the first place lowest."""
    byte = codes[..., 0, :]
    for place in range(1, 8 // bits):
        byte = byte | (codes[..., place, :] << (place * bits))
    return byte
