"""The compressive memory of Infini-attention (Munkhdalai et al. 2024, arXiv 2404.07143, 2.1).

Finished segments are stored as sums over their tokens, of constant size. With
sigma(x) = elu(x) + 1, M = sum of sigma(k)^T v and z = sum of sigma(k), and a query reads
sigma(q) M / (sigma(q) z). Keys and queries are those before rotation. Under every rule, additions
of the current segment depend only on M and z at its start, and are a sum over its tokens. They are
stored separately, so that single tokens, chunks of any length and the whole text give the same
numbers.

The rules, with v' = the value that the memory at the segment's start returns for k:

linear      M += sum sigma(k)^T v           z += sum sigma(k)                      (equation 4)
delta       M += sum sigma(k)^T (v - v')    z += sum sigma(k)                      (equation 5)
delta_once  M += sum sigma(k)^T v - r (sum sigma(k)^T v')     z = max(z, sum sigma(k))

The published delta rule leaves M unchanged if a binding exists already, but still increases z, so a
binding that is written twice is read at half its value. "delta_once" corrects this. For each entry
of z, r = min(1, z / sum sigma(k)) is the share of the segment's writes that replaces old content;
v' is subtracted for that share only. The rest is new and increases z by (1 - r) sum sigma(k), which
gives the maximum above. A repeated binding changes neither M nor z, one with another value replaces
the old, and one whose key has no overlap with the memory is added in full. The rule cannot diverge:
M becomes (1 - A) M plus a sum, where A is r times sum sigma(k)^T sigma(k) / (sigma(k) z). A has no
negative entries and A z = r sum sigma(k) <= z, so its eigenvalues are between 0 and 1.
"""

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import struct

from jaxllm.ops.buckets import Buckets
from jaxllm.ops.products import einsum

Update = Literal["linear", "delta", "delta_once"]
UPDATES = get_args(Update)
MIN_MASS = 1e-30  # smaller sums mean that nothing was written


class Memory(struct.PyTreeNode):
    """The memory of a layer, one row per text, float32 except `segment_B`.

    Attributes:
        m_BKHH, z_BKH: Of all finished segments; m is `[B, K, keys, values]`.
        dm_BKHH, dz_BKH: Additions of the current segment.
        segment_B: int32, the number of the current segment.
        old_BKHH: The current segment's sum of sigma(k)^T v', whose share is known at its end; None
            except under "delta_once".
    """

    m_BKHH: jax.Array
    z_BKH: jax.Array
    dm_BKHH: jax.Array
    dz_BKH: jax.Array
    segment_B: jax.Array
    old_BKHH: jax.Array | None = None


def memory_shapes(heads: int, size: int, update: Update) -> Memory:
    """Return the `jax.ShapeDtypeStruct`s of one row, for this number of key heads."""
    matrix: Any = jax.ShapeDtypeStruct((heads, size, size), jnp.float32)
    vector: Any = jax.ShapeDtypeStruct((heads, size), jnp.float32)
    number: Any = jax.ShapeDtypeStruct((), jnp.int32)
    old = matrix if update == "delta_once" else None
    return Memory(matrix, vector, matrix, vector, number, old)


def empty_memory(rows: int, heads: int, size: int, update: Update) -> Memory:
    """Return a memory of nothing."""
    one = memory_shapes(heads, size, update)
    zeros: Memory = jax.tree.map(lambda x: jnp.zeros((rows, *x.shape), x.dtype), one)
    return zeros


def sigma(x: jax.Array) -> jax.Array:
    """Return elu(x) + 1 in float32; below zero as exp(x), where elu(x) + 1 would cancel."""
    x = x.astype(jnp.float32)
    return jnp.where(x > 0, x + 1.0, jnp.exp(jnp.minimum(x, 0.0)))


def read(memory: Memory, q_BTNH: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Read finished segments with queries before rotation.

    Query head n reads the memory of key head n // (N / K).

    Returns:
        Values, float32 `[B, T, N, H]`, and where the memory has content, bool `[B, T, N]`; values
            are
        zero elsewhere.
    """
    B, T, N, H = q_BTNH.shape
    K = memory.z_BKH.shape[1]
    value_BTNV, has_content = _retrieve(memory, sigma(q_BTNH).reshape(B, T, K, N // K, H))
    return value_BTNV.reshape(B, T, N, -1), has_content.reshape(B, T, N)


def finish_segment(memory: Memory, into_B: jax.Array) -> Memory:
    """Add the current segment to the memory in rows that move on to segment `into_B`.

    No row moves back.
    """
    m, z = memory.m_BKHH + memory.dm_BKHH, memory.z_BKH + memory.dz_BKH
    if memory.old_BKHH is not None:
        z = jnp.maximum(memory.z_BKH, memory.dz_BKH)
        # If nothing was written, nothing is replaced: `old` is zero there.
        written = jnp.where(memory.dz_BKH > MIN_MASS, memory.dz_BKH, 1.0)
        share = jnp.minimum(1.0, memory.z_BKH / written)
        m = m - share[..., None] * memory.old_BKHH
    nothing = jax.tree.map(jnp.zeros_like, memory)
    folded = nothing.replace(m_BKHH=m, z_BKH=z, segment_B=into_B)
    return _select_rows(into_B > memory.segment_B, folded, memory)


def write(
    memory: Memory, k_BTKH: jax.Array, v_BTKH: jax.Array, real_BT: jax.Array, update: Update
) -> Memory:
    """Add tokens to the current segment; k before rotation. Padding adds nothing."""
    real_BT11 = real_BT[:, :, None, None]
    k_BTKH = jnp.where(real_BT11, sigma(k_BTKH), 0.0)
    v_BTKH = jnp.where(real_BT11, v_BTKH.astype(jnp.float32), 0.0)
    old = memory.old_BKHH
    if update != "linear":
        known_BTKH = _retrieve(memory, k_BTKH[:, :, :, None])[0][:, :, :, 0]
        if old is None:
            v_BTKH = v_BTKH - known_BTKH
        else:
            old = old + einsum("BTKH,BTKV->BKHV", k_BTKH, known_BTKH)
    return memory.replace(
        dm_BKHH=memory.dm_BKHH + einsum("BTKH,BTKV->BKHV", k_BTKH, v_BTKH),
        dz_BKH=memory.dz_BKH + k_BTKH.sum(axis=1),
        old_BKHH=old,
    )


def discard_segment(memory: Memory) -> Memory:
    """Return the memory as it was at the start of the current segment."""
    begun: Memory = jax.tree.map(jnp.zeros_like, memory)
    return begun.replace(m_BKHH=memory.m_BKHH, z_BKH=memory.z_BKH, segment_B=memory.segment_B)


def run_segments(
    memory: Memory,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    buckets: Buckets,
    update: Update,
) -> tuple[jax.Array, jax.Array, Memory]:
    """Read and then write tokens by segment; return the outputs of `read`, and the new memory.

    q and k are those before rotation. A differentiable scan over segments.
    """

    def run_segment(
        memory: Memory, segment: tuple[jax.Array, ...]
    ) -> tuple[Memory, tuple[jax.Array, jax.Array]]:
        q_BWNH, k_BWKH, v_BWKH, position_BW, segment_B = segment
        real_BW = position_BW >= 0
        into_B = jnp.where(real_BW.any(axis=1), segment_B, memory.segment_B)
        memory = finish_segment(memory, into_B)
        answers = read(memory, q_BWNH)
        return write(memory, k_BWKH, v_BWKH, real_BW, update), answers

    qkv = (buckets.split(x) for x in (q_BTNH, k_BTKH, v_BTKH))
    segments = (*qkv, buckets.position_nBW, buckets.segment_nB)
    if buckets.segment_nB.shape[0] == 1:
        memory, answers = run_segment(memory, jax.tree.map(lambda x: x[0], segments))
        answers = jax.tree.map(lambda x: x[None], answers)
    else:
        memory, answers = jax.lax.scan(run_segment, memory, segments)
    values, has_content = (buckets.join(x) for x in answers)
    return values, has_content, memory


def _retrieve(memory: Memory, q_BTKGH: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Read finished segments with sigma(q); return values and where there is content."""
    mass = einsum("BTKGH,BKH->BTKG", q_BTKGH, memory.z_BKH)
    has_content = mass > MIN_MASS
    value_BTKGV = einsum("BTKGH,BKHV->BTKGV", q_BTKGH, memory.m_BKHH)
    value_BTKGV = value_BTKGV / jnp.where(has_content, mass, 1.0)[..., None]
    return jnp.where(has_content[..., None], value_BTKGV, 0.0), has_content


def _select_rows(which_B: jax.Array, yes: Memory, no: Memory) -> Memory:
    def choose(yes: jax.Array, no: jax.Array) -> jax.Array:
        return jnp.where(which_B.reshape(which_B.shape + (1,) * (yes.ndim - 1)), yes, no)

    chosen: Memory = jax.tree.map(choose, yes, no)
    return chosen
