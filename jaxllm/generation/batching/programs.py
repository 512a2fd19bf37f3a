"""Which programs of a serving loop are compiled, so that no row waits for a compiler.

Where a thread compiles ahead (`compile_ahead`), a step runs the smallest compiled program that it
fits into, and a request that needs programs of another form waits until they are there, while
others run. It is only done where bits do not depend on shapes.
"""

import math
import threading
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from jaxllm.generation.loops.joined_pass import can_join, joined_width
from jaxllm.generation.loops.microbatch import TokenRun, bucket_rows, padded_width, sites_to_read

Kind = Literal["fill", "step", "joined", "rounds"]


class Family(NamedTuple):
    """What a step's program depends on besides its shape.

    form: the number of what all rows depend on, such as the kinds of samplers (`Programs.number`).
    adapters: whether rows choose theirs. read: names of the sites that it returns.
    """

    form: int
    adapters: bool = False
    read: tuple[str, ...] = ()


class Job(NamedTuple):
    """A program to compile, and the draw after it.

    kind: "fill" puts a request into a row; "step" runs `width` tokens of each of so many rows;
    "joined" one token of each, and `width` of a prompt; "rounds" a draft's tokens of each.
    """

    family: Family
    kind: Kind
    rows: int = 0
    width: int = 0


class Group(NamedTuple):
    """Runs of tokens for a program with so many rows and tokens in each; None: the usual number."""

    runs: list[TokenRun]
    rows: int | None = None
    width: int | None = None


class Programs:
    """The compiled programs of a loop with so many rows, and those to compile. Threads share it.

    Before `plan`, and while nothing compiles what is planned, the loop compiles what it needs.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._change = threading.Condition()
        self._numbers: dict[Hashable, int] = {}
        self._loops: dict[int, Any] = {}
        self._compiled = set[Job]()
        self._sizes = defaultdict[tuple[Family, Kind], set[tuple[int, int]]](set)
        self._first: dict[Family, list[Job]] = {}
        self._urgent = list[Family]()
        self._planned = list[Job]()
        self._missed = Counter[Job]()
        self._chooses, self._compiling, self._closed = False, False, False

    def number(self, form: Hashable) -> int:
        """Return the number of a form."""
        with self._change:
            return self._numbers.setdefault(form, len(self._numbers))

    def plan(
        self, loop: Any, first: Iterable[Job], usual: Iterable[Job] = (), *, chooses: bool
    ) -> None:
        """Plan the programs of a form, for the thread that compiles from now on (`compiling`).

        loop: with the shapes of its state. first: those without which no request of their families
        runs. chooses: whether the loop may run larger programs than it needs.
        """
        with self._change:
            for job in first:
                self._loops[job.family.form] = loop
                self._first.setdefault(job.family, []).append(job)
                self._planned.append(job)
            self._planned += usual
            self._chooses |= chooses
            self._compiling = True
            self._change.notify_all()

    def hurry(self, families: Collection[Family]) -> None:
        """Let the first programs of families be compiled before all others."""
        with self._change:
            self._urgent += [family for family in families if family not in self._urgent]
            self._change.notify_all()

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """A block that compiles what is planned. After it the loop compiles for itself."""
        with self._change:
            self._compiling = True
        try:
            yield
        finally:
            with self._change:
                self._compiling = False
                self._change.notify_all()

    @property
    def _follows(self) -> bool:
        """Whether the loop runs only what is compiled."""
        return self._chooses and self._compiling

    def find_missing(self, families: Collection[Family]) -> list[Family]:
        """Return the families of which a request must wait for programs."""
        with self._change:
            return [
                family
                for family in families
                if self._follows and not self._compiled.issuperset(self._first.get(family, [None]))
            ]

    def is_planned(self, family: Family) -> bool:
        """Whether its first programs are compiled, or will be."""
        return family in self._first

    @property
    def is_urgent(self) -> bool:
        """Whether requests may wait for a program."""
        with self._change:
            return self._next_first() is not None

    def _next_first(self) -> Job | None:
        jobs = (job for family in self._urgent for job in self._first[family])
        return next((job for job in jobs if job not in self._compiled), None)

    def take(self, waits: bool) -> tuple[Any, Job] | None:
        """Return the next program to compile, and its loop: one that requests may wait for, else
        the one that steps missed most. None: there is none, or the loop has ended.

        waits: until there is one.
        """
        with self._change:
            while not self._closed:
                job = self._next_first()
                while job is None and self._planned:
                    job = max(self._planned, key=self._missed.__getitem__)
                    self._planned.remove(job)
                    job = None if job in self._compiled else job
                if job is not None:
                    return self._loops[job.family.form], job
                if not waits:
                    return None
                self._change.wait()
        return None

    def add(self, job: Job) -> None:
        """Note that a program is compiled; or cannot be, so that the loop meets the error."""
        with self._change:
            self._compiled.add(job)
            self._sizes[job.family, job.kind].add((job.rows, job.width))
            self._change.notify_all()

    @property
    def num_planned(self) -> int:
        """The number of programs that are still to be compiled."""
        with self._change:
            return len(self._planned)

    def wait(self, seconds: float) -> None:
        """Wait for the next program, so many seconds at most."""
        with self._change:
            self._change.wait(seconds)

    def forget(self) -> None:
        """Note that no program is compiled any more; they are planned again."""
        with self._change:
            self._planned += self._compiled
            self._compiled.clear()
            self._sizes.clear()
            self._change.notify_all()

    def close(self) -> None:
        """End the thread that compiles."""
        with self._change:
            self._closed = True
            self._change.notify_all()

    def fit_rows(self, family: Family, kind: Kind, count: int) -> int | None:
        """Return the number of rows of the smallest program for `count` rows of a token each; None
        if there is none.
        """
        found = self._fit(family, kind, count, 1)
        return None if found is None else found[0]

    def fit_part(self, family: Family, part: int, count: int) -> int:
        """Return how much of a part of a prompt runs in one pass with `count` rows."""
        widths = [width for rows, width in self._list_sizes(family, "joined") if rows >= count]
        return min(part, max(widths, default=part))

    def fit_groups(
        self, form: int, groups: Sequence[list[TokenRun]], joins: bool
    ) -> tuple[list[Group], bool]:
        """Return groups for programs that are compiled, and whether they are two for one pass.

        joins: whether groups may run in one pass.
        """
        if joins := joins and can_join(groups):
            (part,), single = groups
            family = Family(form, any(run.adapter is not None for run in single))
            if not self._list_sizes(family, "step"):
                return [Group(runs) for runs in groups], True
            if found := self._fit(family, "joined", len(single), part.index_T.size):
                rows, width = found
                return [Group([part], None, width), Group(single, rows)], True
        return [x for runs in groups for x in self._fit_group(form, runs)], False

    def _fit_group(self, form: int, runs: list[TokenRun]) -> list[Group]:
        family = Family(form, any(run.adapter is not None for run in runs), sites_to_read(runs))
        sizes = self._list_sizes(family, "step")
        if not sizes:  # none is planned, or they were forgotten
            return [Group(runs)]
        width = padded_width(max(run.index_T.size for run in runs))
        if found := self._fit(family, "step", len(runs), width):
            return [Group(runs, *found)]
        if len(runs) > 1:
            return [x for run in runs for x in self._fit_group(form, [run])]
        (run,), widest = runs, max(width for _, width in sizes)
        # Sites are read at the last token, for which there is a program.
        starts = [0, run.index_T.size - 1] if family.read else [*range(0, run.index_T.size, widest)]
        ends = [*starts[1:], run.index_T.size]
        pieces = [run.slice_tokens(slice(*cut)) for cut in zip(starts, ends, strict=True)]
        return [x for piece in pieces for x in self._fit_group(form, [piece])]

    def _list_sizes(self, family: Family, kind: Kind) -> Collection[tuple[int, int]]:
        """Return the sizes of compiled programs, if the loop must choose from them."""
        with self._change:
            return set(self._sizes[family, kind]) if self._follows else set()

    def _fit(self, family: Family, kind: Kind, count: int, width: int) -> tuple[int, int] | None:
        """Return the size of the smallest compiled program for so many rows and tokens in each."""
        usual = min(bucket_rows(count), self._rows)
        joins = kind == "joined"
        wanted = Job(family, kind, usual, joined_width(width, usual) if joins else width)
        sizes = self._list_sizes(family, kind)
        fitting = [size for size in sizes if size[0] >= count and size[1] >= width]
        found = min(fitting, key=sum if joins else math.prod, default=None)
        if found != wanted[2:]:
            with self._change:
                self._missed[wanted] += 1
        return found
