"""Sensitivity ranking against quantizing and comparing each group by brute force."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import scipy.special

import jaxllm
from jaxllm.errors import ConfigError
from jaxllm.evaluate.likelihood.data import Loader, loader
from jaxllm.evaluate.likelihood.sensitivity import matrix_groups, measure_sensitivity, plot
from jaxllm.weights.paths import flatten
from jaxllm.weights.quantize import dequantize, quantize
from tests.conftest import Run
from tests.tiny_models import random_model

TEXT = "Once upon a time there was a little dog. It liked to run in the park with a red ball. " * 3
WINDOW = 32


@pytest.fixture(scope="module")
def demo() -> jaxllm.LM:
    return jaxllm.load("demo:llama", dtype="float32")


@pytest.fixture(scope="module")
def made(demo: jaxllm.LM) -> Loader:
    assert demo.tokenizer is not None
    return loader([demo.tokenizer.encode(TEXT, bos=True)], window=WINDOW, batch=3)


def brute_force(demo: jaxllm.LM, made: Loader, rules: list[tuple[str, str]]) -> tuple[float, float]:
    """Return mean KL and same-top share of quantized weights, per window, in float64."""
    changed = dequantize(quantize(demo.params, rules))
    kl, same = [], []
    for span in made.spans:
        ids = made.documents[0][span.start : span.end][None]
        p, q = (
            scipy.special.log_softmax(
                np.asarray(jaxllm.forward(demo.model, w, None, ids).logits[0, :-1], np.float64), -1
            )
            for w in (demo.params, changed)
        )
        kl.append((np.exp(p) * (p - q)).sum(axis=-1))
        same.append(p.argmax(axis=-1) == q.argmax(axis=-1))
    return float(np.concatenate(kl).mean()), float(np.concatenate(same).mean())


@pytest.mark.parametrize(("by", "name"), [("layer", "int4"), ("kind", "int8")])
def test_sensitivity_ranking_equals_brute_force(
    demo: jaxllm.LM, made: Loader, by: str, name: str
) -> None:
    """KL, top share and order equal those of quantizing each group alone, in float64."""
    rows = measure_sensitivity(demo.model, demo.params, made, name, group_by=by)
    assert {row.group: row.regex for row in rows} == matrix_groups(demo.params, by)
    expected = {row.group: brute_force(demo, made, [(row.regex, name)]) for row in rows}
    for row in rows:
        kl, same = expected[row.group]
        assert row.divergence.kl.mean == pytest.approx(kl, rel=5e-3)
        assert row.divergence.same_top.mean == pytest.approx(same, abs=1e-12)
    assert [row.group for row in rows] == sorted(expected, key=lambda g: -expected[g][0])


def test_sensitivity_variants_share_compiled_program(demo: jaxllm.LM, compiled: list[str]) -> None:
    """Other groups and formats compile nothing: dequantized weights run in the same program."""
    windows = loader([demo.encode(TEXT)], window=WINDOW - 5)  # a length no other test uses
    for name in ("int4", "bfloat16"):  # rounding to a format also compiles, per shape
        measure_sensitivity(demo.model, demo.params, windows, name, group_by="kind")
    before = len(compiled)
    for name in ("int4", "bfloat16"):
        assert (
            len(measure_sensitivity(demo.model, demo.params, windows, name, group_by="layer")) >= 5
        )
    assert compiled[before:] == []


def test_sensitivity_reports_bytes_of_formats(demo: jaxllm.LM, made: Loader) -> None:
    """A layer's bytes are 4 per weight in float32 and 2 in bfloat16."""
    rows = measure_sensitivity(demo.model, demo.params, made, "bfloat16", group_by="layer")
    (first, *_) = [r for r in rows
                   if r.group == "layers.0"]  # fmt: skip
    size = sum(
        leaf.size for path, leaf in flatten(demo.params)
        if path.startswith("layers.0.") and leaf.ndim == 2
    )  # fmt: skip
    assert (first.bytes_before, first.bytes_after) == (4 * size, 2 * size)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_matrix_groups_cover_each_matrix_once(family: str) -> None:
    _, params = random_model(family)
    matrices = [path for path, leaf in flatten(params) if leaf.ndim == 2]
    sizes = {}
    for by in ("layer", "kind", "module"):
        found = matrix_groups(params, by)
        sizes[by] = len(found)
        covered = [p for regex in found.values() for p in matrices if re.fullmatch(regex, p)]
        assert sorted(covered) == sorted(matrices)
    outside = 2  # token embeddings, and the head (llama) or the positions (gpt2)
    kinds = (len(matrices) - outside) // 2
    assert sizes == {"layer": 2 + outside, "kind": kinds + outside, "module": len(matrices)}
    names = {"llama": "mlp.down_proj", "gpt2": "attn.c_attn"}
    assert names[family] in matrix_groups(params, "kind")


def test_sensitivity_refuses_bad_arguments(demo: jaxllm.LM, made: Loader) -> None:
    with pytest.raises(ConfigError, match="by must be one of layer, kind, module"):
        measure_sensitivity(demo.model, demo.params, made, "int8", group_by="head")
    with pytest.raises(ConfigError, match="int5"):
        measure_sensitivity(demo.model, demo.params, made, "int5")


def test_sensitivity_command_prints_and_plots_ranking(
    run: Run, demo: jaxllm.LM, made: Loader, tmp_path: Path
) -> None:
    """`sensitivity` lists groups by falling KL, as text and as JSON, and writes the plot."""
    file, picture = tmp_path / "text", tmp_path / "ranking.png"
    file.write_text(TEXT, encoding="utf-8")
    command = ("sensitivity", "demo:llama", "--text", f"@{file}", "--by", "kind")
    command += ("--window", WINDOW, "--batch", 3, "--dtype", "float32")
    status, out, err = run(*command, "--plot", picture)
    assert status == 0
    assert f"{len(made.spans)} windows of {WINDOW}" in err
    report = json.loads(run(*command, "--json")[1])
    kl = [row["kl"] for row in report["groups"]]
    assert kl == sorted(kl, reverse=True)
    assert [line.split()[0] for line in out.splitlines()[1:]] == [
        row["group"] for row in report["groups"]
    ]
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    assert {path.name for path in tmp_path.iterdir()} == {"text", "ranking.png"}


def test_plot_handles_zero_divergence(tmp_path: Path, demo: jaxllm.LM, made: Loader) -> None:
    """A ranking in which every divergence is 0 is plotted."""
    rows = measure_sensitivity(demo.model, demo.params, made, "float32", group_by="layer")
    assert all(row.divergence.kl.mean == 0 for row in rows)
    plot(rows, tmp_path / "plot.png", "nothing changed")
    assert (tmp_path / "plot.png").stat().st_size > 1000
