"""Several adapters beside one model's weights, of which each row of a batch takes one or none.

Their matrices stand one below the other in a leaf; what belongs to another adapter is set to zero
between the two products. So a row's bits do not depend on who else is in the batch, adapters may
differ in rank and in what they are beside, and the choice is data: nothing is compiled anew for it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.adapters.attach import Adapter, leaf_of
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
    dtype = jnp.result_type(*(leaf.a.dtype for leaf in kept)) if _alike(kept) else jnp.float32
    owner = [jnp.full(leaf.scale.shape, n, jnp.int32) for n, leaf in leaves.items()]
    return Adapted(
        weight,
        jnp.concatenate([leaf.a.astype(dtype) for leaf in kept]),
        jnp.concatenate([leaf.b.astype(dtype) for leaf in kept], axis=1),
        jnp.concatenate([leaf.scale for leaf in kept]),
        *_lengths(leaves, count),
        jnp.concatenate(owner),
        site=kept[0].site,
    )


def _alike(leaves: Sequence[Adapted]) -> bool:
    return len({leaf.a.dtype for leaf in leaves}) == 1


def _lengths(
    leaves: Mapping[int, Adapted], count: int
) -> tuple[jax.Array | None, jax.Array | None]:
    """DoRA's lengths and the norms that there are, `[n, O]` each; 1 and 1 where there are none."""
    given = {n: leaf for n, leaf in leaves.items() if leaf.magnitude is not None}
    if not given:
        return None, None
    first = next(iter(given.values())).magnitude
    assert first is not None
    ones = jnp.ones(first.shape, jnp.float32)
    magnitude = [ones] * count
    norm = [ones] * count
    for n, leaf in given.items():
        assert leaf.magnitude is not None
        magnitude[n], norm[n] = leaf.magnitude.astype(jnp.float32), leaf.norms()
    return jnp.stack(magnitude), jnp.stack(norm)
