"""Multi-LoRA: several adapters on one model, of which each row of a batch uses one or none.

The adapters' matrices are concatenated in one leaf, and between the two products the components of
other adapters are masked to zero. So a row's result does not depend on the other rows, adapters may
differ in rank and target modules, and changing the choice does not recompile.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.adapters.attach import Adapter, make_leaf, row_norms
from jaxllm.adapters.targets import resolve_targets
from jaxllm.config.model import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.weights.paths import Params, map_leaves
from jaxllm.weights.types.lora import BASE, LoraWeight


def with_adapters(config: ModelConfig, params: Params, adapters: Mapping[str, Adapter]) -> Params:
    """Attach adapters to parameters for inference; `choose_adapters` selects among them by index.

    Raises ConfigError for a reserved name, or if the parameters already have adapters.
    """
    if BASE in adapters or "" in adapters:
        raise ConfigError(f"adapter name {BASE!r} is reserved for the model without an adapter")
    plans = [resolve_targets(config, adapter.config) for adapter in adapters.values()]
    each = list(adapters.values())
    beside: dict[str, dict[str, list[int]]] = {}  # weight path -> module -> adapter indices
    for n, lows in enumerate(plans):
        for module, low in lows.items():
            beside.setdefault(low.target.path, {}).setdefault(module, []).append(n)

    def attach_leaf(path: str, weight: Any) -> Any:
        if isinstance(weight, LoraWeight):
            raise ConfigError(f"{path} has an adapter already: merge it first")
        for module, owners in beside.get(path, {}).items():
            leaves = {
                n: make_leaf(weight, plans[n][module], each[n].matrices[module], each[n].config)
                for n in owners
            }
            weight = _stack_leaves(weight, leaves, len(each))
        return weight

    return map_leaves(attach_leaf, params)


def _stack_leaves(weight: Any, leaves: Mapping[int, LoraWeight], count: int) -> LoraWeight:
    """Combine the leaves of a module's adapters into one; count: number of adapters in all."""
    each = list(leaves.values())
    dtypes = {leaf.a.dtype for leaf in each}
    dtype = dtypes.pop() if len(dtypes) == 1 else jnp.dtype(jnp.float32)
    # In numpy: JAX would compile.
    a_KI = np.concatenate([np.asarray(leaf.a).astype(dtype) for leaf in each])
    b_OK = np.concatenate([np.asarray(leaf.b).astype(dtype) for leaf in each], axis=1)
    owner_K = np.concatenate([np.full(leaf.scale.shape, n, np.int32) for n, leaf in leaves.items()])
    scale_K = np.concatenate([np.asarray(leaf.scale) for leaf in each])
    a_KI, b_OK, scale_K, owner_K = jax.device_put((a_KI, b_OK, scale_K, owner_K))
    lengths = _stack_magnitudes(leaves, count)
    return LoraWeight(weight, a_KI, b_OK, scale_K, *lengths, owner_K, site=each[0].site)


def _stack_magnitudes(
    leaves: Mapping[int, LoraWeight], count: int
) -> tuple[jax.Array | None, jax.Array | None]:
    """Return DoRA's magnitudes and row norms, `[n, O]` each; both are 1 for LoRA adapters."""
    given = {n: leaf for n, leaf in leaves.items() if leaf.magnitude is not None}
    if not given:
        return None, None
    (length,) = {np.asarray(leaf.magnitude).shape for leaf in given.values()}
    magnitude, norm = np.ones((count, *length), np.float32), np.ones((count, *length), np.float32)
    for n, leaf in given.items():
        magnitude[n], norm[n] = np.asarray(leaf.magnitude), np.asarray(row_norms(leaf))
    return jax.device_put(magnitude), jax.device_put(norm)
