"""Writing slots: from a cursor on, or slot by slot.

Works on any pytree of arrays `[B, S, ...]`: a segment, its positions alone, or the past of a
fixed-shape program. Writes to slots that do not exist are dropped and change nothing.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.ops import native

NO_SLOT = np.iinfo(np.int32).max  # a slot number beyond every cache

T = TypeVar("T")


def write_slots(old: T, new: T, slot_RT: Any, row_R: Any = None) -> T:
    """Write entries `[R, T, ...]` of `new` to slots of rows of `old`, `[B or 1, S, ...]`.

    Args:
        slot_RT: int32; `NO_SLOT` for entries that are not written.
        row_R: Row of each entry; default: the rows in order, and shared arrays are copied per row.
    """
    rows = slot_RT.shape[0]
    row_R1 = (jnp.arange(rows) if row_R is None else row_R)[:, None]

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        if row_R is None:
            old = jnp.broadcast_to(old, (rows, *old.shape[1:]))
        return old.at[row_R1, slot_RT].set(new, mode="drop")

    written: T = jax.tree.map(put, old, new)
    return written


@jax.custom_jvp
def write_at_cursor(cursor: jax.Array, tail: T, new: T, wait_for: tuple[jax.Array, ...]) -> T:
    """Return the tail with new entries from slot `cursor` on; on a CPU in place if it was donated.

    Entries past the end are dropped. XLA:CPU would rewrite a whole bfloat16 array to change one of
    its slots, so a native kernel writes instead. It is not used on several devices: a cache may be
    sharded, and XLA gathers the arguments of calls that it cannot look into.

    Args:
        wait_for: Arrays computed from the tail before the write, which waits for them (in plain JAX
            for the first only, `[B, T, D]`).
    """
    if not native.is_enabled() or jax.device_count() > 1:
        return _write_leaves(cursor, tail, new, wait_for)

    @jax.custom_batching.custom_vmap
    def kernel(cursor: jax.Array, tail: T, new: T, after: tuple[jax.Array, ...]) -> T:
        new = jax.tree.map(lambda old, x: x.astype(old.dtype), tail, new)
        leaves, structure = jax.tree.flatten(tail)
        written = native.write(cursor, leaves, jax.tree.leaves(new), after)
        grown: T = jax.tree.unflatten(structure, written)
        return grown

    @kernel.def_vmap
    def _(size: int, batched: Any, *args: Any) -> tuple[T, Any]:
        axes = jax.tree.map(lambda b: 0 if b else None, tuple(batched))
        out = jax.vmap(_write_leaves, in_axes=axes)(*args)
        return out, jax.tree.map(lambda _: True, out)

    written: T = jax.lax.platform_dependent(
        cursor, tail, new, wait_for, cpu=kernel, default=_write_leaves
    )
    return written


@write_at_cursor.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return write_at_cursor(*primals), jax.jvp(_write_leaves, primals, tangents)[1]


def _write_leaves(cursor: jax.Array, tail: T, new: T, wait_for: tuple[jax.Array, ...]) -> T:
    new = add_dependency(new, wait_for[0]) if wait_for else new
    written: T = jax.tree.map(lambda old, x: update_window(old, x, cursor), tail, new)
    return written


def add_dependency(new: T, after_BTX: jax.Array) -> T:
    """Make keys and values depend on `wait_for`.

    Without an order between reading a tail and writing to it, XLA first copies all of it.
    """
    last_BT = after_BTX.reshape(*after_BTX.shape[:2], -1)[..., 0].astype(jnp.float32)
    # A zero that XLA cannot fold; negative, since adding it keeps the sign of other zeros.
    zero_BT = jnp.abs(jnp.clip(jnp.nan_to_num(last_BT), -1.0, 1.0)) * -0.0

    def add_zero(x: jax.Array) -> jax.Array:
        if x.ndim < 3:  # positions and ids, which are small
            return x
        return x + zero_BT.reshape(*zero_BT.shape, *[1] * (x.ndim - 2)).astype(x.dtype)

    waiting: T = jax.tree.map(add_zero, new)
    return waiting


def update_window(old_BSX: jax.Array, new_BTX: jax.Array, cursor: jax.Array) -> jax.Array:
    """Return `old` with `new` at slots `cursor ...`; entries past the end are dropped.

    `dynamic_update_slice` would shift such a write back over older slots, so the window that is
    written keeps the old contents where no new token belongs.
    """
    slots = old_BSX.shape[1]
    new_BTX = new_BTX[:, :slots].astype(old_BSX.dtype)
    width = new_BTX.shape[1]
    start = jnp.clip(cursor, 0, slots - width)
    source = jnp.arange(width, dtype=jnp.int32) + start - cursor
    inside = ((source >= 0) & (source < width)).reshape((1, width) + (1,) * (old_BSX.ndim - 2))
    window = jax.lax.dynamic_slice_in_dim(old_BSX, start, width, axis=1)
    moved = jnp.take(new_BTX, jnp.clip(source, 0, width - 1), axis=1)
    return jax.lax.dynamic_update_slice_in_dim(
        old_BSX, jnp.where(inside, moved, window), start, axis=1
    )
