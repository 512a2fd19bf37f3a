"""What measures speed, lengths and differences: each at the smallest size, and what it says."""

import json
import sys
from pathlib import Path
from typing import Any

import bench_long
import family_speed
import family_table
import load_time
import numpy as np
import pytest
import receptive_field

import jaxllm


@pytest.mark.full
def test_a_length_is_timed_in_a_process_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, picture = tmp_path / "rows.jsonl", tmp_path / "long.png"
    given: Any = {"kinds": "dilated", "measures": "layer", "least": 16, "most": 16, "repeats": 1}
    bench_long.main(**given, limit=100, out=picture, results=rows)
    found = json.loads(rows.read_text())
    assert (found["measure"], found["kind"], found["tokens"]) == ("layer", "dilated", 16)
    assert 0 < found["seconds"] < found["first"], "the first run compiles"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "| layer | dilated | 16 |" in (said := capsys.readouterr().out)
    bench_long.main(**given, limit=0, out=picture, results=rows)  # what is there is kept
    assert capsys.readouterr().out == said


def test_slopes_are_those_of_the_logarithms() -> None:
    assert bench_long.slope({n: 3e-6 * n**2 for n in (1, 2, 4, 8)}) == pytest.approx(2)
    assert bench_long.slope({1: 1.0, 2: 1.0, 4: 1.0, 8: 2.0}) == pytest.approx(1)  # the upper half
    assert np.isnan(bench_long.slope({8: 1.0}))


@pytest.mark.full
def test_nothing_crosses_the_borders_that_are_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    paper = "dilated, by pairs (the paper's)"
    monkeypatch.setattr(receptive_field, "ROWS", {paper: receptive_field.ROWS[paper]})
    receptive_field.draw(36, tmp_path / "field.png")
    assert "0 crossings of 1 borders" in capsys.readouterr().out
    assert (tmp_path / "field.png").exists()


def test_a_process_is_timed_and_weighed(capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-c", "import time; held = b'x' * 100_000_000; time.sleep(0.3)"]
    seconds, resident, own = load_time.run(command, {})
    assert seconds > 0.3
    assert 0.1 < own < 0.2
    assert own < resident  # of the process that started it, too, where that is larger
    with pytest.raises(SystemExit, match="ended with 3: b'no luck'"):
        code = "import sys; sys.stderr.write('no luck'); sys.exit(3)"
        load_time.run([sys.executable, "-c", code], {})


def test_a_file_of_noise_decodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {**family_speed.SQUARE, "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96}
    small |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    monkeypatch.setattr(family_speed, "CONFIGS", {"llama": small})
    family_speed.write("llama", "Q8_0", tmp_path / "noise.gguf")
    lm = jaxllm.load(tmp_path / "noise.gguf")
    logits = np.asarray(jaxllm.forward(lm.model, lm.params, None, [[1, 2, 3]]).logits)
    assert np.isfinite(logits).all()
    assert logits.std() > 0


def test_a_family_has_a_line_of_figures(tmp_path: Path) -> None:
    cells = [cell.strip() for cell in family_table.row("qwen2", tmp_path, 2).strip("|").split("|")]
    assert cells[0] == "qwen2"
    assert all(float(cell) < 1e-4 for cell in cells[2 : 2 + len(family_table.GROUPS)])
    assert cells[-2:] == ["4 of 4", "exact"]
