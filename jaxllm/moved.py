"""Modules that have moved: importing one by its old name works for one release, and says so.

Installed by `import jaxllm`. What the names are now is the whole of it; delete a row, and in the
end the file, with the release after.
"""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_ROOMS = {
    ("decode", "sampling"): "constraints options penalties readers truncation",
    ("decode", "loops"): "beam contrastive generate guidance overflow speculative",
    ("decode", "batching"): "batch draws places plan serve",
    ("evaluate", "equivalence"): "difference reference report sides stages vectors",
    ("evaluate", "likelihood"): "data divergence passes perplexity score sensitivity windows",
}
MODULES = {
    "jaxllm.export": "jaxllm.fixed.export",
    "jaxllm.exported": "jaxllm.fixed.exported",
    "jaxllm.weights.qtensor": "jaxllm.weights.leaves.integers",
    **{
        f"jaxllm.{floor}.{name}": f"jaxllm.{floor}.{room}.{name}"
        for (floor, room), names in _ROOMS.items()
        for name in names.split()
    },
}


def install() -> None:
    """Have the old names found, once."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def attribute(package: str, module: str, name: str) -> Any:
    """What a module had that is a package now; Python asks for it where the package has none."""
    if name.startswith("__") or not hasattr(found := importlib.import_module(module), name):
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    _warn(f"{package}.{name}", f"{module}.{name}", 4)
    return getattr(found, name)


def _warn(old: str, new: str, level: int) -> None:
    text = f"{old} is {new} now; the old name goes with the next release"
    warnings.warn(text, DeprecationWarning, stacklevel=level)


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MODULES else None

    def exec_module(self, module: ModuleType) -> None:
        new = MODULES[module.__name__]
        _warn(module.__name__, new, 3)
        there = vars(importlib.import_module(new))
        vars(module).update({k: v for k, v in there.items() if not k.startswith("__")})
