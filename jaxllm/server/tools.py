"""Tools: the grammar under which a model calls them, and the calls in its text.

A model that must call one writes the bare object `{"name": ..., "arguments": ...}`. A model that
may writes text, and calls in the form that its chat template shows.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Tool = Mapping[str, Any]


class CallStyle(NamedTuple):
    """How calls stand in a text: each between `begin` and `end`; arguments have the key `key`."""

    begin: str
    end: str
    key: str = "arguments"


# What a chat template contains -> its style.
STYLES = {
    "hermes": CallStyle("<tool_call>", "</tool_call>"),
    "llama": CallStyle("<|python_tag|>", "", "parameters"),
    "mistral": CallStyle("[TOOL_CALLS]", ""),
}
PLAIN = CallStyle("", "")  # the whole text is a call
# A forced call has the spaces that templates show, and no others: small models fill their last
# tokens with spaces where these are allowed. Clients do not see them.
_SEPARATORS = {"key_separator": ": ", "item_separator": ", "}


def find_style(template: str) -> str:
    """Return the name of the style that a chat template shows, "" if it shows none."""
    return next((name for name, style in STYLES.items() if style.begin in template), "")


def tool_schema(tools: Sequence[Tool], key: str = "arguments") -> dict[str, Any]:
    """Return the JSON schema of a call of one of these functions."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                key: tool["function"].get("parameters") or {"type": "object"},
            },
            "required": ["name", key],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def tool_grammar(tools: Sequence[Tool], choice: str, style: str) -> dict[str, Any]:
    """Return the option of `LM.generate` for these tools.

    choice: "required" forces a call; "auto" allows calls in the template's style, or nothing but
    text if it has none with an end.
    """
    if choice == "required":
        from jaxllm.grammar import Grammar

        schema = {**tool_schema(tools), "x-guidance": _SEPARATORS}
        grammar = Grammar.json_schema(schema, whitespace="")
        return {"grammar": grammar, "json_schema": None}  # not the one of response_format
    form = STYLES.get(style, PLAIN)
    if not form.end:
        return {}
    from llguidance import StructTag

    tags = [
        StructTag(
            trigger=form.begin,
            begin=f'{form.begin}\n{{"name": {json.dumps(tool["function"]["name"])}, "{form.key}": ',
            grammar=tool["function"].get("parameters") or {"type": "object"},
            end="}\n" + form.end,
        )
        for tool in tools
    ]
    return {"lark": StructTag.to_grammar(tags)}


class ToolText:
    """Splits a text that grows into content and calls.

    forced: the whole text is one call.
    """

    def __init__(self, style: str, *, forced: bool) -> None:
        self._style = PLAIN if forced else STYLES.get(style, PLAIN)
        self._forced, self._text, self._sent = forced, "", 0

    def push(self, piece: str) -> str:
        """Add text; return what is now surely content."""
        self._text += piece
        if self._forced:
            return ""
        begin = self._style.begin
        at = self._text.find(begin) if begin else -1
        stop = at if at >= 0 else len(self._text) - _overlap(self._text, begin)
        content, self._sent = self._text[self._sent : stop], max(stop, self._sent)
        return content

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """Return the rest of the content, and the calls: names and arguments as JSON text."""
        if self._forced:
            call = self._read_call(self._text)
            return ("", [call]) if call else (self._text, [])
        rest, content, calls = self._text[self._sent :], "", []
        begin, end, _ = self._style
        while begin and begin in rest:
            before, _, rest = rest.partition(begin)
            body, closed, after = rest.partition(end) if end else (rest, "", "")
            found = self._read_calls(body)
            calls += found
            content += before if found else before + begin + body + closed
            rest = after
        return content + rest, calls

    def _read_calls(self, text: str) -> list[dict[str, Any]]:
        try:
            found = json.loads(text)
        except ValueError:
            return []
        calls = [self._read_call(item) for item in (found if isinstance(found, list) else [found])]
        return [call for call in calls if call]

    def _read_call(self, item: Any) -> dict[str, Any]:
        """Return name and arguments of a call, {} where it is none."""
        if isinstance(item, str):
            try:
                item = json.loads(item)
            except ValueError:
                return {}
        if not isinstance(item, dict) or not isinstance(item.get("name"), str):
            return {}
        arguments: Any = next((item[k] for k in (self._style.key, "arguments") if k in item), {})
        return {"name": item["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}


def _overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` that could begin `mark`."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)
