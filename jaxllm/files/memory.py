"""What the machine has: asked before a file or an option is allowed to ask for it."""

import contextlib
import ctypes
import mmap
import os
import re
from pathlib import Path

from jaxllm.errors import CapacityError, JaxllmError

_CGROUP = Path("/sys/fs/cgroup/memory.max")
_MAPS = Path("/proc/self/maps")
_READ_ONLY = re.compile(r"([0-9a-f]+)-([0-9a-f]+) r--. \S+ \S+ [1-9]\d* ", re.M)  # of a file


def machine_memory() -> int | None:
    """Bytes of memory that this process may at most have, None where nobody says."""
    found = []
    with contextlib.suppress(AttributeError, OSError, ValueError):
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with contextlib.suppress(OSError, ValueError):  # "max" is no number
        found.append(int(_CGROUP.read_text(encoding="ascii")))
    return min(found, default=None)


def check_memory(nbytes: int, what: str, error: type[JaxllmError] = CapacityError) -> None:
    """Raise `error` where `what` would take more memory than the machine has."""
    has = machine_memory()
    if has is not None and nbytes > has:
        raise error(
            f"{what} would take {nbytes / 1e9:,.1f} GB; this machine has {has / 1e9:,.1f} GB"
        )


def give_back(begin: int, end: int) -> None:
    """Let go of the memory from address `begin` to `end` so far as it is a file's, mapped to be
    read: what is looked at later comes from the file again. Elsewhere, and where the system does
    not say, nothing happens.
    """
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    with contextlib.suppress(OSError, UnicodeError):
        page = mmap.PAGESIZE
        first, last = -(-begin // page) * page, end // page * page  # its neighbours' stay
        for found in _READ_ONLY.finditer(_MAPS.read_text()):
            if int(found[1], 16) <= first < last <= int(found[2], 16):
                advise = ctypes.CDLL(None).madvise
                advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
                advise(first, last - first, mmap.MADV_DONTNEED)
