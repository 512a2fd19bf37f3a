"""GBNF, llama.cpp's form of grammars, as Lark for llguidance.

llguidance splits a text into terminals, each as long as it can be, but GBNF has characters only. So
a terminal is one character; or the whole text, where no rule contains itself.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from jaxllm.errors import GrammarError

_NAME = re.compile(r"[a-zA-Z0-9_-]+")
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_COUNT = re.compile(r"\{\s*(\d+)\s*(?:(,)\s*(\d+)?\s*)?\}")
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.?))", re.DOTALL)
_ESCAPED = {"t": "\t", "r": "\r", "n": "\n", **{c: c for c in '\\"[]'}}
_MAX_DEPTH = 100
_REPEATS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class Characters(NamedTuple):
    """One character, as a regex of llguidance."""

    regex: str


class Reference(NamedTuple):
    """The texts of a rule."""

    name: str


class Sequence(NamedTuple):
    """Parts, one after the other."""

    parts: tuple["Part", ...]


class Alternatives(NamedTuple):
    """One of several parts."""

    parts: tuple["Part", ...]


class Repeat(NamedTuple):
    """A part `low` to `high` times; None is without end."""

    part: "Part"
    low: int
    high: int | None


Part = Characters | Reference | Sequence | Alternatives | Repeat


def gbnf_to_lark(grammar: str) -> str:
    """Return a GBNF grammar as Lark.

    Raises GrammarError, with the line, for one that is invalid, and with the rule for one that is
    undefined, left-recursive (llama.cpp refuses it too) or matches no text.
    """
    rules = _Reader(grammar).rules()
    if "root" not in rules:
        raise GrammarError(f"the GBNF grammar has no rule root: its rules are {', '.join(rules)}")
    for name, part in rules.items():
        for used in _references(part):
            if used not in rules:
                raise GrammarError(f"the GBNF grammar's rule {name} uses {used}, which is no rule")
    nullable = _rules_where(rules, characters=False)
    firsts = {name: _references(part, nullable) for name, part in rules.items()}
    if looping := [name for name in rules if name in _reachable(name, firsts)]:
        raise GrammarError(
            f"the GBNF grammar's rule {looping[0]} is left-recursive: it can begin with itself."
            " Write the repeated part with * or at the end of the rule"
        )
    if "root" not in _rules_where(rules, characters=True):
        raise GrammarError("the GBNF grammar matches no text: its rule root never ends")
    uses = {name: _references(part) for name, part in rules.items()}
    reached = {"root", *_reachable("root", uses)}
    recursive = any(name in _reachable(name, uses) for name in reached)
    letter = "r" if recursive else "R"  # Lark: a rule or a terminal
    names = {name: f"{letter}{number}" for number, name in enumerate(rules) if name in reached}
    lines = [f"{names[name]}: {_to_lark(rules[name], names)}" for name in names]
    return "\n".join([f"start: {names['root']}", *lines])


def _to_lark(part: Part, names: Mapping[str, str]) -> str:
    if isinstance(part, Characters):
        return f"/{part.regex}/"
    if isinstance(part, Reference):
        return names[part.name]
    if isinstance(part, Repeat):
        high = "" if part.high is None else part.high
        return f"({_to_lark(part.part, names)}){{{part.low},{high}}}"
    between = " " if isinstance(part, Sequence) else " | "
    return "(" + (between.join(_to_lark(inner, names) for inner in part.parts) or '""') + ")"


def _matches(part: Part, characters: bool, rules: set[str]) -> bool:
    """Return whether a part has a text made of such rules; characters: whether it may have some."""
    if isinstance(part, Characters):
        return characters
    if isinstance(part, Reference):
        return part.name in rules
    if isinstance(part, Repeat):
        return part.low == 0 or _matches(part.part, characters, rules)
    test = all if isinstance(part, Sequence) else any
    return test(_matches(inner, characters, rules) for inner in part.parts)


def _rules_where(rules: Mapping[str, Part], characters: bool) -> set[str]:
    """Return the rules that match some text, or with characters=False the empty text."""
    names: set[str] = set()
    while new := {n for n in rules.keys() - names if _matches(rules[n], characters, names)}:
        names |= new
    return names


def _references(part: Part, nullable: set[str] | None = None) -> set[str]:
    """Return the rules that a part uses; with `nullable`, those with which its text can begin."""
    if isinstance(part, Characters):
        return set()
    if isinstance(part, Reference):
        return {part.name}
    if isinstance(part, Repeat):
        return _references(part.part, nullable)
    names: set[str] = set()
    for inner in part.parts:
        names |= _references(inner, nullable)
        begins = nullable is not None and isinstance(part, Sequence)
        if begins and not _matches(inner, False, nullable or set()):
            break
    return names


def _reachable(name: str, edges: Mapping[str, set[str]]) -> set[str]:
    """Return the rules that one leads to, itself only if it does."""
    names: set[str] = set()
    new = edges[name]
    while new:
        names |= new
        new = {after for other in new for after in edges[other]} - names
    return names


@dataclass
class _Reader:
    """A reader of a grammar's text; `at` is its place."""

    text: str
    at: int = 0

    def rules(self) -> dict[str, Part]:
        rules: dict[str, Part] = {}
        self._skip(_SPACE_AND_LINES)
        while self.at < len(self.text):
            name = self._match(_NAME)
            if not name:
                raise self._error("expected the name of a rule")
            self._skip(_SPACE)
            if not self._take("::="):
                raise self._error(f"expected ::= after {name[0]}")
            self._skip(_SPACE_AND_LINES)
            rules[name[0]] = self._alternatives(_SPACE)  # the last one counts, as in llama.cpp
            if self.at < len(self.text) and self.text[self.at] not in "\r\n":
                tokens = " (tokens in <> are not supported: see lark=)"
                more = tokens if self.text[self.at] in "<!" else ""
                raise self._error(f"expected the end of the line{more}")
            self._skip(_SPACE_AND_LINES)
        return rules

    def _alternatives(self, space: re.Pattern[str], depth: int = 0) -> Part:
        branches = [self._sequence(space, depth)]
        while self._take("|"):
            self._skip(_SPACE_AND_LINES)
            branches.append(self._sequence(space, depth))
        return branches[0] if len(branches) == 1 else Alternatives(tuple(branches))

    def _sequence(self, space: re.Pattern[str], depth: int) -> Part:
        parts: list[Part] = []
        while self.at < len(self.text):
            if self._take('"'):
                parts.append(self._literal())
            elif self._take("["):
                parts.append(self._class())
            elif self._take("."):
                parts.append(Characters("(?s:.)"))
            elif self._take("("):
                self._skip(_SPACE_AND_LINES)
                if depth == _MAX_DEPTH:
                    raise self._error(f"more than {_MAX_DEPTH} groups are within one another")
                parts.append(self._alternatives(_SPACE_AND_LINES, depth + 1))
                if not self._take(")"):
                    raise self._error("expected )")
            elif name := self._match(_NAME):
                parts.append(Reference(name[0]))
            elif self.text[self.at] in "*+?{":
                if not parts:
                    raise self._error("nothing is before the repeat")
                low, high = self._repeat()
                parts[-1] = Sequence(()) if high == 0 else Repeat(parts[-1], low, high)
            else:
                break
            self._skip(space)
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _repeat(self) -> tuple[int, int | None]:
        sign = self.text[self.at]
        if sign in _REPEATS:
            self.at += 1
            return _REPEATS[sign]
        match = _COUNT.match(self.text, self.at)
        if not match:
            raise self._error("expected {m}, {m,} or {m,n}")
        low = int(match[1])
        high = (int(match[3]) if match[3] else None) if match[2] else low
        if high is not None and high < low:
            raise self._error(f"{match[0]} repeats at least {low} and at most {high} times")
        self.at = match.end()
        return low, high

    def _literal(self) -> Part:
        characters: list[Part] = []
        while not self._take('"'):
            characters.append(Characters(f"[{_escape(self._character())}]"))
        return Sequence(tuple(characters))

    def _class(self) -> Part:
        negated = "^" if self._take("^") else ""
        ranges = ""
        while not self._take("]"):
            ranges += self._range()
        if not ranges:
            raise self._error("a class of characters needs one at least")
        return Characters(f"[{negated}{ranges}]")

    def _range(self) -> str:
        low = high = self._character()
        if self.text.startswith("-", self.at) and not self.text.startswith("-]", self.at):
            self.at += 1
            high = self._character()
        if high < low:
            raise self._error(f"a range of characters from {low!r} to {high!r} is empty")
        return f"{_escape(low)}-{_escape(high)}"

    def _character(self) -> str:
        if self.at >= len(self.text):
            raise self._error("unexpected end of the grammar")
        match = _ESCAPE.match(self.text, self.at)
        if match is None:
            self.at += 1
            return self.text[self.at - 1]
        digits = match[1] or match[2] or match[3]
        code = int(digits, 16) if digits else ord(_ESCAPED.get(match[4], "\ud800"))
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            raise self._error(f"{match[0]} is no character")
        self.at = match.end()
        return chr(code)

    def _take(self, word: str) -> bool:
        matches = self.text.startswith(word, self.at)
        self.at += len(word) if matches else 0
        return matches

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self.text, self.at)
        self.at = match.end() if match else self.at
        return match

    def _skip(self, space: re.Pattern[str]) -> None:
        self._match(space)

    def _error(self, problem: str) -> GrammarError:
        line = self.text.count("\n", 0, self.at) + 1
        near = self.text[self.at : self.at + 20].split("\n")[0]
        where = f"line {line}, at {near!r}" if near else f"line {line}, at its end"
        return GrammarError(f"the GBNF grammar is invalid in {where}: {problem}")


def _escape(character: str) -> str:
    return f"\\x{{{ord(character):x}}}"
