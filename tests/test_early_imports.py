"""Early imports: what is put off still works, and a plugin for ROCm is still found."""

import subprocess
import sys
from pathlib import Path

import pytest

from jaxllm.runtime import early_imports

START = """
import importlib.metadata, sys
from jaxllm.runtime import early_imports
search = importlib.metadata.distributions
early_imports.import_jax()
kinds = [type(sys.modules[name]).__name__ for name in ("rich.console", "absl.logging", "yaml")]
assert kinds == 3 * ["_LazyModule"], kinds
assert importlib.metadata.distributions is search
assert early_imports._LateFinder not in sys.meta_path
import jax, yaml
print(yaml.safe_load("[1, 2]"), jax.numpy.arange(3).sum())
"""


def test_late_modules_are_executed_when_used() -> None:
    """In a new process they are put off, and everything else is as without."""
    done = subprocess.run([sys.executable, "-c", START], capture_output=True, text=True)
    assert done.stdout == "[1, 2] 3\n", done.stderr


def test_rocm_plugins_are_searched_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search is left out only if no package has such a plugin's name."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), "missing", __file__])
    assert not early_imports._has_rocm()
    (tmp_path / "jax_rocm7_plugin-1.0.dist-info").mkdir()
    assert early_imports._has_rocm()
