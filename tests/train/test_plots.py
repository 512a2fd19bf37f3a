"""The loss plot of a training run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.train.loop import StepRecord
from jaxllm.train.plots import moving_mean, plot


@pytest.mark.parametrize(("count", "labels"), [(9, 2), (80, 3)])
def test_plot_draws_and_labels_every_loss(
    count: int, labels: int, figures: list[Any], tmp_path: Path
) -> None:
    """A long run also has a moving mean, and the ticks are integer steps."""
    losses = 6 * 0.9 ** np.arange(count)
    records = [
        StepRecord(n, float(x), 1.0, 1.0, float(x) if n % 3 == 0 else None, {})
        for n, x in enumerate(losses, 1)
    ]
    plot(records, 6.5, tmp_path / "losses.png", "losses")
    (axes,) = figures[0].axes
    lines = {str(line.get_label()): line for line in axes.lines}
    np.testing.assert_array_equal(lines["training loss"].get_ydata(), losses)
    assert len(lines) == labels == len(axes.get_legend_handles_labels()[0])
    assert lines["validation loss"].get_xdata()[0] == 0
    assert all(tick == round(tick) for tick in axes.get_xticks())
    mean = lines.get("mean over 5 steps")
    if mean is not None:
        assert mean.get_ydata()[-1] == losses[-1]


def test_moving_mean_is_centered_and_exact_at_ends() -> None:
    """The moving mean of a linear sequence is the sequence itself."""
    line = [3.0, 5.0, 7.0, 9.0, 11.0, 13.0]
    assert moving_mean(line, 5) == line
    assert moving_mean([0.0, 3.0, 0.0, 3.0, 6.0], 3) == [0.0, 1.0, 2.0, 3.0, 6.0]
