"""WikiText as it is published: the plain `.raw` file, or parquet as the hub has it."""

from importlib import import_module
from pathlib import Path
from typing import Any

from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.files import read_text, regular_size

MOST = 1 << 31  # bytes of a .raw file: WikiText-103 has 540 million


def read_wikitext(path: Path) -> list[str]:
    """The rows of the dataset: a line each, with its newline; "" for a blank line.

    path: `.parquet` with a column `text`, or else text. `"\\n\\n".join` of them is the text over
    which papers evaluate.

    Raises ConfigError where pyarrow is missing, CheckpointError for what cannot be read.
    """
    if path.suffix == ".parquet":
        return _parquet(path)
    lines = read_text(path, MOST).split("\n")
    ended = [line + "\n" for line in lines[:-1]] + lines[-1:] * bool(lines[-1])
    return [line if line.strip() else "" for line in ended]


def _parquet(path: Path) -> list[str]:
    try:
        parquet: Any = import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(
            f"reading {path.name} needs pyarrow ({error}): pip install 'jaxllm[data]'"
        ) from None
    regular_size(path)
    try:
        file = parquet.ParquetFile(path)
        if "text" not in file.schema_arrow.names:
            names = ", ".join(file.schema_arrow.names)
            raise CheckpointError(f"{path} has no column text, but {names:.200}")
        column = file.read(columns=["text"]).column("text").to_pylist()
    except (OSError, import_module("pyarrow").ArrowException) as error:
        raise CheckpointError(f"{path} cannot be read as parquet: {error!s:.200}") from None
    if not all(isinstance(row, str) for row in column):
        raise CheckpointError(f"{path}: the column text holds other things than text")
    return column
