"""What the machine has: asked before a file or an option is allowed to ask for it."""

import contextlib
import os
from pathlib import Path

from jaxllm.errors import CapacityError, JaxllmError

_CGROUP = Path("/sys/fs/cgroup/memory.max")


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
