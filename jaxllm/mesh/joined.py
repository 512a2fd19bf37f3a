"""Parameters on a mesh as a model of one device has them, to be written."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxllm.weights.leaves.leaf import Leaf
from jaxllm.weights.leaves.parted import Shares
from jaxllm.weights.paths import Params, map_leaves


def joined(params: Params, names: Callable[[str], tuple[str, ...]]) -> Params:
    """The same on the host: shares joined, but for quantized ones, and layers of stages apart.

    names: the paths of what stands in one place, one for each stage.
    """
    found: Params = {}
    for name, value in params.items():
        each = names(name)
        for i, own in enumerate(each):
            number = i if len(each) > 1 else None
            found[own] = map_leaves(partial(_whole, number), {"": value})[""]
    return found


def _whole(stage: int | None, _: str, leaf: Any) -> Any:
    mine = leaf if stage is None else jax.tree.map(lambda x: x[stage], leaf)
    mine = jax.tree.map(_of_shares, mine, is_leaf=lambda x: isinstance(x, Shares))
    return jax.tree.map(np.asarray, mine)


def _of_shares(x: Any) -> Any:
    return x.dense() if isinstance(x, Shares) and not isinstance(x.parts, Leaf) else x
