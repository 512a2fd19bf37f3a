"""Heatmap of a context over time: attention per token, culled and repaired entries.

One decision: a cell is the attention share of one iteration, not an average, so that the picture
shows the model's attention and not the loop's smoothing.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

MAX_LABELS = 120  # tokens; labels of longer texts would overlap
CULLED, HATCH, REPAIRED = "#d9d9de", "#a9a9b2", "#2fd4c5"
TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)  # percent


def draw(
    path: Path,
    share_PI: np.ndarray,
    repaired_PI: np.ndarray,
    pieces: Sequence[str],
    title: str,
) -> None:
    """Write a PNG of positions P (down) by iterations I (right).

    Args:
        share_PI: share of an iteration's attention; NaN before a token exists and after culling.
        repaired_PI: bool; the entries that step 0 of an iteration recomputed.
        pieces: the text of each token; further positions are omitted.
    """
    share_PI, repaired_PI = share_PI[: len(pieces)], repaired_PI[: len(pieces)]
    P, I = share_PI.shape  # noqa: E741
    height = float(np.clip(0.155 * P + 1.7, 4, 20))
    figure = Figure((float(np.clip(0.155 * I + 4.2, 8, 24)), height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    present_PI = ~np.isnan(share_PI)
    culled_PI = ~present_PI & np.maximum.accumulate(present_PI, axis=1)
    edges_I, edges_P = np.arange(I + 1) - 0.5, np.arange(P + 1) - 0.5

    def mesh(values_PI: np.ndarray, shown_PI: np.ndarray, **style: Any) -> QuadMesh:
        return axes.pcolormesh(edges_I, edges_P, np.ma.array(values_PI, mask=~shown_PI), **style)

    percent_PI = 100 * share_PI
    # So that a few tiny shares cost no contrast.
    low = max(float(np.nanpercentile(percent_PI, 1)), TICKS[0])
    high = max(float(np.nanmax(percent_PI)), 2 * low)
    norm = LogNorm(low, high, clip=True)
    bright: ScalarMappable = mesh(percent_PI, present_PI, norm=norm, cmap="inferno")
    for left, row in _find_culled(culled_PI):
        axes.barh(
            row, I - 0.5 - left, 1, left, color=CULLED, edgecolor=HATCH, hatch="////", linewidth=0
        )
    row_R, column_R = np.nonzero(repaired_PI)
    square: dict[str, Any] = {"marker": "s", "fillstyle": "none", "linestyle": "none"}
    square |= {"markersize": 3.6, "color": REPAIRED}
    axes.plot(column_R, row_R, **square)

    axes.set(xlim=(-0.5, I - 0.5), ylim=(P - 0.5, -0.5), xlabel="iteration")
    axes.set_title(
        title, loc="left", fontsize=12, pad=26 if culled_PI.any() or repaired_PI.any() else 8
    )
    axes.tick_params(length=2, labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    if P <= MAX_LABELS:
        labels = [f"{_format_label(piece)}  {p}" for p, piece in enumerate(pieces)]
        axes.set_yticks(range(P), labels, fontsize=7, parse_math=False)
        axes.set_ylabel("token and position")
    else:
        axes.set_ylabel("position")
    marks: list[Artist] = []
    if culled_PI.any():
        marks.append(Patch(facecolor=CULLED, edgecolor=HATCH, hatch="////", label="culled"))
    if repaired_PI.any():
        marks.append(Line2D([], [], label="repaired by step 0", **square))
    placement: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.005, 1.0), "ncols": 2}
    axes.legend(handles=marks, frameon=False, fontsize=8.5, borderpad=0.2, **placement)
    bar = figure.colorbar(bright, ax=axes, fraction=0.03, pad=0.015, aspect=35, extend="min")
    bar.set_label("share of this iteration's attention (%)", fontsize=9)
    ticks = [tick for tick in TICKS if low <= tick <= high]
    bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks], fontsize=8)
    bar.minorticks_off()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the font lacks some scripts
        figure.savefig(path, format="png")


def _find_culled(culled_PI: np.ndarray) -> list[tuple[float, int]]:
    """Return the left edge and the row of each culled token; a culled token stays culled."""
    return [(int(row.argmax()) - 0.5, p) for p, row in enumerate(culled_PI) if row.any()]


def _format_label(piece: str) -> str:
    """Return a token's text with visible white space, at most 16 characters."""
    label = piece.replace(" ", "·").replace("\n", "⏎").replace("\t", "⇥")
    return label if len(label) <= 16 else f"{label[:15]}…"
