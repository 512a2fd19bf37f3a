"""Parameters gathered from a mesh, as a model on one device has them: to write, inspect or change.

Each is gathered when it is needed. Several processes gather it together; each of them then holds
only the parameter that is being written, one at a time.
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
    """Return the parameters of the unsharded model, a `Later` each.

    Shards are merged in their own format, and the layers of pipeline stages are separated.

    Args:
        names: gives the paths of the entries of a stacked parameter, one per stage; None: empty.
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
    """Return one parameter, or a stage's entry of a stacked one."""

    def own(x: jax.Array) -> np.ndarray:  # sliced on the host: devices may slice by summing
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
    """Merge shards on the host, bit for bit: a device may merge by summing, and -0 becomes 0."""
    if not isinstance(x, Shares):
        return x
    if isinstance(x.parts, Leaf):
        return x.joined()
    rows = x.parts.reshape(-1, *x.parts.shape[2:])
    return rows[x.places(rows.ndim)]
