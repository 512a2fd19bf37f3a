"""Load named adapters from PEFT directories and GGUF files into a model's parameters."""

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm.adapters.multi_lora import with_adapters
from jaxllm.adapters.peft_io import read_adapter
from jaxllm.config.model import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.weights.paths import Params
from jaxllm.weights.types.lora import choose_adapters

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
    given: Any = [adapters] if isinstance(adapters, str | PathLike) else adapters
    if not isinstance(given, Mapping | list | tuple):
        raise ConfigError(f"adapters must be {_EXPECTED}, got {adapters!r:.60}")
    for directory in given.values() if isinstance(given, Mapping) else given:
        if not isinstance(directory, str | PathLike):
            raise ConfigError(f"adapters must be {_EXPECTED}, got {directory!r:.60} among them")
    if isinstance(given, Mapping):
        for name in given:
            if not isinstance(name, str):
                raise ConfigError(f"an adapter's name must be a string, got {name!r:.60}")
        return {name: Path(directory) for name, directory in given.items()}
    found: dict[str, Path] = {}
    for directory in map(Path, given):
        name = directory.resolve().name.removesuffix(".gguf")
        if name in found:
            raise ConfigError(
                f"two adapters have the name {name!r:.60}: {found[name]} and {directory}. Pass"
                " names, {name: directory} (--adapter NAME=DIR)"
            )
        found[name] = directory
    return found
