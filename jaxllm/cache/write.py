"""The one place where slots are written: from a cursor on, or slot by slot.

What is written is any pytree of arrays `[B, S, ...]` (a segment, its positions alone, the past of a
fixed shape). A slot that there is not is written nowhere, and no other slot changes.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.ops import native

NOWHERE = np.iinfo(np.int32).max  # a slot that no cache has

T = TypeVar("T")


def at_slots(old: T, new: T, slot_RT: Any, row_R: Any = None) -> T:
    """`old`, `[B or 1, S, ...]`, with entries `[R, T, ...]` of `new` at these slots of these rows.

    slot_RT: int32, `NOWHERE` for what is not to be written. row_R: by default the rows in order;
    what all rows share gets rows of its own then.
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
def at_cursor(cursor: jax.Array, tail: T, new: T, after: tuple[jax.Array, ...]) -> T:
    """The tail with new entries from slot `cursor` on; on a CPU in place where it was donated.

    What would run past the end is dropped. after: what was made by reading the tail as it was; the
    write waits for it (in plain JAX for the first, `[B, T, D]`). XLA:CPU rewrites a whole bfloat16
    array to change one slot of it. Where there are several devices the kernel is not asked: a cache
    may be spread over them, and what the compiler cannot look into it is given whole.
    """
    if not native.enabled() or jax.device_count() > 1:
        return _each_at_cursor(cursor, tail, new, after)

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
        out = jax.vmap(_each_at_cursor, in_axes=axes)(*args)
        return out, jax.tree.map(lambda _: True, out)

    written: T = jax.lax.platform_dependent(
        cursor, tail, new, after, cpu=kernel, default=_each_at_cursor
    )
    return written


@at_cursor.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return at_cursor(*primals), jax.jvp(_each_at_cursor, primals, tangents)[1]


def _each_at_cursor(cursor: jax.Array, tail: T, new: T, after: tuple[jax.Array, ...]) -> T:
    new = waiting(new, after[0]) if after else new
    written: T = jax.tree.map(lambda old, x: window_at_cursor(old, x, cursor), tail, new)
    return written


def waiting(new: T, after_BTX: jax.Array) -> T:
    """Keys and values that are not there before `after` is. Without an order between reading a tail
    and writing into it XLA copies all of it first.
    """
    last_BT = after_BTX.reshape(*after_BTX.shape[:2], -1)[..., 0].astype(jnp.float32)
    # A zero that XLA cannot know to be one, whose sign leaves that of other zeros alone.
    zero_BT = jnp.abs(jnp.clip(jnp.nan_to_num(last_BT), -1.0, 1.0)) * -0.0

    def later(x: jax.Array) -> jax.Array:
        if x.ndim < 3:  # where tokens are, which is small
            return x
        return x + zero_BT.reshape(*zero_BT.shape, *[1] * (x.ndim - 2)).astype(x.dtype)

    waiting: T = jax.tree.map(later, new)
    return waiting


def window_at_cursor(old_BSX: jax.Array, new_BTX: jax.Array, cursor: jax.Array) -> jax.Array:
    """`old` with `new` at slots `cursor ...`; what would run past the end is dropped.

    `dynamic_update_slice` shifts such a write back over older slots, so the window that it does
    write is filled with the old contents wherever no new token belongs.
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
