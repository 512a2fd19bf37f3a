"""Parameters gathered from a mesh, as a model on one device has them: to write, inspect or change.

Each is gathered when it is needed. Several processes gather it together; each of them then holds
only the parameter that is being written, one at a time.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxllm.runtime.multihost import to_host
from jaxllm.sharding.shard_list import ShardList
from jaxllm.weights.lazy_gather import LazyWeight
from jaxllm.weights.paths import Params, map_leaves
from jaxllm.weights.types.base import WeightBase


def gather_lazy(params: Params, names: Callable[[str], tuple[str | None, ...]]) -> Params:
    """Return the parameters of the unsharded model, a `LazyWeight` each.

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
            found[own] = map_leaves(partial(_lazy_weight, stage), {"": value})[""]
    return found


def _lazy_weight(stage: int | None, _: str, leaf: Any) -> LazyWeight:
    """Return one parameter, or a stage's entry of a stacked one."""

    def own(x: jax.Array) -> np.ndarray:  # sliced on the host: devices may slice by summing
        whole = np.asarray(to_host(x))
        return whole if stage is None else whole[stage]

    def read() -> Any:
        here = jax.tree.map(own, leaf)
        return jax.tree.map(_merge_shards, here, is_leaf=lambda x: isinstance(x, ShardList))

    form = jax.eval_shape(lambda: leaf if stage is None else jax.tree.map(lambda x: x[0], leaf))
    if isinstance(form, ShardList) and not isinstance(form.shards, WeightBase):
        form = jax.ShapeDtypeStruct(form.shape, form.dtype)
    return LazyWeight(read, form)


def _merge_shards(x: Any) -> Any:
    """Merge shards on the host, bit for bit: a device may merge by summing, and -0 becomes 0."""
    if not isinstance(x, ShardList):
        return x
    if isinstance(x.shards, WeightBase):
        return x.merge()
    rows = x.shards.reshape(-1, *x.shards.shape[2:])
    return rows[x.row_index(rows.ndim)]
