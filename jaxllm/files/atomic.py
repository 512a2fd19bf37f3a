"""Atomic writing: a file or a directory appears under its name when it is complete, or not at all.

Until then it is `.NAME.PID.N.partial` in the same folder, locked by its writer. If that process is
killed, the next writer in the folder removes the partial file.
"""

import contextlib
import importlib.util
import itertools
import json
import math
import os
import re
import shutil
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from jaxllm.errors import CheckpointError
from jaxllm.files.reading import open_regular, path_exists, path_inside
from jaxllm.runtime import multihost, signals

# Without this module there are no locks, and partial files are not removed.
fcntl: Any = importlib.import_module("fcntl") if importlib.util.find_spec("fcntl") else None

_PARTIAL = re.compile(r"\.(.+?)\.\d+(\.\d+)?\.partial")
_PROCESS_START = time.time()
_counter = itertools.count()  # several threads may write to one path


@contextlib.contextmanager
def atomic_file(path: Path, mode: str = "wb") -> Iterator[IO[Any]]:
    """Yield a file that replaces `path` if the block succeeds.

    If the block fails or is interrupted, `path` is unchanged and the partial file is removed. Links
    are followed; a device or a FIFO is written directly. In a group of processes only the first
    writes.

    Args:
        mode: "wb", or "w" for UTF-8 text.

    Raises:
        CheckpointError: it cannot be written: no such folder, no space, no permission.
    """
    encoding = None if "b" in mode else "utf-8"
    path = path if signals.is_leader() else Path(os.devnull)
    with _convert_os_errors(path):
        target = Path(os.path.realpath(path))
        if target.exists() and not stat.S_ISREG(target.stat().st_mode):
            with open(target, mode, encoding=encoding) as file:
                yield file
            return
        remove_partials(target.parent)
        partial = _partial_path(target)
        with signals.cleanup_on_exit(partial, path):
            try:
                with open(partial, mode, encoding=encoding) as file:
                    _try_lock(file.fileno())
                    yield file
                os.replace(partial, target)
            finally:
                partial.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_directory(directory: Path, last_file: str = "config.json") -> Iterator[Path]:
    """Yield a directory whose files move to `directory` if the block succeeds.

    If the block fails, `directory` is unchanged or still missing. In a group of processes the first
    one writes; what others write there with `atomic_file` is discarded.

    Args:
        last_file: the file that marks a directory as complete; it is moved after all others.

    Raises:
        CheckpointError: it cannot be written.
    """
    if not signals.is_leader():
        yield directory
        return
    target = Path(os.path.realpath(directory))
    with _convert_os_errors(directory):
        is_folder = target.is_dir()
        target.parent.mkdir(parents=True, exist_ok=True)
        # Inside an existing directory: its parent may be another file system.
        partial = _partial_path(target / target.name if is_folder else target)
        remove_partials(partial.parent)
        with signals.cleanup_on_exit(partial, directory), _temporary_directory(partial):
            yield partial
            if not is_folder:
                os.replace(partial, target)
                return
            for file in sorted(partial.iterdir(), key=lambda file: file.name == last_file):
                os.replace(file, target / file.name)


@contextlib.contextmanager
def _temporary_directory(partial: Path) -> Iterator[None]:
    """Create and lock a directory, and remove it after the block."""
    partial.mkdir()
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        _try_lock(descriptor)
        yield
    finally:
        os.close(descriptor)
        shutil.rmtree(partial, ignore_errors=True)


def check_vacant(directory: Path, last_file: str, what: str) -> None:
    """Check before the work that `atomic_directory` can succeed. In a group of processes the first
    one checks and all raise.

    Raises:
        CheckpointError: the directory already holds `what`, is a file, or is not writable.
    """
    if complaint := multihost.broadcast_from_zero(
        lambda: _find_obstacle(directory, last_file, what)
    ):
        raise CheckpointError(complaint)


def _find_obstacle(directory: Path, last_file: str, what: str) -> str:
    if path_exists(directory / last_file):
        return f"{directory} already holds {what}; name an empty directory"
    absolute = Path(os.path.realpath(directory))
    nearest = next(path for path in (absolute, *absolute.parents) if path_exists(path))
    if not nearest.is_dir():
        return f"cannot write {directory}: {nearest} is not a directory"
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"cannot write {directory}: no permission to write to {nearest}"
    return ""


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write an indented JSON object atomically.

    Raises:
        CheckpointError: it cannot be written.
    """
    with atomic_file(path, "w") as file:
        file.write(json.dumps(data, indent=2) + "\n")


def finite_json(value: Any) -> Any:
    """Return a JSON value with NaN and infinity, which JSON lacks, replaced by null."""
    if isinstance(value, dict):
        return {name: finite_json(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def copy_files(files: Iterable[Path], directory: Path) -> None:
    """Copy files into a directory, and those in a folder, but no further, into one of its name.

    Raises:
        CheckpointError: a file is a link that leaves its directory (`path_inside`), or cannot be
            written.
    """
    for path in files:
        if path.is_dir():
            (directory / path.name).mkdir()
            copy_files(filter(Path.is_file, sorted(path.iterdir())), directory / path.name)
            continue
        source = path_inside(path.parent, path.name)
        with open_regular(source) as file, atomic_file(directory / path.name) as copy:
            shutil.copyfileobj(file, copy)


@contextlib.contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, which is created if missing, while the block runs.

    Raises:
        CheckpointError: another process holds the lock, or it is not a regular file or cannot be
            opened.
    """
    with _convert_os_errors(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NONBLOCK", 0), 0o666)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CheckpointError(f"{path} is not a regular file")
        if _try_lock(descriptor) is False:
            raise CheckpointError(
                f"{path} is in use by another process: wait for it, or name another file"
            )
        yield
    finally:
        os.close(descriptor)


def remove_partials(directory: Path) -> None:
    """Remove partial files and directories of dead processes.

    These are older than this process, and their lock is free.
    """
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(directory)):
            if not _PARTIAL.fullmatch(entry.name) or entry.is_symlink():
                continue
            with contextlib.suppress(OSError):
                if entry.stat().st_mtime < _PROCESS_START and _is_abandoned(entry.path):
                    if entry.is_dir():
                        shutil.rmtree(entry.path)
                    else:
                        os.unlink(entry.path)


@contextlib.contextmanager
def _convert_os_errors(path: Path) -> Iterator[None]:
    """Convert an OSError to a CheckpointError that names the path to be written."""
    try:
        yield
    except OSError as error:
        meant = Path(*(_PARTIAL.sub(r"\1", part) for part in path.parts))
        raise CheckpointError(f"cannot write {meant}: {error.strerror or error}") from error


def _partial_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.{next(_counter)}.partial")


def _try_lock(descriptor: int) -> bool | None:
    """Return whether the lock was acquired; None if locks are not supported."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return None
    return True


def _is_abandoned(path: str) -> bool:
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        return _try_lock(descriptor) is True
    finally:
        os.close(descriptor)
