"""A guard beside a process of a group: it sees how the process ends, and says so in a line.

JAX's coordination service ends a process from C++, by SIGABRT and with pages of its stack, when
another is gone or never came, and Python cannot hold it back. So the process that a user starts
runs the command in a child, whose standard streams it hands on, while what C++ writes to stdout and
stderr goes to a file: it is shown where the child ended for another reason. If the guard is killed,
the child ends too.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import IO, Never

from jaxllm import process
from jaxllm.distributed import JOINING, SILENT, Group

_LOST = 75  # the status of a child that saw in a computation that another process is gone
_MOST = 1 << 16  # bytes of what C++ wrote that are looked at
_FATAL = "JAX distributed service detected fatal errors"


def run(arguments: Sequence[str], group: Group) -> int:
    """Run `jaxllm` with these arguments in a child, to its end; returns the status to end with."""
    streams = os.dup(1), os.dup(2)
    life, held = os.pipe()
    handed = {process.GUARDED: ",".join(map(str, (*streams, life)))}
    with tempfile.TemporaryFile() as noise:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "jaxllm", *arguments],
            stdout=noise,
            stderr=noise,
            env={**os.environ, **_direct(group), **handed},
            pass_fds=(*streams, life),
        )
        for end in (*streams, life):
            os.close(end)
        process.hand_on(child.send_signal)
        status = child.wait()
        os.close(held)
        return _told(status, noise, group)


def lost(error: Exception) -> Never:
    """End a guarded process that learned from an error that another one is gone."""
    sys.stdout.flush()
    os.write(2, f"{error}\n".encode(errors="replace"))
    os._exit(_LOST)


def _direct(group: Group) -> dict[str, str]:
    """What keeps a proxy out of the way between the processes of a group."""
    host = group.address.rpartition(":")[0]
    known = os.environ.get("no_grpc_proxy", os.environ.get("no_proxy", ""))  # noqa: SIM112
    return {"no_grpc_proxy": ",".join(filter(None, (known, host)))}


def _told(status: int, noise: IO[bytes], group: Group) -> int:
    """The status for a child's, with a line on stderr where it did not end by itself."""
    size = noise.seek(0, os.SEEK_END)
    noise.seek(max(0, size - _MOST))
    text = noise.read().decode(errors="replace")
    if status == _LOST or (status == -signal.SIGABRT and _FATAL in text):
        sys.stderr.write(f"jaxllm: {cause(text, group)}\n")
        return 1
    if status < 0:
        sys.stderr.write(f"{text}jaxllm: ended by {signal.Signals(-status).name}\n")
        return 128 - status
    return status


def cause(text: str, group: Group) -> str:
    """What happened to a group, as JAX's service or a computation has told it."""
    if "ALREADY_EXISTS" in text or "newer incarnation" in text:
        return f"two processes are --process {group.number} of {group}: each has its own number"
    if "RegisterTask" in text:
        return (
            f"{group} was not complete within {JOINING} s: is process 0 there, can it be reached,"
            f" and was each process started, with a number of its own?"
        )
    if silent := re.search(r"unhealthy[^\n]*:\n((?:.*\D)?\d+(?:\n\d+)*)\n", text):
        numbers = re.findall(r"\d+", silent[1])
        which = f"process{'es' * (len(numbers) > 1)} {', '.join(numbers)}"
        return f"{which} of {group} gave no sign of life for {SILENT} s: it ended, or hangs"
    if group.number != 0 and re.search("Failed to send RPC|Socket closed|UNAVAILABLE", text):
        return f"process 0 of {group}, which holds it together, is gone"
    which = "another process" if group.size != 2 else f"process {1 - (group.number or 0)}"
    return f"{which} of {group} is gone: what it said last may tell why"
