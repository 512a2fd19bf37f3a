"""Reading: regular files only, of bounded size; JSON of bounded depth and digits, and its schema.

Whether a file is there is the caller's business; everything else that is wrong with it is a
`CheckpointError` that names the file and, within JSON, the field.
"""

import json
import math
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from jaxllm.errors import CheckpointError, JaxllmError

MAX_BYTES = 1 << 28
MAX_DEPTH = 64  # of JSON: a tokenizer's has 10
MAX_DIGITS = 40  # of a JSON number: 2**64 has 20, a float64 written in full 25

T = TypeVar("T")


def regular_size(path: Path) -> int:
    """The bytes of a regular file.

    Raises:
      CheckpointError: not a regular file (opening a FIFO would hang), or unreadable.
    """
    try:
        found = path.stat()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise CheckpointError(f"cannot read {path}: {_reason(error)}") from error
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path} is not a regular file")
    return found.st_size


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. Raises CheckpointError as `regular_size` does."""
    regular_size(path)
    try:
        # What has become a FIFO since it was looked at does not block either.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise CheckpointError(f"{path} is not a regular file")
        return os.fdopen(descriptor, "rb")
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {_reason(error)}") from error


def read_bytes(path: Path, most: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file of at most `most` bytes.

    Raises:
      CheckpointError: as `regular_size`, or too large.
    """
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise CheckpointError(f"{path} has {size:,} bytes; at most {most:,} are read")
        try:
            return file.read(most)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {_reason(error)}") from error


def read_text(path: Path, most: int = MAX_BYTES) -> str:
    """Return the content of a UTF-8 file, as `read_bytes` does.

    Raises:
      CheckpointError: as `read_bytes`, or the bytes are not UTF-8.
    """
    try:
        return read_bytes(path, most).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text (byte {error.start})") from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
      CheckpointError: as `read_text` and `parse_json`, or it is no object.
    """
    content = parse_json(read_text(path), str(path))
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} should hold a JSON object, not {type(content).__name__}")
    return content


def parse_json(text: str | bytes, where: str, error: type[JaxllmError] = CheckpointError) -> Any:
    """Return what a JSON text says: every number finite, no name twice, all text encodable.

    where: what the text is, for messages. Raises `error` for what is no JSON, deeper than
    `MAX_DEPTH`, or has a number of more than `MAX_DIGITS` digits.
    """
    try:
        value = json.loads(
            text,
            object_pairs_hook=_without_duplicates,
            parse_int=_whole,
            parse_float=_finite,
            parse_constant=_refused,
        )
        _check_depth(value)
    except json.JSONDecodeError as problem:
        at = f"line {problem.lineno}, column {problem.colno}: {problem.msg}"
        raise error(f"{where} is not valid JSON ({at})") from None
    except RecursionError:
        raise error(f"{where} is not valid JSON (nested too deeply)") from None
    except ValueError as problem:  # UnicodeDecodeError is one
        raise error(f"{where} is not valid JSON ({problem})") from None
    return value


def as_schema(
    value: Any, schema: type[T] | Any, where: str, error: type[JaxllmError] = CheckpointError
) -> T:
    """What JSON brought as a value of `schema`: a msgspec.Struct, a TypedDict, or any annotation.

    Nothing is coerced: a text is no number, a bool no integer. Raises `error` with `where` and the
    path of the field that does not fit.
    """
    try:
        fitting: T = msgspec.convert(value, schema, strict=True)
    except msgspec.ValidationError as problem:
        message, _, path = str(problem).partition(" - at ")
        path = path.strip("`").removeprefix("$").removeprefix(".")
        message = message.replace("`", "")
        raise error(f"{where}: {path + ': ' if path else ''}{message}") from None
    return fitting


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {next(n for n in names if names.count(n) > 1)!r} stands twice")
    return result


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits; at most {MAX_DIGITS} are read")
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"the number {digits:.40} is beyond float64")
    return number


def _refused(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH + 1:
            raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
        below: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                if not all(map(_encodable, node)):
                    raise ValueError("a lone surrogate, which is no text")
                below += node.values()
            elif isinstance(node, list):
                below += node
            elif isinstance(node, str) and not _encodable(node):
                raise ValueError("a lone surrogate, which is no text")
        level = below


def _encodable(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
