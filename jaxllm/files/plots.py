"""Plots by matplotlib, which is optional."""

import warnings
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError
from jaxllm.files.atomic import atomic_file


def check_plot(option: str = "--plot") -> None:
    """Raise ConfigError if matplotlib is missing. option: the option to drop, for the message."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"{option} requires matplotlib: pip install 'jaxllm[notebooks]', or drop {option}"
        ) from None


def save_figure(figure: Any, path: Path, dpi: int = 150) -> None:
    """Write a figure as a PNG file. Raises CheckpointError if it cannot be written.

    A character that the font lacks becomes a box, without a warning.
    """
    with atomic_file(path) as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        figure.savefig(file, format="png", dpi=dpi)
