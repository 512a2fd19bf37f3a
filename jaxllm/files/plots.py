"""Plots by matplotlib, which is optional."""

import warnings
from pathlib import Path
from typing import Any

from jaxllm.errors import requires_extra
from jaxllm.files.atomic import atomic_file


def check_plot(option: str = "--plot") -> None:
    """Raise ConfigError if matplotlib is missing. option: what needs it, for the message."""
    with requires_extra("notebooks", option):
        import matplotlib  # noqa: F401


def save_figure(figure: Any, path: Path, dpi: int = 150) -> None:
    """Write a figure as a PNG file. Raises CheckpointError if it cannot be written.

    A character that the font lacks becomes a box, without a warning.
    """
    with atomic_file(path) as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        figure.savefig(file, format="png", dpi=dpi)
