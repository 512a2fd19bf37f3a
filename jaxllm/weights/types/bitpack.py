"""Bit packing: codes of 4, 3 and 2 bits in bytes.

A row is stored in whole chunks of 128 columns. At 4 bits a chunk is four blocks of 16 bytes: byte j
of block b holds columns 32 b + j (low four bits) and 32 b + j + 16 (high). At fewer bits the blocks
are interleaved in the unused bits of each other:

2 bits  32 bytes: byte j is that of block 0 and, two bits higher, that of block 1; byte 16 + j has
        blocks 2 and 3.
3 bits  48 bytes: 32 with the two low bits of each code, laid out as for 2 bits, and then 16 with
        the high bit: in byte j, block b has it b bits above the lowest of four.

So the 4-bit bytes are a shift and a mask away, and code that reads those reads all.
"""

from typing import Any

import jax

CHUNK = 128  # columns of a row are stored in whole chunks; the kernels walk by them
HALF = 16  # at 4 bits, columns i and i + 16 of each 32 share a byte
_BLOCKS = 4  # blocks of 32 columns in a chunk


def pack_codes(codes: Any, bits: int) -> Any:
    """Pack uint8 codes `[..., I']`, I' in whole chunks, into bytes `[..., I' bits / 8]`.

    Works on arrays of NumPy and of JAX, and returns the same kind.
    """
    lead, of = codes.shape[:-1], codes.__array_namespace__()
    if bits == 8:
        return codes
    low, high = of.moveaxis(codes.reshape(*lead, -1, 2, HALF), -2, 0)
    byte = (low | (high << 4)).reshape(*lead, -1, _BLOCKS, HALF)
    block = [byte[..., b, :] for b in range(_BLOCKS)]
    if bits == 4:
        return byte.reshape(*lead, -1)
    planes = [
        _low_bits(block[0]) | (_low_bits(block[1]) << 2),
        _low_bits(block[2]) | (_low_bits(block[3]) << 2),
    ]
    if bits == 3:
        upper = [((x >> 2) & 0x11) << b for b, x in enumerate(block)]
        planes.append(upper[0] | upper[1] | upper[2] | upper[3])
    return of.concat(planes, axis=-1).reshape(*lead, -1)


def to_four_bits(data: jax.Array, bits: int) -> jax.Array:
    """Convert the bytes of codes of 4 bits or fewer to those of 4-bit codes, `[..., I' / 2]`."""
    if bits == 4:
        return data
    lead, of = data.shape[:-1], data.__array_namespace__()
    plane = data.reshape(*lead, -1, bits, HALF)
    block = [plane[..., b // 2, :] >> (2 * (b % 2)) & 0x33 for b in range(_BLOCKS)]
    if bits == 3:
        block = [x | ((plane[..., 2, :] >> b) & 0x11) << 2 for b, x in enumerate(block)]
    joined: jax.Array = of.stack(block, axis=-2).reshape(*lead, -1)
    return joined


def unpack_codes(data: jax.Array, bits: int) -> jax.Array:
    """Unpack bytes to the codes that `pack_codes` took."""
    if bits == 8:
        return data
    byte = to_four_bits(data, bits).reshape(*data.shape[:-1], -1, HALF)
    codes = byte.__array_namespace__().stack([byte & 15, byte >> 4], axis=-2)
    unpacked: jax.Array = codes.reshape(*data.shape[:-1], -1)
    return unpacked


def _low_bits(byte: Any) -> Any:
    """Keep the two low bits of both codes."""
    return byte & 0x33
