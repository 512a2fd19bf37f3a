"""Several processes that run one command, each with devices of its own: `jax.distributed`.

Every process runs all of the command, on the same whole arrays of which each holds its share, so
all must come to the same decisions. What only one can know (stdin, a random seed, the clock), or
one alone is to do, the first does and tells the others (`told`, `from_first`); what each has by
itself (versions, files) is compared (`agree`, `weights.copies`). What is written goes through all
of them, an array at a time (`fetched`), and the first has the file. JAX ends a process from C++
when another is gone; `jaxllm.guard` says then in a line what happened.
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
JOINING = 30  # seconds until all are there; JAX then takes up to fifteen more
SILENT = 20  # seconds without a sign of life, after which a process is taken for gone
LEAVING = 5  # seconds that a process that failed waits for others that fail for the same reason
DAY = 86_400_000  # milliseconds: a person may be typing
PIECE = 1 << 20  # characters of a text that are told at once: a call takes 4 MB
MOST = 1 << 16  # processes

_numbers = itertools.count()
_asked: dict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)  # by who asks
_ALONE = [False]  # whether this process works by itself for a while


class Group(NamedTuple):
    """Where a group meets, how many they are, and which this process is; None: as JAX finds out."""

    address: str
    size: int | None = None
    number: int | None = None

    def __str__(self) -> str:
        of = "" if self.size is None else f" of {self.size} processes"
        return f"the group{of} at {self.address}"


def group_of(address: str, count: int | None, number: int | None) -> Group:
    """A group as a user names it. Raises ConfigError for what is none."""
    if address == AUTO:
        if count is not None or number is not None:
            raise ConfigError("--distributed auto finds --processes and --process out by itself")
        return Group(AUTO)
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port[:9]) < 1 << 16):
        raise ConfigError(
            "--distributed takes HOST:PORT, where process 0 is and a port that is free there, or"
            f" auto; got {address!r:.60}"
        )
    if count is None or number is None:
        raise ConfigError(
            "--distributed HOST:PORT goes with --processes, how many there are, and --process,"
            " which of them this is, from 0"
        )
    if not 1 <= count <= MOST:
        raise ConfigError(f"--processes must be from 1 to {MOST}, got {count}")
    if not 0 <= number < count:
        raise ConfigError(
            f"--process must be from 0 to {count - 1} in a group of {count}, got {number}"
        )
    return Group(address, count, number)


def join(group: Group) -> None:
    """Begin JAX with the devices of all; only the first process says what all would say.

    Before anything else is done with JAX. Where the others do not come, JAX ends the process.
    Raises ConfigError where nothing tells JAX of a group that it is to find out itself.
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
    jax.config.update("jax_check_proxy_envs", False)  # the guard sees to proxies
    try:
        jax.distributed.initialize(
            **given,
            initialization_timeout=JOINING,
            heartbeat_timeout_seconds=SILENT,
            shutdown_timeout_seconds=SILENT,
        )
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"{group}: {error}") from None
    agree({"processes": _state().num_processes})  # before devices are waited for
    if _state().process_id:
        process.follow()


def several() -> bool:
    """Whether this process is one of several that now do the same."""
    if _ALONE[0] or "jax" not in sys.modules:
        return False
    return _state().client is not None and _state().num_processes > 1


def number() -> int:
    """Which of several processes this is, from 0."""
    return int(_state().process_id) if several() else 0


def told(make: Callable[[], str]) -> str:
    """What `make` gives in the first process, which is as one alone meanwhile; of one alone, in it.

    Raises in all of them what it raises of ours: in the others a ConfigError that says the same.
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
        client.key_value_set(f"{key}/{n}", f"={piece}")  # an empty one would be none
    client.key_value_set(key, str(len(pieces)))
    return text


def once(work: Callable[[], Any]) -> None:
    """The first process does it, as one alone, while the others wait; raises as `told`."""

    def said() -> str:
        work()
        return ""

    told(said)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """In the block this process is as one alone."""
    _ALONE[0] = True
    try:
        yield
    finally:
        _ALONE[0] = False


def each(mine: Any, among: Sequence[int] | None = None) -> list[Any]:
    """What every process has, in order: plain data, as JSON has it. among: the numbers of those
    that ask, of which this is one; by default all.
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
    """The arrays of a pytree on the host, all of each. What is spread over processes each of them
    asks for together.
    """
    import jax

    return jax.device_get(jax.tree.map(_gathered, tree) if several() else tree)


def _gathered(x: Any) -> Any:
    """An array as it is where all of it is here, else from all processes, bit for bit: what sums of
    zeros and it would be, -0 is not.
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
    """The first process's array on the host of each. x: in the others any of its shape and format.
    All ask for it together.
    """
    import numpy as np

    if not several():
        return np.asarray(x)
    from jax.experimental import multihost_utils

    mine = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    bits = np.asarray(multihost_utils.broadcast_one_to_all(mine))
    return bits.view(x.dtype).reshape(x.shape)


def arrays_told(make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """The arrays that `make` gives in the first process, by name, on each one's host; as `told`."""
    import numpy as np

    found: dict[str, Any] = {}

    def forms() -> str:
        found.update(make())
        return json.dumps({name: (x.shape, x.dtype.name) for name, x in found.items()})

    said = json.loads(told(forms))
    return {name: from_first(found.get(name, np.zeros(*form))) for name, form in said.items()}


def agree(about: Mapping[str, Any]) -> None:
    """Compare what each process has, by name; for one alone nothing.

    Raises ConfigError in all of them, with what differs, where, and how.
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
        raise ConfigError(f"processes must have the same of everything: {complaint}")


def differences(each: list[dict[str, str]]) -> str:
    """What processes have that is not as process 0 has it, in words."""
    found = []
    for name in each[0]:
        first = each[0][name]
        for number, mine in enumerate(each):
            if (other := mine.get(name, "nothing")) != first:
                found.append(f"{name}: {_apart(first, other)} in process {number}")
    return "; ".join(found)


def _apart(one: str, other: str) -> str:
    """Two texts from a little before where they part."""
    same = next(i for i, (a, b) in enumerate(zip(f"{one}\0", f"{other}\1", strict=False)) if a != b)
    begin = max(0, same - 40) if max(len(one), len(other)) > 160 else 0
    before = "..." if begin else ""
    return f"{before}{one[begin : begin + 160]} in process 0, {before}{other[begin : begin + 160]}"


def digest(texts: Iterable[str]) -> str:
    """A short name of texts, for `agree`."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def leave(status: int) -> None:
    """The end of a command: of one that failed the process ends here, of others when all have.

    A process that failed waits a moment for others that fail too, so that each says why itself.
    """
    if not several():
        return
    import jax

    sys.stdout.flush()
    sys.stderr.flush()
    if not status:
        jax.distributed.shutdown()
        return
    with contextlib.suppress(RuntimeError):  # the others go on, and will miss this one
        _state().client.wait_at_barrier("jaxllm/failed", 1000 * LEAVING)
    os._exit(status)


def is_lost(error: Exception) -> bool:
    """Whether an error of a computation says that another process is gone."""
    return bool(re.search(r"Gloo|NCCL|[Cc]onnection (closed|reset)|UNAVAILABLE", str(error)))


def _state() -> Any:
    """Of JAX's group: num_processes, process_id, and client, its store of keys and values, which is
    all that JAX has for words between processes. Looking here starts no devices.
    """
    from jax._src import distributed

    return distributed.global_state
