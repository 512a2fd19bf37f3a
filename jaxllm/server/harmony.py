"""Harmony, how gpt-oss writes: messages in channels, each with a header up to `<|message|>`.

The prompt ends in `<|start|>assistant`. Analysis is thought, the final channel is content, and so
is commentary without a recipient. A call is `<|channel|>commentary to=functions.NAME
<|constrain|>json<|message|>ARGUMENTS<|call|>`; the recipient may also precede the channel.
"""

import re
from collections.abc import Mapping
from typing import Any

from jaxllm.server.text_reader import TextReader, overlap

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_END = re.compile("|".join(map(re.escape, _ENDS)))
_HEADER = re.compile(r"\s*(?:<\|(?:start|channel)\|>|to=)")
_HEADER_BEGINS = ("<|start|>", "<|channel|>", "to=")
_RECIPIENT = re.compile(r"\bto=([\w.:-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def as_rendered(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as the template takes it: a thought by its name there, and no null.

    A message with calls has one text, which the template takes for the thought.
    """
    plain = {name: value for name, value in message.items() if value is not None}
    thought = plain.pop("reasoning_content", None)
    if thought and not (plain.get("tool_calls") and plain.get("content")):
        plain.setdefault("thinking", thought)
    return plain


class HarmonyText(TextReader):
    """Splits a text into the messages of its channels."""

    def __init__(self, asked: Mapping[str, Any] | None = None) -> None:
        super().__init__(asked)
        self._kind, self._has_content = "header", False

    def _advance(self, final: bool) -> bool:
        if self._kind == "header":
            header, mark, body = self._rest.partition(_MESSAGE)
            if mark:
                self._begin(header)
                self._rest = body
                return True
            if self._may_begin_header() and (not final or _HEADER.match(self._rest)):
                return False
            self._kind = "content"  # an answer without channels, as a grammar may force it
        if end := _END.search(self._rest):
            self._add_text(self._rest[: end.start()])
            self._rest, self._kind = self._rest[end.end() :], "header"
            if end[0] == "<|start|>":
                self._rest = end[0] + self._rest
            return bool(self._rest)
        known = len(self._rest) - (0 if final else overlap(self._rest, *_ENDS))
        self._add_text(self._rest[:known])
        self._rest = self._rest[known:]
        return False

    def _may_begin_header(self) -> bool:
        begin = self._rest.lstrip()
        short = any(mark.startswith(begin) for mark in _HEADER_BEGINS)
        return short or _HEADER.match(begin) is not None

    def _begin(self, header: str) -> None:
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        name = recipient[1].removeprefix("functions.") if recipient else ""
        if name in self._tools:
            self._kind = "arguments"
            self._add("call", name)
        elif channel is None or channel[1] == "final" or (channel[1] != "analysis" and not name):
            self._kind = "content"
            self._add("content", "\n" * self._has_content)
        else:
            self._kind = "thought"

    def _add_text(self, text: str) -> None:
        self._has_content |= self._kind == "content" and bool(text)
        self._add(self._kind, text)
