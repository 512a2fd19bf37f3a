"""Trees of tokens in recurrent layers: a node is a row, and sees its ancestors' rows.

All nodes share the sum at the boundary. What a node adds under its key follows from that sum, its
ancestors' rows and its own key (`ops.recurrent`). Axes: M new
nodes, P nodes of a path, J nodes that have run before and then the new ones.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.ops.products import einsum
from jaxllm.ops.recurrent import (
    Pending,
    Recurrence,
    RecurrentState,
    Rows,
    convolve,
    map_rows,
    past_inputs,
    read_and_write,
    split_tokens,
    take_tokens,
    write_rows,
)


def run_tree(
    state: RecurrentState,
    recurrence: Recurrence,
    input_BMX: jax.Array,
    others: Any,
    position_BM: jax.Array,
    place_BMP: jax.Array,
    nodes: Rows | None,
) -> tuple[jax.Array, Pending]:
    """Run nodes of a tree (positions -1: padding), each after its parent; see `run`.

    Args:
        place_BMP: int32, the places of each node, its parent, and so on, among `nodes` and then the
            new ones; -1 for none.
        nodes: The rows of nodes that have run before.
    """
    B, M, _ = place_BMP.shape
    window = state.before_BLX.shape[1]
    input_BJX = input_BMX if nodes is None else _join(nodes.input_BTX, input_BMX, 1)
    at_BM = position_BM - state.start_B[:, None]
    up_L = jnp.arange(window, 0, -1, dtype=jnp.int32)
    past_BNX = past_inputs(state, (at_BM[..., None] - up_L[None, None]).reshape(B, -1))
    longer_BMP = jnp.pad(place_BMP, ((0, 0), (0, 0), (0, window)), constant_values=-1)
    place_BML = longer_BMP[:, :, window:0:-1]
    near_BNX = take_tokens(input_BJX, place_BML.clip(0).reshape(B, -1))
    before_BNX = jnp.where((place_BML >= 0).reshape(B, -1, 1), near_BNX, past_BNX)
    before_BMLX = before_BNX.reshape(B, M, window, -1)
    inputs = jnp.concatenate([before_BMLX, input_BMX[:, :, None]], axis=2)
    conv_BMX = convolve(inputs.reshape(B * M, window + 1, -1), recurrence).reshape(B, M, -1)
    if recurrence.split is None:
        return conv_BMX, Pending(state, Rows(input_BMX))
    tokens = split_tokens(recurrence, conv_BMX, others, position_BM >= 0)
    decay_BHRJ, past = tokens.decay, state.rows
    if nodes is not None:
        decay_BHRJ = _join(nodes.decay_BHRT, tokens.decay, 3)
        past = map_rows(_join, past, nodes)
    J = decay_BHRJ.shape[-1]
    node_111J = jnp.arange(J, dtype=jnp.int32)[None, None, None]
    is_BMPJ = (place_BMP[..., None] == node_111J).astype(jnp.float32)
    path_BHRMP = einsum("BMPJ,BHRJ->BHRMP", is_BMPJ, decay_BHRJ)
    sum_BHRMP = jnp.cumsum(path_BHRMP, axis=-1)  # from the node upward
    gap_BHRMJ = einsum("BMPJ,BHRMP->BHRMJ", is_BMPJ, sum_BHRMP - path_BHRMP)
    gap_BHRMJ = jnp.where(is_BMPJ.any(axis=2)[:, None, None], gap_BHRMJ, -jnp.inf)
    sum_BHRC = jnp.cumsum(state.rows.decay_BHRT, axis=-1)
    since_BHRM = sum_BHRC[..., -1:] + sum_BHRMP[..., -1]
    gap_BHRMC = jnp.minimum(since_BHRM[..., None] - sum_BHRC[..., None, :], 0.0)
    past_gap = _join(gap_BHRMC, gap_BHRMJ[..., : J - M], 4)
    own_gap = gap_BHRMJ[..., J - M :]
    out, value = read_and_write(state.sum_BHRKV, past, past_gap, tokens, since_BHRM, own_gap)
    rows = Rows(input_BMX, tokens.key, value, tokens.decay)
    return jnp.moveaxis(out, 3, 1), Pending(state, rows)


def _join(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    return jnp.concatenate([a, b], axis=axis)


def empty_nodes(state: RecurrentState, slots: int) -> Pending:
    """Return room for the rows of nodes of a tree after a state."""

    def empty(x: jax.Array, axis: int) -> jax.Array:
        return jnp.zeros((*x.shape[:axis], slots, *x.shape[axis + 1 :]), x.dtype)

    return Pending(state, map_rows(empty, state.rows))


def append_nodes(old: Pending, new: Pending, first: jax.Array, slots: int) -> Pending:
    """Return the rows of nodes, and of new ones from number `first` on, in `slots` slots."""
    B, have = old.rows.input_BTX.shape[:2]

    def widen(x: jax.Array, axis: int) -> jax.Array:
        return jnp.pad(x, [(0, slots - have if i == axis else 0) for i in range(x.ndim)])

    wide = map_rows(widen, old.rows) if slots > have else old.rows
    slot_T = first + jnp.arange(new.rows.input_BTX.shape[1], dtype=jnp.int32)
    slot_BT = jnp.broadcast_to(slot_T[None], (B, slot_T.size))
    return Pending(old.state, write_rows(wide, new.rows, slot_BT))


def take_nodes(pending: Pending, node_BP: jax.Array) -> Pending:
    """Return the rows of a path of nodes."""
    rows = map_rows(lambda x, axis: take_tokens(x, node_BP, axis), pending.rows)
    return pending.replace(rows=rows)
