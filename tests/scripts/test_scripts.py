"""Every script is listed in its folder, imports, and names existing files."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

SCRIPTS = [p for p in sorted(ROOT.glob("scripts/*/*.py")) if p.name != "__init__.py"]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script_is_listed_and_its_paths_exist(path: Path) -> None:
    """A script is listed in its folder's docstring, names only existing scripts, and imports."""
    folder = importlib.import_module(f"scripts.{path.parent.name}")
    assert folder.__doc__ and f"\n{path.stem}: " in folder.__doc__
    text = path.read_text(encoding="utf-8")
    named = set(re.findall(r"scripts/\w+/\w+\.\w+", text))
    assert [name for name in named if not (ROOT / name).exists()] == []
    if path.stem != "openvino_engine":  # OpenVINO is an optional dependency
        importlib.import_module(f"scripts.{path.parent.name}.{path.stem}")


@pytest.mark.parametrize("name", ["benchmarks/policy_table.py", "demo_models/story_grammar.py"])
def test_script_runs_as_file(name: str, tmp_path: Path) -> None:
    """A script runs by its path from any working directory."""
    command = [sys.executable, ROOT / "scripts" / name, "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "usage" in done.stdout, done.stderr
