"""Varying axes: the mesh axes along which an array differs between devices inside `jax.shard_map`.

Outside of `shard_map` there are none, and these functions change nothing.
"""

from typing import Any, TypeVar

import jax

T = TypeVar("T")


def varying_axes(*trees: Any) -> frozenset[str]:
    """Return the mesh axes along which any array of these pytrees varies."""
    types = [jax.typeof(x).manual_axis_type for x in jax.tree.leaves(trees)]
    return frozenset().union(*(t.varying for t in types))


def match_varying(x: T, *trees: Any) -> T:
    """Mark x as varying along all axes along which these pytrees vary, as loop carries need."""
    axes = varying_axes(*trees)

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - jax.typeof(x).manual_axis_type.varying))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    said: T = jax.tree.map(cast, x)
    return said
