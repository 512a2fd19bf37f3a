"""The notebooks tell the truth: each is its .py file, runs, and gives the outputs it shows.

Kernels and their sockets stay in processes of their own, away from pytest's warnings-are-errors.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

SOURCES = sorted((ROOT / "notebooks").glob("*.py"))
each_notebook = pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, cwd=cwd
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def stored(source: Path) -> Any:
    return json.loads(source.with_suffix(".ipynb").read_text(encoding="utf-8"))


def without_images(cells: list[Any]) -> list[Any]:
    """The cells, their pictures left out: how a line is drawn may differ between machines."""
    for cell in cells:
        for output in cell.get("outputs", []):
            output.get("data", {}).pop("image/png", None)
    return cells


def test_every_notebook_is_a_pair() -> None:
    names = {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert names == {source.stem for source in SOURCES} != set()


@pytest.mark.full  # every day the next test: what is run comes from the .py file, cell by cell
@each_notebook
def test_the_pair_agrees(source: Path, tmp_path: Path) -> None:
    converted = run("-m", "jupytext", "--to", "ipynb", "--output", "-", source, cwd=tmp_path)

    def text(notebook: Any) -> list[tuple[str, str]]:
        return [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]

    assert text(json.loads(converted)) == text(stored(source))


@each_notebook
def test_running_it_gives_what_it_shows(source: Path, tmp_path: Path) -> None:
    script = ROOT / "scripts" / "execute_notebooks.py"
    run(script, source, "--output-dir", tmp_path, cwd=tmp_path)
    again = json.loads((tmp_path / f"{source.stem}.ipynb").read_text(encoding="utf-8"))
    assert again["metadata"] == stored(source)["metadata"]
    shown = without_images(stored(source)["cells"])
    for new, old in zip(without_images(again["cells"]), shown, strict=True):
        assert new == old
