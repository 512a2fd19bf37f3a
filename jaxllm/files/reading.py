"""Reading: regular files only, of bounded size; JSON of bounded depth and digits.

Whether a file is there is the caller's business; everything else that is wrong with it is a
`CheckpointError` that names the file.
"""

import collections
import io
import json
import math
import os
import stat
from os import PathLike
from pathlib import Path
from typing import Any

from jaxllm.errors import CheckpointError, JaxllmError

MAX_BYTES = 1 << 28
MAX_JSON = (
    1 << 26
)  # a list of empty lists takes 20 times its text; the largest tokenizers have 2**25
MAX_DEPTH = 64  # of JSON: a tokenizer's has 10
MAX_DIGITS = 40  # of a JSON number: 2**64 has 20, a float64 written in full 25


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


def open_regular(path: Path) -> io.BufferedReader:
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


def as_path(path: Any) -> Path:
    """A path that a user gave. Raises CheckpointError for what is neither a text nor a Path."""
    if not isinstance(path, str | PathLike):
        raise CheckpointError(f"a path must be a text or a Path, got {path!r:.60}")
    return Path(path)


def is_there(path: str | Path) -> bool:
    """Whether there is a file or a directory of this name, whatever the name says."""
    return os.path.exists(path)  # unlike Path.exists, which raises for names that cannot be


def inside(directory: Path, name: str) -> Path:
    """The path of a file that lies in a directory, for whoever brought the directory named it.

    Raises:
      CheckpointError: no plain name, nothing there, not a regular file, or a link that leads out
        of the directory: what it leads to would be read, copied or shown in the directory's place.
    """
    if name != os.path.basename(name) or name in ("", ".", "..") or {"\\", "\0"} & {*name}:
        raise CheckpointError(f"{directory}: {name!r:.80} is not a plain file name")
    path = directory / name
    if not is_there(path):
        raise CheckpointError(f"{directory}: {name} is missing")
    regular_size(path)
    home = directory.resolve()
    homes = [home]
    if home.parent.name == "snapshots":  # the hub's cache: links from snapshots/x into blobs
        homes.append(home.parent.parent / "blobs")
    if path.resolve().parent not in homes:
        raise CheckpointError(
            f"{directory}: {name} is a link that leaves the directory; put a copy in its place"
        )
    return path


def read_bytes(path: Path, most: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file of at most `most` bytes.

    Raises:
      CheckpointError: as `regular_size`, or too large.
    """
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise CheckpointError(f"{path} has {size:,} bytes; at most {most:,} are read")
        try:
            return file.read(size)
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
    """Return the JSON object in a file of at most `MAX_JSON` bytes.

    Raises:
      CheckpointError: as `read_text` and `parse_json`, or it is no object.
    """
    content = parse_json(read_text(path, MAX_JSON), str(path))
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


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        ((twice, _),) = collections.Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the name {twice!r:.80} stands twice")
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
