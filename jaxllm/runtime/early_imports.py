"""Faster imports of JAX and Flax, for commands: what neither needs is skipped, put off or mapped.

Imports only light parts of the standard library, because it runs before everything else.
"""

import contextlib
import ctypes
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

# Modules that JAX and Flax import and that jaxllm hardly uses: executed at their first use.
_LATE = frozenset(
    {"rich.console", "rich.table", "rich.text", "yaml", "absl.logging", "unittest.mock", "filelock"}
    | {"pygments", "pygments.lexers", "pygments.formatters"}
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


def begin() -> None:
    """Map JAX's library in another thread, while Python imports other modules; returns at once."""
    sys.meta_path.insert(0, _LateFinder)
    spec = importlib.util.find_spec("jaxlib")
    if os.name == "posix" and spec is not None and spec.origin is not None:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # as JAX does before it loads the library
        path = os.path.join(os.path.dirname(spec.origin), "libjax_common.so")
        # A call of a C function runs without Python's lock, unlike `ctypes.CDLL(path)`.
        arguments = (os.fsencode(path), os.RTLD_LAZY)
        threading.Thread(target=ctypes.CDLL(None).dlopen, args=arguments, daemon=True).start()


def import_jax() -> None:
    """Import JAX without a search of all packages' metadata for a ROCm plugin, if there is none."""
    with _without_metadata() if not _has_rocm() else contextlib.nullcontext():
        import jax  # noqa: F401


def _has_rocm() -> bool:
    """Return whether a package's name begins as those of ROCm plugins do: `jax-rocm`."""
    folders = (path for path in sys.path if os.path.isdir(path))
    names = (name for path in folders for name in os.listdir(path))
    return any(name.lower().replace("-", "_").startswith("jax_rocm") for name in names)


@contextlib.contextmanager
def _without_metadata() -> Iterator[None]:
    search = importlib.metadata.distributions

    def find_none(**context: Any) -> Iterable[importlib.metadata.Distribution]:
        return search(**context) if context else ()

    importlib.metadata.distributions = find_none
    try:
        yield
    finally:
        importlib.metadata.distributions = search
