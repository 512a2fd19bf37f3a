"""Parameters on a mesh as a model of one device has them, to be written.

Of several processes the first has them, and writes; a process never has more of another's share
than the one array that is on its way.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from jaxllm.distributed import at_first
from jaxllm.weights.leaves.leaf import Leaf
from jaxllm.weights.leaves.parted import Shares
from jaxllm.weights.paths import Params, map_leaves


def joined(params: Params, names: Callable[[str], tuple[str, ...]]) -> Params:
    """The same on the host: shares joined, each in its format, and layers of stages apart.

    names: the paths of what stands in one place, one for each stage.
    """
    found: Params = {}
    for name, value in params.items():
        each, here = names(name), map_leaves(_on_host, {"": value})
        for i, own in enumerate(each):
            stage = i if len(each) > 1 else None
            found[own] = map_leaves(partial(_whole, stage), here)[""]
    return found


def _on_host(_: str, leaf: Any) -> Any:
    return jax.tree.map(at_first, leaf)


def _whole(stage: int | None, _: str, leaf: Any) -> Any:
    mine = leaf if stage is None else jax.tree.map(lambda x: x[stage], leaf)
    return jax.tree.map(_of_shares, mine, is_leaf=lambda x: isinstance(x, Shares))


def _of_shares(x: Any) -> Any:
    """Joined by the host, bit for bit: what devices join they may add up, and -0 is then 0."""
    if not isinstance(x, Shares):
        return x
    if isinstance(x.parts, Leaf):
        return x.joined()
    rows = x.parts.reshape(-1, *x.parts.shape[2:])
    return at_first(rows[x.places(rows.ndim)])
