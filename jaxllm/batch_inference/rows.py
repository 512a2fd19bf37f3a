"""Input rows from JSON lines or Parquet, each with a request or an error.

A line is a text, token ids, or an object with `prompt` (a text or ids), an optional `id`, and
options that override those of the job. A row of Parquet is such an object, without its nulls. With
a `field` the rows are any data set: that field is the prompt, and the others are ignored. A row
that cannot be read is answered with its error; it does not affect the others.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from jaxllm.errors import CheckpointError, ConfigError, SamplingError
from jaxllm.files import parse_json, read_text, regular_size, split_lines

MAX_BYTES = 1 << 31  # bytes of a JSON lines file


class Row(NamedTuple):
    """An input row.

    Attributes:
      line: its number, from 1.
      id: by default the line number.
      request: prompt and options.
      complaint: why there is no request, if so.
      duplicate: number of earlier rows with the same id, so that their seeds differ.
    """

    line: int
    id: Any
    request: dict[str, Any]
    complaint: str | None = None
    duplicate: int = 0


def read_rows(path: Path, field: str | None = None) -> list[Row]:
    """Read the rows of a `.parquet` or JSON lines file.

    Raises CheckpointError if the file cannot be read, ConfigError for Parquet if pyarrow or the
    column is missing.
    """
    if path.suffix == ".parquet":
        return _count_duplicates(_read_parquet(path, field))
    return read_lines(split_lines(read_text(path, MAX_BYTES)), field)


def read_lines(lines: Iterable[str], field: str | None = None) -> list[Row]:
    """Return the row of each line that is not blank."""
    return _count_duplicates(
        _parse_line(n, line, field) for n, line in enumerate(lines, 1) if line.strip()
    )


def _count_duplicates(rows: Iterable[Row]) -> list[Row]:
    """Set `duplicate` of each row."""
    seen: Counter[str] = Counter()
    counted = []
    for row in rows:
        name = json.dumps(row.id, sort_keys=True)
        counted.append(row._replace(duplicate=seen[name]))
        seen[name] += 1
    return counted


def import_pyarrow(path: Path) -> Any:
    """Import and return `pyarrow.parquet`. Raises ConfigError if it is not installed."""
    try:
        return import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(f"{path.name} needs pyarrow ({error}): pip install 'jaxllm[data]'") from (
            None
        )


def _parse_line(number: int, line: str, field: str | None) -> Row:
    try:
        value = parse_json(line, f"line {number}", SamplingError)
    except SamplingError as error:
        return Row(number, number, {}, str(error))
    return _make_row(number, value if isinstance(value, dict) else {"prompt": value}, field)


def _make_row(number: int, fields: dict[str, Any], field: str | None) -> Row:
    request = {name: value for name, value in fields.items() if name != "id"}
    name = fields.get("id")
    name = number if name is None else name
    try:
        json.dumps([name, request], allow_nan=False)
    except (TypeError, ValueError) as error:  # from Parquet: times, bytes, NaN
        return Row(
            number, number, {}, f"line {number} has values that JSON does not allow: {error}"
        )
    if field is not None:
        request = {"prompt": request.get(field)}
    if (prompt := request.get("prompt")) is None:
        return Row(number, name, {}, f"line {number} has no {field or 'prompt'}")
    if not isinstance(prompt, str | list):
        return Row(
            number,
            name,
            {},
            f"line {number}: {field or 'prompt'} must be a text or a list of token ids, got"
            f" {prompt!r:.40}",
        )
    if request.get("seed") == "random":
        return Row(number, name, {}, f"line {number}: the seed must be a number, to be repeatable")
    return Row(number, name, request)


def _read_parquet(path: Path, field: str | None) -> Iterator[Row]:
    parquet = import_pyarrow(path)
    regular_size(path)
    number, wanted = 0, field or "prompt"
    try:
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
        if wanted not in names:
            raise ConfigError(
                f"{path} has no column {wanted}: it has {', '.join(names):.200}. Name one with"
                " --field"
            )
        kept = None if field is None else [name for name in ("id", field) if name in names]
        for batch in file.iter_batches(columns=kept):
            for given in batch.to_pylist():
                number += 1
                there = {name: value for name, value in given.items() if value is not None}
                yield _make_row(number, there, field)
    except (OSError, import_module("pyarrow").ArrowException) as error:
        raise CheckpointError(f"{path} cannot be read as Parquet: {error!s:.200}") from None
