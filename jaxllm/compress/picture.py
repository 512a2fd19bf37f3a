"""Quality against bytes: a picture of one recipe's steps, or of many runs."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from jaxllm.compress.report import ORIGINAL, Row
from jaxllm.errors import ConfigError
from jaxllm.files import writing


def pareto(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other one beats: none is as low in both and lower in one. In order of the
    first number; equal points are one.
    """
    front: list[tuple[float, float]] = []
    for point in sorted(set(points)):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front


def plot(runs: Mapping[str, Sequence[Row]], path: Path, title: str) -> None:
    """Write a PNG file: mean KL divergence (log scale) against bytes, the Pareto front marked.

    runs: rows by the run's name, each a path through its steps; `report.read_rows` reads those of a
    file. A point has its step's name; of several runs those on the front have, the others their
    run's colour. What equals the original stands at the foot of the picture: a logarithm has no
    zero.

    Raises ConfigError where matplotlib is not installed or no row has both numbers, CheckpointError
    where the file cannot be written.
    """
    check_plot()
    from matplotlib.figure import Figure

    points = {name: _points(rows) for name, rows in runs.items()}
    measured = [point for found in points.values() for point in found]
    above = [kl for _, _, kl in measured if kl > 0]
    if not measured:
        raise ConfigError("there is nothing to draw: no step's KL divergence was measured")
    foot = min(above, default=1.0) / 3
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.add_subplot()
    for name, found in points.items():
        xs, ys = [x for _, x, _ in found], [max(kl, foot) for _, _, kl in found]
        axes.plot(xs, ys, "o-", alpha=0.7, linewidth=1 if len(runs) == 1 else 0.3, label=name)
    front = pareto((x, kl) for _, x, kl in measured)
    for label, x, kl in measured:
        if len(runs) == 1 or (x, kl) in front:
            at = (x, max(kl, foot))
            axes.annotate(label, at, (6, 6), textcoords="offset points", fontsize=7, rotation=15)
    xs, ys = [x for x, _ in front], [max(kl, foot) for _, kl in front]
    axes.plot(xs, ys, "ko--", linewidth=1, markersize=11, fillstyle="none", label="Pareto front")
    axes.set_yscale("log")
    axes.set(xlabel="MB of parameters", ylabel="mean KL divergence (nats a token)", title=title)
    axes.margins(x=0.2, y=0.1)  # room for names
    if len(measured) > len(above):
        axes.axhline(foot, color="grey", linewidth=0.5)
        axes.annotate("0", (0, foot), xycoords=("axes fraction", "data"), fontsize=8)
    figure.legend(fontsize=8, loc="outside right upper")
    with writing(path) as file:
        figure.savefig(file, format="png", dpi=150)


def check_plot(option: str = "--plot") -> None:
    """Raise ConfigError, before the work, where there is nothing to draw with. option: who asks."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"a plot needs matplotlib: pip install 'jaxllm[notebooks]', or leave out {option}"
        ) from None


def _points(rows: Sequence[Row]) -> list[tuple[str, float, float]]:
    """Step, megabytes and mean KL of what has both; the original's KL is exactly zero."""
    return [
        (row.step, row.bytes / 1e6, 0.0 if row.step == ORIGINAL else row.kl)
        for row in rows
        if row.bytes is not None and row.kl is not None and math.isfinite(row.kl)
    ]
