"""Benchmarks at the smallest size: they run and print plausible figures."""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxllm
from jaxllm.errors import ConfigError
from scripts.benchmarks import (
    cluster_table,
    compare_peers,
    experts,
    family_speed,
    family_table,
    first_token,
    format_divergence,
    gpu,
    load_time,
    long,
    patching,
    policy_table,
    prefix_table,
    speculation,
    trees,
)
from tests.conftest import ROOT
from tests.tiny_models import save_random

Printed = pytest.CaptureFixture[str]


def test_compare_peers_refuses_bad_formats() -> None:
    with pytest.raises(ConfigError, match="int7"):
        compare_peers.compare_peers("demo:llama", formats="int7")


@pytest.mark.full
def test_compare_peers_times_each_engine(tmp_path: Path) -> None:
    options: dict[str, Any] = {"formats": "float32", "torch_dtypes": "float32"}
    options |= {"prompts": "8", "depths": "8", "batches": "", "decode": 2, "rounds": 1}
    options |= {"output_format": "json"}
    compare_peers.compare_peers("demo:llama", **options, out=tmp_path / "out.json")
    rows = json.loads((tmp_path / "out.json").read_text())["results"]
    engines = ("jaxllm float32", "transformers float32")
    assert [(r["test"], r["engine"]) for r in rows] == [
        (test, engine) for test in ("pp8", "tg2 @ d8") for engine in engines
    ]
    assert all(r["seconds"][0] > 0 for r in rows)


@pytest.mark.filterwarnings("ignore")
def test_openvino_logits_equal_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenVINO gives transformers' logits for two rows, with the input in one or several pieces."""
    pytest.importorskip("openvino", reason="OpenVINO is not installed")
    import torch
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    from scripts.benchmarks.openvino_engine import compile_model

    save_random(tmp_path, "llama")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, 9))
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)).logits.numpy()
    step, reset = compile_model(str(tmp_path), "float32")
    for pieces in ((5, 1, 1, 2), (9,)):
        reset()
        past = 0
        for length in pieces:
            logits = step(ids[:, past : past + length], past)
            past += length
            np.testing.assert_allclose(logits[:, 0], expected[:, past - 1], atol=2e-5)


@pytest.mark.more
def test_gpu_times_each_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts, a serving loop and training steps have rows; what is longer than asked has none."""
    monkeypatch.setattr(gpu, "NEW", 2)
    monkeypatch.setattr(gpu, "RUNS", 1)
    monkeypatch.setattr(gpu, "DECODING", {"bfloat16": [(1, 0), (2, 8), (1, 99)]})
    monkeypatch.setattr(gpu, "PROMPTS", {"bfloat16": [8, 99]})
    monkeypatch.setattr(gpu, "TRAINING", [(2, 16)])
    monkeypatch.setattr(gpu, "SERVED", (2, 4, 3))
    options = argparse.Namespace(longest=16, rows=2, layers=1, decode_only=False)
    rows = list(gpu.measure("tiny", "bfloat16", options))
    names = ["tg2", "tg2 @ d8 x 2", "pp8", "serve, 2 rows, 4 + 3", "lora step, 2 x 16"]
    assert [row["test"] for row in rows] == [*names, "full step, 2 x 16"]
    assert all(row["rate"] > 0 and row["device"] for row in rows)
    lines = [gpu.describe("tiny", "bfloat16", row) for row in rows]
    assert all(line.count("|") == 10 for line in lines)


@pytest.mark.more
def test_long_times_one_length(tmp_path: Path) -> None:
    rows, picture = tmp_path / "rows.jsonl", tmp_path / "long.png"
    options: Any = {"kinds": "dilated", "measures": "layer", "least": 16, "most": 16, "repeats": 1}
    long.main(**options, limit=100, out=picture, results=rows)
    timing = json.loads(rows.read_text())
    assert 0 < timing["seconds"] < timing["first"], "the first run compiles"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_load_time_measures_child_process() -> None:
    """load_time.run reports the duration and memory of the child process."""
    command = [sys.executable, "-c", "import time; held = b'x' * 100_000_000; time.sleep(0.3)"]
    seconds, resident, anonymous = load_time.run(command, {})
    assert seconds > 0.3
    assert 0.1 < anonymous < 0.2
    assert anonymous < resident  # includes the parent's, before exec, if that is larger


def test_family_speed_writes_loadable_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GGUF file of random weights loads and gives finite logits."""
    small = {**family_speed.SQUARE, "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96}
    small |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    monkeypatch.setattr(family_speed, "CONFIGS", {"llama": small})
    family_speed.write_noise("llama", "Q8_0", tmp_path / "noise.gguf")
    lm = jaxllm.load(tmp_path / "noise.gguf")
    assert np.isfinite(jaxllm.forward(lm.model, lm.params, None, [[1, 2, 3]]).logits).all()


def test_family_table_has_small_differences(tmp_path: Path) -> None:
    cells = [
        cell.strip() for cell in family_table.make_row("qwen2", tmp_path, 2).strip("|").split("|")
    ]
    assert cells[0] == "qwen2"
    assert all(float(cell) < 1e-4 for cell in cells[1 : 1 + len(family_table.GROUPS)])
    assert cells[-2:] == ["4 of 4", "exact"]


@pytest.mark.more
def test_first_token_lists_all_stages(capsys: Printed) -> None:
    """The table of the first token has a row for import, tracing, compiling and both tokens."""
    first_token.main(["-m", str(ROOT / "jaxllm/demo/llama"), "--repetitions", "1"])
    printed = capsys.readouterr().out
    other = "other threads: compiling"
    for stage in ("import jax", "tracing", other, "**first token**", "**second token**"):
        assert f"| {stage} |" in printed


@pytest.mark.full
def test_format_divergence_is_small(monkeypatch: pytest.MonkeyPatch, capsys: Printed) -> None:
    monkeypatch.setattr(format_divergence, "FORMATS", "int8")
    monkeypatch.setattr(sys, "argv", ["format_divergence", "--rows", "2", "--tokens", "24"])
    format_divergence.main()
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[1] for row in rows] == ["exact", "int8"]
    assert 0 < float(rows[0][2].split(" ")[0]) < 0.05


@pytest.mark.full
def test_policy_prefix_and_expert_tables_run(
    monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    policy = "--models demo:llama --lengths 96 --depths 0 --policies full --tries 1"
    prefix = "--prefix 64 --width 16 --rows 2 --steps 2"
    expert = "experts --small --steps 1 --rounds 1 --prompt 8"
    policy_table.main(policy.split())
    prefix_table.main(prefix.split())
    monkeypatch.setattr(sys, "argv", expert.split())
    experts.main()
    printed = capsys.readouterr().out
    assert "full" in printed and "| 64 | 2 x 16 |" in printed


@pytest.mark.full
def test_speculation_tables_run(capsys: Printed) -> None:
    speculation.main(["--rows=8", "--new-tokens=8", "--width=2", "--rounds=1"])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert [len(row) for row in rows] == [7, 1, 7, 7, 7, 1, 6, 1] + [6] * 16


@pytest.mark.more
def test_lookup_table_runs_on_a_text(tmp_path: Path, demo_names: None, capsys: Printed) -> None:
    """A text that repeats itself is looked up, and each sampling has a row per rule."""
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a cat. " * 20, encoding="utf-8")
    sizes = ["--prompt=24", "--rows=1", "--new-tokens=8", "--width=2", "--rounds=1"]
    speculation.main(["--model=demo:gpt2", "--text", str(text), *sizes])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert [len(row) for row in rows] == [5, 1] + [5] * 12
    assert float(rows[3][3]) > 0


def test_scale_page_contains_the_current_table() -> None:
    """docs/scale.md has exactly the table that cluster_table generates."""
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    assert cluster_table.replace_table(page) == page


@pytest.mark.more
def test_patching_equals_hooks(capsys: Printed) -> None:
    """The sweeps of jaxllm, shared and whole, agree with those of PyTorch's hooks."""
    patching.compare_sweeps("small", tokens=24, positions=4, torch_layers=2)
    patching.compare_steering("small", rounds=1)
    printed = capsys.readouterr().out
    assert "3 layers x 4 positions of 24 tokens" in printed
    rows = re.findall(r"^\| .*(?: \| [\d.]+){4} \|$", printed, re.M)
    assert len(rows) == 4 and "steered" in printed


@pytest.mark.more
def test_trees_compare_ways_and_drafts(demo_names: None, capsys: Printed) -> None:
    """Each way has a row; a tree of drafts drafts more and accepts no less than its first chain."""
    options = "--branches 3 --tokens 2 --prompt 8 --rounds 1"
    trees.main(options.split())
    printed = capsys.readouterr().out
    assert len(re.findall(r"^\| 3 \| .* \| \d+ \| [\d.]+ \| [\d.]+ \|$", printed, re.M)) == 7
    assert trees.make_tree(3, 3, True) == [[-1, -1], [0, 1, 0], [2, 3, 4]]
    text = [1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 3, 9] * 3
    (chain, drafted), (tree, more) = (trees.simulate(text, 12, count, 3) for count in (1, 2))
    assert 1 < chain < tree and 0 < drafted < more
