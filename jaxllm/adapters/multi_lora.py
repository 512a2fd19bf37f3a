"""Multi-LoRA: several adapters on one model, of which each row of a batch uses one or none.

The adapters' matrices are concatenated in one leaf, and between the two products the components of
other adapters are masked to zero. So a row's result does not depend on the other rows, adapters may
differ in rank and target modules, and changing the choice does not recompile.
"""

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.adapters.attach import Adapter, make_leaf, resolve_adapter, row_norms
from jaxllm.adapters.peft_io import read_adapter
from jaxllm.config.model import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.weights.paths import Params, map_leaves
from jaxllm.weights.types.lora import BASE, LoraWeight, choose_adapters


def with_adapters(config: ModelConfig, params: Params, adapters: Mapping[str, Adapter]) -> Params:
    """Attach adapters to parameters for inference; `choose_adapters` selects among them by index.

    Raises ConfigError for a reserved name, an adapter of another model, or if the parameters
    already have adapters.
    """
    if BASE in adapters or "" in adapters:
        raise ConfigError(f"adapter name {BASE!r} is reserved for the model without an adapter")
    plans = [resolve_adapter(config, adapter) for adapter in adapters.values()]
    each = list(adapters.values())
    owners_of_path: dict[str, dict[str, list[int]]] = {}  # weight path -> module -> adapter indices
    for n, lows in enumerate(plans):
        for module, low in lows.items():
            owners_of_path.setdefault(low.target.path, {}).setdefault(module, []).append(n)

    def attach_leaf(path: str, weight: Any) -> Any:
        if isinstance(weight, LoraWeight):
            raise ConfigError(f"{path} has an adapter already: merge it first")
        for module, owners in owners_of_path.get(path, {}).items():
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
    dora = {n: leaf for n, leaf in leaves.items() if leaf.magnitude is not None}
    if not dora:
        return None, None
    (length,) = {np.asarray(leaf.magnitude).shape for leaf in dora.values()}
    magnitude, norm = np.ones((count, *length), np.float32), np.ones((count, *length), np.float32)
    for n, leaf in dora.items():
        magnitude[n], norm[n] = np.asarray(leaf.magnitude), np.asarray(row_norms(leaf))
    return jax.device_put(magnitude), jax.device_put(norm)


# Paths of adapters: one, several, or a mapping from names.
AdapterPaths = str | Path | Sequence[str | Path] | Mapping[str, str | Path]
_EXPECTED = "directories or GGUF files: one, a list of them, or {name: directory}"


def with_loaded_adapters(
    config: ModelConfig, params: Params, adapters: AdapterPaths
) -> tuple[Params, tuple[str, ...]]:
    """Load and attach adapters, with the first one selected; also return their names.

    Raises CheckpointError for anything but an adapter of this model, ConfigError for duplicate
    names.
    """
    named = {
        name: read_adapter(directory, config, params)
        for name, directory in _name_paths(adapters).items()
    }
    if not named:
        return params, ()
    first = jax.device_put(np.zeros(1, np.int32))
    return choose_adapters(with_adapters(config, params, named), first), tuple(named)


def _name_paths(adapters: AdapterPaths) -> dict[str, Path]:
    """Return the paths by name; the default name is that of the directory or file."""
    directories: Any = [adapters] if isinstance(adapters, str | PathLike) else adapters
    if not isinstance(directories, Mapping | list | tuple):
        raise ConfigError(f"adapters must be {_EXPECTED}, got {adapters!r:.60}")
    for directory in directories.values() if isinstance(directories, Mapping) else directories:
        if not isinstance(directory, str | PathLike):
            raise ConfigError(f"adapters must be {_EXPECTED}, got {directory!r:.60} among them")
    if isinstance(directories, Mapping):
        for name in directories:
            if not isinstance(name, str):
                raise ConfigError(f"an adapter's name must be a string, got {name!r:.60}")
        return {name: Path(directory) for name, directory in directories.items()}
    paths: dict[str, Path] = {}
    for directory in map(Path, directories):
        name = directory.resolve().name.removesuffix(".gguf")
        if name in paths:
            raise ConfigError(
                f"two adapters have the name {name!r:.60}: {paths[name]} and {directory}. Pass"
                " names, {name: directory} (--adapter NAME=DIR)"
            )
        paths[name] = directory
    return paths
