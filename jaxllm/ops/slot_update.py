"""Writing slots: from a cursor on, or slot by slot.

Works on any pytree of arrays `[B, S, ...]`: a segment, its positions alone, or the past of a
fixed-shape program. Writes to slots that do not exist are dropped and change nothing.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.ops import native

NO_SLOT = np.iinfo(np.int32).max  # a slot number beyond every cache

T = TypeVar("T")


def write_slots(
    old: T, new: T, slot_RT: Any, row_R: Any = None, wait_for: tuple[jax.Array, ...] = ()
) -> T:
    """Write entries `[R, T, ...]` of `new` to slots of rows of `old`, `[B or 1, S, ...]`.

    Args:
        slot_RT: int32; `NO_SLOT` for entries that are not written.
        row_R: Row of each entry, or `[R, P]` the rows that have its slots, one after another;
            default: the rows in order, and shared arrays are copied per row.
        wait_for: As for `write_at_cursor`.
    """
    rows = slot_RT.shape[0]
    if row_R is None:
        old = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape[1:])), old)
        row_R = jnp.arange(rows, dtype=jnp.int32)
    elif row_R.ndim == 2:
        size, slot_RT = jax.tree.leaves(old)[0].shape[1], jnp.asarray(slot_RT)
        place: Any = {"axis": 1, "mode": "fill", "fill_value": NO_SLOT}
        row_R = jnp.take_along_axis(jnp.asarray(row_R), slot_RT // size, **place).reshape(-1)
        slot_RT = (slot_RT % size).reshape(-1, 1)
        new = jax.tree.map(lambda x: x.reshape(row_R.size, 1, *x.shape[2:]), new)
    return _write(_write_entries, (jnp.asarray(row_R), jnp.asarray(slot_RT)), old, new, wait_for)


def _write_entries(
    places: tuple[jax.Array, jax.Array], old: T, new: T, wait_for: tuple[jax.Array, ...]
) -> T:
    row_R, slot_RT = places
    written: T = jax.tree.map(
        lambda x, new: x.at[row_R[:, None], slot_RT].set(new, mode="drop"), old, new
    )
    return written


def write_at_cursor(cursor: jax.Array, tail: T, new: T, wait_for: tuple[jax.Array, ...]) -> T:
    """Return the tail with new entries from slot `cursor` on; on a CPU in place if it was donated.

    Entries past the end are dropped.

    Args:
        wait_for: Arrays computed from the tail before the write, which waits for them (in plain JAX
            for the first only, `[B, T, D]`).
    """
    return _write(_write_leaves, cursor, tail, new, wait_for)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _write(
    plain: Callable[..., Any], places: Any, old: Any, new: Any, wait_for: tuple[jax.Array, ...]
) -> Any:
    """Return `plain(places, old, new, wait_for)`, by a native kernel if there is one.

    XLA:CPU would rewrite a whole bfloat16 array to change one of its slots. The kernel is not used
    on several devices: a cache may be sharded, and XLA gathers the arguments of calls that it
    cannot look into.

    Args:
        places: Rows and slots, or a cursor for all rows.
    """
    if not native.is_enabled() or jax.device_count() > 1:
        return plain(places, old, new, wait_for)

    @jax.custom_batching.custom_vmap
    def kernel(places: Any, old: Any, new: Any, wait_for: tuple[jax.Array, ...]) -> Any:
        leaves, structure = jax.tree.flatten(old)
        fresh = [x.astype(y.dtype) for x, y in zip(jax.tree.leaves(new), leaves, strict=True)]
        if isinstance(places, tuple):
            row_R, slot_RT = places
        else:
            rows, width = fresh[0].shape[:2]
            row_R = jnp.arange(rows, dtype=jnp.int32)
            slot_RT = jnp.broadcast_to(places + jnp.arange(width, dtype=jnp.int32), (rows, width))
        written = native.write(row_R, slot_RT, leaves, fresh, wait_for)
        return jax.tree.unflatten(structure, written)

    @kernel.def_vmap
    def _(size: int, batched: Any, *args: Any) -> tuple[Any, Any]:
        axes = jax.tree.map(lambda b: 0 if b else None, tuple(batched))
        out = jax.vmap(plain, in_axes=axes)(*args)
        return out, jax.tree.map(lambda _: True, out)

    return jax.lax.platform_dependent(places, old, new, wait_for, cpu=kernel, default=plain)


@_write.defjvp
def _(plain: Callable[..., Any], primals: Any, tangents: Any) -> Any:
    return _write(plain, *primals), jax.jvp(plain, primals, tangents)[1]


def _write_leaves(cursor: jax.Array, tail: T, new: T, wait_for: tuple[jax.Array, ...]) -> T:
    new = delay_entries(new, wait_for[0]) if wait_for else new
    written: T = jax.tree.map(lambda old, x: update_window(old, x, cursor), tail, new)
    return written


def delay_entries(new: T, after_BTX: jax.Array) -> T:
    """Make keys and values depend on `after_BTX`, row by row, so that a mesh moves nothing.

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
