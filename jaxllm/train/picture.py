"""The losses of a run as a picture."""

from collections.abc import Sequence
from pathlib import Path

from jaxllm.files import writing
from jaxllm.train.loop import Record

SMOOTH = 0.9  # of the running mean over the steps' losses


def plot(records: Sequence[Record], before: float | None, path: Path, title: str) -> None:
    """Write a PNG file: the loss of each step, their running mean, and the held-out loss.

    before: the held-out loss before the first step. Raises CheckpointError where the file cannot be
    written.
    """
    from matplotlib.figure import Figure

    steps = [r.step for r in records]
    held = [(r.step, r.held_out) for r in records if r.held_out is not None]
    held = held if before is None else [(0, before), *held]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, [r.loss for r in records], color="tab:blue", alpha=0.25, linewidth=1)
    axes.plot(steps, smoothed([r.loss for r in records]), color="tab:blue", label="trained on")
    if held:
        axes.plot(*zip(*held, strict=True), "o-", color="tab:orange", label="held out")
    axes.set(xlabel="step", ylabel="loss (nats a token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    with writing(path) as file:
        figure.savefig(file, format="png", dpi=150)


def smoothed(values: Sequence[float]) -> list[float]:
    """The exponential running mean, without the pull of its start (as Adam's moments)."""
    found, mean = [], 0.0
    for number, value in enumerate(values, 1):
        mean = SMOOTH * mean + (1 - SMOOTH) * value
        found.append(mean / (1 - SMOOTH**number))
    return found
