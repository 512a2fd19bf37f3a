"""The output: answers in input order, as JSON lines or Parquet, written atomically."""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from jaxllm.batch_inference.rows import Row, import_pyarrow
from jaxllm.batch_inference.tasks import TASKS, Answer
from jaxllm.files import atomic_file

_ROWS_PER_GROUP = 4096  # per Parquet row group


def format_answer(answer: Answer) -> str:
    """Return an answer as a line of JSON."""
    return json.dumps(answer, ensure_ascii=False) + "\n"


def write_answers(out: Path, answers: Iterable[Answer], task: str, rows: Sequence[Row]) -> None:
    """Write all answers as Parquet if the suffix is `.parquet`, else as JSON lines.

    Raises CheckpointError if the file cannot be written.
    """
    if out.suffix == ".parquet":
        _write_parquet(out, answers, task, rows)
        return
    with atomic_file(out) as file:
        for answer in answers:
            file.write(format_answer(answer).encode())


def check_out(out: Path) -> None:
    """Raise ConfigError if the file's format needs a package that is not installed."""
    if out.suffix == ".parquet":
        import_pyarrow(out)


def _write_parquet(out: Path, answers: Iterable[Answer], task: str, rows: Sequence[Row]) -> None:
    parquet = import_pyarrow(out)
    import pyarrow

    types = {
        "string": pyarrow.string(),
        "float64": pyarrow.float64(),
        "int64": pyarrow.int64(),
        "uint64": pyarrow.uint64(),
        "bool": pyarrow.bool_(),
        "list<int32>": pyarrow.list_(pyarrow.int32()),
        "list<float32>": pyarrow.list_(pyarrow.float32()),
    }
    kind = _id_type(rows)
    columns = {"id": kind, "line": "int64", **TASKS[task].columns, "error": "string"}
    schema = pyarrow.schema([(name, types[column]) for name, column in columns.items()])
    with atomic_file(out) as file, parquet.ParquetWriter(file, schema) as written:
        for some in _row_groups(answers):
            if kind == "string":
                some = [{**a, "id": _format_id(a["id"])} for a in some]
            written.write_table(pyarrow.Table.from_pylist(some, schema=schema))


def _id_type(rows: Sequence[Row]) -> str:
    """Return the type of the id column: int64 if all ids are integers, else string or JSON."""
    ids = [row.id for row in rows]
    are_integers = all(type(x) is int and -(1 << 63) <= x < 1 << 63 for x in ids)
    return "int64" if are_integers else "string"


def _format_id(name: Any) -> str:
    return name if isinstance(name, str) else json.dumps(name, ensure_ascii=False)


def _row_groups(answers: Iterable[Answer]) -> Iterator[list[Answer]]:
    left = iter(answers)
    for first in left:
        yield list(chain([first], islice(left, _ROWS_PER_GROUP - 1)))
