"""Safety check of the regular expressions in a tokenizer.json.

The `tokenizers` library matches them by backtracking, without a limit on steps. So a pattern that
could need many is rejected by its structure; all others match any text in at most quadratic time.
Published patterns are far below the limits.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from jaxllm.errors import CheckpointError

MAX_LENGTH = 2000
MAX_REPEAT = 1000
MAX_DEPTH = 20
MAX_WAYS = 256  # combinations of the short optional parts of one alternative
_SHORT = 16  # repeats with more possible counts are treated as unbounded

# The supported part of Oniguruma's syntax; anything else is rejected.
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
    """A part of an alternative, repeated from `minimum` to `maximum` times (None: no limit).

    branches: the alternatives of a group; empty for one character. asserts: whether it is a
    zero-width assertion.
    """

    minimum: int
    maximum: int | None
    branches: tuple[tuple["_Item", ...], ...] = ()
    is_assertion: bool = False

    @property
    def variation(self) -> int:
        """Number of possible repeat counts minus one; above `_SHORT` if there is no limit."""
        return MAX_REPEAT if self.maximum is None else self.maximum - self.minimum

    @property
    def can_fail(self) -> bool:
        """Whether it can fail to match, which makes the engine backtrack into earlier parts."""
        some = not self.branches or any(any(i.can_fail for i in branch) for branch in self.branches)
        return self.is_assertion or (self.minimum > 0 and some)

    @property
    def is_rigid(self) -> bool:
        """Whether it can match a given text in only one way."""
        inner = [item for branch in self.branches for item in branch]
        return not self.variation and len(self.branches) < 2 and all(i.is_rigid for i in inner)


def check_regex(regex: str, where: str) -> None:
    """Raise CheckpointError, naming `where`, if matching a regex may take too long."""
    try:
        branches = _Parser(regex).read()
        for branch in branches:
            _check(branch, can_fail=False)
    except ValueError as error:
        raise CheckpointError(f"{where}: the regex {regex!r:.80} is rejected: {error}") from None


def _check(branch: tuple[_Item, ...], *, can_fail: bool) -> tuple[int, int]:
    """Return the number of unbounded repeats that can backtrack, and of ways of the short ones.

    Args:
      can_fail: whether the part after the branch can fail.
    """
    unbounded, ways = 0, 1
    for item in reversed(branch):
        if item.maximum != 1 and not all(i.is_rigid for b in item.branches for i in b):
            raise ValueError("it repeats a group that can match in several ways")
        if item.maximum != 1 and len(item.branches) > 1:
            raise ValueError("it repeats alternatives")
        inner = [_check(b, can_fail=can_fail or item.is_assertion) for b in item.branches]
        unbounded += max((n for n, _ in inner), default=0)
        ways *= sum(n for _, n in inner) or 1
        if item.variation > _SHORT:
            unbounded += can_fail
        else:
            ways *= 1 + item.variation
        can_fail = can_fail or item.can_fail
    if unbounded > 1:
        raise ValueError("the part after two unbounded repeats can fail")
    if ways > MAX_WAYS:
        raise ValueError(f"one alternative can match in more than {MAX_WAYS} ways")
    return unbounded, ways


class _Parser:
    """Parser of a regex into items. Raises ValueError for unsupported syntax."""

    def __init__(self, regex: str) -> None:
        if len(regex) > MAX_LENGTH:
            raise ValueError(f"got {len(regex):,} characters, expected at most {MAX_LENGTH:,}")
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
                branches[-1].append(self._parse_repeat(self._atom(depth)))
        return tuple(map(tuple, branches))

    def _atom(self, depth: int) -> _Item:
        char = self.regex[self.at]
        if char == "(":
            found = _GROUP.match(self.regex, self.at)
            assert found is not None
            self.at = found.end()
            if self.regex[self.at : self.at + 1] in ("?", "*"):
                raise ValueError(f"{self.regex[found.start() : self.at + 2]} is not supported")
            branches = self._branches(depth + 1)
            self._expect(")")
            return _Item(1, 1, branches, is_assertion=found[0] in ("(?=", "(?!", "(?<=", "(?<!"))
        if char == "[":
            self._class()
        elif char == "\\":
            return _Item(1, 1, is_assertion=self._escape() in _ASSERTIONS)
        else:
            if char in "*+?":
                raise ValueError(f"{char} has nothing to repeat")
            self.at += 1
        return _Item(1, 1, is_assertion=char in "^$")

    def _parse_repeat(self, atom: _Item) -> _Item:
        bounds = [*self._quantifiers()]
        if not bounds:
            return atom
        if len(bounds) > 1:
            raise ValueError("it repeats a repeat")
        least, most = bounds[0]
        if (most or least) > MAX_REPEAT:
            raise ValueError(f"it repeats more than {MAX_REPEAT} times")
        return _Item(least, most, atom.branches, atom.is_assertion)

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
                    raise ValueError(f"{found[0]} has a minimum above its maximum")
                # In Oniguruma {n}? is optional, and {n,m}+ repeats a repeat.
                lazy = self.regex[self.at : self.at + 1] == "?"
                self.at += lazy
                yield (0 if lazy else least), most
                continue
            if self.regex[self.at : self.at + 1] in ("?", "+"):  # lazy or possessive
                self.at += 1
            yield simple

    def _class(self, depth: int = 0) -> None:
        """Skip a character class, which may be nested."""
        if depth > MAX_DEPTH:
            raise ValueError(f"its classes are nested more than {MAX_DEPTH} deep")
        self.at += 1
        self.at += self.regex[self.at : self.at + 1] == "^"
        if self.regex[self.at : self.at + 1] == "]":
            raise ValueError("a character class begins with ]: write \\]")
        while (char := self.regex[self.at : self.at + 1]) != "]":
            if not char:
                raise ValueError("a character class is not closed")
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
            raise ValueError(f"{self.regex[self.at : self.at + 2]!r} is not supported")
        self.at = found.end()
        return found[0][1:]

    def _expect(self, char: str) -> None:
        if self.regex[self.at : self.at + 1] != char:
            raise ValueError(f"{char} is missing")
        self.at += 1
