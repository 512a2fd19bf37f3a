"""Figures of scripts/benchmarks/memory.py against array sizes."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.benchmarks import memory


@pytest.mark.skipif(not memory.read_memory().resident, reason="needs /proc of Linux")
def test_generate_reports_memory(tmp_path: Path) -> None:
    """The report has sizes of weights, cache, loading peak and total peak in range, and fills the
    compile cache.
    """
    (weights, cache, loaded), peak = memory.run(
        memory.generate, "demo:llama", "int8", "int8", 20, 4, programs=str(tmp_path)
    )
    assert any(tmp_path.iterdir())
    assert 1.0e6 < weights < 1.6e6  # a million 8-bit weights, and the norms
    assert 0 < cache < 1e6
    assert 1e8 < loaded <= peak.resident < 1e9
    assert 0 < peak.anonymous < peak.resident
    with pytest.raises(subprocess.CalledProcessError):
        memory.run_command(["false"], {})


def test_mesh_holds_planned_bytes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mesh = "data=2,tensor=2"
    monkeypatch.setattr(sys, "argv", ["memory.py", "mesh", "demo:llama", "--meshes", mesh])
    assert memory.main() == 0
    *_, line = capsys.readouterr().out.splitlines()
    name, *cells = line.strip("| ").split(" | ")
    held, planned, total, growth = map(float, cells)
    assert (name, held, total) == (mesh, planned, 4 * held)
    assert 0 <= growth < 1000


def test_sharded_logits_need_less_memory_and_traffic() -> None:
    """Sharded logits need no gathered logits: less memory, and no logits or gradients are sent."""
    arguments = memory.compile_logits, "tensor=2", 2003, 4, 32
    (took, sharded_took, sent, sharded_sent), _ = memory.run(*arguments, devices=2)
    whole, shard = (4 * 32 * n * 4 for n in (2004, 1002))
    assert took - sharded_took >= whole - shard
    assert sent - sharded_sent == whole + shard  # gathered logits, and their scattered gradient
    assert sharded_sent == 0
