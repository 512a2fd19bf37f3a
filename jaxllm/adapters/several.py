"""Multi-LoRA: several adapters on one model, of which each row of a batch uses one or none.

The adapters' matrices are concatenated in one leaf, and between the two products the components of
other adapters are masked to zero. So a row's result does not depend on the other rows, adapters may
differ in rank and target modules, and changing the choice does not recompile.
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

BASE = "base"  # the model without an adapter


def with_adapters(config: ModelConfig, params: Params, adapters: Mapping[str, Adapter]) -> Params:
    """Attach adapters to parameters for inference; `choose` selects among them by index.

    Raises ConfigError for a reserved name, or if the parameters already have adapters.
    """
    if BASE in adapters or "" in adapters:
        raise ConfigError(f"adapter name {BASE!r} is reserved for the model without an adapter")
    plans = [plan(config, adapter.config) for adapter in adapters.values()]
    each = list(adapters.values())
    beside: dict[str, dict[str, list[int]]] = {}  # weight path -> module -> adapter indices
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
    """Return an adapter's index by name; NONE for "base" or None.

    Raises ConfigError for an unknown name.
    """
    if name is None or name == BASE:
        return NONE
    if name not in names:
        there = ", ".join([*names, BASE])
        raise ConfigError(f"no adapter {name!r:.60}{nearest(str(name), names)}; loaded are {there}")
    return list(names).index(name)


def _together(weight: Any, leaves: Mapping[int, Adapted], count: int) -> Adapted:
    """Combine the leaves of a module's adapters into one; count: number of adapters in all."""
    kept = list(leaves.values())
    dtypes = {leaf.a.dtype for leaf in kept}
    dtype = dtypes.pop() if len(dtypes) == 1 else jnp.dtype(jnp.float32)

    def joined(arrays: Sequence[Any], axis: int = 0) -> np.ndarray:  # in numpy: JAX would compile
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
    """Return DoRA's magnitudes and row norms, `[n, O]` each; both are 1 for LoRA adapters."""
    given = {n: leaf for n, leaf in leaves.items() if leaf.magnitude is not None}
    if not given:
        return None, None
    (length,) = {np.asarray(leaf.magnitude).shape for leaf in given.values()}
    magnitude, norm = np.ones((count, *length), np.float32), np.ones((count, *length), np.float32)
    for n, leaf in given.items():
        magnitude[n], norm[n] = np.asarray(leaf.magnitude), np.asarray(norms(leaf))
    return jax.device_put(magnitude), jax.device_put(norm)
