"""Reading: regular files of bounded size, and JSON of bounded depth and digits.

Any problem with a file raises a `CheckpointError` that names it. Callers check first whether an
optional file exists.
"""

import collections
import io
import itertools
import json
import math
import os
import re
import stat
from os import PathLike
from pathlib import Path
from typing import Any

from jaxllm.errors import CheckpointError, JaxllmError

MAX_BYTES = 1 << 28
# Nested lists take 20 times this in memory; the largest tokenizers have 2**25.
MAX_JSON_BYTES = 1 << 26
MAX_DEPTH = 64  # of JSON: a tokenizer's has 10
MAX_DIGITS = 40  # of a JSON integer: 2**64 has 20
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # the escape of one, alone or of a pair


def regular_size(path: Path) -> int:
    """Return the size of a regular file in bytes.

    Raises:
        CheckpointError: it is not a regular file (opening a FIFO would hang), or cannot be read.
    """
    try:
        status = path.stat()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise CheckpointError(f"cannot read {path}: {_error_reason(error)}") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is not a regular file")
    return status.st_size


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file for reading. Raises CheckpointError as `regular_size` does."""
    regular_size(path)
    try:
        # O_NONBLOCK: a file replaced by a FIFO since the check must not block either.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise CheckpointError(f"{path} is not a regular file")
        return os.fdopen(descriptor, "rb")
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {_error_reason(error)}") from error


def as_path(path: Any) -> Path:
    """Convert a user's path. Raises CheckpointError if it is neither a string nor a Path."""
    if not isinstance(path, str | PathLike):
        raise CheckpointError(f"a path must be a string or a Path: got {path!r:.60}")
    return Path(path)


def path_exists(path: str | Path) -> bool:
    """Return whether a file or directory of this name exists; False for impossible names."""
    return os.path.exists(path)  # unlike Path.exists, which can raise


def path_inside(directory: Path, name: str) -> Path:
    """Return the path of a file in a directory, for untrusted names and directories.

    Raises:
        CheckpointError: the name is not plain, the file is missing or not regular, or it is a link
            that leaves the directory, so that a file elsewhere would be read, copied or shown.
    """
    if name != os.path.basename(name) or name in ("", ".", "..") or {"\\", "\0"} & {*name}:
        raise CheckpointError(f"{directory}: {name!r:.80} is not a plain file name")
    path = directory / name
    if not path_exists(path):
        raise CheckpointError(f"{directory}: {name} is missing")
    regular_size(path)
    home = directory.resolve()
    homes = [home]
    for above in home.parents[:2]:  # Hugging Face cache: snapshots/x, or a folder in it, links
        if above.name == "snapshots":  # into blobs
            homes.append(above.parent / "blobs")
    if path.resolve().parent not in homes:
        raise CheckpointError(
            f"{directory}: {name} is a link that leaves the directory. Replace it by a copy"
        )
    return path


def read_bytes(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file of at most `max_bytes` bytes.

    Raises:
        CheckpointError: as `regular_size`, or the file is too large.
    """
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > max_bytes:
            raise CheckpointError(
                f"{path} is too large: got {size:,} bytes, expected at most {max_bytes:,}"
            )
        try:
            return file.read(size)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {_error_reason(error)}") from error


def read_text(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """Return the text of a UTF-8 file of at most `max_bytes` bytes.

    Raises:
        CheckpointError: as `read_bytes`, or the bytes are not UTF-8.
    """
    try:
        return read_bytes(path, max_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text (byte {error.start})") from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of at most `MAX_JSON_BYTES` bytes.

    Raises:
        CheckpointError: as `read_text` and `parse_json`, or it is not an object.
    """
    content = parse_json(read_text(path, MAX_JSON_BYTES), str(path))
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object: got {type(content).__name__}")
    return content


def parse_json(text: str | bytes, where: str, error: type[JaxllmError] = CheckpointError) -> Any:
    """Parse JSON strictly: finite numbers, unique names, encodable strings.

    Args:
        where: what the text is, for messages.

    Raises `error` if the text is not such JSON, is nested deeper than `MAX_DEPTH`, or has an
    integer of more than `MAX_DIGITS` digits.
    """
    try:
        value = json.loads(
            text,
            object_pairs_hook=_reject_duplicates,
            parse_int=_parse_int,
            parse_float=_parse_float,
            parse_constant=_reject_constant,
        )
        _check_tree(value, isinstance(text, bytes) or _may_hold_surrogates(text))
    except json.JSONDecodeError as problem:
        at = f"line {problem.lineno}, column {problem.colno}: {problem.msg}"
        raise error(f"{where} is not valid JSON ({at})") from None
    except RecursionError:
        raise error(f"{where} is not valid JSON (nested too deeply)") from None
    except ValueError as problem:  # UnicodeDecodeError is one
        raise error(f"{where} is not valid JSON ({problem})") from None
    return value


def _error_reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        ((twice, _),) = collections.Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the name {twice!r:.80} occurs twice")
    return result


def _parse_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"an integer has {len(digits):,} digits, expected at most {MAX_DIGITS}")
    return int(digits)


def _parse_float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"the number {digits:.40} exceeds float64")
    return number


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def _may_hold_surrogates(text: str) -> bool:
    return bool(_SURROGATE.search(text)) or not _is_encodable(text)


def _check_tree(value: Any, search_surrogates: bool) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH + 1:
            raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
        objects = [node for node in level if isinstance(node, dict)]
        if search_surrogates:
            texts = itertools.chain((node for node in level if isinstance(node, str)), *objects)
            if not _is_encodable("".join(texts)):
                raise ValueError("a lone surrogate, which is not text")
        lists = [node for node in level if isinstance(node, list)]
        level = [*itertools.chain(*lists, *(node.values() for node in objects))]


def _is_encodable(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
