"""How Gemma 4 writes: a thought between `<|channel>thought`, with a line end, and `<channel|>`;
text; calls.

A call is `<|tool_call>call:NAME{KEY:VALUE,...}<tool_call|>`: JSON whose keys have no quotes, and
whose strings are between two `<|"|>`.
"""

import json
import re

from jaxllm.server.text_reader import TextReader, overlap

_QUOTE = '<|"|>'
_KINDS = {"<|channel>": "header", "<channel|>": "content", "<|tool_call>": "call",
          "<tool_call|>": "content"}  # of what follows a mark  # fmt: skip
_MARK = re.compile("|".join(map(re.escape, _KINDS)))
_HEADER_END = re.compile(rf"\n|{_MARK.pattern}")
_LONGEST_HEADER = 32
_CALL = re.compile(r"\s*call:([\w.-]+)\s*(?=\{)")
_CALL_BEGIN = re.compile(r"\s*(?:c|ca|cal|call|call:[\w.-]*\s*)?\Z")
_WORD = re.compile(r"[^{}\[\],:<]+")
_LITERAL = re.compile(r"true|false|null|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")


def open_turn(prompt: str) -> str:
    """Return a prompt with the model's turn, which published templates leave out after a call with
    text.
    """
    return f"{prompt}<|turn>model\n" if prompt.endswith("<turn|>\n") else prompt


class Gemma4Text(TextReader):
    """Splits a text into thoughts, content and calls, and writes arguments as JSON."""

    _depth, _in_string = 0, False  # of the arguments

    @property
    def is_thinking(self) -> bool:
        return self._kind in ("thought", "header")

    def _advance(self, final: bool) -> bool:
        """Read up to a mark, or what is there; return whether more may follow."""
        if self._kind == "call":
            return self._begin_call(final)
        if self._kind == "arguments":
            return self._read_arguments(final)
        in_header = self._kind == "header"
        end = (_HEADER_END if in_header else _MARK).search(self._rest)
        known = len(self._rest) - (0 if final else overlap(self._rest, *_KINDS))
        if in_header and (end.start() if end else known) >= _LONGEST_HEADER:
            self._kind = "thought"
            return True
        if end is None:
            if in_header:
                return False
            if not final:  # space before a mark is left out
                known = len(self._rest[:known].rstrip())
            self._add_text(self._rest[:known])
            self._rest = self._rest[known:]
            return False
        text, self._rest = self._rest[: end.start()], self._rest[end.end() :]
        if end[0] == "\n":
            self._kind = "thought"
        elif self._kind == "thought" and end[0] != "<channel|>":
            self._add_text(text + end[0])
        elif end[0] == "<|tool_call>" and not self._tools:
            self._add_text(text + end[0])
            self._kind = "literal"
        else:
            self._add_text(text + end[0] if self._kind == "literal" else text.rstrip())
            self._kind = _KINDS[end[0]]
        return True

    def _begin_call(self, final: bool) -> bool:
        if found := _CALL.match(self._rest):
            self._add("call", found[1])
            self._rest, self._kind, self._depth = self._rest[found.end() :], "arguments", 0
        elif not final and _CALL_BEGIN.match(self._rest):
            return False
        else:
            self._add("content", "<|tool_call>")
            self._kind = "literal"
        return True

    def _read_arguments(self, final: bool) -> bool:
        """Translate one value, sign or word, or what is there of a string."""
        rest = self._rest
        if self._in_string:
            text, mark, after = rest.partition(_QUOTE)
            known = len(text) if mark or final else len(text) - overlap(text, _QUOTE)
            self._add("arguments", json.dumps(text[:known], ensure_ascii=False)[1:-1])
            self._rest = mark + after if mark else text[known:]
            if not mark:
                return False
            rest = self._rest
        if rest.startswith(_QUOTE):
            self._in_string = not self._in_string
            self._add("arguments", '"')
            self._rest = rest[len(_QUOTE) :]
        elif word := _WORD.match(rest):
            if word.end() == len(rest) and not final:
                return False
            self._rest = rest[word.end() :]
            text = word[0].strip()
            if text and (self._rest[:1] == ":" or not _LITERAL.fullmatch(text)):
                text = json.dumps(text, ensure_ascii=False)
            self._add("arguments", text)
        elif not rest or (_QUOTE.startswith(rest) and not final):
            return False
        elif rest[0] == "<":  # a mark, before the end of the arguments
            self._kind = "rest"
        else:
            self._depth += (rest[0] in "{[") - (rest[0] in "}]")
            self._add("arguments", rest[0] + " " * (rest[0] in ":,"))
            self._rest = rest[1:]
            if not self._depth:
                self._kind = "rest"  # of a call, which is left out
        return True

    def _add_text(self, text: str) -> None:
        if self._kind not in ("header", "rest"):
            self._add("thought" if self._kind == "thought" else "content", text)
