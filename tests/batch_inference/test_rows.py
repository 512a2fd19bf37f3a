"""Input rows as JSON lines and Parquet; rows that cannot be read have a complaint."""

import io
import itertools
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from jaxllm.batch_inference.rows import BatchRow, check_rows, parse_lines, read_rows
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.files import split_lines


def parse(*lines: str, field: str | None = None) -> list[BatchRow]:
    return list(parse_lines(io.BytesIO("\n".join(lines).encode()), field))


SEPARATORS = "\u2028\u2029\x85\v\f"


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_rows_end_at_line_feeds_only(end: str, tmp_path: Path) -> None:
    """Unicode separators that JSON strings may contain unescaped do not end a row."""
    texts = [f"one{c}two" for c in "\u2028\u2029\x85"]
    assert split_lines(f"a{SEPARATORS}b\r\nc\n") == [f"a{SEPARATORS}b", "c"]
    file = tmp_path / "rows.jsonl"
    lines = [json.dumps(text, ensure_ascii=False) + end for text in texts]
    file.write_bytes(b"\xef\xbb\xbf" + "".join(lines).encode())
    rows = list(read_rows(file))
    assert [row.request["prompt"] for row in rows] == texts
    assert [(row.line, row.id) for row in rows] == [(1, 1), (2, 2), (3, 3)]


def test_invalid_row_is_reported_by_line() -> None:
    """A row that is not JSON or UTF-8, or has no prompt of the right type, names its line."""
    rows = parse('{"prompt": 5}', "", '{"prompt": null}', '{"text": "x"}', "[" * 100_000, "5")
    assert rows[0].complaint == "line 1: prompt must be a text or a list of token ids, got 5"
    assert [row.complaint for row in rows[1:3]] == ["line 3 has no prompt", "line 4 has no prompt"]
    assert rows[3].complaint == "line 5 is not valid JSON (nested too deeply)"
    assert [row.line for row in rows] == [1, 3, 4, 5, 6]
    (one, other) = parse_lines(io.BytesIO(b'"a\xff"\n"b"\n'))
    assert "line 1 is not valid JSON" in str(one.complaint)
    assert other.request == {"prompt": "b"}


def test_rows_are_read_lazily(tmp_path: Path) -> None:
    """The first rows of an endless file are read."""
    lines = itertools.chain([b"[5]\n", b"[6]\n"], itertools.repeat(b"[7]\n"))

    class Endless(io.BytesIO):
        def readline(self, size: int | None = -1) -> bytes:
            return next(lines)

    found = [row.request["prompt"] for row in itertools.islice(parse_lines(Endless()), 4)]
    assert found == [[5], [6], [7], [7]]


def test_equal_ids_are_refused() -> None:
    """Equal ids raise an error that names the line, also those of a default and an explicit one."""
    for lines in (
        ['{"prompt": "x", "id": "a"}', '"y"', '{"prompt": "z", "id": "a"}'],
        ['{"prompt": "x", "id": 3}', '"y"', '"z"'],
        [
            '{"prompt": "x", "id": {"a": 1, "b": 2}}',
            '"y"',
            '{"prompt": "", "id": {"b": 2, "a": 1}}',
        ],
    ):
        with pytest.raises(ConfigError, match="line 3 has the id of an earlier row"):
            check_rows(parse(*lines))
    count, digest = check_rows(parse('{"prompt": "x", "id": 1}', '{"prompt": "x", "id": "1"}'))
    assert count == 2
    assert digest != check_rows(parse('{"prompt": "x", "id": 1}', '{"prompt": "y", "id": "1"}'))[1]
    with pytest.raises(ConfigError, match="no rows"):
        check_rows(parse("", " "))


def test_parquet_equals_json_lines(tmp_path: Path) -> None:
    """Parquet and JSON lines with the same values give the same rows; nulls are left out."""
    table = {"prompt": [[5, 6], [7], [8, 9]], "id": ["a", "b", None], "seed": [1, None, 4]}
    parquet, lines = tmp_path / "in.parquet", tmp_path / "in.jsonl"
    pyarrow.parquet.write_table(pyarrow.table(table), parquet)
    values = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
    lines.write_text(
        "".join(
            json.dumps({name: x for name, x in row.items() if x is not None}) + "\n"
            for row in values
        )
    )
    found = list(read_rows(parquet))
    assert found == list(read_rows(lines))
    assert [row.id for row in found] == ["a", "b", 3]
    assert found[1].request == {"prompt": [7]}


def test_field_option_reads_prompts_from_column(tmp_path: Path) -> None:
    """field names the column of prompts, others are ignored; missing ones and bad files raise."""
    table = pyarrow.table({"id": [4, 5], "text": ["one", None], "url": [b"x", b"y"]})
    pyarrow.parquet.write_table(table, tmp_path / "set.parquet")
    one, two = read_rows(tmp_path / "set.parquet", field="text")
    assert one == BatchRow(1, 4, {"prompt": "one"})
    assert (two.id, two.complaint) == (5, "line 2 has no text")
    (line,) = parse('{"text": "a", "id": 9, "temperature": 2}', field="text")
    assert line == BatchRow(1, 9, {"prompt": "a"})
    pyarrow.parquet.write_table(pyarrow.table({"prompt": [b"x"]}), tmp_path / "bytes.parquet")
    (row,) = read_rows(tmp_path / "bytes.parquet")
    assert "values that JSON does not allow" in str(row.complaint)
    with pytest.raises(ConfigError, match=r"no column prompt: it has id, text, url\. Name one"):
        list(read_rows(tmp_path / "set.parquet"))
    (tmp_path / "no.parquet").write_text("no parquet")
    with pytest.raises(CheckpointError, match="cannot be read as Parquet"):
        list(read_rows(tmp_path / "no.parquet"))
