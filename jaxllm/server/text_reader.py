"""Readers: what a model writes is split, while it grows, into content, thoughts and calls.

A reader returns parts in the order of the text, as soon as it is sure of them: the parts of a
stream are those of the whole answer. `TextReader` takes all for content. Others read the marks of
thoughts (`ThoughtText`) and of calls (`tools`, `harmony`, `gemma4`).
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

# A text that begins with the first mark is a thought up to the second.
THOUGHT_MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
)


class Part(NamedTuple):
    """A piece of an answer.

    kind: "content", "thought", "call" (the text is a function's name) or "arguments" (a piece of
    the JSON that follows the name).
    """

    kind: str
    text: str


class TextReader:
    """Splits a text that grows into parts.

    asked: As in `tools.tool_grammar`; None without tools.
    """

    def __init__(self, asked: Mapping[str, Any] | None = None) -> None:
        tools = asked["tools"] if asked is not None else ()
        self._tools = {tool["function"]["name"]: tool for tool in tools}
        self._parallel = asked is None or asked["parallel"]
        self._num_calls = 0
        self._rest, self._kind = "", "content"  # what is not read; of the text before it
        self._parts: list[Part] = []

    @property
    def is_thinking(self) -> bool:
        """Whether the text ends within a thought."""
        return self._kind == "thought"

    def open_thought(self) -> None:
        """Begin within a thought: the prompt has its mark."""
        self._kind = "thought"

    def push(self, piece: str) -> list[Part]:
        """Add text; return the parts that are now known."""
        self._rest += piece
        return self._read(final=False)

    def finish(self) -> list[Part]:
        """Return the parts of what is left."""
        return self._read(final=True)

    def _read(self, *, final: bool) -> list[Part]:
        while self._advance(final):
            pass
        parts, self._parts = self._parts, []
        return parts

    def _advance(self, final: bool) -> bool:
        """Read some of the rest; return whether more may follow. final: no text will come."""
        self._add("content", self._rest)
        self._rest = ""
        return False

    def _add(self, kind: str, text: str) -> None:
        """Add a part, but not one of a call that is one too many."""
        self._num_calls += kind == "call"
        is_call = kind in ("call", "arguments")
        if not text or (is_call and self._num_calls > 1 and not self._parallel):
            return
        if kind != "call" and self._parts and self._parts[-1].kind == kind:
            text = self._parts.pop().text + text
        self._parts.append(Part(kind, text))


class ThoughtText(TextReader):
    """Splits a text into the thought that it begins with, and what another reader finds behind.

    marks: One of `THOUGHT_MARKS`. separates: The thought is a part, without its marks and without
    space at its ends; else it is content as it is written.
    """

    def __init__(self, reader: TextReader, marks: Iterable[str], *, separates: bool) -> None:
        super().__init__()
        self._reader, self._separates = reader, separates
        self._open, self._close = marks
        self._kind, self._begun = "start", False

    def _advance(self, final: bool) -> bool:
        if self._kind == "start":
            begin = self._rest.lstrip()
            if begin.startswith(self._open):
                self.open_thought()
                self._rest = begin[len(self._open) :] if self._separates else self._rest
            elif self._open.startswith(begin) and not final:
                return False
            else:
                self._kind = "content"
            return True
        if self._kind == "thought":
            return self._read_thought(final)
        if self._kind == "space":  # after a thought
            self._rest = self._rest.lstrip()
            self._kind = "content" if self._rest or final else "space"
        if self._kind == "content":
            parts = self._reader.push(self._rest)
            self._rest = ""
            for part in parts + (self._reader.finish() if final else []):
                self._add(*part)
        return False

    def _read_thought(self, final: bool) -> bool:
        text, mark, after = self._rest.partition(self._close)
        known = len(text) if mark or final else len(text) - overlap(text, self._close)
        if self._separates:
            known = len(text[:known].rstrip())
            self._add("thought", text[:known] if self._begun else text[:known].lstrip())
            self._begun |= known > 0
        else:
            self._add("content", text[:known] + mark)
        self._rest = after if mark else text[known:]
        if mark:
            self._kind = "space" if self._separates else "content"
        return bool(mark)


def overlap(text: str, *marks: str) -> int:
    """Return the length of the longest end of `text` that could begin a mark."""
    longest = min(len(text), max(map(len, marks)) - 1)
    ends = (text[len(text) - n :] for n in range(longest, 0, -1))
    return next((len(end) for end in ends if any(mark.startswith(end) for mark in marks)), 0)
