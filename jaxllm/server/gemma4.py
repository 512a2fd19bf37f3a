"""How Gemma 4 writes: a thought between `<|channel>thought`, with a line end, and `<channel|>`;
text; calls.

A call is `<|tool_call>call:NAME{KEY:VALUE,...}<tool_call|>`: JSON whose keys have no quotes, and
whose strings are between two `<|"|>`.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from jaxllm.server.harmony import HarmonyText
from jaxllm.server.tools import Call, overlap

_QUOTE = '<|"|>'
_KINDS = {"<|channel>": "header", "<channel|>": "content", "<|tool_call>": "call",
          "<tool_call|>": "content"}  # of what follows a mark  # fmt: skip
_MARK = re.compile("|".join(map(re.escape, _KINDS)))
_HEADER_END = re.compile(rf"\n|{_MARK.pattern}")
_LONGEST_HEADER = 32
_CALL = re.compile(r"\s*call:([\w.-]+)\s*(\{.*\})\s*", re.DOTALL)
_PART = re.compile(r"""<\|"\|>(.*?)<\|"\|>|([^{}\[\],:<]++)(:)?""", re.DOTALL)


def open_turn(prompt: str) -> str:
    """Return a prompt with the model's turn, which published templates leave out after a call with
    text.
    """
    return f"{prompt}<|turn>model\n" if prompt.endswith("<turn|>\n") else prompt


class Gemma4Text(HarmonyText):
    """Splits a text that grows into content, thought and calls."""

    def __init__(self, asked: Mapping[str, Any] | None) -> None:
        super().__init__(asked)
        self._kind, self._call = "content", ""

    def finish(self) -> tuple[str, list[Call]]:
        before = len(self._content)
        self._add(self._rest)
        self._end_call("")
        self._rest = ""
        return self._content[before:], self._calls if self._parallel else self._calls[:1]

    def _advance(self) -> bool:
        """Read up to a mark, or what is there; return whether more may follow."""
        in_header = self._kind == "header"
        end = (_HEADER_END if in_header else _MARK).search(self._rest)
        known = len(self._rest) - max(overlap(self._rest, mark) for mark in (*_KINDS, _QUOTE))
        if in_header and (end.start() if end else known) >= _LONGEST_HEADER:
            self._kind = "thought"
            return True
        if end is None:
            if in_header:
                return False
            if self._kind != "call":  # space before a mark is left out
                known = len(self._rest[:known].rstrip())
            self._add(self._rest[:known])
            self._rest = self._rest[known:]
            return False
        text, self._rest = self._rest[: end.start()], self._rest[end.end() :]
        if end[0] == "\n":
            self._kind = "thought"
        elif self._is_literal(text, end[0]):
            self._add(text + end[0])
        else:
            self._add(text if self._kind == "call" else text.rstrip())
            self._end_call(end[0])
            self._kind = _KINDS[end[0]]
        return bool(self._rest)

    def _is_literal(self, text: str, mark: str) -> bool:
        """Return whether a mark is a part of a thought or of a string."""
        if self._kind == "call":
            return (self._call + text).count(_QUOTE) % 2 == 1
        return self._kind == "thought" and mark != "<channel|>"

    def _add(self, text: str) -> None:
        if self._kind == "call":
            self._call += text
        elif self._kind != "header":
            super()._add(text)

    def _end_call(self, mark: str) -> None:
        """Read a call that has begun; what is none is content."""
        if self._kind != "call":
            return
        text, self._call = self._call, ""
        try:
            if not self._tools:
                raise ValueError("there are no tools")
            self._calls.append(_read_call(text))
        except (ValueError, RecursionError):
            self._content += f"<|tool_call>{text}{mark}"


def _read_call(text: str) -> Call:
    """Return a call. Raises ValueError for another text."""
    found = _CALL.fullmatch(text)
    if found is None:
        raise ValueError("not a call")

    def replace(part: re.Match[str]) -> str:
        quoted, word, colon = part.groups()
        if quoted is not None:
            return json.dumps(quoted)
        return json.dumps(word.strip()) + ":" if colon else word

    arguments = json.loads(_PART.sub(replace, found[2]))
    return {"name": found[1], "arguments": json.dumps(arguments, ensure_ascii=False)}
