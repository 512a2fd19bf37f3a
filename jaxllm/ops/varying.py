"""What differs from device to device inside `jax.shard_map`, as the types of its arrays say.

Outside of it nothing does, and these functions change nothing.
"""

from typing import Any, TypeVar

import jax

T = TypeVar("T")


def varying(*trees: Any) -> frozenset[str]:
    """The axes of the mesh along which some array of these pytrees differs."""
    types = [jax.typeof(x).manual_axis_type for x in jax.tree.leaves(trees)]
    return frozenset().union(*(t.varying for t in types))


def varying_as(x: T, *trees: Any) -> T:
    """x, said to differ along all axes along which these do: as the carry of a loop must be."""
    axes = varying(*trees)

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - jax.typeof(x).manual_axis_type.varying))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    said: T = jax.tree.map(cast, x)
    return said
