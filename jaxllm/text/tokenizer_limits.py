"""Schema and limits of a tokenizer.json, before it is passed to the `tokenizers` library.

The library has no limits of its own: neither on a text that grows tenfold in each of thirty
normalizers, nor on regular expressions. It matches these by backtracking, so a pattern that could
need many steps is rejected by its structure; all others match any text in at most quadratic time.
Published patterns are far below the limits.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from jaxllm.errors import CheckpointError
from jaxllm.runtime.schema import as_schema

MAX_STEPS = 64  # of normalizers, of pre-tokenizers and of decoders
MAX_GROWTH = 64  # factor by which they may lengthen a text
MAX_PIECE = 1 << 12  # characters of a piece, or of an inserted text
MAX_ADDED = 1 << 17
# Of all pieces: the library's tries use 100 bytes per character; 2**21 are usual.
MAX_CHARACTERS = 1 << 23
MAX_LENGTH = 2000  # of a regex
MAX_REPEAT = 1000
MAX_DEPTH = 20
MAX_WAYS = 256  # combinations of the short optional parts of one alternative
_SHORT = 16  # repeats with more possible counts are treated as unbounded

# The supported part of Oniguruma's syntax; anything else is rejected.
_ESCAPE = re.compile(
    r"\\(?:[pP]\{\^?\w{1,40}\}|x[0-9a-fA-F]{2}|x\{[0-9a-fA-F]{1,8}\}|u[0-9a-fA-F]{4}"
    r"|[AzZbBG]|[^\w]|[dDsSwWhHRXnrtfvae])"
)
_ASSERTIONS = {"(?=", "(?!", "(?<=", "(?<!", "^", "$", *(f"\\{letter}" for letter in "AzZbBG")}
_GROUP = re.compile(r"\((?:\?(?:[im]*(?:-[im]+)?:|=|!|<=|<!|>|<[A-Za-z]\w*>))?")
_POSIX = re.compile(r"\[:\^?\w+:\]")
# The first may be lazy or possessive. In Oniguruma {n}? is optional, and {n,m}+ repeats a repeat.
_QUANTIFIER = re.compile(r"([*+?])[?+]?|\{(?!,?\})(\d{1,6})?(,)?(\d{1,6})?\}(\?)?")

_Piece = Annotated[str, Meta(max_length=MAX_PIECE)]
_Id = Annotated[int, Meta(ge=0, lt=1 << 31)]
_SEQUENCES = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}


class _Model(msgspec.Struct):
    """The pieces and their merges; the library reads the other fields."""

    vocab: dict[_Piece, _Id] | list[tuple[_Piece, float]]
    type: str | None = None
    merges: list[str | tuple[str, str]] = []
    unk_token: _Piece | dict[str, Any] | None = None
    continuing_subword_prefix: _Piece | None = None
    end_of_word_suffix: _Piece | None = None
    max_input_chars_per_word: Annotated[int, Meta(ge=0, le=1000)] = 100


class _AddedToken(msgspec.Struct):
    """A token that is matched before all others."""

    id: _Id
    content: _Piece
    special: bool = False


class _TokenizerJson(msgspec.Struct):
    """A tokenizer.json; its normalizer, pre-tokenizer and decoder are checked step by step."""

    model: _Model
    added_tokens: Annotated[list[_AddedToken], Meta(max_length=MAX_ADDED)] = []
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None


def check_tree(tree: dict[str, Any], where: str) -> None:
    """Raise CheckpointError if a tokenizer.json is malformed or its work is not bounded."""
    pieces: _TokenizerJson = as_schema(tree, _TokenizerJson, where)
    vocab = pieces.model.vocab
    names = vocab if isinstance(vocab, dict) else (piece for piece, _ in vocab)
    total = sum(map(len, names)) + sum(len(token.content) for token in pieces.added_tokens)
    if total > MAX_CHARACTERS:
        raise CheckpointError(
            f"{where}: the pieces are too long: got {total:,} characters in total, expected at most"
            f" {MAX_CHARACTERS:,}"
        )
    for part, within in _SEQUENCES.items():
        growth = 1.0
        for count, step in enumerate(_steps(tree.get(part), within, f"{where}: {part}"), 1):
            growth *= _growth(step, f"{where}: {part}")
            if count > MAX_STEPS:
                raise CheckpointError(f"{where}: {part} has more than {MAX_STEPS} steps")
        if growth > MAX_GROWTH:
            raise CheckpointError(
                f"{where}: {part} can lengthen a text by more than a factor of {MAX_GROWTH}"
            )


def _steps(step: Any, key: str, where: str) -> Iterator[dict[str, Any]]:
    """Yield a step, or the steps of a (nested) sequence."""
    if step is None:
        return
    if not isinstance(step, dict):
        raise CheckpointError(f"{where} must be an object: got {step!r:.60}")
    if key not in step:
        yield step
        return
    for part in as_schema(step[key], list[dict[str, Any]], f"{where}: {key}"):
        yield from _steps(part, key, where)


def _growth(step: dict[str, Any], where: str) -> float:
    """Return the factor by which a step can lengthen a text; checks its regex and strings."""
    texts = [text for text in step.values() if isinstance(text, str)]
    if any(len(text) > MAX_PIECE for text in texts):
        raise CheckpointError(f"{where}: a step has a text of more than {MAX_PIECE} characters")
    pattern = step.get("pattern")
    regex = pattern.get("Regex") if isinstance(pattern, dict) else None
    if regex is not None:
        check_regex(as_schema(regex, str, where), where)
    content = step.get("content")
    if step.get("type") == "Replace" and isinstance(content, str):
        if regex is not None or not isinstance(pattern, dict):
            return 1.0 + len(content)  # it may match the empty string between any two characters
        return max(1.0, len(content) / max(1, len(str(pattern.get("String", "")))))
    return 2.0 if step.get("type") == "ByteLevel" else 1.0


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
        for branch in _Parser(regex).read():
            _check(branch, can_fail=False)
    except ValueError as error:
        raise CheckpointError(f"{where}: the regex {regex!r:.80} is rejected: {error}") from None


def _check(branch: tuple[_Item, ...], *, can_fail: bool) -> tuple[int, int]:
    """Return the number of unbounded repeats that can backtrack, and of ways of the short ones.

    Args:
        can_fail: Whether the part after the branch can fail.
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

    @property
    def _next(self) -> str:
        """The next character, "" at the end."""
        return self.regex[self.at : self.at + 1]

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        if match := pattern.match(self.regex, self.at):
            self.at = match.end()
        return match

    def read(self) -> tuple[tuple[_Item, ...], ...]:
        """Return the alternatives of the regex."""
        branches = self._branches(depth=0)
        if self._next:
            raise ValueError("it closes a group that it did not open")
        return branches

    def _branches(self, depth: int) -> tuple[tuple[_Item, ...], ...]:
        if depth > MAX_DEPTH:
            raise ValueError(f"its groups are nested more than {MAX_DEPTH} deep")
        branches: list[list[_Item]] = [[]]
        while self._next not in ("", ")"):
            if self._next == "|":
                self.at += 1
                branches.append([])
            else:
                branches[-1].append(self._repeat(*self._atom(depth)))
        return tuple(map(tuple, branches))

    def _atom(self, depth: int) -> tuple[tuple[tuple[_Item, ...], ...], bool]:
        """Return the alternatives of a group, none for a character, and whether it asserts."""
        begin = self._next
        if group := self._take(_GROUP):
            if self._next in ("?", "*"):
                raise ValueError(f"{group[0]}{self._next} is not supported")
            branches = self._branches(depth + 1)
            if self._next != ")":
                raise ValueError(") is missing")
            self.at += 1
            return branches, group[0] in _ASSERTIONS
        if begin == "[":
            self._skip_class()
        elif begin == "\\":
            begin = self._escape()
        elif begin in "*+?":
            raise ValueError(f"{begin} has nothing to repeat")
        else:
            self.at += 1
        return (), begin in _ASSERTIONS

    def _repeat(self, branches: tuple[tuple[_Item, ...], ...], is_assertion: bool) -> _Item:
        least: int
        most: int | None
        least, most = 1, 1
        if match := self._take(_QUANTIFIER):
            if sign := match[1]:
                least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
            else:
                least = int(match[2] or 0)
                most = int(match[4]) if match[4] else (None if match[3] else least)
                if most is not None and most < least:
                    raise ValueError(f"{match[0]} has a minimum above its maximum")
                least = 0 if match[5] else least
            if self._take(_QUANTIFIER):
                raise ValueError("it repeats a repeat")
            if (most or least) > MAX_REPEAT:
                raise ValueError(f"it repeats more than {MAX_REPEAT} times")
        return _Item(least, most, branches, is_assertion)

    def _skip_class(self, depth: int = 0) -> None:
        """Skip a character class, which may be nested."""
        if depth > MAX_DEPTH:
            raise ValueError(f"its classes are nested more than {MAX_DEPTH} deep")
        self.at += 1
        self.at += self._next == "^"
        if self._next == "]":
            raise ValueError("a character class begins with ]: write \\]")
        while (char := self._next) != "]":
            if not char:
                raise ValueError("a character class is not closed")
            if char == "\\":
                self._escape()
            elif char == "[" and not self._take(_POSIX):
                self._skip_class(depth + 1)
            elif char != "[":
                self.at += 1
        self.at += 1

    def _escape(self) -> str:
        match = self._take(_ESCAPE)
        if match is None:
            raise ValueError(f"{self.regex[self.at : self.at + 2]!r} is not supported")
        return match[0]
