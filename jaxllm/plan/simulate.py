"""Simulation of requests on replicas: continuous batching, shared prefixes, failures.

As in `generation.batching`, a replica runs one operation at a time: it prefills waiting prompts one
by one while there are free rows, then runs a decoding step of all rows. `Machine` gives their
times, from a plan or from measurements. Arrivals are a Poisson process. Other overheads are
ignored; the network only transfers frozen segments.
"""

import dataclasses
import heapq
import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.runtime.validation import check_int


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
            check_int(name, getattr(self, name), 1, error=ConfigError)
        check_int("shared", self.shared, 0, self.prompt - 1, ConfigError)
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
      prefill_replicas: number of additional replicas that only prefill, and pass frozen segments
        on; 0: each replica prefills its own prompts.
      route_by_prefix: route a request to a replica that has its prefix, unless its load exceeds the
        lowest load by more than `Machine.rows`; otherwise to the least loaded.
      failures: (second, replica, seconds of downtime) of each failure. Its requests start again on
        other replicas.
    """

    replicas: int
    prefill_replicas: int = 0
    route_by_prefix: bool = False
    failures: tuple[tuple[float, int, float], ...] = ()


@dataclasses.dataclass
class Request:
    """A request. prompt_computed: prompt tokens that were run for it, including repetitions after
    failures.
    """

    number: int
    arrival: float
    group: int
    first_token_time: float = math.inf
    end_time: float = math.inf
    num_answered: int = 0
    prompt_computed: int = 0
    is_prefilled: bool = False  # a prefilling replica has run its prompt


class _Replica:
    """The state of a replica."""

    def __init__(self) -> None:
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.prefixes: list[int] = []  # groups whose prefix it has, the most recently used last
        self.free_at = 0.0  # time when it finishes its operation
        self.down_until = -math.inf  # time until which it is down
        self.restarts = 0  # number of failures; they cancel the operation that was running

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.running)


def simulate(workload: Workload, machine: Machine, fleet: Fleet) -> list[Request]:
    """Simulate the fleet, and return the requests in order of arrival, with their times."""
    if fleet.replicas < 1 or fleet.prefill_replicas < 0:
        raise ConfigError(f"a fleet needs at least one replica, got {fleet}")
    return _Simulation(workload, machine, fleet).run()


class _Simulation:
    def __init__(self, workload: Workload, machine: Machine, fleet: Fleet) -> None:
        self.workload, self.machine, self.fleet = workload, machine, fleet
        self.decoding = [_Replica() for _ in range(fleet.replicas)]
        self.prefilling = [_Replica() for _ in range(fleet.prefill_replicas)]
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.count = 0

    def run(self) -> list[Request]:
        w = self.workload
        rng = np.random.default_rng(w.seed)
        arrivals = np.cumsum(rng.exponential(1 / w.rate, w.count))
        groups = rng.integers(0, w.groups, w.count)
        requests = [Request(i, float(arrivals[i]), int(groups[i])) for i in range(w.count)]
        for request in requests:
            self.schedule(request.arrival, partial(self.arrive, request))
        for second, number, lasting in self.fleet.failures:
            self.schedule(second, partial(self.fail_replica, number, lasting))
        while self.events:
            now, _, happen = heapq.heappop(self.events)
            happen(now)
        return requests

    def schedule(self, when: float, action: Callable[[float], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (when, self.count, action))

    def arrive(self, request: Request, now: float) -> None:
        """Route a request to a replica with its prefix, or to the least loaded one that is up."""
        pool = self.decoding if request.is_prefilled or not self.prefilling else self.prefilling
        there = [r for r in pool if r.down_until <= now]
        if not there:
            back = min(r.down_until for r in pool)
            self.schedule(back, partial(self.arrive, request))
            return
        least = min(there, key=lambda r: r.load)
        if self.fleet.route_by_prefix and not request.is_prefilled:
            has = [r for r in there if request.group in r.prefixes]
            near = min(has, key=lambda r: r.load, default=least)
            least = near if near.load <= least.load + self.machine.rows else least
        least.waiting.append(request)
        self.wake(least, now)

    def wake(self, replica: _Replica, now: float) -> None:
        """Start the next operation of a replica if it is idle."""
        if replica.free_at <= now:
            self.start_next(replica, now)

    def start_next(self, replica: _Replica, now: float) -> None:
        """Start the next operation: a prefill if there is a free row, else a decoding step."""
        if replica.down_until > now or not replica.load:
            return
        alone = replica in self.prefilling
        if replica.waiting and (alone or len(replica.running) < self.machine.rows):
            request = replica.waiting.pop(0)
            ready = request.is_prefilled
            lasting = (
                0.0 if ready else self.machine.prompt_time(self.prompt_tokens(replica, request))
            )
            replica.running.append(request)
            self.run_until(replica, now + lasting, partial(self.finish_prompt, replica, request))
            return
        lasting, rows = self.machine.step_time(len(replica.running)), list(replica.running)
        self.run_until(replica, now + lasting, partial(self.finish_step, replica, rows))

    def run_until(self, replica: _Replica, end: float, action: Callable[[float], None]) -> None:
        """Run an operation until `end`, then start the next, unless the replica fails before."""
        replica.free_at, life = end, replica.restarts

        def finish(now: float) -> None:
            if replica.restarts == life:
                action(now)
                self.start_next(replica, now)

        self.schedule(end, finish)

    def prompt_tokens(self, replica: _Replica, request: Request) -> int:
        """Return the number of prompt tokens to run, and update the replica's prefixes."""
        count = self.workload.prompt
        if self.machine.prefixes:
            if request.group in replica.prefixes:
                replica.prefixes.remove(request.group)
                count -= self.workload.shared
            replica.prefixes = [*replica.prefixes, request.group][-self.machine.prefixes :]
        request.prompt_computed += count
        return count

    def finish_prompt(self, replica: _Replica, request: Request, now: float) -> None:
        if replica in self.prefilling:
            replica.running.remove(request)
            request.is_prefilled = True
            self.schedule(now + self.machine.move_time, partial(self.arrive, request))
        else:
            self.add_token(replica, request, now)

    def finish_step(self, replica: _Replica, rows: Sequence[Request], now: float) -> None:
        for request in rows:
            self.add_token(replica, request, now)

    def add_token(self, replica: _Replica, request: Request, now: float) -> None:
        """Add a token to a request, which may be the last."""
        request.num_answered += 1
        request.first_token_time = min(request.first_token_time, now)
        if request.num_answered >= self.workload.answer:
            request.end_time = now
            replica.running.remove(request)

    def fail_replica(self, number: int, duration: float, now: float) -> None:
        """Take a replica down with all its state; its requests start again on other replicas."""
        replica = self.decoding[number]
        lost = [*replica.running, *replica.waiting]
        replica.waiting, replica.running, replica.prefixes = [], [], []
        replica.down_until = replica.free_at = now + duration
        replica.restarts += 1
        for request in lost:
            request.num_answered, request.is_prefilled = 0, False
            self.arrive(request, now)
        self.schedule(replica.down_until, partial(self.wake, replica))
