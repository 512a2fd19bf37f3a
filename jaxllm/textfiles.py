"""The small text files beside weights: read with bounds, regular files only; written whole.

Whether a file is there is the caller's business; everything else that is wrong with it is a
`CheckpointError` that names it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.errors import CheckpointError

MAX_BYTES = 1 << 28


def read_bytes(path: Path) -> bytes:
    """Return the content of a regular file of at most `MAX_BYTES` bytes.

    Raises:
      CheckpointError: not a regular file (a FIFO would hang), too large, or unreadable.
    """
    try:
        if not path.is_file():
            raise CheckpointError(f"{path} is not a regular file")
        if (size := path.stat().st_size) > MAX_BYTES:
            raise CheckpointError(f"{path} has {size:,} bytes; at most {MAX_BYTES:,} are read")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error


def read_text(path: Path) -> str:
    """Return the content of a UTF-8 file, as `read_bytes` does.

    Raises:
      CheckpointError: as `read_bytes`, or the bytes are not UTF-8.
    """
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text (byte {error.start})") from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
      CheckpointError: as `read_text`, or the text is not JSON, or not an object.
    """
    try:
        content = json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        where = f"line {error.lineno}" if isinstance(error, json.JSONDecodeError) else "too deep"
        raise CheckpointError(f"{path} is not valid JSON ({where})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} should hold a JSON object, not {type(content).__name__}")
    return content


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON object for people to read, complete or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)
