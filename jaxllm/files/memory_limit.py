"""The machine's memory: checked before a file or an option makes the program allocate it."""

import contextlib
import ctypes
import mmap
import os
import re
from pathlib import Path

from jaxllm.errors import CapacityError, JaxllmError

_CGROUP = Path("/sys/fs/cgroup/memory.max")
_MAPS = Path("/proc/self/maps")
# Read-only file mappings.
_READ_ONLY = re.compile(r"([0-9a-f]+)-([0-9a-f]+) r--. \S+ \S+ [1-9]\d* ", re.M)


def machine_memory() -> int | None:
    """Return the memory in bytes that this process may use, or None if unknown."""
    limits = []
    with contextlib.suppress(AttributeError, OSError, ValueError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with contextlib.suppress(OSError, ValueError):  # "max" is not a number
        limits.append(int(_CGROUP.read_text(encoding="ascii")))
    return min(limits, default=None)


def check_memory(nbytes: int, what: str, error: type[JaxllmError] = CapacityError) -> None:
    """Raise `error` if `what` needs more memory than the machine has."""
    has = machine_memory()
    if has is not None and nbytes > has:
        raise error(f"{what} needs {nbytes / 1e9:,.1f} GB; this machine has {has / 1e9:,.1f} GB")


def release_pages(begin: int, end: int) -> None:
    """Release the resident pages between two addresses if they are a read-only file mapping.

    Later accesses read the file again. For other memory, and on systems without /proc or madvise,
    nothing happens.
    """
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    with contextlib.suppress(OSError, UnicodeError):
        page = mmap.PAGESIZE
        first, last = -(-begin // page) * page, end // page * page  # only whole pages
        for match in _READ_ONLY.finditer(_MAPS.read_text()):
            if int(match[1], 16) <= first < last <= int(match[2], 16):
                advise = ctypes.CDLL(None).madvise
                advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
                advise(first, last - first, mmap.MADV_DONTNEED)
