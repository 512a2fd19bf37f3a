"""The measures of a parity report against brute force and hand values."""

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxllm.evaluate.parity.activations import example_case
from jaxllm.evaluate.parity.compare import (
    TOLERANCES,
    Report,
    Tolerance,
    compare_greedy,
    measure,
    to_json,
    to_text,
    ulp_distance,
)

STRICT = TOLERANCES["float32"]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_ulp_distance_equals_rank_difference(dtype: Any) -> None:
    """The distance of two values equals their distance in the sorted list of all finite values."""
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    with np.errstate(invalid="ignore"):
        every = np.unique(every[np.isfinite(every)].astype(np.float64))
    rng = np.random.default_rng(0)
    i, j = rng.integers(0, len(every), (2, 4000))
    j[:2000] = np.clip(i[:2000] + rng.integers(-5, 6, 2000), 0, len(every) - 1)
    found = ulp_distance(every[i].astype(dtype), every[j].astype(dtype))
    np.testing.assert_array_equal(found, np.abs(i - j))


def test_ulp_distance_counts_nextafter_steps() -> None:
    """float32 distances count nextafter steps; -0 equals 0, and NaN has the largest distance."""
    start = np.array([1.0, -1e-30, 1e-45, 0.0, 3.1e38, -7.25], np.float32)
    stepped = start
    for steps in range(9):
        np.testing.assert_array_equal(ulp_distance(start, stepped), [steps] * 6)
        stepped = np.nextafter(stepped, np.float32(-np.inf))
    assert ulp_distance(np.float32([-0.0]), np.float32([0.0])) == 0
    nan = ulp_distance(np.float32([np.nan]), np.float32([1.0]))
    assert nan == np.iinfo(np.int64).max


def test_measure_rejects_nan_and_unmatched_infinity() -> None:
    """NaN, or an infinity only in the reference, exceeds any tolerance; equal ones are no error."""
    ours = np.float32([1.0, np.nan, 3.0])
    found = measure("x", ours, np.float32([1.0, 2.0, 3.0]), Tolerance(1e9))
    assert found.beyond == 1
    assert not found.holds
    infinite = np.float32([1.0, np.inf])
    assert measure("x", infinite, infinite, STRICT).max_error == 0
    assert measure("x", np.float32([1.0, 2.0]), infinite, STRICT).beyond > 0


def test_tolerance_is_relative_to_reference() -> None:
    """Bounds are 0.01 x the reference's largest value (at least 1) + 0.1 x each of its values: here
    1.1, 0.3, 1.1 and 0.1.
    """
    theirs = np.float32([10, 2, -10, 0])
    for off, beyond in (([1.09, 0.29, -1.09, 0.09], 0), ([1.11, 0.31, -1.11, -0.11], 4)):
        found = measure("x", theirs + np.float32(off), theirs, Tolerance(0.01, 0.1))
        assert found.beyond == beyond
        assert found.holds == (beyond == 0)
    small = np.float32([0.5])  # the scale is at least 1: a bound of 0.01 + 0.05
    assert measure("x", small + np.float32(0.059), small, Tolerance(0.01, 0.1)).holds
    assert not measure("x", small + np.float32(0.061), small, Tolerance(0.01, 0.1)).holds


def test_greedy_margin_is_measured_at_first_disagreement() -> None:
    """A row counts at the first step where its tokens differ, with the reference's margin; the
    allowed margin is 2 x atol x the largest logit.
    """
    theirs = np.array([[[5.0, 1, 2], [6, 1, 2], [0, 3, 2.75]], [[1, 4, 3], [3.5, 4, 3], [7, 6, 0]]])
    ours = np.array([[[5.0, 1, 2], [6, 1, 2], [0, 3, 3.5]], [[1, 4, 3], [5, 3, 3.5], [7, 6, 0]]])
    found = compare_greedy(ours, theirs, Tolerance(1e-5))
    assert (found.compared, found.agreed) == (6, 4)
    # Ordered by step, then row: row 1 differs at step 1 (margin 4 - 3.5), row 0 only at step 2.
    assert found.first == {"row": 1, "step": 1, "reference": 1, "ours": 0, "margin": 0.5}
    assert found.worst_margin == 0.5
    assert found.allowed_margin == 1e-3
    assert not found.holds
    # 2 x atol x the largest logit, 7: both logits may be off by the tolerance.
    loose = compare_greedy(ours, theirs, Tolerance(0.04))
    assert loose.allowed_margin == pytest.approx(0.56)
    assert loose.holds


def _tiny_report() -> Report:
    found = measure("x", np.float32([1, 2]), np.float32([1, np.nan]), STRICT)
    greedy = compare_greedy(np.ones((1, 1, 2)), np.ones((1, 1, 2)), STRICT)
    return Report("a", "b", "float32", STRICT, (found,), (), greedy)


def test_report_json_contains_no_nan() -> None:
    """A report with NaN errors is valid JSON, with null in their place."""
    data = to_json(_tiny_report())
    assert json.loads(json.dumps(data, allow_nan=False)) == json.loads(json.dumps(data))
    assert data["stages"][0]["max_error"] is None
    assert data["first_diverging"] == "x"
    assert data["holds"] is False


def test_text_report_fits_100_columns() -> None:
    """The table is at most 100 columns wide and shows that 1 of 2 values is equal."""
    lines = to_text(_tiny_report()).splitlines()
    assert max(map(len, lines)) <= 100
    assert "equal" in lines[0] + lines[1]
    assert next(line for line in lines if line.startswith("x ")).split()[6:8] == ["50.0%", "50.0%"]


def test_example_case_is_deterministic_with_unequal_rows() -> None:
    """example_case gives the same rows of 9 and 6 tokens each time, random or taken from a text."""
    case = example_case(None, 131, 9)
    np.testing.assert_array_equal(case.token_BT, example_case(None, 131, 9).token_BT)
    assert (case.position_BT >= 0).sum(axis=1).tolist() == [9, 6]
    text = example_case(list(range(100)), 131, 9)
    assert text.token_BT.tolist() == [list(range(9)), [0, 0, 0, *range(9, 15)]]
