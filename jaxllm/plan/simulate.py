"""Many requests on many replicas, simulated: continuous batching, shared prefixes, failures.

A replica does one thing after the other, as `decode.batching` does: it takes in what fits, a
prompt at a time, and then runs a token of every row. What each takes, `Machine` says, from a plan
or from measurements; arrivals are a Poisson process. Nothing else is known here: no overheads, no
network but what frozen segments take to move.
"""

import dataclasses
import heapq
import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.whole import whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests: `rate` a second, `count` in all. prompt: tokens of each, of which the first
    `shared` are those of its group, one of `groups`. answer: tokens that each is given.
    """

    rate: float
    count: int
    prompt: int
    answer: int
    shared: int = 0
    groups: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("count", "prompt", "answer", "groups"):
            whole(name, getattr(self, name), 1, error=ConfigError)
        whole("shared", self.shared, 0, self.prompt - 1, ConfigError)
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise ConfigError(f"rate must be above 0 requests a second, got {self.rate!r:.40}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """What one replica takes, in seconds. prompt_time: of so many tokens of a prompt. step_time: of
    a token of each of so many rows. rows: the most that run at once. prefixes: how many groups'
    prefixes it keeps, frozen, those that were used last. move_time: of a prompt's keys and values
    from one replica to another, as they are.
    """

    prompt_time: Callable[[int], float]
    step_time: Callable[[int], float]
    rows: int
    prefixes: int = 0
    move_time: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fleet:
    """Replicas. prefilling: how many more do prompts alone, and hand frozen segments on; 0: each
    does its own. by_prefix: whether a request goes to a replica that has its prefix, if that is not
    the busier by more than `rows`; otherwise to the least busy. fails: (second, replica, seconds
    until it is back) of each failure: what it ran begins anew elsewhere.
    """

    replicas: int
    prefilling: int = 0
    by_prefix: bool = False
    fails: tuple[tuple[float, int, float], ...] = ()


@dataclasses.dataclass
class Request:
    """One of them. first, end: when its first and its last token are there. computed: tokens of its
    prompt that were run, again after a failure too.
    """

    number: int
    arrival: float
    group: int
    first: float = math.inf
    end: float = math.inf
    done: int = 0
    computed: int = 0
    ready: bool = False  # its prompt has been run elsewhere


class _Replica:
    """What one is doing."""

    def __init__(self) -> None:
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.kept: list[int] = []  # groups, the one that was used last at the end
        self.free = 0.0  # when it has done what it is doing
        self.down = -math.inf  # until when it is gone
        self.life = 0  # how often it has failed: what it was doing before comes to nothing

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.running)


def simulate(workload: Workload, machine: Machine, fleet: Fleet) -> list[Request]:
    """The requests, in the order of their arrival, as they were served."""
    if fleet.replicas < 1 or fleet.prefilling < 0:
        raise ConfigError(f"a fleet has a replica at least, got {fleet}")
    return _Run(workload, machine, fleet).run()


class _Run:
    def __init__(self, workload: Workload, machine: Machine, fleet: Fleet) -> None:
        self.workload, self.machine, self.fleet = workload, machine, fleet
        self.decoding = [_Replica() for _ in range(fleet.replicas)]
        self.prefilling = [_Replica() for _ in range(fleet.prefilling)]
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.count = 0

    def run(self) -> list[Request]:
        w = self.workload
        rng = np.random.default_rng(w.seed)
        arrivals = np.cumsum(rng.exponential(1 / w.rate, w.count))
        groups = rng.integers(0, w.groups, w.count)
        requests = [Request(i, float(arrivals[i]), int(groups[i])) for i in range(w.count)]
        for request in requests:
            self.at(request.arrival, partial(self.arrive, request))
        for second, number, lasting in self.fleet.fails:
            self.at(second, partial(self.fail, number, lasting))
        while self.events:
            now, _, happen = heapq.heappop(self.events)
            happen(now)
        return requests

    def at(self, when: float, happen: Callable[[float], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (when, self.count, happen))

    def arrive(self, request: Request, now: float) -> None:
        """A request goes to a replica: that of its prefix, or the least busy that is there."""
        pool = self.decoding if request.ready or not self.prefilling else self.prefilling
        there = [r for r in pool if r.down <= now]
        if not there:
            back = min(r.down for r in pool)
            self.at(back, partial(self.arrive, request))
            return
        least = min(there, key=lambda r: r.load)
        if self.fleet.by_prefix and not request.ready:
            has = [r for r in there if request.group in r.kept]
            near = min(has, key=lambda r: r.load, default=least)
            least = near if near.load <= least.load + self.machine.rows else least
        least.waiting.append(request)
        self.wake(least, now)

    def wake(self, replica: _Replica, now: float) -> None:
        """Let a replica that is idle go on."""
        if replica.free <= now:
            self.work(replica, now)

    def work(self, replica: _Replica, now: float) -> None:
        """Do the next thing: take a prompt in if there is room, else a token of every row."""
        if replica.down > now or not replica.load:
            return
        alone = replica in self.prefilling
        if replica.waiting and (alone or len(replica.running) < self.machine.rows):
            request = replica.waiting.pop(0)
            ready = request.ready  # elsewhere
            lasting = 0.0 if ready else self.machine.prompt_time(self.tokens(replica, request))
            replica.running.append(request)
            self.busy(replica, now + lasting, partial(self.prompted, replica, request))
            return
        lasting, rows = self.machine.step_time(len(replica.running)), list(replica.running)
        self.busy(replica, now + lasting, partial(self.stepped, replica, rows))

    def busy(self, replica: _Replica, until: float, then: Callable[[float], None]) -> None:
        """Do something until then, and the next thing after it, unless it fails before."""
        replica.free, life = until, replica.life

        def done(now: float) -> None:
            if replica.life == life:
                then(now)
                self.work(replica, now)

        self.at(until, done)

    def tokens(self, replica: _Replica, request: Request) -> int:
        """Those of its prompt that this replica has to run."""
        count = self.workload.prompt
        if self.machine.prefixes:
            if request.group in replica.kept:
                replica.kept.remove(request.group)
                count -= self.workload.shared
            replica.kept = [*replica.kept, request.group][-self.machine.prefixes :]
        request.computed += count
        return count

    def prompted(self, replica: _Replica, request: Request, now: float) -> None:
        if replica in self.prefilling:
            replica.running.remove(request)
            request.ready = True
            self.at(now + self.machine.move_time, partial(self.arrive, request))
        else:
            self.gain(replica, request, now)

    def stepped(self, replica: _Replica, rows: Sequence[Request], now: float) -> None:
        for request in rows:
            self.gain(replica, request, now)

    def gain(self, replica: _Replica, request: Request, now: float) -> None:
        """A token, which may be the last."""
        request.done += 1
        request.first = min(request.first, now)
        if request.done >= self.workload.answer:
            request.end = now
            replica.running.remove(request)

    def fail(self, number: int, lasting: float, now: float) -> None:
        """A replica is gone, with all that it had; its requests go to others, from the start."""
        replica = self.decoding[number]
        lost = [*replica.running, *replica.waiting]
        replica.waiting, replica.running, replica.kept = [], [], []
        replica.down = replica.free = now + lasting
        replica.life += 1
        for request in lost:
            request.done, request.ready = 0, False
            self.arrive(request, now)
        self.at(replica.down, partial(self.wake, replica))
