"""The losses of a run as a picture."""

from collections.abc import Sequence
from pathlib import Path

from jaxllm.files import writing
from jaxllm.train.loop import Record

SHARE = 20  # the mean of a step is over this part of a run's steps


def plot(records: Sequence[Record], before: float | None, path: Path, title: str) -> None:
    """Write a PNG file: the loss of each step, the mean around each, and the held-out loss.

    before: the held-out loss before the first step. Raises CheckpointError where the file cannot be
    written.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    steps, losses = [r.step for r in records], [r.loss for r in records]
    held = [(r.step, r.held_out) for r in records if r.held_out is not None]
    held = held if before is None else [(0, before), *held]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    width = len(losses) // SHARE | 1  # odd: as many before a step as after
    noisy = width > 1
    axes.plot(
        steps, losses, color="tab:blue", linewidth=1, label="trained on, each step",
        alpha=0.5 if noisy else 1.0, marker="o" if len(losses) == 1 else None,
    )  # fmt: skip
    if noisy:
        axes.plot(steps, means(losses, width), color="navy", label=f"mean of {width} steps")
    if held:
        axes.plot(*zip(*held, strict=True), "o-", color="tab:orange", label="held out")
    axes.set(xlabel="step", ylabel="loss (nats a token)", title=title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
    with writing(path) as file:
        figure.savefig(file, format="png", dpi=150)


def means(values: Sequence[float], width: int) -> list[float]:
    """Return the mean around each value: of those up to width / 2 away, as many before as after, so
    that it neither lags behind nor leaves the values at the ends.
    """
    found, last = [], len(values) - 1
    for at in range(len(values)):
        reach = min(width // 2, at, last - at)
        near = values[at - reach : at + reach + 1]
        found.append(sum(near) / len(near))
    return found
