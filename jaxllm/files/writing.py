"""Writing: a file or a directory appears under its name when it is complete, or not at all.

What is being written lies beside it as `.NAME.PID.partial`, locked by its writer. A process that is
killed leaves that behind; whoever writes there next sweeps it away.
"""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from jaxllm.errors import CheckpointError

# Where there is no such module there are no locks, and no sweeping either.
fcntl: Any = importlib.import_module("fcntl") if importlib.util.find_spec("fcntl") else None

_PARTIAL = re.compile(r"\..+\.\d+\.partial")
_STARTED = time.time()


@contextlib.contextmanager
def writing(path: Path, mode: str = "wb") -> Iterator[IO[Any]]:
    """A file to write, which replaces what is at `path` when the block ends well.

    mode: "wb", or "w" for UTF-8 text. Whatever ends the block otherwise, an interrupt too, leaves
    `path` as it was and nothing beside it.

    Raises:
      CheckpointError: it cannot be written: no such folder, no room, no permission.
    """
    partial = _beside(path)
    with _told(path):
        sweep(path.parent)
        try:
            with open(partial, mode, encoding=None if "b" in mode else "utf-8") as file:
                _lock(file.fileno())
                yield file
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def writing_directory(directory: Path, last: str = "config.json") -> Iterator[Path]:
    """A directory to fill, which becomes `directory` when the block ends well.

    last: the file that says the directory is complete. Into a directory that has files already the
    new ones are moved one by one, `last` at the end. Whatever ends the block otherwise leaves
    `directory` as it was.

    Raises:
      CheckpointError: it cannot be written.
    """
    partial = _beside(directory)
    with _told(directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
        sweep(directory.parent)
        partial.mkdir()
        descriptor = os.open(partial, os.O_RDONLY)
        try:
            _lock(descriptor)
            yield partial
            _move_into_place(partial, directory, last)
        finally:
            os.close(descriptor)
            shutil.rmtree(partial, ignore_errors=True)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON object for people to read, complete or not at all.

    Raises:
      CheckpointError: it cannot be written.
    """
    with writing(path, "w") as file:
        file.write(json.dumps(data, indent=2) + "\n")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep a file to this process while the block runs; the file is made if it is not there.

    Raises:
      CheckpointError: another process has it, or it cannot be opened.
    """
    with _told(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NONBLOCK", 0), 0o666)
    try:
        if not _lock(descriptor):
            raise CheckpointError(f"{path} is in use by another process")
        yield
    finally:
        os.close(descriptor)


def sweep(directory: Path) -> None:
    """Remove what processes that are gone left half-written here.

    That is what is older than this process and locked by nobody.
    """
    if fcntl is None:
        return
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(directory)):
            if not _PARTIAL.fullmatch(entry.name) or entry.is_symlink():
                continue
            with contextlib.suppress(OSError):
                if entry.stat().st_mtime < _STARTED and _abandoned(entry.path):
                    if entry.is_dir():
                        shutil.rmtree(entry.path)
                    else:
                        os.unlink(entry.path)


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """An OSError as one line that names what was to be written."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def _lock(descriptor: int) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _abandoned(path: str) -> bool:
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        return _lock(descriptor)
    finally:
        os.close(descriptor)


def _move_into_place(partial: Path, directory: Path, last: str) -> None:
    if not directory.exists() or not any(directory.iterdir()):
        os.replace(partial, directory)
        return
    for file in sorted(partial.iterdir(), key=lambda file: file.name == last):
        os.replace(file, directory / file.name)
