"""The folder of compiled programs: where it is, and whether it can be trusted.

Without JAX, so that `jaxllm doctor` can look at it where JAX does not start.
"""

import hashlib
import os
import platform
import stat
from pathlib import Path

CACHE_ENV = "JAXLLM_COMPILE_CACHE"


def locate_program_folder(folder: str | Path | None = None) -> Path:
    """Return this processor type's folder in `folder`; by default in that of JAXLLM_COMPILE_CACHE,
    else in `jaxllm` of the user's cache directory.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    home = Path(folder or os.environ.get(CACHE_ENV) or caches / "jaxllm")
    return home.expanduser() / f"compiled-{_processor_id()}"


def find_folder_problem(folder: Path) -> str:
    """Create a folder; return why it is unsafe or unusable for programs, or ""."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status, files = folder.stat(), [f.stat(follow_symlinks=False) for f in os.scandir(folder)]
    except OSError as error:
        return error.strerror or str(error)
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        return "another user may write there"
    if any(f.st_uid != status.st_uid or not _is_plain(f.st_mode) for f in files):
        return "it holds something other than files and folders of this user"
    return "" if os.access(folder, os.W_OK) else "it is not writable"


def _is_plain(mode: int) -> bool:
    """Whether it is a file, or a folder (XLA's measurements of a GPU) that others cannot change."""
    return stat.S_ISREG(mode) or (stat.S_ISDIR(mode) and not mode & 0o022)


def _processor_id() -> str:
    """Return a short hash of the processor model and its instruction set."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        kinds = ("model name", "flags", "Features", "CPU ")
        lines = info.read_text(encoding="utf-8").split("\n\n")[0].splitlines()
        flags = "".join(line for line in lines if line.startswith(kinds))
    else:
        flags = platform.processor()
    return hashlib.sha256((platform.machine() + flags).encode()).hexdigest()[:12]
