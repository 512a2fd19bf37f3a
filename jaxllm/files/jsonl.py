"""JSON lines: files with one JSON value per line, read one line at a time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from jaxllm.errors import CheckpointError, JaxllmError
from jaxllm.files.reading import MAX_BYTES, MAX_JSON_BYTES, open_regular, parse_json, regular_size

BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # UTF-8 byte order mark, which JSON does not allow


def split_lines(text: str) -> list[str]:
    """Return the lines of a text, which end in "\\n" or "\\r\\n".

    Unlike str.splitlines, it does not split at other separators such as U+2028.
    """
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return lines if lines[-1] else lines[:-1]


def read_json_lines(
    path: Path, error: type[JaxllmError], *, max_bytes: int | None = MAX_BYTES
) -> Iterator[tuple[str, Any]]:
    """Yield the location ("FILE, line 3") and value of each line that is not blank.

    Holds one line of at most `MAX_JSON_BYTES` bytes in memory.

    Args:
        error: the error to raise for a line that is not JSON.
        max_bytes: the maximum file size in bytes; None for no limit.

    Raises:
        CheckpointError: If the file cannot be read.
    """
    if max_bytes is not None and (size := regular_size(path)) > max_bytes:
        raise CheckpointError(
            f"{path} is too large: got {size:,} bytes, expected at most {max_bytes:,}"
        )
    with open_regular(path) as file:
        for number, line in iterate_lines(file, f"{path}, ", error):
            where = f"{path}, line {number}"
            try:
                text = line.decode()
            except UnicodeDecodeError as problem:
                raise CheckpointError(f"{where} is not UTF-8 text (byte {problem.start})") from None
            yield where, parse_json(text, where, error)


def iterate_lines(
    file: BinaryIO, where: str = "", error: type[JaxllmError] = CheckpointError
) -> Iterator[tuple[int, bytes]]:
    """Yield the number and bytes of each line that is not blank, without a byte order mark.

    Raises `error` for a line of more than `MAX_JSON_BYTES` bytes. where: before its number.
    """
    number = 0
    while line := file.readline(MAX_JSON_BYTES + 1):
        number += 1
        if len(line) > MAX_JSON_BYTES:
            raise error(
                f"{where}line {number} is too long: expected at most {MAX_JSON_BYTES:,} bytes"
            )
        line = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
        if line.strip():
            yield number, line
