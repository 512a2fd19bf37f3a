"""Trees of tokens: which nodes are on whose path, and the delta of one path.

A tree of N nodes runs as N rows of one token. Each row reads the cache in place, and its ancestors'
keys and values are gathered by number. Attention sums by position, so a node's bits are those of
its path run as a chain (`Precision.invariant`).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.kv import (
    EMPTY,
    MAX_SLOTS,
    Delta,
    KVCache,
    Segment,
    TreeDelta,
    cache_nbytes,
    cast_delta,
    check_usable,
)
from jaxllm.cache.operations import gather_slots
from jaxllm.errors import CacheMismatchError, CapacityError, TokenError
from jaxllm.files import check_memory
from jaxllm.ops import recurrent_tree
from jaxllm.ops.kv_quant import Entries
from jaxllm.ops.padding import next_power_of_two
from jaxllm.ops.slot_update import write_at_cursor
from jaxllm.runtime.validation import check_int, check_int_array


class Branches(NamedTuple):
    """Which nodes each row of one new token attends to: itself and its ancestors.

    Attributes:
        position_RP: int32, the nodes' positions, -1 for none.
        new_RP: int32, the row of a node that is among the new tokens.
        place_BMP: int32, the nodes' places among those that have run before and then the new ones
            of the row; -1 for none.
        old_RP: int32, the place of a node that is not new, over all rows of `nodes`; -1 for others.
        nodes: Nodes that have run before; None if there are none.
    """

    position_RP: jax.Array
    new_RP: jax.Array
    place_BMP: jax.Array
    old_RP: Any = None
    nodes: TreeDelta | None = None

    def gather(self, new: Entries, layer: int, name: str) -> Entries:
        """Return the nodes' keys or values, `[R, P, K, H]`. new: of the new tokens, `[R, 1, ...]`.

        name: "k" or "v".
        """
        taken: Entries = jax.tree.map(
            lambda x: jnp.take(x[:, 0], self.new_RP, axis=0, mode="clip"), new
        )
        if self.nodes is None:
            return taken
        old_RP = self.old_RP

        def pick(x: jax.Array, y: jax.Array) -> jax.Array:
            flat = y.reshape(-1, *y.shape[2:])
            is_old = (old_RP >= 0).reshape(*old_RP.shape, *[1] * (x.ndim - 2))
            return jnp.where(is_old, jnp.take(flat, old_RP, axis=0, mode="clip"), x)

        chosen: Entries = jax.tree.map(pick, taken, getattr(self.nodes, name)[layer])
        return chosen


def init_tree(cache: KVCache, slots: int) -> TreeDelta:
    """Return a tree without nodes on a cache, with room for `slots` nodes per row.

    A tree that grows from it keeps its shape, so growing it compiles no further programs.

    Raises:
        CapacityError: For less than one slot, and for more than the machine's memory holds.
    """
    check_usable(cache)
    slots = check_int("a tree's slots", slots, 1, MAX_SLOTS, CapacityError)
    B = cache.batch
    size = cache_nbytes(cache.config, B, slots, cache.dtype)
    check_memory(size, f"a tree of {slots:,} nodes in {B:,} rows")
    nodes = jax.tree.map(
        lambda x: jnp.zeros((B, slots, *x.shape[2:]), x.dtype), as_segment(cache.tail)
    )
    empty_BS = np.full((B, slots), EMPTY, np.int32)
    return TreeDelta(
        nodes.k, nodes.v, jax.device_put(empty_BS), nodes.token_BS, nodes.patched_BS,
        tuple(x and recurrent_tree.empty_nodes(x, slots) for x in cache.state),
        parent_BS=empty_BS, size=np.int32(0), start_B=cache.next_position_B,
    )  # fmt: skip


class TreePlan(NamedTuple):
    """New nodes of a tree, in a power of two of columns M unless they are traced.

    Attributes:
        parent_BS, size, start_B: Of the grown tree, as in `TreeDelta`.
        first: int32 scalar, the number of the first new node.
        path_BMP: int32, each new node's number, its parent's, and so on; -1 beyond the first.
        position_BM: int32, -1 for padding.
    """

    parent_BS: Any
    size: Any
    start_B: Any
    first: Any
    path_BMP: Any
    position_BM: Any


def plan_tree(
    cache: KVCache | None, parents_BN: Any, tree: Any, shape: tuple[int, ...]
) -> TreePlan:
    """Return where new nodes with these parents are in the tree. shape: of their tokens, `[B, N]`.

    Raises:
        TokenError: Parents of another shape or type, or one that does not come before its child.
        CacheMismatchError: The tree continues a cache of other positions.
    """
    parents_BN = _as_parents(parents_BN, shape)
    B, N = shape
    start_B = np.zeros(B, np.int32) if cache is None else cache.next_position_B
    if tree is not None:
        _check_tree(tree, start_B)
        if cache is not None and _entries(tree) != _entries(cache.tail):
            raise CacheMismatchError("the tree continues a cache of another model or dtype")
    first = np.int32(0) if tree is None else tree.size
    xp = _namespace(parents_BN, first, None if tree is None else tree.parent_BS)
    if xp is np:
        first = np.int32(first)
        _check_order(np.asarray(parents_BN), int(first))
    slots = width = N if xp is jnp else next_power_of_two(N)
    parent_BM = xp.pad(parents_BN, ((0, 0), (0, width - N)), constant_values=EMPTY)
    parent_BS = parent_BM
    if tree is not None:
        old = tree.parent_BS.shape[1]
        if xp is jnp:
            slots = old + N
        else:
            slots = old if first + N <= old else next_power_of_two(int(first) + N)
        before_BS = xp.pad(tree.parent_BS, ((0, 0), (0, slots - old)), constant_values=EMPTY)
        at_S = xp.arange(slots, dtype=np.int32) - first
        placed_BS = xp.where(at_S[None] < N, parent_BM[:, at_S.clip(0, width - 1)], EMPTY)
        parent_BS = xp.where(at_S[None] < 0, before_BS, placed_BS)
    node_M = (first + xp.arange(width, dtype=np.int32)).clip(0, slots - 1)
    path_BMP = ancestors(parent_BS)[:, node_M]
    depth_BM = (path_BMP >= 0).sum(axis=2, dtype=np.int32)
    real_1M = np.arange(width)[None] < N
    xp = _namespace(depth_BM, start_B)
    position_BM = xp.where(real_1M, xp.asarray(start_B)[:, None] + depth_BM - 1, EMPTY)
    return TreePlan(parent_BS, first + np.int32(N), start_B, first, path_BMP, position_BM)


def ancestors(parent_BS: Any) -> Any:
    """Return each node's number, its parent's and so on up to a node without one, then -1.

    Each round doubles the paths, by those of the nodes that they have reached.

    Returns:
        int32 `[B, S, P]` with P a power of two: the least for all paths, or S or more if traced.
    """
    xp, S = _namespace(parent_BS), parent_BS.shape[1]
    path_BSP = xp.broadcast_to(xp.arange(S, dtype=np.int32)[None, :, None], (*parent_BS.shape, 1))
    above_BS = xp.asarray(parent_BS)
    while path_BSP.shape[2] < S and (xp is jnp or (above_BS >= 0).any()):
        at_BS = above_BS.clip(0)
        more_BSP = xp.take_along_axis(path_BSP, at_BS[..., None], axis=1)
        more_BSP = xp.where(above_BS[..., None] >= 0, more_BSP, EMPTY)
        path_BSP = xp.concatenate([path_BSP, more_BSP], axis=2)
        above_BS = xp.where(above_BS >= 0, xp.take_along_axis(above_BS, at_BS, axis=1), EMPTY)
    return path_BSP


def branches_of(path_BMP: jax.Array, position_BM: jax.Array, first: Any, tree: Any) -> Branches:
    """Return what rows of one new node each attend to, in a compiled program."""
    B, M, P = path_BMP.shape
    up_11P = jnp.arange(P, dtype=jnp.int32)[None, None]
    position_BMP = jnp.where(path_BMP >= 0, position_BM[:, :, None] - up_11P, EMPTY)
    row_B11 = jnp.arange(B, dtype=jnp.int32)[:, None, None]
    new_BMP = row_B11 * M + (path_BMP - first).clip(0, M - 1)
    if tree is None:
        return Branches(position_BMP.reshape(-1, P), new_BMP.reshape(-1, P), path_BMP)
    shift = tree.parent_BS.shape[1] - first
    place_BMP = jnp.where(path_BMP < first, path_BMP, path_BMP + shift)
    old_BMP = jnp.where(path_BMP < first, row_B11 * tree.parent_BS.shape[1] + path_BMP, EMPTY)
    old_BMP = jnp.where(path_BMP >= 0, old_BMP, EMPTY)
    position_RP, new_RP, old_RP = (x.reshape(-1, P) for x in (position_BMP, new_BMP, old_BMP))
    return Branches(position_RP, new_RP, place_BMP, old_RP, tree)


def append_nodes(
    tree: TreeDelta, new: Delta, first: jax.Array, slots: int, wait_for: tuple[jax.Array, ...]
) -> Delta:
    """Return the tree's nodes and new ones from number `first` on, in `slots` slots."""
    nodes = as_segment(tree)
    room = slots - nodes.position_BS.shape[1]
    if room:
        free_BS = jnp.full((nodes.position_BS.shape[0], room), EMPTY, jnp.int32)
        position_BS = jnp.concatenate([nodes.position_BS, free_BS], axis=1)
        nodes = jax.tree.map(
            lambda x: jnp.pad(x, ((0, 0), (0, room), *[(0, 0)] * (x.ndim - 2))), nodes
        ).replace(position_BS=position_BS)
    grown = write_at_cursor(first, nodes, cast_delta(new, nodes), wait_for)
    state = tuple(
        old and recurrent_tree.append_nodes(old, x, first, slots)
        for old, x in zip(tree.state, new.state, strict=True)
    )
    return Delta(grown.k, grown.v, grown.position_BS, grown.token_BS, grown.patched_BS, state)


def as_segment(nodes: Segment) -> Segment:
    """Return the fields of a segment alone."""
    return Segment(nodes.k, nodes.v, nodes.position_BS, nodes.token_BS, nodes.patched_BS)


def select_path(tree: TreeDelta, node: Any, next_position_B: Any) -> Delta:
    """Return the delta of the path to a node, int or one per row `[B]`.

    next_position_B: of the cache that it is for.

    Raises:
        TokenError: There is no such node.
        CacheMismatchError: The tree continues a cache of other positions.
    """
    B = tree.parent_BS.shape[0]
    node_B = node if isinstance(node, jax.Array) else check_int_array("node", node, TokenError)
    if not jnp.issubdtype(node_B.dtype, jnp.integer) or node_B.shape not in ((), (B,)):
        raise TokenError(f"node must be a number or one per row, [{B}], got {node!r:.60}")
    _check_tree(tree, next_position_B)
    xp = _namespace(node_B, tree.size, tree.parent_BS)
    if xp is np and (np.min(node_B) < 0 or np.max(node_B) >= tree.size):
        raise TokenError(
            f"node must be from 0 to {int(tree.size) - 1}, got {np.asarray(node_B).tolist()}"
        )
    node_B11 = xp.broadcast_to(node_B, (B,))[:, None, None]
    path_BP = xp.take_along_axis(ancestors(tree.parent_BS), node_B11, axis=1)[:, 0]
    length_B1 = (path_BP >= 0).sum(axis=1, keepdims=True, dtype=np.int32)
    at_1P = xp.arange(path_BP.shape[1], dtype=np.int32)[None]
    order_BP = xp.take_along_axis(path_BP, (length_B1 - 1 - at_1P).clip(0), axis=1)
    path = gather_slots((as_segment(tree),), order_BP.astype(np.int32), order_BP.shape[1])
    position_BP = jnp.where(at_1P < length_B1, path.position_BS, EMPTY)
    state = tuple(x and recurrent_tree.take_nodes(x, order_BP.clip(0)) for x in tree.state)
    return Delta(path.k, path.v, position_BP, path.token_BS, path.patched_BS, state, tree.edits_B)


def _as_parents(parents_BN: Any, shape: tuple[int, ...]) -> Any:
    if not isinstance(parents_BN, jax.Array):
        parents_BN = check_int_array("parents", parents_BN, TokenError)
    if parents_BN.shape != shape:
        raise TokenError(
            f"parents must have the shape of the tokens, {shape}, got {parents_BN.shape}"
        )
    if not jnp.issubdtype(parents_BN.dtype, jnp.integer):
        raise TokenError(f"parents must be integers, got {parents_BN.dtype}")
    if _namespace(parents_BN) is jnp:
        return parents_BN.astype(jnp.int32)
    return np.asarray(parents_BN, np.int64).clip(-(1 << 30), 1 << 30).astype(np.int32)


def _check_order(parents_BN: np.ndarray, first: int) -> None:
    """Raise TokenError unless each parent is -1 or an earlier node."""
    number_N = first + np.arange(parents_BN.shape[1])
    wrong = np.argwhere((parents_BN < EMPTY) | (parents_BN >= number_N))
    if wrong.size:
        row, at = wrong[0]
        raise TokenError(
            f"row {row}: the parent of node {number_N[at]} is {parents_BN[row, at]}, expected an"
            " earlier node or -1, the cache's last token"
        )


def _entries(nodes: Segment) -> list[Any]:
    return [(x.shape[2:], x.dtype) for x in jax.tree.leaves(nodes.k)]


def _check_tree(tree: Any, next_position_B: Any) -> None:
    """Raise CacheMismatchError unless the tree continues a cache with these next positions."""
    if not isinstance(tree, TreeDelta):
        raise CacheMismatchError(
            f"tree must be the delta of forward(..., parents=...), got {type(tree).__name__}"
        )
    if tree.parent_BS.shape[0] != next_position_B.shape[0]:
        raise CacheMismatchError(
            f"the tree has {tree.parent_BS.shape[0]} rows, the cache has {next_position_B.shape[0]}"
        )
    if tree.start_B is next_position_B or _namespace(tree.start_B, next_position_B) is jnp:
        return
    cursors, starts = np.asarray(next_position_B).tolist(), np.asarray(tree.start_B).tolist()
    if cursors != starts:
        raise CacheMismatchError(
            f"the tree continues a cache at positions {starts}, this cache is at {cursors}"
        )


def _namespace(*arrays: Any) -> Any:
    """Return `jax.numpy` if any array is traced, else NumPy."""
    return jnp if any(isinstance(x, jax.core.Tracer) for x in arrays) else np
