"""Simulation of requests on replicas: continuous batching, shared prefixes, failures.

As in `decode.batching`, a replica runs one operation at a time: it prefills waiting prompts one by
one while there are free rows, then runs a decoding step of all rows. `Machine` gives their times,
from a plan or from measurements. Arrivals are a Poisson process. Other overheads are ignored; the
network only transfers frozen segments.
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
    """The requests.

    Attributes:
      rate: requests per second.
      count: number of requests.
      prompt: tokens per prompt; the first `shared` are the same within each of `groups` groups.
      answer: tokens per answer.
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
    """The speed of a replica; times are in seconds.

    Attributes:
      prompt_time: of the prefill of this many tokens.
      step_time: of a decoding step of this many rows.
      rows: maximum number of rows that run at once.
      prefixes: number of frozen group prefixes that it keeps, the most recently used ones.
      move_time: to move a prompt's keys and values to another replica.
    """

    prompt_time: Callable[[int], float]
    step_time: Callable[[int], float]
    rows: int
    prefixes: int = 0
    move_time: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fleet:
    """The replicas, and how requests are routed.

    Attributes:
      prefilling: number of additional replicas that only prefill, and pass frozen segments on; 0:
        each replica prefills its own prompts.
      by_prefix: route a request to a replica that has its prefix, unless its load exceeds the
        lowest load by more than `Machine.rows`; otherwise to the least loaded.
      fails: (second, replica, seconds of downtime) of each failure. Its requests start again on
        other replicas.
    """

    replicas: int
    prefilling: int = 0
    by_prefix: bool = False
    fails: tuple[tuple[float, int, float], ...] = ()


@dataclasses.dataclass
class Request:
    """A request. first, end: times of its first and last token. computed: prompt tokens that were
    run for it, including repetitions after failures.
    """

    number: int
    arrival: float
    group: int
    first: float = math.inf
    end: float = math.inf
    done: int = 0
    computed: int = 0
    ready: bool = False  # a prefilling replica has run its prompt


class _Replica:
    """The state of a replica."""

    def __init__(self) -> None:
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.kept: list[int] = []  # groups whose prefix it has, the most recently used last
        self.free = 0.0  # time when it finishes its operation
        self.down = -math.inf  # time until which it is down
        self.life = 0  # number of failures; they cancel the operation that was running

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.running)


def simulate(workload: Workload, machine: Machine, fleet: Fleet) -> list[Request]:
    """Simulate the fleet, and return the requests in order of arrival, with their times."""
    if fleet.replicas < 1 or fleet.prefilling < 0:
        raise ConfigError(f"a fleet needs at least one replica, got {fleet}")
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
        """Route a request to a replica with its prefix, or to the least loaded one that is up."""
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
        """Start the next operation of a replica if it is idle."""
        if replica.free <= now:
            self.work(replica, now)

    def work(self, replica: _Replica, now: float) -> None:
        """Start the next operation: a prefill if there is a free row, else a decoding step."""
        if replica.down > now or not replica.load:
            return
        alone = replica in self.prefilling
        if replica.waiting and (alone or len(replica.running) < self.machine.rows):
            request = replica.waiting.pop(0)
            ready = request.ready
            lasting = 0.0 if ready else self.machine.prompt_time(self.tokens(replica, request))
            replica.running.append(request)
            self.busy(replica, now + lasting, partial(self.prompted, replica, request))
            return
        lasting, rows = self.machine.step_time(len(replica.running)), list(replica.running)
        self.busy(replica, now + lasting, partial(self.stepped, replica, rows))

    def busy(self, replica: _Replica, until: float, then: Callable[[float], None]) -> None:
        """Run an operation until `until`, then start the next, unless the replica fails before."""
        replica.free, life = until, replica.life

        def done(now: float) -> None:
            if replica.life == life:
                then(now)
                self.work(replica, now)

        self.at(until, done)

    def tokens(self, replica: _Replica, request: Request) -> int:
        """Return the number of prompt tokens to run, and update the replica's prefixes."""
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
        """Add a token to a request, which may be the last."""
        request.done += 1
        request.first = min(request.first, now)
        if request.done >= self.workload.answer:
            request.end = now
            replica.running.remove(request)

    def fail(self, number: int, lasting: float, now: float) -> None:
        """Take a replica down with all its state; its requests start again on other replicas."""
        replica = self.decoding[number]
        lost = [*replica.running, *replica.waiting]
        replica.waiting, replica.running, replica.kept = [], [], []
        replica.down = replica.free = now + lasting
        replica.life += 1
        for request in lost:
            request.done, request.ready = 0, False
            self.arrive(request, now)
        self.at(replica.down, partial(self.wake, replica))
