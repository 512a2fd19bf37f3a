"""Regular expressions as automata over bytes: Python's syntax and meaning, as `re.fullmatch` does.

Python's own parser reads the pattern. Each of its parts becomes a fragment of a nondeterministic
automaton over UTF-8 bytes (Thompson 1968); sets of its states are the states of the deterministic
one, which is then made minimal (Moore 1956). Only regular patterns have one: what needs memory or
looks around is refused by name.
"""

import _sre  # type: ignore[import-not-found]
import re
import re._casefix as casefix  # type: ignore[import-not-found]
import re._constants as op  # type: ignore[import-not-found]
import re._parser as parser  # type: ignore[import-not-found]
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from jaxllm.errors import GrammarError

DEAD = -1
MAX_FRAGMENT_STATES = 200_000
MAX_STATES = 20_000
MAX_ROUNDS = 1000
_LAST = sys.maxunicode
_FLAGS = re.UNICODE | re.DOTALL | re.VERBOSE | re.ASCII | re.IGNORECASE
_REFUSED = {
    op.ASSERT: "look-around",
    op.ASSERT_NOT: "look-around",
    op.GROUPREF: "a reference to a group",
    op.GROUPREF_EXISTS: "a condition on a group",
    op.ATOMIC_GROUP: "an atomic group",
    op.POSSESSIVE_REPEAT: "a possessive repeat",
}
_parsing = threading.Lock()  # filters of warnings belong to all threads

Ranges = tuple[tuple[int, int], ...]  # code points, both ends included, in order


class ByteAutomaton(NamedTuple):
    """A deterministic automaton over bytes; state 0 is the start.

    next_SN: int32 `[S, 256]`, the state after each byte, `DEAD` if no text continues so.
    accepts_S: bool, whether the text may end here.
    """

    next_SN: np.ndarray
    accepts_S: np.ndarray

    def run(self, text: bytes) -> int:
        """Return the state after a text, `DEAD` if it is not the beginning of any match."""
        state = 0
        for byte in text:
            state = int(self.next_SN[state, byte])
            if state == DEAD:
                return DEAD
        return state


def compile_regex(pattern: str) -> ByteAutomaton:
    """Return the automaton of the texts that `re.fullmatch` accepts.

    Raises GrammarError for a pattern that is invalid, not regular, matches nothing, or needs too
    many states.
    """
    if not isinstance(pattern, str):
        raise GrammarError(f"regex must be a text: got {pattern!r:.60}")
    try:
        with _parsing, warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of what brackets may mean one day
            tree = parser.parse(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise GrammarError(f"regex {pattern!r:.60} is invalid: {error}") from None
    if unknown := re.RegexFlag(tree.state.flags) & ~_FLAGS:
        raise GrammarError(
            f"regex {pattern!r:.60} has the flag {unknown!r}, which is not supported"
        )
    builder = _Builder(pattern, tree.state.flags)
    builder.check_size(_count_characters(tree))
    end = builder.sequence(list(tree), builder.new_state(), True, True)
    return _determine(builder, end, f"regex {pattern!r:.60}")


def compile_choice(texts: Sequence[str]) -> ByteAutomaton:
    """Return the automaton of a finite set of texts. Raises GrammarError for an empty set."""
    if (
        isinstance(texts, str)
        or not isinstance(texts, Iterable)
        or not (texts := list(texts))
        or not all(isinstance(text, str) for text in texts)
    ):
        raise GrammarError(f"choice must be a list of at least one text: got {texts!r:.60}")
    builder = _Builder("choice", 0)
    start, end = builder.new_state(), builder.new_state()
    for text in texts:
        state = start
        for byte in _utf8(text):
            state = builder.edge(state, byte, byte)
        builder.skips[state].append(end)
    return _determine(builder, end, "choice")


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise GrammarError(f"text {text!r:.60} is not Unicode: {error.reason}") from None


class _Builder:
    """A nondeterministic automaton under construction, and the fragments that are added to it.

    edges[s]: (first byte, last byte, target). skips[s]: targets without a byte. Each method adds a
    fragment after a state and returns the fragment's last state.
    """

    def __init__(self, pattern: str, flags: int) -> None:
        self.edges: list[list[tuple[int, int, int]]] = []
        self.skips: list[list[int]] = []
        self._pattern, self._flags = pattern, flags

    def check_size(self, states: int) -> None:
        """Raise GrammarError for too many states."""
        if states > MAX_FRAGMENT_STATES:
            raise GrammarError(
                f"regex {self._pattern!r:.60} is too large: its repeats need more than"
                f" {MAX_FRAGMENT_STATES:,} states. Use smaller counts, or lark="
            )

    def new_state(self) -> int:
        self.check_size(len(self.edges) + 1)
        self.edges.append([])
        self.skips.append([])
        return len(self.edges) - 1

    def edge(self, source: int, first: int, last: int) -> int:
        target = self.new_state()
        self.edges[source].append((first, last, target))
        return target

    def sequence(self, items: list[Any], start: int, first: bool, last: bool) -> int:
        """Add parsed items. first, last: whether nothing comes before or after them."""
        for number, (kind, value) in enumerate(items):
            at_start = first and number == 0
            at_end = last and number == len(items) - 1
            start = self._item(kind, value, start, at_start, at_end)
        return start

    def _item(self, kind: Any, value: Any, start: int, first: bool, last: bool) -> int:
        if kind is op.BRANCH:
            end = self.new_state()
            for branch in value[1]:
                head = self.new_state()
                self.skips[start].append(head)
                self.skips[self.sequence(list(branch), head, first, last)].append(end)
            return end
        if kind is op.SUBPATTERN:
            if value[1] & ~_FLAGS:
                raise GrammarError(f"regex {self._pattern!r:.60} has a flag that is not supported")
            before = self._flags
            self._flags = (before | value[1]) & ~value[2]
            end = self.sequence(list(value[3]), start, first, last)
            self._flags = before
            return end
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            low, high, inner = value
            return self._repeat(low, high, list(inner), start)
        if kind is op.AT:
            return self._anchor(value, start, first, last)
        if kind in _REFUSED:
            raise GrammarError(
                f"regex {self._pattern!r:.60} has {_REFUSED[kind]}, which no automaton can follow"
            )
        return self._characters(self._item_ranges(kind, value), start)

    def _repeat(self, low: int, high: Any, items: list[Any], start: int) -> int:
        for _ in range(low):
            start = self.sequence(items, start, False, False)
        if high is op.MAXREPEAT:
            loop, end = self.new_state(), self.new_state()
            self.skips[start].append(loop)
            self.skips[self.sequence(items, loop, False, False)].append(loop)
            self.skips[loop].append(end)
            return end
        end = self.new_state()
        for _ in range(high - low):
            self.skips[start].append(end)
            start = self.sequence(items, start, False, False)
        self.skips[start].append(end)
        return end

    def _anchor(self, kind: Any, start: int, first: bool, last: bool) -> int:
        begins = kind in (op.AT_BEGINNING, op.AT_BEGINNING_STRING) and first
        if begins or (kind in (op.AT_END, op.AT_END_STRING) and last):
            return start  # the whole text must match anyway
        raise GrammarError(
            f"regex {self._pattern!r:.60} has an anchor or word boundary inside. Only ^ at its"
            " beginning and $ at its end are supported"
        )

    def _item_ranges(self, kind: Any, value: Any) -> Ranges:
        """Return the characters that an item accepts; with (?i), as Python's compiler reads it."""
        if kind is op.ANY:
            return _complement(() if self._flags & re.DOTALL else ((10, 10),))
        if kind is op.NOT_LITERAL:
            return _complement(self._either_case(self._literal_ranges(op.LITERAL, value)))
        if kind is not op.IN:
            return self._either_case(self._literal_ranges(kind, value))
        negate = value[0][0] is op.NEGATE
        parts = [self._literal_ranges(*item) for item in (value[1:] if negate else value)]
        merged = self._either_case(_merge(one for ranges in parts for one in ranges))
        return _complement(merged) if negate else merged

    def _literal_ranges(self, kind: Any, value: Any) -> Ranges:
        if kind is op.CATEGORY:
            return _category(str(value), bool(self._flags & re.ASCII))
        if kind not in (op.LITERAL, op.RANGE):
            raise GrammarError(f"regex {self._pattern!r:.60} has {kind}, which is not supported")
        ranges: Ranges = (value if kind is op.RANGE else (value, value),)
        return _lowered(ranges, self._lower) if self._flags & re.IGNORECASE else ranges

    def _either_case(self, ranges: Ranges) -> Ranges:
        """Return the characters whose lower case is in these ranges, if case is ignored."""
        if not self._flags & re.IGNORECASE:
            return ranges
        cased = _cased(self._lower)
        stay = [(n, n) for low, high in ranges for n in range(low, high + 1) if n not in cased]
        moved = {n: m for n, m in cased.items() if any(a <= m <= b for a, b in ranges)}
        return _merge([*stay, *((n, n) for n in moved)])

    @property
    def _lower(self) -> Callable[[int], int]:
        return _sre.ascii_tolower if self._flags & re.ASCII else _sre.unicode_tolower

    def _characters(self, ranges: Ranges, start: int) -> int:
        """Add one character of these ranges, in UTF-8. Equal tails of byte sequences are shared."""
        end = self.new_state()
        tails: dict[tuple[tuple[int, int], ...], int] = {(): end}
        for sequence in _utf8_sequences(ranges):
            self.edges[start].append((*sequence[0], self._before(sequence[1:], tails)))
        return end

    def _before(
        self, tail: tuple[tuple[int, int], ...], tails: dict[tuple[tuple[int, int], ...], int]
    ) -> int:
        """Return the state before these byte ranges, one of `tails` or a new one."""
        if tail not in tails:
            tails[tail] = self.new_state()
            self.edges[tails[tail]].append((*tail[0], self._before(tail[1:], tails)))
        return tails[tail]


def _count_characters(items: Iterable[tuple[Any, Any]]) -> int:
    """Return how many characters parsed items have when repeats are written out.

    Each needs a state, so most patterns that are too large are refused before any is made.
    """
    count = 0
    for kind, value in items:
        if kind is op.BRANCH:
            count += sum(map(_count_characters, value[1]))
        elif kind is op.SUBPATTERN:
            count += _count_characters(value[3])
        elif kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            low, high, inner = value
            count += (low + 1 if high is op.MAXREPEAT else high) * _count_characters(inner)
        else:
            count += kind is not op.AT
    return count


@cache
def _cased(lower: Callable[[int], int]) -> dict[int, int]:
    """Return the lower case of each character that has another one."""
    return {n: m for n in range(_LAST + 1) if (m := lower(n)) != n}


def _lowered(ranges: Ranges, lower: Callable[[int], int]) -> Ranges:
    """Return the lower cases of characters, and what Python takes for equal to them."""
    points = {lower(n) for low, high in ranges for n in range(low, high + 1)}
    if lower is _sre.unicode_tolower:
        points |= {other for n in points for other in casefix._EXTRA_CASES.get(n, ())}
    return _merge((n, n) for n in points)


def _merge(ranges: Iterable[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return tuple(merged)


def _complement(ranges: Ranges) -> Ranges:
    bounds = [-1, *(x for low, high in ranges for x in (low - 1, high)), _LAST]
    pairs = zip(bounds[::2], bounds[1::2], strict=True)
    return tuple((low + 1, high) for low, high in pairs if low < high)


@cache
def _category(name: str, ascii_only: bool) -> Ranges:
    """Return the code points of \\d, \\s, \\w or their complements, as Python defines them."""
    kind = name.rsplit("_", 1)[1]
    member: Callable[[str], bool] = {
        "DIGIT": str.isdecimal,
        "SPACE": str.isspace,
        "WORD": lambda c: c.isalnum() or c == "_",
    }[kind]
    last = 127 if ascii_only else _LAST
    points = [n for n in range(last + 1) if member(chr(n))]
    if ascii_only and kind == "SPACE":
        points = [n for n in points if n in (32, *range(9, 14))]
    ranges = _merge((n, n) for n in points)
    return _complement(ranges) if "NOT" in name else ranges


def _utf8_sequences(ranges: Ranges) -> Iterable[tuple[tuple[int, int], ...]]:
    """Yield sequences of byte ranges that together spell exactly these code points in UTF-8."""
    for low, high in ranges:
        for first, last in (
            (0, 0x7F),
            (0x80, 0x7FF),
            (0x800, 0xD7FF),
            (0xE000, 0xFFFF),
            (0x10000, _LAST),
        ):
            a, b = max(low, first), min(high, last)
            if a <= b:
                yield from _split(chr(a).encode(), chr(b).encode())


def _split(low: bytes, high: bytes) -> Iterable[tuple[tuple[int, int], ...]]:
    """Split a range of equally long encodings where its bytes are not independent."""
    rest = len(low) - 1
    if low[0] == high[0]:
        if not rest:
            yield ((low[0], low[0]),)
            return
        for tail in _split(low[1:], high[1:]):
            yield ((low[0], low[0]), *tail)
        return
    floor, ceiling = b"\x80" * rest, b"\xbf" * rest
    first, last = low[0], high[0]
    if low[1:] != floor:
        yield from (((first, first), *tail) for tail in _split(low[1:], ceiling))
        first += 1
    if high[1:] != ceiling:
        yield from (((last, last), *tail) for tail in _split(floor, high[1:]))
        last -= 1
    if first <= last:
        yield ((first, last), *[(0x80, 0xBF)] * rest)


def _determine(builder: _Builder, end: int, what: str) -> ByteAutomaton:
    """Return the minimal automaton of a builder, by the construction of subsets."""

    def close(states: Iterable[int]) -> frozenset[int]:
        visited, left = set(states), list(states)
        while left:
            for target in builder.skips[left.pop()]:
                if target not in visited:
                    visited.add(target)
                    left.append(target)
        return frozenset(s for s in visited if builder.edges[s] or s == end)

    start = close([0])
    numbers, queue, rows = {start: 0}, [start], []
    for subset in queue:
        row = np.full(256, DEAD, np.int32)
        edges = [edge for state in subset for edge in builder.edges[state]]
        cuts = sorted({low for low, _, _ in edges} | {high + 1 for _, high, _ in edges})
        for low, above in pairwise(cuts):
            targets = [target for first, last, target in edges if first <= low <= last]
            if not targets:
                continue
            reached = close(targets)
            if reached not in numbers:
                if len(numbers) >= MAX_STATES:
                    raise GrammarError(
                        f"{what} needs more than {MAX_STATES:,} states. Simplify it, or use lark="
                    )
                numbers[reached] = len(numbers)
                queue.append(reached)
            row[low:above] = numbers[reached]
        rows.append(row)
    accepts_S = np.array([end in subset for subset in queue])
    return _minimize(*_prune(np.stack(rows), accepts_S, what))


def _prune(next_SN: np.ndarray, accepts_S: np.ndarray, what: str) -> tuple[np.ndarray, np.ndarray]:
    """Remove states from which no text ends. The others stay reachable."""
    useful_S = can_finish(next_SN, accepts_S)
    if not useful_S[0]:
        raise GrammarError(f"{what} matches no text")
    number_S = np.append(np.where(useful_S, np.cumsum(useful_S) - 1, DEAD), DEAD).astype(np.int32)
    return number_S[next_SN[useful_S]], accepts_S[useful_S]


def can_finish(next_SX: np.ndarray, accepts_S: np.ndarray) -> np.ndarray:
    """Return which states lead to an accepting one, bool `[S]`; entries below 0 lead nowhere."""
    return _distance_to_end(next_SX, accepts_S) >= 0


def _distance_to_end(next_SX: np.ndarray, accepts_S: np.ndarray) -> np.ndarray:
    """Return the least number of steps to an accepting state, int32 `[S]`; -1 for none."""
    states = accepts_S.size
    source, column = np.nonzero(next_SX >= 0)
    edge = np.unique(next_SX[source, column].astype(np.int64) * states + source)
    target, source = np.divmod(edge, states)
    first = np.searchsorted(target, np.arange(states + 1))
    distance_S, steps = np.where(accepts_S, 0, -1).astype(np.int32), 0
    new = np.flatnonzero(accepts_S)
    while new.size:
        steps += 1
        before = np.unique(np.concatenate([source[first[s] : first[s + 1]] for s in new]))
        new = before[distance_S[before] < 0]
        distance_S[new] = steps
    return distance_S


def _minimize(next_SN: np.ndarray, accepts_S: np.ndarray) -> ByteAutomaton:
    """Merge states that accept the same texts; state 0 stays the start.

    Rounds split classes of states, which begin with the distance to the end; signatures are
    compared by random 64-bit sums. If `MAX_ROUNDS` are not enough, the states stay as they are.
    """
    columns_SX = np.unique(next_SN, axis=1)
    weight_X = np.random.default_rng(0).integers(0, 1 << 64, columns_SX.shape[1] + 1, np.uint64)
    class_S, count = _distance_to_end(next_SN, accepts_S).astype(np.uint64), 0
    for _ in range(MAX_ROUNDS):
        sum_S = class_S * weight_X[-1]
        sum_S += (np.append(class_S + 1, 0).astype(np.uint64)[columns_SX] * weight_X[:-1]).sum(1)
        _, first, inverse = np.unique(sum_S, return_index=True, return_inverse=True)
        class_S = inverse.reshape(-1).astype(np.uint64)
        if first.size == count:
            break
        count = first.size
    else:
        return ByteAutomaton(next_SN, accepts_S)
    class_S = class_S.astype(np.int32)
    order = np.argsort(np.where(np.arange(count) == class_S[0], -1, first))
    rank = np.empty(count + 1, np.int32)
    rank[order], rank[count] = np.arange(count), DEAD
    first = first[order]
    return ByteAutomaton(rank[np.append(class_S, count)[next_SN[first]]], accepts_S[first])
