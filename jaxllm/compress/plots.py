"""Plots of quality against bytes: of the steps of one recipe, or of many runs."""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from jaxllm.compress.report import ORIGINAL, ReportRow
from jaxllm.errors import ConfigError
from jaxllm.files.plots import check_plot, save_figure


def pareto(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the Pareto front of points to minimize, by the first number, without duplicates."""
    front: list[tuple[float, float]] = []
    for point in sorted(set(points)):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front


def plot(runs: Mapping[str, Sequence[ReportRow]], path: Path, title: str) -> None:
    """Write a PNG file: mean KL divergence (log scale) against bytes, with the Pareto front.

    Each run is a line through its steps. Points are labelled with their step; of several runs, only
    those on the front are. A star marks the original, whose divergence is exactly 0: the scale is
    linear below its lowest decade.

    Args:
        runs: Rows by the run's name; `report.read_rows` reads those of a file.

    Raises:
        ConfigError: If matplotlib is not installed, or no row has both numbers.
        CheckpointError: If the file cannot be written.
    """
    check_plot()
    from matplotlib.figure import Figure

    points = {name: _measured_points(rows) for name, rows in runs.items()}
    measured = list(dict.fromkeys(point for run_points in points.values() for point in run_points))
    if not measured:
        raise ConfigError("nothing to plot: no step has a measured KL divergence")
    lowest = min((kl for _, _, kl in measured if kl > 0), default=1.0)
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.add_subplot()
    for name, run_points in points.items():
        if all(step == ORIGINAL for step, _, _ in run_points):
            continue
        xs, ys = [x for _, x, _ in run_points], [kl for _, _, kl in run_points]
        axes.plot(xs, ys, "o-", alpha=0.7, linewidth=1 if len(runs) == 1 else 0.3, label=name)
    front = pareto((x, kl) for _, x, kl in measured)
    axes.plot(*zip(*front, strict=True), "ko--", linewidth=1, markersize=11, fillstyle="none",
              label="Pareto front")  # fmt: skip
    originals = [(x, kl) for step, x, kl in measured if step == ORIGINAL]
    if originals:
        axes.plot(*zip(*originals, strict=True), "k*", markersize=13, label="original")
    linear = 10 ** math.floor(math.log10(lowest))
    axes.set_yscale("symlog", linthresh=linear, linscale=0.5)
    axes.set_ylim(bottom=-0.2 * linear)  # keep the whole star at 0 visible
    axes.set(xlabel="MB of parameters", ylabel="mean KL divergence (nats per token)", title=title)
    axes.margins(x=0.1, y=0.1)
    middle = sum(axes.get_xlim()) / 2
    for label, x, kl in measured:
        if len(runs) == 1 or (x, kl) in front:
            right = x > middle  # put the label where there is room
            axes.annotate(
                textwrap.fill(label, 44), (x, kl), (-8 if right else 8, 8),
                textcoords="offset points", fontsize=7, ha="right" if right else "left",
            )  # fmt: skip
    figure.legend(fontsize=8, loc="outside right upper")
    save_figure(figure, path)


def _measured_points(rows: Sequence[ReportRow]) -> list[tuple[str, float, float]]:
    """Return (step, MB, mean KL) of the rows with both; the original's KL is exactly zero."""
    return [
        (row.step, row.bytes / 1e6, 0.0 if row.step == ORIGINAL else row.kl)
        for row in rows
        if row.bytes is not None and row.kl is not None and math.isfinite(row.kl)
    ]
