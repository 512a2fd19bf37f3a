"""Several adapters beside one model's weights, of which each row of a batch takes one or none.

Their matrices stand one below the other in a leaf; what belongs to another adapter is set to zero
between the two products. So a row's bits do not depend on who else is in the batch, adapters may
differ in rank and in what they are beside, and the choice is data: nothing is compiled anew for it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.adapters.attach import Adapter, leaf_of, norms
from jaxllm.adapters.targets import plan
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError, nearest
from jaxllm.weights.leaves.adapted import NONE, Adapted
from jaxllm.weights.paths import Params, map_leaves

BASE = "base"  # the name of none


def with_adapters(config: ModelConfig, params: Params, adapters: Mapping[str, Adapter]) -> Params:
    """The parameters with adapters beside them, in order, for inference: `choose` says which.

    Raises ConfigError for a name that means none, or parameters that have adapters already.
    """
    if BASE in adapters or "" in adapters:
        raise ConfigError(f"no adapter can be called {BASE!r}: that names the model without one")
    plans = [plan(config, adapter.config) for adapter in adapters.values()]
    each = list(adapters.values())
    beside: dict[str, dict[str, list[int]]] = {}  # path of the leaf: module: whose
    for n, lows in enumerate(plans):
        for module, low in lows.items():
            beside.setdefault(low.target.path, {}).setdefault(module, []).append(n)

    def around(path: str, weight: Any) -> Any:
        if isinstance(weight, Adapted):
            raise ConfigError(f"{path} has an adapter already: merge it first")
        for module, whose in beside.get(path, {}).items():
            leaves = {
                n: leaf_of(weight, plans[n][module], each[n].matrices[module], each[n].config)
                for n in whose
            }
            weight = _together(weight, leaves, len(each))
        return weight

    return map_leaves(around, params)


def number_of(name: str | None, names: Sequence[str]) -> int:
    """The number of an adapter by its name; NONE for "base" or None.

    Raises ConfigError for a name that none of them has.
    """
    if name is None or name == BASE:
        return NONE
    if name not in names:
        there = ", ".join([*names, BASE])
        raise ConfigError(f"no adapter {name!r:.60}{nearest(str(name), names)}; there are {there}")
    return list(names).index(name)


def _together(weight: Any, leaves: Mapping[int, Adapted], count: int) -> Adapted:
    """One leaf of those that adapters have beside a module; `count` adapters there are in all."""
    kept = list(leaves.values())
    dtypes = {leaf.a.dtype for leaf in kept}
    dtype = dtypes.pop() if len(dtypes) == 1 else jnp.dtype(jnp.float32)

    def joined(arrays: Sequence[Any], axis: int = 0) -> np.ndarray:  # JAX's would be compiled
        return np.concatenate([np.asarray(x) for x in arrays], axis=axis)

    a_KI = joined([np.asarray(leaf.a).astype(dtype) for leaf in kept])
    b_OK = joined([np.asarray(leaf.b).astype(dtype) for leaf in kept], axis=1)
    owner_K = joined([np.full(leaf.scale.shape, n, np.int32) for n, leaf in leaves.items()])
    scale_K = joined([leaf.scale for leaf in kept])
    a_KI, b_OK, scale_K, owner_K = jax.device_put((a_KI, b_OK, scale_K, owner_K))
    lengths = _lengths(leaves, count)
    return Adapted(weight, a_KI, b_OK, scale_K, *lengths, owner_K, site=kept[0].site)


def _lengths(
    leaves: Mapping[int, Adapted], count: int
) -> tuple[jax.Array | None, jax.Array | None]:
    """DoRA's lengths and the norms that there are, `[n, O]` each; 1 and 1 where there are none."""
    given = {n: leaf for n, leaf in leaves.items() if leaf.magnitude is not None}
    if not given:
        return None, None
    (length,) = {np.asarray(leaf.magnitude).shape for leaf in given.values()}
    magnitude, norm = np.ones((count, *length), np.float32), np.ones((count, *length), np.float32)
    for n, leaf in given.items():
        magnitude[n], norm[n] = np.asarray(leaf.magnitude), np.asarray(norms(leaf))
    return jax.device_put(magnitude), jax.device_put(norm)
