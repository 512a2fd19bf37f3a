"""Pictures of what lenses show."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxllm.files.plots import check_plot, save_figure


def plot_lens(
    pieces: Sequence[str], guesses: Sequence[Sequence[str]], prob_LT: np.ndarray, path: Path
) -> None:
    """Write a picture of the likeliest token after each layer (rows) of each token (columns).

    Args:
        pieces: The text of each token.
        guesses: The text of the likeliest next token, by layer and token.
        prob_LT: Its probability, which is the color.

    Raises:
        ConfigError: if matplotlib is missing.
        CheckpointError: if the file cannot be written.
    """
    check_plot()
    from matplotlib.figure import Figure

    L, T = prob_LT.shape
    figure = Figure(figsize=(1.6 + 0.85 * T, 1.2 + 0.36 * L), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(prob_LT, aspect="auto", origin="lower", cmap="Blues", vmin=0, vmax=1)
    for layer, row in enumerate(guesses):
        for column, guess in enumerate(row):
            color = "white" if prob_LT[layer, column] > 0.6 else "black"
            axes.text(
                column, layer, guess[:11], ha="center", va="center", color=color, fontsize=8,
                parse_math=False,
            )  # fmt: skip
    axes.set_xticks(range(T), pieces, rotation=35, ha="right", fontsize=8)
    for label in axes.get_xticklabels():
        label.set_parse_math(False)
    axes.set_yticks(range(L))
    axes.set(ylabel="after layer", xlabel="token")
    figure.colorbar(image, label="probability")
    save_figure(figure, path)
