"""Recall results as a table, as JSON and as heat maps."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.evaluate.needle.grid import Cell
from jaxllm.files.plots import save_figure


def table(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield a table's lines: for each policy, a row per depth and a column per length.

    Entries are percentages of texts: those whose right answer was the most likely, and after a
    slash those that greedy decoding answers correctly.
    """
    for policy, group in group_by_policy(cells).items():
        lengths = list(dict.fromkeys(cell.length for cell in group))
        yield f"{policy:14}" + "".join(f"{length:>11,}" for length in lengths)
        for depth in dict.fromkeys(cell.depth for cell in group):
            row = [cell for cell in group if cell.depth == depth]
            shown = "".join(f"{_percent(c.right, c):>6} /{_percent(c.greedy, c):>3}" for c in row)
            yield f"  depth {depth:<6.2f}{shown}"


def to_records(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return the cells as JSON-able dicts, with shares and the chance level."""
    return [
        {
            **cell.__dict__,
            "share": cell.share,
            "greedy_share": cell.greedy / cell.tries,
            "chance": 1 / cell.choices,
        }
        for cell in cells
    ]


def plot(
    maps: Mapping[str, Sequence[Cell]], path: Path, title: str, *, columns: int = 3, dpi: int = 150
) -> None:
    """Write a PNG file of heat maps, each titled with its name, over lengths and depths.

    maps: cells by name, of one policy (see `group_by_policy`) or model each; missing cells stay
        empty.
    columns: maximum number of maps in a row. Raises CheckpointError if the file cannot be written.
    """
    from matplotlib.figure import Figure

    cells = [cell for group in maps.values() for cell in group]
    lengths = sorted({cell.length for cell in cells})
    depths = sorted({cell.depth for cell in cells})
    columns = min(columns, len(maps))
    down = math.ceil(len(maps) / columns)
    figure = Figure(figsize=(1 + 3.6 * columns, 0.8 + 2.6 * down), layout="constrained")
    all_axes = figure.subplots(down, columns, squeeze=False)
    image = None
    for axes, (name, group) in zip(all_axes.flat, maps.items(), strict=False):
        share = {(c.depth, c.length): c.share for c in group}
        map_DL = np.array([[share.get((d, n), np.nan) for n in lengths] for d in depths])
        image = axes.imshow(map_DL, vmin=0, vmax=1, cmap="cividis", aspect="auto")
        for (row, column), value in np.ndenumerate(map_DL):
            label = "" if np.isnan(value) else f"{value:.0%}"
            ink = "black" if value > 0.5 else "white"  # the color map gets lighter
            axes.text(column, row, label, ha="center", va="center", fontsize=8, color=ink)
        axes.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths], fontsize=7)
        axes.set_yticks(range(len(depths)), [f"{d:.0%}" for d in depths], fontsize=7)
        axes.set_title(name, fontsize=9)
    for axes in all_axes.flat[len(maps) :]:
        axes.axis("off")
    figure.supxlabel("text length in tokens", fontsize=8)
    figure.supylabel("depth of the fact", fontsize=8)
    chance = max(1 / cell.choices for cell in cells)
    figure.suptitle(f"{title}; chance: {chance:.0%}", fontsize=10)
    if image is not None:
        figure.colorbar(image, ax=all_axes, label="share of right answers", shrink=0.8)
    save_figure(figure, path, dpi=dpi)


def group_by_policy(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """Group the cells by policy, in order."""
    names = dict.fromkeys(cell.policy for cell in cells)
    return {name: [cell for cell in cells if cell.policy == name] for name in names}


def _percent(count: int, cell: Cell) -> str:
    return f"{100 * count / cell.tries:.0f}"
