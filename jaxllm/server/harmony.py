"""Harmony, how gpt-oss writes: messages in channels, each with a header up to `<|message|>`.

The prompt ends in `<|start|>assistant`. Analysis is thought, the final channel is content, and so
is commentary without a recipient. A call is `<|channel|>commentary to=functions.NAME
<|constrain|>json<|message|>ARGUMENTS<|call|>`; the recipient may also precede the channel.
"""

import re
from collections.abc import Mapping
from typing import Any

from jaxllm.server.tools import Call, overlap

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


class HarmonyText:
    """Splits a text that grows into content, thought and calls.

    asked: As in `tool_grammar`; None without tools.
    """

    def __init__(self, asked: Mapping[str, Any] | None) -> None:
        tools = asked["tools"] if asked is not None else ()
        self._tools = {tool["function"]["name"] for tool in tools}
        self._parallel = asked is None or asked["parallel"]
        self._rest, self._kind = "", ""  # what is not read; of the message, "" in a header
        self._thought, self._content = "", ""
        self._calls: list[Call] = []

    def push(self, piece: str) -> str:
        """Add text; return the content that it adds."""
        self._rest += piece
        before = len(self._content)
        while self._advance():
            pass
        return self._content[before:]

    def finish(self) -> tuple[str, list[Call]]:
        """Return the rest of the content, and the calls."""
        content = ""
        if self._kind:
            before = len(self._content)
            self._add(self._rest)
            content = self._content[before:]
        elif not _HEADER.match(self._rest):
            content = self._rest
        self._rest = ""
        return content, self._calls if self._parallel else self._calls[:1]

    def take_thought(self) -> str:
        """Return the thought since the last call."""
        thought, self._thought = self._thought, ""
        return thought

    def _advance(self) -> bool:
        """Read a header, or what is there of a message; return whether more may follow."""
        if not self._kind:
            header, mark, body = self._rest.partition(_MESSAGE)
            if mark:
                self._begin(header)
                self._rest = body
            elif self._may_begin_header():
                return False
            else:  # an answer without channels, as a grammar may force it
                self._kind = "content"
            return True
        if end := _END.search(self._rest):
            self._add(self._rest[: end.start()])
            self._rest, self._kind = self._rest[end.end() :], ""
            if end[0] == "<|start|>":
                self._rest = end[0] + self._rest
            return bool(self._rest)
        known = len(self._rest) - max(overlap(self._rest, mark) for mark in _ENDS)
        self._add(self._rest[:known])
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
            self._kind = "call"
            self._calls.append({"name": name, "arguments": ""})
        elif channel is None or channel[1] == "final" or (channel[1] != "analysis" and not name):
            self._kind = "content"
            self._content += "\n" * bool(self._content)
        else:
            self._kind = "thought"

    def _add(self, text: str) -> None:
        if self._kind == "call":
            self._calls[-1]["arguments"] += text
        elif self._kind == "content":
            self._content += text
        else:
            self._thought += text
