"""Notebooks: each equals its paired .py file, runs, and reproduces its stored outputs.

Jupyter kernels run in separate processes, because pytest turns their warnings into errors.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import ROOT

SOURCES = sorted((ROOT / "notebooks").glob("*.py"), reverse=True)


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, cwd=cwd
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def stored(source: Path) -> Any:
    return json.loads(source.with_suffix(".ipynb").read_text(encoding="utf-8"))


def without_images(cells: list[Any]) -> list[Any]:
    """Remove images from the cells: rendering may differ between machines."""
    for cell in cells:
        for output in cell.get("outputs", []):
            output.get("data", {}).pop("image/png", None)
    return cells


# A rounding error such as 5e-05: only its magnitude is the same on all processors.
SMALL = r"\b\d(?:\.\d+)?e-\d+\b"


def test_every_notebook_has_paired_script() -> None:
    names = {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert names == {source.stem for source in SOURCES} != set()


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_first_cell_has_install_command_of_colab(source: Path) -> None:
    first = "".join(stored(source)["cells"][0]["source"])
    assert "`%pip install -q 'jaxllm[all]' matplotlib`" in first


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_notebook_execution_reproduces_stored_outputs(source: Path, tmp_path: Path) -> None:
    """Cells and outputs are the stored ones, but for images and the digits of rounding errors."""
    script = ROOT / "scripts" / "tools" / "execute_notebooks.py"
    run(script, source, "--output-dir", tmp_path, cwd=tmp_path)
    again = json.loads((tmp_path / f"{source.stem}.ipynb").read_text(encoding="utf-8"))
    assert again["metadata"] == stored(source)["metadata"]
    shown = without_images(stored(source)["cells"])
    for new, old in zip(without_images(again["cells"]), shown, strict=True):
        new_text, old_text = json.dumps(new), json.dumps(old)
        assert re.sub(SMALL, "_", new_text) == re.sub(SMALL, "_", old_text)
        found = (list(map(float, re.findall(SMALL, text))) for text in (new_text, old_text))
        np.testing.assert_allclose(*found, rtol=0.5)
