"""A report lists the cost of each step, in the numbers of the separate evaluations."""

import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from jaxllm.checkpoints.resume import TensorStore
from jaxllm.compress.pipeline import StepResult, initial_state
from jaxllm.compress.plots import pareto, plot
from jaxllm.compress.recipe import ModelState, parse_line
from jaxllm.compress.registry import STEPS
from jaxllm.compress.report import (
    ORIGINAL,
    ReportRow,
    StepEvaluator,
    as_json,
    as_table,
    read_rows,
    summarize,
)
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.evaluate.likelihood.data import Loader, loader
from jaxllm.evaluate.likelihood.divergence import divergence
from jaxllm.lm import LM
from jaxllm.models import build
from jaxllm.weights.paths import flatten
from jaxllm.weights.quantize import quantize
from tests.compress.models import tiny
from tests.tiny_models import tokens

LINE = parse_line("quantize: rtn int8", STEPS)


@pytest.fixture(scope="module")
def lm() -> LM:
    return tiny("llama")


@pytest.fixture(scope="module")
def text() -> Loader:
    return loader([tokens(1, 61)[0].tolist()], window=24, batch=2)


@pytest.fixture(scope="module")
def one_layer(lm: LM) -> ModelState:
    """One layer, in int8."""
    one = tiny("llama", num_hidden_layers=1)
    params = {name: x for name, x in lm.params.items() if name != "layers.1"}
    return ModelState(one.config, quantize(params, "int8"), lm.model.precision)


def test_evaluator_row_equals_divergence(lm: LM, text: Loader, one_layer: ModelState) -> None:
    """A row's quality numbers equal those of divergence(), also for a model of another
    configuration.
    """
    row = StepEvaluator(lm, text, speed=False).measure("a step", one_layer, 1.5)
    found = divergence(lm.model, lm.params, build(one_layer.config), one_layer.params, text)
    assert (row.step, row.seconds, row.tokens_per_second) == ("a step", 1.5, None)
    numbers = {
        row.kl: found.kl.mean,
        row.kl_error: found.kl.error,
        row.kl_p99: found.kl_p99,
        row.same_top: found.same_top.mean,
        row.ratio: found.perplexity_ratio.mean,
        row.ratio_error: found.perplexity_ratio.error,
        row.perplexity: found.other.perplexity.mean,
        row.perplexity_error: found.other.perplexity.error,
    }
    np.testing.assert_allclose(list(map(float, filter(None, numbers))), [*numbers.values()], 1e-5)


def test_reported_bytes_equal_array_sizes(lm: LM) -> None:
    scale = StepEvaluator(lm, None, speed=False)
    row = scale.measure("", initial_state(lm))
    assert row.bytes == 4 * sum(int(np.prod(x.shape)) for _, x in flatten(lm.params))
    assert row.kl is None


def test_measured_speed_is_positive(lm: LM) -> None:
    speed = StepEvaluator(lm, None).measure("", initial_state(lm)).tokens_per_second
    assert speed is not None
    assert 0 < speed < 1e9


def test_measured_rows_are_reused(
    lm: LM, text: Loader, one_layer: ModelState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale, journal = StepEvaluator(lm, text, speed=False), TensorStore(tmp_path, "ours")
    first = scale.original_row(journal)
    assert (first.step, first.kl, first.same_top, first.ratio) == (ORIGINAL, 0.0, 1.0, 1.0)
    own = journal.child("1", str(LINE))
    row = scale.step_row(StepResult(LINE, one_layer, 2.0, own))
    own.clear("row")
    monkeypatch.setattr(StepEvaluator, "measure", None)
    assert scale.original_row(journal) == first
    assert scale.step_row(StepResult(LINE, None, None, own)) == row
    elsewhere = StepEvaluator(lm, None, speed=False)
    assert elsewhere.step_row(StepResult(LINE, None, None, own)) == ReportRow(step=str(LINE))


ROWS = [
    ReportRow(
        step=ORIGINAL, bytes=4_000_000, perplexity=10.0, kl=0.0, kl_error=0.0, same_top=1.0, ratio=1
    ),
    ReportRow(step="quantize: rtn int8", bytes=1_000_000, kl=0.001234, seconds=2.04),
    ReportRow(step="prune: much", bytes=500_000, kl=0.25, ratio=np.nan, tokens_per_second=12.34),
]


def test_table_has_one_line_per_step() -> None:
    lines = as_table(ROWS).splitlines()
    names = "step MB perplexity ratio mean KL +/- same top-1 tokens/s seconds"
    assert lines[0].split() == names.split()
    assert lines[1].split() == [
        "original",
        "4.00",
        "10.0000",
        "1.0000",
        "0",
        "0",
        "100.00%",
        "-",
        "-",
    ]
    assert lines[2].split()[3:] == ["1.00", "-", "-", "0.00123", "-", "-", "-", "2.0"]
    assert lines[3].split()[2:] == ["0.50", "-", "nan", "0.25", "-", "-", "12.3", "-"]
    assert len(set(map(len, lines))) == 1
    assert summarize(ROWS[1]) == "quantize: rtn int8: MB 1.00, mean KL 0.00123, seconds 2.0"


def test_json_report_contains_all_numbers() -> None:
    """JSON holds every number exactly; NaN becomes null."""
    report = json.loads(as_json(ROWS, {"model": "tiny"}), parse_constant=lambda _: 1 / 0)
    assert report["model"] == "tiny"
    assert [row["bytes"] for row in report["rows"]] == [4_000_000, 1_000_000, 500_000]
    assert report["rows"][2]["ratio"] is None
    assert report["rows"][1]["kl"] == 0.001234


def test_report_round_trips(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_text(as_json(ROWS, {"model": "tiny"}))
    assert read_rows(file)[:2] == ROWS[:2]
    file.write_text('{"rows": [{"step": 1}]}')
    with pytest.raises(CheckpointError, match=r"rows.*step must be a string"):
        read_rows(file)


POINTS = st.tuples(st.integers(0, 6), st.integers(0, 6))


@given(st.lists(POINTS, min_size=1, max_size=12))
def test_pareto_front_equals_brute_force(points: list[tuple[int, int]]) -> None:
    def beaten(p: tuple[int, int]) -> bool:
        return any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)

    assert pareto(points) == sorted({p for p in points if not beaten(p)})


@pytest.mark.parametrize("runs", [{"one": ROWS}, {"one": ROWS, "other": ROWS[:2]}])
def test_plot_draws_one_or_several_runs(runs: Any, tmp_path: Path, figures: list[Any]) -> None:
    """Zero is on the axis, the original is marked there, and labels lie inside the frame."""
    plot(runs, tmp_path / "costs.png", "costs")
    (axes,) = figures[0].axes
    assert 0 in axes.get_yticks()
    marked = next(line for line in axes.lines if line.get_label() == "original")
    assert marked.get_ydata().tolist() == [0]
    frame = axes.get_window_extent()
    for text in axes.texts:
        box = text.get_window_extent()
        assert frame.x0 <= box.x0 <= box.x1 <= frame.x1
        assert frame.y0 <= box.y0 <= box.y1 <= frame.y1
    assert (tmp_path / "costs.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_plot_without_quality_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to plot"):
        plot({"one": [ReportRow(step=ORIGINAL, bytes=1)]}, tmp_path / "costs.png", "")
    assert not (tmp_path / "costs.png").exists()
