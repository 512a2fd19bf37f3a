"""A faster import of JAX and Flax, for commands: what a command does not need is put off."""

import contextlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

# Modules that JAX and Flax import and that commands hardly use.
_LATE = frozenset(
    {"rich.console", "rich.table", "rich.text", "yaml", "absl.logging", "unittest.mock", "filelock"}
    | {"pygments.lexers", "pygments.formatters", "jax.extend.pallas"}
    | {"jaxlib.mosaic.python.tpu"}
)


class _LateFinder:
    """Finds the modules of `_LATE`; `importlib.util.LazyLoader` executes them when used."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _LATE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = importlib.util.LazyLoader(spec.loader)
        return spec


def import_jax() -> None:
    """Import JAX and Flax, without the modules of `_LATE` until they are used.

    JAX also reads the metadata of all packages to find a plugin for ROCm. That search is left out
    if no package's name begins as those of such plugins do.
    """
    sys.meta_path.insert(0, _LateFinder)
    try:
        with contextlib.nullcontext() if _has_rocm() else _without_metadata():
            import jax  # noqa: F401
        import flax.linen  # noqa: F401
    finally:
        sys.meta_path.remove(_LateFinder)


def _has_rocm() -> bool:
    folders = (path for path in sys.path if os.path.isdir(path))
    names = (name for path in folders for name in os.listdir(path))
    return any(name.lower().replace("-", "_").startswith("jax_rocm") for name in names)


@contextlib.contextmanager
def _without_metadata() -> Iterator[None]:
    """Find no packages when all are asked for."""
    search = importlib.metadata.distributions

    def search_named(**context: Any) -> Iterable[importlib.metadata.Distribution]:
        return search(**context) if context else ()

    importlib.metadata.distributions = search_named
    try:
        yield
    finally:
        importlib.metadata.distributions = search
