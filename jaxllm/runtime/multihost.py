"""Several processes that run one command on one model, with `jax.distributed`.

Every process runs the whole command on the same global arrays, of which it holds a shard, so all
must make the same decisions. Process 0 does what only one process can (stdin, random seeds, the
clock) and broadcasts the result (`broadcast_from_zero`, `broadcast_array`). Processes compare their
own versions and files (`check_processes_agree`, `weights.replica_check`). To write
a file, all processes gather one array at a time (`to_host`) and process 0 writes it. If a process
dies, JAX aborts the others from C++; `jaxllm.runtime.supervisor` then reports the cause in one
line.
"""

import contextlib
import hashlib
import json
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from jaxllm.errors import ConfigError, JaxllmError
from jaxllm.runtime import signals

AUTO = "auto"
JOIN_TIMEOUT_S = 30  # seconds to wait for all processes; JAX adds up to 15
HEARTBEAT_TIMEOUT_S = 20  # seconds without a heartbeat until a process counts as lost
LEAVE_TIMEOUT_S = 5  # seconds that a failed process waits for others that fail for the same reason
MIN_MESSAGE_BYTES = 1 << 12  # shorter messages are padded, so that one program sends most of them
MAX_PROCESSES = 1 << 16  # processes

_LOCAL_ONLY = [False]  # whether this process temporarily acts alone


class Group(NamedTuple):
    """Coordinator address, number of processes and index of this one; None if JAX detects them."""

    address: str
    num_processes: int | None = None
    process_id: int | None = None

    def __str__(self) -> str:
        of = "" if self.num_processes is None else f" of {self.num_processes} processes"
        return f"the group{of} at {self.address}"


def parse_group(address: str, num_processes: int | None, process_id: int | None) -> Group:
    """Parse the options of a group. Raises ConfigError for invalid ones."""
    if address == AUTO:
        if num_processes is not None or process_id is not None:
            raise ConfigError("--distributed auto detects --processes and --process. Remove them")
        return Group(AUTO)
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port[:9]) < 1 << 16):
        raise ConfigError(
            "--distributed must be HOST:PORT, the host of process 0 and a free port there, or"
            f" auto, got {address!r:.60}"
        )
    if num_processes is None or process_id is None:
        raise ConfigError(
            "--distributed HOST:PORT requires --processes, the number of processes, and --process,"
            " the index of this one, from 0"
        )
    if not 1 <= num_processes <= MAX_PROCESSES:
        raise ConfigError(f"--processes must be from 1 to {MAX_PROCESSES}, got {num_processes}")
    if not 0 <= process_id < num_processes:
        raise ConfigError(
            f"--process must be from 0 to {num_processes - 1} with --processes {num_processes},"
            f" got {process_id}"
        )
    return Group(address, num_processes, process_id)


def join_group(group: Group) -> None:
    """Initialize JAX with the devices of all processes; mute all but process 0.

    Call it before any other use of JAX. If the other processes do not join, JAX aborts this one.
    Raises ConfigError if JAX cannot detect the group with `auto`.
    """
    import jax

    given: dict[str, Any] = {}
    if group.address != AUTO:
        given = {
            "coordinator_address": group.address,
            "num_processes": group.num_processes,
            "process_id": group.process_id,
            "cluster_detection_method": "deactivate",
        }
    jax.config.update("jax_check_proxy_envs", False)  # the supervisor handles proxies
    try:
        jax.distributed.initialize(
            **given,
            initialization_timeout=JOIN_TIMEOUT_S,
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
            shutdown_timeout_seconds=HEARTBEAT_TIMEOUT_S,
        )
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"{group}: {error}") from None
    devices = Counter(device.process_index for device in jax.devices())
    if group.num_processes not in (None, len(devices)):
        raise ConfigError(f"{group}: process 0 has --processes {len(devices)}")
    if len({*devices.values()}) > 1:
        counts = ", ".join(f"{count} in process {number}" for number, count in devices.items())
        raise ConfigError(f"all processes must use as many devices: got {counts}")
    if jax.process_index():
        signals.mute_follower()


def is_multiprocess() -> bool:
    """Return whether several processes are running this command together."""
    if _LOCAL_ONLY[0] or "jax" not in sys.modules:
        return False
    import jax

    return jax.distributed.is_initialized() and jax.process_count() > 1


def process_index() -> int:
    """Return the index of this process, from 0."""
    import jax

    return jax.process_index() if is_multiprocess() else 0


def broadcast_from_zero(make: Callable[[], str]) -> str:
    """Return what `make` returns in process 0, which acts as a single process meanwhile.

    If it raises a JaxllmError there, the other processes raise a ConfigError with the same message.
    """
    if not is_multiprocess():
        return make()
    text, failure = "", None
    if process_index() == 0:
        try:
            with _run_locally():
                text = make()
        except JaxllmError as error:
            failure = error
    message = json.dumps([text, None if failure is None else str(failure)]).encode()
    (length,) = broadcast_array([len(message)])
    text, complaint = json.loads(broadcast_array(_pad_message(message, length))[:length].tobytes())
    if complaint is not None:
        raise failure or ConfigError(complaint)
    return text


def _pad_message(message: bytes, length: int) -> Any:
    """Return the bytes of a message in an array whose size all messages of `length` have."""
    import numpy as np

    padded = np.zeros(max(MIN_MESSAGE_BYTES, 1 << int(length).bit_length()), np.uint8)
    data = np.frombuffer(message, np.uint8)[:length]
    padded[: len(data)] = data
    return padded


def run_on_process_zero(work: Callable[[], Any]) -> None:
    """Run `work` in process 0 while the others wait; raise as `broadcast_from_zero` does."""
    broadcast_from_zero(lambda: str(work())[:0])


@contextlib.contextmanager
def _run_locally() -> Iterator[None]:
    """Act as a single process within the block."""
    _LOCAL_ONLY[0] = True
    try:
        yield
    finally:
        _LOCAL_ONLY[0] = False


def all_gather_objects(value: Any) -> list[Any]:
    """Return the values of all processes in order; they must be JSON data."""
    if not is_multiprocess():
        return [value]
    import numpy as np
    from jax.experimental.multihost_utils import process_allgather

    message = json.dumps(value).encode()
    lengths = process_allgather(np.int32(len(message)))
    texts = process_allgather(_pad_message(message, lengths.max()))
    return [json.loads(x[:n].tobytes()) for x, n in zip(texts, lengths, strict=True)]


def to_host(tree: Any) -> Any:
    """Return a pytree with all arrays complete on the host. If any is sharded over processes, all
    processes must call this together.
    """
    import jax

    return jax.device_get(jax.tree.map(_gather_array, tree) if is_multiprocess() else tree)


def _gather_array(x: Any) -> Any:
    """Gather an array from all processes unless it is complete here.

    Floats are gathered as bits, because a gather that sums with zeros would turn -0 into 0.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import multihost_utils

    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
        return x
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return multihost_utils.process_allgather(x, tiled=True)
    bits = jax.lax.bitcast_convert_type(x, np.dtype(f"uint{8 * x.dtype.itemsize}"))
    return np.asarray(multihost_utils.process_allgather(bits, tiled=True)).view(x.dtype)


def broadcast_array(x: Any) -> Any:
    """Return process 0's array on every host; all processes must call this together. x: in the
    others, any array of the same shape and dtype.
    """
    import numpy as np

    array = np.asarray(x)
    if not is_multiprocess():
        return array
    from jax.experimental.multihost_utils import broadcast_one_to_all

    sent = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    bits = np.asarray(broadcast_one_to_all(sent))
    return bits.view(array.dtype).reshape(array.shape)


def broadcast_arrays(make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """Return the named arrays that `make` returns in process 0, on every host; like
    `broadcast_from_zero`.
    """
    import numpy as np

    local: dict[str, Any] = {}

    def describe_arrays() -> str:
        local.update(make())
        return json.dumps({name: (x.shape, x.dtype.name) for name, x in local.items()})

    forms = json.loads(broadcast_from_zero(describe_arrays))
    return {name: broadcast_array(local.get(name, np.zeros(*form))) for name, form in forms.items()}


def check_processes_agree(facts: Mapping[str, Any]) -> None:
    """Check that all processes have equal values, by name; a single process checks nothing.

    Raises ConfigError in all processes, with each difference.
    """
    if complaint := describe_differences(
        all_gather_objects({name: str(value) for name, value in facts.items()})
    ):
        raise ConfigError(f"all processes must use identical inputs: {complaint}")


def describe_differences(facts_by_process: list[dict[str, str]]) -> str:
    """Describe how the values of the other processes differ from those of process 0."""
    differences = []
    for name in facts_by_process[0]:
        first = facts_by_process[0][name]
        for number, facts in enumerate(facts_by_process):
            if (other := facts.get(name, "nothing")) != first:
                differences.append(f"{name}: {_show_difference(first, other)} in process {number}")
    return "; ".join(differences)


def _show_difference(one: str, other: str) -> str:
    """Show two texts from shortly before their first difference."""
    same = next(i for i, (a, b) in enumerate(zip(f"{one}\0", f"{other}\1", strict=False)) if a != b)
    begin = max(0, same - 40) if max(len(one), len(other)) > 160 else 0
    before = "..." if begin else ""
    return f"{before}{one[begin : begin + 160]} in process 0, {before}{other[begin : begin + 160]}"


def digest(texts: Iterable[str]) -> str:
    """Return a short hash of texts, for `check_processes_agree`."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def leave_group(status: int) -> None:
    """Leave the group at the end of a command; with a non-zero status, exit the process.

    A successful process waits until all have finished. A failed one waits a moment for others that
    also fail, so that each can report its own error.
    """
    if not is_multiprocess():
        return
    import jax

    sys.stdout.flush()
    sys.stderr.flush()
    leaving = threading.Thread(target=jax.distributed.shutdown, daemon=True)  # waits for all
    leaving.start()
    leaving.join(LEAVE_TIMEOUT_S if status else None)
    if status:
        os._exit(status)


def is_connection_lost(error: Exception) -> bool:
    """Return whether a computation failed because another process is lost."""
    return bool(re.search(r"Gloo|NCCL|[Cc]onnection (closed|reset)|UNAVAILABLE", str(error)))
