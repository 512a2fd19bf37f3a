"""Load named adapters from PEFT directories and GGUF files into a model's parameters."""

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm.adapters.files import read_adapter
from jaxllm.adapters.several import with_adapters
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.weights.leaves.adapted import choose
from jaxllm.weights.paths import Params

# Paths of adapters: one, several, or a mapping from names.
Adapters = str | Path | Sequence[str | Path] | Mapping[str, str | Path]
_EXPECTED = "directories or GGUF files: one, a list of them, or {name: directory}"


def with_directories(
    config: ModelConfig, params: Params, adapters: Adapters
) -> tuple[Params, tuple[str, ...]]:
    """Load and attach adapters, with the first one selected; also return their names.

    Raises CheckpointError for anything but an adapter of this model, ConfigError for duplicate
    names.
    """
    named = {
        name: read_adapter(directory, config, params)
        for name, directory in _named(adapters).items()
    }
    if not named:
        return params, ()
    first = jax.device_put(np.zeros(1, np.int32))
    return choose(with_adapters(config, params, named), first), tuple(named)


def _named(adapters: Adapters) -> dict[str, Path]:
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
