"""JSON lines: a value in each line of a file, read one after the other."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxllm.errors import CheckpointError, JaxllmError
from jaxllm.files.reading import MAX_BYTES, MAX_JSON, open_regular, parse_json, regular_size

MARK = b"\xef\xbb\xbf"  # a byte order mark is no JSON


def split_lines(text: str) -> list[str]:
    """Return the lines of a text, which end at "\\n" or "\\r\\n".

    Other separators, as U+2028, may stand in a line: str.splitlines would break it there.
    """
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return lines if lines[-1] else lines[:-1]


def json_lines(
    path: Path, error: type[JaxllmError], *, most: int | None = MAX_BYTES
) -> Iterator[tuple[str, Any]]:
    """Each line's value, and where it stands ("FILE, line 3"); blank lines are passed over.

    error: raised for a line that is no JSON. most: bytes of the file, None for any; a line has at
    most `MAX_JSON`. Memory: a line. Raises CheckpointError for a file that cannot be read.
    """
    if most is not None and (size := regular_size(path)) > most:
        raise CheckpointError(f"{path} has {size:,} bytes; at most {most:,} are read")
    with open_regular(path) as file:
        number = 0
        while line := file.readline(MAX_JSON + 1):
            number += 1
            where = f"{path}, line {number}"
            if len(line) > MAX_JSON:
                raise error(f"{where} has more than {MAX_JSON:,} bytes")
            line = line.removeprefix(MARK) if number == 1 else line
            if not line.strip():
                continue
            try:
                text = line.decode()
            except UnicodeDecodeError as problem:
                raise CheckpointError(f"{where} is not UTF-8 text (byte {problem.start})") from None
            yield where, parse_json(text, where, error)
