"""A plot of the losses of a run."""

from collections.abc import Sequence
from pathlib import Path

from jaxllm.files.plots import save_figure
from jaxllm.train.loop import StepRecord

SMOOTHING = 20  # the moving mean is over one SHARE-th of the steps


def plot(
    records: Sequence[StepRecord],
    initial_loss: float | None,
    path: Path,
    title: str,
    metric: str | None = None,
) -> None:
    """Write a PNG file: the loss of each step, its moving mean, and the validation loss.

    initial_loss: validation loss before the first step. metric: a further metric of the steps to
    draw instead of the loss. Raises CheckpointError if the file cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    steps = [r.step for r in records]
    losses = [r.loss if metric is None else r.also[metric] for r in records]
    name = "training loss" if metric is None else metric
    held = [(r.step, r.held_out) for r in records if r.held_out is not None]
    held = held if initial_loss is None else [(0, initial_loss), *held]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    width = len(losses) // SMOOTHING | 1  # odd, so that the window is symmetric
    noisy = width > 1
    axes.plot(
        steps, losses, color="tab:blue", linewidth=1, label=name,
        alpha=0.5 if noisy else 1.0, marker="o" if len(losses) == 1 else None,
    )  # fmt: skip
    if noisy:
        axes.plot(steps, moving_mean(losses, width), color="navy", label=f"mean over {width} steps")
    if held:
        axes.plot(*zip(*held, strict=True), "o-", color="tab:orange", label="validation loss")
    axes.set(xlabel="step", ylabel=metric or "loss (nats per token)", title=title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path)


def moving_mean(values: Sequence[float], width: int) -> list[float]:
    """Return the centered moving mean. Near the ends the window shrinks and stays symmetric."""
    means, last = [], len(values) - 1
    for at in range(len(values)):
        reach = min(width // 2, at, last - at)
        near = values[at - reach : at + reach + 1]
        means.append(sum(near) / len(near))
    return means
