"""The table of families and meshes, of cells that were found before."""

import json
import sys
from pathlib import Path

import mesh_matrix
import pytest

GOOD = {"logits": 3e-7, "trained": 2e-6, "generated": True, "drawn": True, "served": True}


def test_cells_that_are_known_are_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [
        (["llama", "tensor=2", "int8"], GOOD),
        (["llama", "stage=4", "int8"], {**GOOD, "served": False, "logits": 1e-3}),
        (["llama", "tensor=8", "int8"], {"error": "it does not divide"}),
    ]
    out = tmp_path / "table.md"
    out.with_suffix(".jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in cells))
    meshes = ["tensor=2", "stage=4", "tensor=8"]
    asked = ["--families", "llama", "--precisions", "int8", "--meshes", *meshes, "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["mesh_matrix.py", *asked])
    monkeypatch.setattr(mesh_matrix, "cell", None)
    monkeypatch.setattr(mesh_matrix.jax.config, "update", lambda *_: None)
    mesh_matrix.main()
    assert out.read_text().splitlines()[-1] == (
        "| llama | 3e-07 / 2e-06 | 1e-03 / 2e-06, not served, too far | it does not divide |"
    )
