"""Reader of WikiText as published: a plain `.raw` file, or parquet from the Hugging Face Hub."""

from importlib import import_module
from pathlib import Path
from typing import Any

from jaxllm.errors import CheckpointError, requires_extra
from jaxllm.files import read_text, regular_size

MAX_BYTES = 1 << 31  # bytes of a .raw file: WikiText-103 has 540 million


def read_wikitext(path: Path) -> list[str]:
    """Read the rows of the dataset: a line each, with its newline; "" for a blank line.

    Papers evaluate on the text `"\\n\\n".join(rows)`.

    Args:
        path: A `.parquet` file with a column `text`; any other suffix means plain text.

    Raises:
        ConfigError: If pyarrow is missing.
        CheckpointError: If the file cannot be read.
    """
    if path.suffix == ".parquet":
        return _parquet(path)
    lines = read_text(path, MAX_BYTES).split("\n")
    ended = [line + "\n" for line in lines[:-1]] + lines[-1:] * bool(lines[-1])
    return [line if line.strip() else "" for line in ended]


def _parquet(path: Path) -> list[str]:
    with requires_extra("data", path.name):
        parquet: Any = import_module("pyarrow.parquet")
    regular_size(path)
    try:
        file = parquet.ParquetFile(path)
        if "text" not in file.schema_arrow.names:
            names = ", ".join(file.schema_arrow.names)
            raise CheckpointError(f"{path} has no column 'text': got {names:.200}")
        column = file.read(columns=["text"]).column("text").to_pylist()
    except (OSError, import_module("pyarrow").ArrowException) as error:
        raise CheckpointError(f"{path} cannot be read as parquet: {error!s:.200}") from None
    if not all(isinstance(row, str) for row in column):
        raise CheckpointError(f"{path}: the column 'text' holds values that are not strings")
    return column
