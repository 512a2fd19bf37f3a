"""Multi-process runs of one command with `jax.distributed`: broadcast, gather, agreement.

Every process runs the whole command on the same global arrays, of which it holds a shard, so all
must make the same decisions. Process 0 does what only one process can (stdin, random seeds, the
clock) and broadcasts the result (`broadcast_from_zero`, `broadcast_array`). What each process has
by itself (versions, files) is compared (`check_processes_agree`, `weights.replica_check`). To write
a file, all processes gather one array at a time (`to_host`) and process 0 writes it. If a process
dies, JAX aborts the others from C++; `jaxllm.runtime.supervisor` then reports the cause in one
line.
"""

import contextlib
import hashlib
import itertools
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxllm.errors import ConfigError, JaxllmError
from jaxllm.runtime import signals

AUTO = "auto"
JOIN_TIMEOUT_S = 30  # seconds to wait for all processes; JAX adds up to 15
HEARTBEAT_TIMEOUT_S = 20  # seconds without a heartbeat until a process counts as lost
LEAVE_TIMEOUT_S = 5  # seconds that a failed process waits for others that fail for the same reason
WAIT_TIMEOUT_MS = 86_400_000  # milliseconds; a user may be typing
CHUNK_CHARS = 1 << 20  # characters per message; a call takes 4 MB
MAX_PROCESSES = 1 << 16  # processes

_call_numbers = itertools.count()
_gather_numbers: dict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)  # by processes
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
    jax.config.update("jax_check_proxy_envs", False)  # the guard handles proxies
    try:
        jax.distributed.initialize(
            **given,
            initialization_timeout=JOIN_TIMEOUT_S,
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
            shutdown_timeout_seconds=HEARTBEAT_TIMEOUT_S,
        )
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"{group}: {error}") from None
    check_processes_agree({"processes": _state().num_processes})  # before waiting for devices
    if _state().process_id:
        signals.mute_follower()


def is_multiprocess() -> bool:
    """Return whether several processes are running this command together."""
    if _LOCAL_ONLY[0] or "jax" not in sys.modules:
        return False
    return _state().client is not None and _state().num_processes > 1


def process_index() -> int:
    """Return the index of this process, from 0."""
    return int(_state().process_id) if is_multiprocess() else 0


def broadcast_from_zero(make: Callable[[], str]) -> str:
    """Return what `make` returns in process 0, which acts as a single process meanwhile.

    If it raises a JaxllmError there, the other processes raise a ConfigError with the same message.
    """
    if not is_multiprocess():
        return make()
    client, key = _state().client, f"jaxllm/told/{next(_call_numbers)}"
    if _state().process_id:
        count, failed, complaint = client.blocking_key_value_get(key, WAIT_TIMEOUT_MS).partition(
            "!"
        )
        if failed:
            raise ConfigError(complaint)
        each = (
            client.blocking_key_value_get(f"{key}/{n}", WAIT_TIMEOUT_MS) for n in range(int(count))
        )
        return "".join(piece[1:] for piece in each)
    try:
        with _run_locally():
            text = make()
    except JaxllmError as error:
        client.key_value_set(key, f"!{error}")
        raise
    pieces = [text[at : at + CHUNK_CHARS] for at in range(0, len(text), CHUNK_CHARS)]
    for n, piece in enumerate(pieces):
        client.key_value_set(f"{key}/{n}", f"={piece}")  # an empty value would count as missing
    client.key_value_set(key, str(len(pieces)))
    return text


def run_on_process_zero(work: Callable[[], Any]) -> None:
    """Run `work` in process 0 while the others wait; raise as `broadcast_from_zero` does."""

    def run_work() -> str:
        work()
        return ""

    broadcast_from_zero(run_work)


@contextlib.contextmanager
def _run_locally() -> Iterator[None]:
    """Act as a single process within the block."""
    _LOCAL_ONLY[0] = True
    try:
        yield
    finally:
        _LOCAL_ONLY[0] = False


def all_gather_objects(value: Any, processes: Sequence[int] | None = None) -> list[Any]:
    """Return the values of all processes in order; they must be JSON data.

    processes: indices of the participating processes, including this one; by default all.
    """
    if not is_multiprocess():
        return [value]
    client, asking = _state().client, tuple(processes or range(_state().num_processes))
    whose = hashlib.sha256(repr(asking).encode()).hexdigest()[:16]
    key = f"jaxllm/each/{whose}/{next(_gather_numbers[asking])}"
    client.key_value_set(f"{key}/{_state().process_id}", json.dumps(value))
    names = [f"{key}/{n}" for n in asking]
    return [json.loads(client.blocking_key_value_get(name, WAIT_TIMEOUT_MS)) for name in names]


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

    if not is_multiprocess():
        return np.asarray(x)
    from jax.experimental import multihost_utils

    mine = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    bits = np.asarray(multihost_utils.broadcast_one_to_all(mine))
    return bits.view(x.dtype).reshape(x.shape)


def broadcast_arrays(make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """Return the named arrays that `make` returns in process 0, on every host; like
    `broadcast_from_zero`.
    """
    import numpy as np

    found: dict[str, Any] = {}

    def describe_arrays() -> str:
        found.update(make())
        return json.dumps({name: (x.shape, x.dtype.name) for name, x in found.items()})

    said = json.loads(broadcast_from_zero(describe_arrays))
    return {name: broadcast_array(found.get(name, np.zeros(*form))) for name, form in said.items()}


def check_processes_agree(facts: Mapping[str, Any]) -> None:
    """Check that all processes have equal values, by name; a single process checks nothing.

    Raises ConfigError in all processes, with each difference.
    """
    if not is_multiprocess():
        return
    client, key = _state().client, f"jaxllm/agree/{next(_call_numbers)}"
    mine = {name: str(value) for name, value in facts.items()}
    if _state().process_id:
        client.key_value_set(f"{key}/{_state().process_id}", json.dumps(mine))
        complaint = client.blocking_key_value_get(key, 1000 * JOIN_TIMEOUT_S)[1:]
    else:
        others = range(1, _state().num_processes)
        texts = [client.blocking_key_value_get(f"{key}/{n}", 1000 * JOIN_TIMEOUT_S) for n in others]
        complaint = describe_differences([mine, *map(json.loads, texts)])
        client.key_value_set(key, f"={complaint}")
    if complaint:
        raise ConfigError(f"all processes must use identical inputs: {complaint}")


def describe_differences(facts_by_process: list[dict[str, str]]) -> str:
    """Describe how the values of the other processes differ from those of process 0."""
    found = []
    for name in facts_by_process[0]:
        first = facts_by_process[0][name]
        for number, mine in enumerate(facts_by_process):
            if (other := mine.get(name, "nothing")) != first:
                found.append(f"{name}: {_show_difference(first, other)} in process {number}")
    return "; ".join(found)


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
    if not status:
        jax.distributed.shutdown()
        return
    with contextlib.suppress(RuntimeError):  # the others still run, and will notice the loss
        _state().client.wait_at_barrier("jaxllm/failed", 1000 * LEAVE_TIMEOUT_S)
    os._exit(status)


def is_connection_lost(error: Exception) -> bool:
    """Return whether a computation failed because another process is lost."""
    return bool(re.search(r"Gloo|NCCL|[Cc]onnection (closed|reset)|UNAVAILABLE", str(error)))


def _state() -> Any:
    """Return JAX's group state: num_processes, process_id and client, a key-value store, JAX's only
    channel for text between processes. Reading it starts no devices.
    """
    from jax._src import distributed

    return distributed.global_state
