"""Regular expressions of a tokenizer.json, which the `tokenizers` library matches by backtracking.

There is no bound on its steps, so what could take many is refused by its form, before it is built:
any text is then matched in time at most quadratic in its length. Published patterns are far within.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from jaxllm.errors import CheckpointError

MAX_LENGTH = 2000
MAX_REPEAT = 1000
MAX_DEPTH = 20
MAX_WAYS = 256  # in which the short optional parts of one alternative may be taken together
_SHORT = 16  # what varies by more counts as unbounded

# Oniguruma's syntax, as far as it is read here; whatever else there is, is refused.
_ESCAPE = re.compile(
    r"\\(?:[pP]\{\^?\w{1,40}\}|x[0-9a-fA-F]{2}|x\{[0-9a-fA-F]{1,8}\}|u[0-9a-fA-F]{4}"
    r"|[AzZbBG]|[^\w]|[dDsSwWhHRXnrtfvae])"
)
_ASSERTIONS = {*"AzZbBG"}
_GROUP = re.compile(r"\((?:\?(?:[im]*(?:-[im]+)?:|=|!|<=|<!|>|<[A-Za-z]\w*>))?")
_POSIX = re.compile(r"\[:\^?\w+:\]")
_QUANTIFIER = re.compile(r"[*+?]|\{(\d{1,6})?(,)?(\d{1,6})?\}")


@dataclass(frozen=True)
class _Item:
    """A part of an alternative, repeated from `least` to `most` times (None: without end).

    branches: of a group; empty for one character. asserts: matches no text, only its place.
    """

    least: int
    most: int | None
    branches: tuple[tuple["_Item", ...], ...] = ()
    asserts: bool = False

    @property
    def varies(self) -> int:
        """In how many ways more than one it can be repeated; without end: more than `_SHORT`."""
        return MAX_REPEAT if self.most is None else self.most - self.least

    @property
    def fails(self) -> bool:
        """Whether it can fail to match, so that what stands before it is tried in other ways."""
        some = not self.branches or any(any(i.fails for i in branch) for branch in self.branches)
        return self.asserts or (self.least > 0 and some)

    @property
    def rigid(self) -> bool:
        """Whether it has just one way to match what it matches."""
        inner = [item for branch in self.branches for item in branch]
        return not self.varies and len(self.branches) < 2 and all(i.rigid for i in inner)


def check_regex(regex: str, where: str) -> None:
    """Raise CheckpointError, naming `where`, for a regex that might be matched without an end."""
    try:
        branches = _Reader(regex).read()
        for branch in branches:
            _check(branch, fails=False)
    except ValueError as error:
        raise CheckpointError(f"{where}: the regex {regex!r:.80} is refused: {error}") from None


def _check(branch: tuple[_Item, ...], *, fails: bool) -> tuple[int, int]:
    """The unbounded repeats that are tried again and again, and the ways of the short ones.

    fails: whether what follows the branch can fail.
    """
    unbounded, ways = 0, 1
    for item in reversed(branch):
        if item.most != 1 and not all(i.rigid for b in item.branches for i in b):
            raise ValueError("it repeats a group that has several ways to match")
        if item.most != 1 and len(item.branches) > 1:
            raise ValueError("it repeats a choice")
        inner = [_check(b, fails=fails or item.asserts) for b in item.branches]
        unbounded += max((n for n, _ in inner), default=0)
        ways *= sum(n for _, n in inner) or 1
        if item.varies > _SHORT:
            unbounded += fails
        else:
            ways *= 1 + item.varies
        fails = fails or item.fails
    if unbounded > 1:
        raise ValueError("what follows two unbounded repeats can fail")
    if ways > MAX_WAYS:
        raise ValueError(f"one alternative can be taken in more than {MAX_WAYS} ways")
    return unbounded, ways


class _Reader:
    """Reads a regex into items. Raises ValueError for what it does not know."""

    def __init__(self, regex: str) -> None:
        if len(regex) > MAX_LENGTH:
            raise ValueError(f"it has {len(regex):,} characters, at most {MAX_LENGTH:,} are read")
        self.regex, self.at = regex.removeprefix("(?i)"), 0

    def read(self) -> tuple[tuple[_Item, ...], ...]:
        branches = self._branches(depth=0)
        if self.at < len(self.regex):
            raise ValueError("it closes a group that it did not open")
        return branches

    def _branches(self, depth: int) -> tuple[tuple[_Item, ...], ...]:
        if depth > MAX_DEPTH:
            raise ValueError(f"its groups are nested more than {MAX_DEPTH} deep")
        branches: list[list[_Item]] = [[]]
        while self.at < len(self.regex) and self.regex[self.at] != ")":
            if self.regex[self.at] == "|":
                self.at += 1
                branches.append([])
            else:
                branches[-1].append(self._repeated(self._atom(depth)))
        return tuple(map(tuple, branches))

    def _atom(self, depth: int) -> _Item:
        char = self.regex[self.at]
        if char == "(":
            found = _GROUP.match(self.regex, self.at)
            assert found is not None
            self.at = found.end()
            if self.regex[self.at : self.at + 1] in ("?", "*"):
                raise ValueError(f"{self.regex[found.start() : self.at + 2]} is not read here")
            branches = self._branches(depth + 1)
            self._expect(")")
            return _Item(1, 1, branches, asserts=found[0] in ("(?=", "(?!", "(?<=", "(?<!"))
        if char == "[":
            self._class()
        elif char == "\\":
            return _Item(1, 1, asserts=self._escape() in _ASSERTIONS)
        else:
            if char in "*+?":
                raise ValueError(f"{char} has nothing to repeat")
            self.at += 1
        return _Item(1, 1, asserts=char in "^$")

    def _repeated(self, atom: _Item) -> _Item:
        bounds = [*self._quantifiers()]
        if not bounds:
            return atom
        if len(bounds) > 1:
            raise ValueError("it repeats a repeat")
        least, most = bounds[0]
        if (most or least) > MAX_REPEAT:
            raise ValueError(f"it repeats more than {MAX_REPEAT} times")
        return _Item(least, most, atom.branches, atom.asserts)

    def _quantifiers(self) -> Iterator[tuple[int, int | None]]:
        while found := _QUANTIFIER.match(self.regex, self.at):
            if found[0] in ("{}", "{,}"):  # literal
                return
            self.at = found.end()
            simple = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(found[0])
            if simple is None:
                least = int(found[1] or 0)
                most = int(found[3]) if found[3] else (None if found[2] else least)
                if most is not None and most < least:
                    raise ValueError(f"{found[0]} repeats less often than often")
                # {n}? is optional in this syntax, {n,m}+ a repeat of a repeat.
                lazy = self.regex[self.at : self.at + 1] == "?"
                self.at += lazy
                yield (0 if lazy else least), most
                continue
            if self.regex[self.at : self.at + 1] in ("?", "+"):  # lazy or possessive
                self.at += 1
            yield simple

    def _class(self, depth: int = 0) -> None:
        """A class of characters, which may have others in it."""
        if depth > MAX_DEPTH:
            raise ValueError(f"its classes are nested more than {MAX_DEPTH} deep")
        self.at += 1
        self.at += self.regex[self.at : self.at + 1] == "^"
        if self.regex[self.at : self.at + 1] == "]":
            raise ValueError("a class of characters begins with ]: write \\]")
        while (char := self.regex[self.at : self.at + 1]) != "]":
            if not char:
                raise ValueError("a class of characters has no end")
            if char == "[":
                if posix := _POSIX.match(self.regex, self.at):
                    self.at = posix.end()
                else:
                    self._class(depth + 1)
            elif char == "\\":
                self._escape()
            else:
                self.at += 1
        self.at += 1

    def _escape(self) -> str:
        found = _ESCAPE.match(self.regex, self.at)
        if found is None:
            raise ValueError(f"{self.regex[self.at : self.at + 2]!r} is not read here")
        self.at = found.end()
        return found[0][1:]

    def _expect(self, char: str) -> None:
        if self.regex[self.at : self.at + 1] != char:
            raise ValueError(f"{char} is missing")
        self.at += 1
