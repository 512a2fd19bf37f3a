"""Input rows from JSON lines or Parquet, each with a request or an error, read one by one.

A line is a text, token ids, or an object with `prompt` (a text or ids), an optional `id`, and
options that override those of the job. A row of Parquet is such an object, without its nulls. With
a `field` the rows are any data set: that field is the prompt, and the others are ignored. A row
that cannot be read is answered with its error; it does not affect the others.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from jaxllm.errors import CheckpointError, ConfigError, SamplingError, requires_extra
from jaxllm.files import iterate_lines, open_regular, parse_json, regular_size


class BatchRow(NamedTuple):
    """An input row.

    Attributes:
        line: its number, from 1.
        id: by default the line number.
        request: prompt and options.
        complaint: why there is no request, if so.
    """

    line: int
    id: Any
    request: dict[str, Any]
    complaint: str | None = None


def read_rows(path: Path, field: str | None = None) -> Iterator[BatchRow]:
    """Yield the rows of a `.parquet` or JSON lines file.

    Raises CheckpointError if the file cannot be read, ConfigError for Parquet if pyarrow or the
    column is missing.
    """
    if path.suffix == ".parquet":
        yield from _read_parquet(path, field)
        return
    with open_regular(path) as file:
        yield from parse_lines(file, field)


def parse_lines(file: BinaryIO, field: str | None = None) -> Iterator[BatchRow]:
    """Yield the row of each line that is not blank."""
    for number, line in iterate_lines(file):
        try:
            value = parse_json(line, f"line {number}", SamplingError)
        except SamplingError as error:
            yield BatchRow(number, number, {}, str(error))
        else:
            fields = value if isinstance(value, dict) else {"prompt": value}
            yield _make_row(number, fields, field)


def check_rows(rows: Iterable[BatchRow]) -> tuple[int, str]:
    """Read all rows, and return their number and a SHA-256.

    Raises ConfigError if there are none, or if two have the same id.
    """
    ids, digest = set[str](), hashlib.sha256()
    for row in rows:
        name = format_id(row.id)
        if name in ids:
            raise ConfigError(
                f"line {row.line} has the id of an earlier row, {name:.60}: ids identify the"
                " answers, so they must differ. A row without one gets its line number"
            )
        ids.add(name)
        digest.update(json.dumps(row).encode())
    if not ids:
        raise ConfigError("the input has no rows")
    return len(ids), digest.hexdigest()


def format_id(value: Any) -> str:
    """Return an id, which may be any JSON value, as a text to compare."""
    return json.dumps(value, sort_keys=True)


def _make_row(number: int, fields: dict[str, Any], field: str | None) -> BatchRow:
    name = number if fields.get("id") is None else fields["id"]
    request = {key: value for key, value in fields.items() if key != "id"}
    if field is not None:
        request = {"prompt": request.get(field)}
    try:
        json.dumps([name, request], allow_nan=False)
    except (TypeError, ValueError) as error:  # from Parquet: times, bytes, NaN
        text = f"line {number} has values that JSON does not allow: {error}"
        return BatchRow(number, number, {}, text)
    complaint, prompt = None, request.get("prompt")
    if prompt is None:
        complaint = f"line {number} has no {field or 'prompt'}"
    elif not isinstance(prompt, str | list):
        complaint = (
            f"line {number}: {field or 'prompt'} must be a text or a list of token ids, got"
            f" {prompt!r:.40}"
        )
    elif request.get("seed") == "random":
        complaint = f"line {number}: the seed must be a number, to be repeatable"
    return BatchRow(number, name, {} if complaint else request, complaint)


def _read_parquet(path: Path, field: str | None) -> Iterator[BatchRow]:
    with requires_extra("data", path.name):
        parquet: Any = import_module("pyarrow.parquet")
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
        columns = None if field is None else [name for name in ("id", field) if name in names]
        for batch in file.iter_batches(columns=columns):
            for values in batch.to_pylist():
                number += 1
                fields = {name: value for name, value in values.items() if value is not None}
                yield _make_row(number, fields, field)
    except (OSError, import_module("pyarrow").ArrowException) as error:
        raise CheckpointError(f"{path} cannot be read as Parquet: {error!s:.200}") from None
