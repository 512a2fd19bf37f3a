"""Supervisor of one process of a group: runs it as a child and reports how it ended, in one line.

If another process is lost or never joins, JAX's coordination service aborts from C++ with SIGABRT
and pages of stack trace, and Python cannot prevent it. So the process that the user starts runs the
command in a child. The child's Python streams are the user's; C++ output to stdout and stderr goes
to a file, which is shown only if the child was killed for another reason. If the supervisor is
killed, the child exits too.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import IO, Never

from jaxllm.runtime import signals
from jaxllm.runtime.multihost import HEARTBEAT_TIMEOUT_S, JOIN_TIMEOUT_S, Group

_PEER_LOST_STATUS = 75  # exit status of a child whose computation failed because of a lost process
_MAX_LOG_BYTES = 1 << 16  # bytes of C++ output to read
_FATAL_MARK = "JAX distributed service detected fatal errors"


def run_supervised(arguments: Sequence[str], group: Group) -> int:
    """Run `jaxllm` with these arguments in a child; return the status to exit with."""
    streams = os.dup(1), os.dup(2)
    closes_with_us, kept_open = os.pipe()
    descriptors = (*streams, closes_with_us)
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "jaxllm", *arguments],
            stdout=output,
            stderr=output,
            env={
                **os.environ,
                **_proxy_env(group),
                signals.SUPERVISED_ENV: ",".join(map(str, descriptors)),
            },
            pass_fds=descriptors,
        )
        for descriptor in descriptors:
            os.close(descriptor)
        signals.forward_signals(child.send_signal)
        status = child.wait()
        os.close(kept_open)
        return _report_exit(status, output, group)


def exit_on_lost_peer(error: Exception) -> Never:
    """Exit a supervised process after an error that means that another process is lost."""
    sys.stdout.flush()
    os.write(2, f"{error}\n".encode(errors="replace"))
    os._exit(_PEER_LOST_STATUS)


def _proxy_env(group: Group) -> dict[str, str]:
    """Return environment variables that bypass a proxy between the processes of a group."""
    host = group.address.rpartition(":")[0]
    known = os.environ.get("no_grpc_proxy", os.environ.get("no_proxy", ""))  # noqa: SIM112
    return {"no_grpc_proxy": ",".join(filter(None, (known, host)))}


def _report_exit(status: int, output: IO[bytes], group: Group) -> int:
    """Convert a child's exit status; write a line to stderr if it was killed or lost a peer."""
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - _MAX_LOG_BYTES))
    text = output.read().decode(errors="replace")
    if status == _PEER_LOST_STATUS or (status == -signal.SIGABRT and _FATAL_MARK in text):
        sys.stderr.write(f"jaxllm: {explain_failure(text, group)}\n")
        return 1
    if status < 0:
        sys.stderr.write(f"{text}jaxllm: killed by {signal.Signals(-status).name}\n")
        return 128 - status
    return status


def explain_failure(text: str, group: Group) -> str:
    """Explain what happened to a group, from the output of JAX's service or a computation."""
    if "ALREADY_EXISTS" in text or "newer incarnation" in text:
        return (
            f"two processes have --process {group.process_id} of {group}. Give each its own index"
        )
    if "RegisterTask" in text:
        return (
            f"{group} was not complete within {JOIN_TIMEOUT_S} s. Check that process 0 is running"
            " and reachable, and that every process was started, with its own index"
        )
    which = (
        "another process" if group.num_processes != 2 else f"process {1 - (group.process_id or 0)}"
    )
    return (
        f"{which} of {group} is lost, or sent no heartbeat for {HEARTBEAT_TIMEOUT_S} s. See its"
        " last output for the reason"
    )
