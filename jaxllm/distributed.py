"""Multi-process runs of one command with `jax.distributed`: broadcast, gather, agreement.

Every process runs the whole command on the same global arrays, of which it holds a shard, so all
must make the same decisions. Process 0 does what only one process can (stdin, random seeds, the
clock) and broadcasts the result (`told`, `from_first`). What each process has by itself (versions,
files) is compared (`agree`, `weights.copies`). To write a file, all processes gather one array at a
time (`fetched`) and process 0 writes it. If a process dies, JAX aborts the others from C++;
`jaxllm.guard` then reports the cause in one line.
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

from jaxllm import process
from jaxllm.errors import ConfigError, JaxllmError

AUTO = "auto"
JOINING = 30  # seconds to wait for all processes; JAX adds up to 15
SILENT = 20  # seconds without a heartbeat until a process counts as lost
LEAVING = 5  # seconds that a failed process waits for others that fail for the same reason
DAY = 86_400_000  # milliseconds; a user may be typing
PIECE = 1 << 20  # characters per message; a call takes 4 MB
MOST = 1 << 16  # processes

_numbers = itertools.count()
_asked: dict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)  # by processes
_ALONE = [False]  # whether this process temporarily acts alone


class Group(NamedTuple):
    """Coordinator address, number of processes and index of this one; None if JAX detects them."""

    address: str
    size: int | None = None
    number: int | None = None

    def __str__(self) -> str:
        of = "" if self.size is None else f" of {self.size} processes"
        return f"the group{of} at {self.address}"


def group_of(address: str, count: int | None, number: int | None) -> Group:
    """Parse the options of a group. Raises ConfigError for invalid ones."""
    if address == AUTO:
        if count is not None or number is not None:
            raise ConfigError("--distributed auto detects --processes and --process. Remove them")
        return Group(AUTO)
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port[:9]) < 1 << 16):
        raise ConfigError(
            "--distributed must be HOST:PORT, the host of process 0 and a free port there, or"
            f" auto, got {address!r:.60}"
        )
    if count is None or number is None:
        raise ConfigError(
            "--distributed HOST:PORT requires --processes, the number of processes, and --process,"
            " the index of this one, from 0"
        )
    if not 1 <= count <= MOST:
        raise ConfigError(f"--processes must be from 1 to {MOST}, got {count}")
    if not 0 <= number < count:
        raise ConfigError(
            f"--process must be from 0 to {count - 1} with --processes {count}, got {number}"
        )
    return Group(address, count, number)


def join(group: Group) -> None:
    """Initialize JAX with the devices of all processes; mute all but process 0.

    Call it before any other use of JAX. If the other processes do not join, JAX aborts this one.
    Raises ConfigError if JAX cannot detect the group with `auto`.
    """
    import jax

    given: dict[str, Any] = {}
    if group.address != AUTO:
        given = {
            "coordinator_address": group.address,
            "num_processes": group.size,
            "process_id": group.number,
            "cluster_detection_method": "deactivate",
        }
    jax.config.update("jax_check_proxy_envs", False)  # the guard handles proxies
    try:
        jax.distributed.initialize(
            **given,
            initialization_timeout=JOINING,
            heartbeat_timeout_seconds=SILENT,
            shutdown_timeout_seconds=SILENT,
        )
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"{group}: {error}") from None
    agree({"processes": _state().num_processes})  # before waiting for devices
    if _state().process_id:
        process.follow()


def several() -> bool:
    """Return whether several processes are running this command together."""
    if _ALONE[0] or "jax" not in sys.modules:
        return False
    return _state().client is not None and _state().num_processes > 1


def number() -> int:
    """Return the index of this process, from 0."""
    return int(_state().process_id) if several() else 0


def told(make: Callable[[], str]) -> str:
    """Return what `make` returns in process 0, which acts as a single process meanwhile.

    If it raises a JaxllmError there, the other processes raise a ConfigError with the same message.
    """
    if not several():
        return make()
    client, key = _state().client, f"jaxllm/told/{next(_numbers)}"
    if _state().process_id:
        count, failed, complaint = client.blocking_key_value_get(key, DAY).partition("!")
        if failed:
            raise ConfigError(complaint)
        each = (client.blocking_key_value_get(f"{key}/{n}", DAY) for n in range(int(count)))
        return "".join(piece[1:] for piece in each)
    try:
        with _alone():
            text = make()
    except JaxllmError as error:
        client.key_value_set(key, f"!{error}")
        raise
    pieces = [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
    for n, piece in enumerate(pieces):
        client.key_value_set(f"{key}/{n}", f"={piece}")  # an empty value would count as missing
    client.key_value_set(key, str(len(pieces)))
    return text


def once(work: Callable[[], Any]) -> None:
    """Run `work` in process 0 while the others wait; raise as `told` does."""

    def said() -> str:
        work()
        return ""

    told(said)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Act as a single process within the block."""
    _ALONE[0] = True
    try:
        yield
    finally:
        _ALONE[0] = False


def each(mine: Any, among: Sequence[int] | None = None) -> list[Any]:
    """Return the values of all processes in order; they must be JSON data.

    among: indices of the participating processes, including this one; by default all.
    """
    if not several():
        return [mine]
    client, asking = _state().client, tuple(among or range(_state().num_processes))
    whose = hashlib.sha256(repr(asking).encode()).hexdigest()[:16]
    key = f"jaxllm/each/{whose}/{next(_asked[asking])}"
    client.key_value_set(f"{key}/{_state().process_id}", json.dumps(mine))
    names = [f"{key}/{n}" for n in asking]
    return [json.loads(client.blocking_key_value_get(name, DAY)) for name in names]


def fetched(tree: Any) -> Any:
    """Return a pytree with all arrays complete on the host. If any is sharded over processes, all
    processes must call this together.
    """
    import jax

    return jax.device_get(jax.tree.map(_gathered, tree) if several() else tree)


def _gathered(x: Any) -> Any:
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


def from_first(x: Any) -> Any:
    """Return process 0's array on every host; all processes must call this together. x: in the
    others, any array of the same shape and dtype.
    """
    import numpy as np

    if not several():
        return np.asarray(x)
    from jax.experimental import multihost_utils

    mine = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    bits = np.asarray(multihost_utils.broadcast_one_to_all(mine))
    return bits.view(x.dtype).reshape(x.shape)


def arrays_told(make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """Return the named arrays that `make` returns in process 0, on every host; like `told`."""
    import numpy as np

    found: dict[str, Any] = {}

    def forms() -> str:
        found.update(make())
        return json.dumps({name: (x.shape, x.dtype.name) for name, x in found.items()})

    said = json.loads(told(forms))
    return {name: from_first(found.get(name, np.zeros(*form))) for name, form in said.items()}


def agree(about: Mapping[str, Any]) -> None:
    """Check that all processes have equal values, by name; a single process checks nothing.

    Raises ConfigError in all processes, with each difference.
    """
    if not several():
        return
    client, key = _state().client, f"jaxllm/agree/{next(_numbers)}"
    mine = {name: str(value) for name, value in about.items()}
    if _state().process_id:
        client.key_value_set(f"{key}/{_state().process_id}", json.dumps(mine))
        complaint = client.blocking_key_value_get(key, 1000 * JOINING)[1:]
    else:
        others = range(1, _state().num_processes)
        texts = [client.blocking_key_value_get(f"{key}/{n}", 1000 * JOINING) for n in others]
        complaint = differences([mine, *map(json.loads, texts)])
        client.key_value_set(key, f"={complaint}")
    if complaint:
        raise ConfigError(f"all processes must use identical inputs: {complaint}")


def differences(each: list[dict[str, str]]) -> str:
    """Describe how the values of the other processes differ from those of process 0."""
    found = []
    for name in each[0]:
        first = each[0][name]
        for number, mine in enumerate(each):
            if (other := mine.get(name, "nothing")) != first:
                found.append(f"{name}: {_apart(first, other)} in process {number}")
    return "; ".join(found)


def _apart(one: str, other: str) -> str:
    """Show two texts from shortly before their first difference."""
    same = next(i for i, (a, b) in enumerate(zip(f"{one}\0", f"{other}\1", strict=False)) if a != b)
    begin = max(0, same - 40) if max(len(one), len(other)) > 160 else 0
    before = "..." if begin else ""
    return f"{before}{one[begin : begin + 160]} in process 0, {before}{other[begin : begin + 160]}"


def digest(texts: Iterable[str]) -> str:
    """Return a short hash of texts, for `agree`."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def leave(status: int) -> None:
    """Leave the group at the end of a command; with a non-zero status, exit the process.

    A successful process waits until all have finished. A failed one waits a moment for others that
    also fail, so that each can report its own error.
    """
    if not several():
        return
    import jax

    sys.stdout.flush()
    sys.stderr.flush()
    if not status:
        jax.distributed.shutdown()
        return
    with contextlib.suppress(RuntimeError):  # the others still run, and will notice the loss
        _state().client.wait_at_barrier("jaxllm/failed", 1000 * LEAVING)
    os._exit(status)


def is_lost(error: Exception) -> bool:
    """Return whether a computation failed because another process is lost."""
    return bool(re.search(r"Gloo|NCCL|[Cc]onnection (closed|reset)|UNAVAILABLE", str(error)))


def _state() -> Any:
    """Return JAX's group state: num_processes, process_id and client, a key-value store, JAX's only
    channel for text between processes. Reading it starts no devices.
    """
    from jax._src import distributed

    return distributed.global_state
