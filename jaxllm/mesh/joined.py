"""Parameters on a mesh as a model of one device has them: to be written, looked at, or changed.

Each is joined when it is wanted. Of several processes all join it together, and what is on its way
to a file, a parameter at a time, is all that any of them has of the others' shares.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxllm.distributed import fetched
from jaxllm.weights.later import Later
from jaxllm.weights.leaves.leaf import Leaf
from jaxllm.weights.leaves.parted import Shares
from jaxllm.weights.paths import Params, map_leaves


def joined(params: Params, names: Callable[[str], tuple[str | None, ...]]) -> Params:
    """The same of one device's form, a `Later` each: shares joined, each in its format, and layers
    of stages apart.

    names: the paths of what stands in one place, one for each stage; None: an empty place.
    """
    found: Params = {}
    for name, value in params.items():
        each = names(name)
        for i, own in enumerate(each):
            if own is None:
                continue
            stage = i if len(each) > 1 else None
            found[own] = map_leaves(partial(_later, stage), {"": value})[""]
    return found


def _later(stage: int | None, _: str, leaf: Any) -> Later:
    """A parameter, or the one of a stage that stands in it."""

    def own(x: jax.Array) -> np.ndarray:  # cut by the host: what devices cut they may add up
        whole = np.asarray(fetched(x))
        return whole if stage is None else whole[stage]

    def read() -> Any:
        here = jax.tree.map(own, leaf)
        return jax.tree.map(_of_shares, here, is_leaf=lambda x: isinstance(x, Shares))

    form = jax.eval_shape(lambda: leaf if stage is None else jax.tree.map(lambda x: x[0], leaf))
    if isinstance(form, Shares) and not isinstance(form.parts, Leaf):
        form = jax.ShapeDtypeStruct(form.shape, form.dtype)
    return Later(read, form)


def _of_shares(x: Any) -> Any:
    """Joined by the host, bit for bit: what devices join they may add up, and -0 is then 0."""
    if not isinstance(x, Shares):
        return x
    if isinstance(x.parts, Leaf):
        return x.joined()
    rows = x.parts.reshape(-1, *x.parts.shape[2:])
    return rows[x.places(rows.ndim)]
