"""Tools: the calls in a model's text, and the grammar under which it must write them.

A model that must call one writes the bare object `{"name": ..., "arguments": ...}`. One that may
writes text and calls, which are read in every form of published models, whatever its template
shows. A grammar restrains it only where the request has a schema to keep.
"""

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from jaxllm.server.text_reader import THOUGHT_MARKS, TextReader, overlap

Tool = Mapping[str, Any]
Call = dict[str, str]  # name, and arguments as JSON text
Found = tuple[list[Call], int]  # calls, and where their text ends

# What calls and thoughts begin and end with: ordinary tokens, special ones, or letters.
MARKS = ("<tool_call>", "</tool_call>", "<|tool_call|>", "<|/tool_call|>", "[TOOL_CALLS]",
         "[CALL_ID]", "[ARGS]", "<|python_tag|>", "<|tool_call_start|>", "<|tool_call_end|>",
         *(mark for pair in THOUGHT_MARKS for mark in pair), "<|start|>", "<|channel|>",
         "<|message|>", "<|constrain|>",
         "<|end|>", "<|call|>", "<|return|>", "<|channel>", "<channel|>", "<|tool_call>",
         "<tool_call|>", '<|"|>')  # fmt: skip
_BEGINS = ("<tool_call>", "<|tool_call|>", "[TOOL_CALLS]", "<|python_tag|>", "<function=",
           "<|tool_call_start|>")  # fmt: skip
_BEGIN = re.compile("|".join(map(re.escape, _BEGINS)))
_SPACE = re.compile(r"\s*")
_ENDS = ("</tool_call>", "<|/tool_call|>", "<|tool_call_end|>")
_END = re.compile(r"\s*(?:" + "|".join(map(re.escape, _ENDS)) + ")")
_BETWEEN = re.compile(r"\s*[;,]?\s*(?=\{)")  # two objects
_CLOSED = re.compile(rf"[\s;,\]}}]*({_END.pattern})?")
# A call as an object, up to its arguments.
_OBJECT = re.compile(
    r"""\s*\[?\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,"""
    r"""\s*"(?:arguments|parameters)"\s*:\s*(?=\{)"""
)
_MAY_CALL = re.compile(r"\s*(?:$|[\[{]|<(?:f|$)|[\w.-]+\s*(?:$|[\[{.(]))")
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)")
_BUILT_IN = re.compile(r"([\w-]+)\.call\(\s*")
_NEXT_CALL = re.compile(r"\s*;\s*")
_KEYWORD = re.compile(r"(\w+)\s*=\s*")
_NEXT_KEYWORD = re.compile(r"\s*,?\s*")
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?")
# Values may hold such ends, and models may leave out the parameter's own.
_PARAMETER_END = re.compile(
    r"\n?</parameter>\s*|\n(?=<parameter=[^>\n]+>\n|</function>\s*(?:</tool_call>|<function=|\Z))"
    r"|\Z"
)
# Python's strings, in which an end of calls is none, and names before "=" or "(".
_QUOTED = r"""(?:"(?:[^"\\]|\\.)*+"|'(?:[^'\\]|\\.)*+')"""
_PYTHON = re.compile(rf"(?:{_QUOTED}|(?!<\|tool_call_(?:start|end)\|>)[^\"'])*+", re.DOTALL)
_PYTHON_PART = re.compile(rf"({_QUOTED})|([\w.-]++)(\s*[=(])?|\s+", re.DOTALL)
_JSON_NAMES = {"true": True, "false": False, "null": None}
_INTERPRETERS = ("python", "ipython", "code_interpreter")
_JSON = json.JSONDecoder(strict=False)  # models write line ends within strings


class CallForm(NamedTuple):
    """How calls stand in a text: `mark`, `begin`, calls with `between`, and `end`.

    key: of the arguments; "" where a call is not an object but `name[ARGS]arguments`.
    """

    mark: str
    begin: str
    between: str
    end: str
    key: str = "arguments"


FORMS = {
    "hermes": CallForm("<tool_call>", "\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
    "granite": CallForm("<|tool_call|>", "[", ", ", "]"),
    "mistral": CallForm("[TOOL_CALLS]", " [", ", ", "]"),
    "mistral_args": CallForm("[TOOL_CALLS]", "", "[TOOL_CALLS]", "", key=""),
    "llama": CallForm("", "", "; ", "", "parameters"),
}
# What a chat template contains -> how its model writes calls. "harmony" (`server.harmony`),
# "gemma4" (`server.gemma4`), "parameters" (Qwen3-Coder, Qwen3.5) and "python" (LFM2): no form of
# `FORMS`.
_SIGNS = {"<|channel|>": "harmony", "[ARGS]": "mistral_args", "[TOOL_CALLS]": "mistral",
          "<|tool_call>": "gemma4", "<|tool_call|>": "granite", "<|tool|>": "granite",
          "<|tool_call_start|>": "python",
          "<|tool_list_start|>": "python", "<parameter=": "parameters", "<function=": "parameters",
          "<tool_call>": "hermes", "<|python_tag|>": "llama", "ipython": "llama"}  # fmt: skip
# A forced call has the spaces that templates show, and no others: small models fill their last
# tokens with spaces where these are allowed. Clients do not see them.
_SEPARATORS = {"key_separator": ": ", "item_separator": ", "}


def find_style(template: str) -> str:
    """Return how a model of this chat template writes calls, "" if it shows none."""
    return next((style for sign, style in _SIGNS.items() if sign in template), "")


def fill_content(messages: Sequence[Mapping[str, Any]], template: str) -> list[dict[str, Any]]:
    """Return messages as a template takes them: an answer of calls alone has an empty text.

    At null, which OpenAI's clients send, most templates fail or write "None". One that asks whether
    the content is none (DeepSeek) shows calls only then, and gets it.
    """
    text = None if "['content'] is not none" in template else ""
    return [{**m, "content": text if m["content"] is None else m["content"]} for m in messages]


def find_marks(tokenizer: Any) -> dict[str, int]:
    """Return the ids of those `MARKS` that are special tokens of a tokenizer, or of None."""
    special = () if tokenizer is None else tokenizer.special_ids
    names = {tokenizer.token(token): token for token in special}
    return {name: names[name] for name in MARKS if name in names}


def find_thought_marks(template: str, tokenizer: Any) -> tuple[str, str] | None:
    """Return those of `THOUGHT_MARKS` that a chat template shows, or that are tokens; or None."""
    for marks in THOUGHT_MARKS:
        if marks[1] in template:
            return marks
        if tokenizer is not None and None not in map(tokenizer.id, marks):
            return marks
    return None


def tool_schema(tools: Sequence[Tool], key: str = "arguments") -> dict[str, Any]:
    """Return the JSON schema of a call of one of these functions."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool["function"]["name"]}, key: _parameters(tool)},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def _parameters(tool: Tool) -> Mapping[str, Any]:
    return tool["function"].get("parameters") or {"type": "object"}


def tool_grammar(
    asked: Mapping[str, Any], style: str, special: Mapping[str, int], answer: Any = None
) -> dict[str, Any]:
    """Return the options of `LM.generate` for these tools.

    If a call is required, it fits its tool's schema. Else text and calls are free, but that the
    arguments of a tool with `strict` fit, and that the text of an answer without calls fits the
    schema `answer`, if it is given. Where the style has no form, or no mark beside `answer`, only
    the latter holds, and such an answer has no calls.

    Args:
        asked: tools, choice ("required" or "auto") and parallel (whether several calls may be).
        style: Of `find_style`.
        special: The ids of those `MARKS` that are special tokens.
        answer: The schema of response_format.
    """
    from jaxllm.grammar import Grammar

    tools, form = asked["tools"], FORMS.get(style)

    def spell(text: str) -> str:
        parts = re.split("(" + "|".join(map(re.escape, MARKS)) + ")", text)
        spelled = (f"<[{special[p]}]>" if p in special else json.dumps(p) for p in parts if p)
        return " ".join(spelled)

    if asked["choice"] == "required" and style == "harmony":
        return {"lark": _harmony_call(tools, special, spell), "json_schema": None}
    if asked["choice"] == "required":
        schema = {**tool_schema(tools), "x-guidance": _SEPARATORS}
        grammar = Grammar.json_schema(schema, whitespace="")
        return {"grammar": grammar, "json_schema": None}  # not the one of response_format
    strict = [tool["function"].get("strict") is True for tool in tools]
    if form is None or not (any(strict) or answer is not None):
        return {}
    if answer is not None and not form.mark:  # both begin with a brace
        return {}

    bodies = []
    for tool, keeps in zip(tools, strict, strict=True):
        name = tool["function"]["name"]
        arguments: Tool = _parameters(tool) if keeps else {"type": "object"}
        head, tail = f"{name}[ARGS]", ""
        if form.key:
            head, tail = f'{{"name": {json.dumps(name)}, "{form.key}": ', "}"
        bodies.append(f"{spell(head)} %json {json.dumps(arguments)} {spell(tail)}")
    more = f"({spell(form.between)} call)*" if asked["parallel"] else ""
    rules = [
        f"calls: {spell(form.begin)} call {more} {spell(form.end)}",
        "call: " + "\n    | ".join(bodies),
    ]
    mark, repeat = spell(form.mark), "*" if asked["parallel"] else "?"
    if answer is not None:
        start = f"{mark} calls | answer"
        rules.append(f"answer: %json {Grammar.json_schema(answer).text}")
    elif not mark:  # calls stand at the beginning
        start = "calls | TEXT"
        rules.append(r"TEXT: /([^{\s](.|\n)*)?/")
    else:
        start = f"(lead calls){repeat} TEXT"
        lead = "lead" if form.mark in special else "lead[lazy]"
        rules += [f"{lead}: TEXT {mark}", r"TEXT: /(.|\n)*/"]
    return {"lark": "\n".join([f"start: {start}", *rules]), "json_schema": None}


def _harmony_call(
    tools: Sequence[Tool], special: Mapping[str, int], spell: Callable[[str], str]
) -> str:
    """Return a Lark grammar of one call in Harmony, after a thought or at once."""
    calls = []
    for tool in tools:
        head = f"to=functions.{tool['function']['name']} <|constrain|>json<|message|>"
        calls.append(f"{spell(head)} %json {json.dumps(_parameters(tool))}")
    lead = "lead" if "<|end|>" in special else "lead[lazy]"
    rules = [
        f"start: thought? {spell('<|channel|>commentary ')} call",
        f"thought: {spell('<|channel|>analysis<|message|>')} lead {spell('<|start|>assistant')}",
        f"{lead}: TEXT {spell('<|end|>')}",
        r"TEXT: /(.|\n)*/",
        "call: " + "\n    | ".join(calls),
    ]
    return "\n".join(rules)


class ToolText(TextReader):
    """Splits a text into content and calls.

    The arguments of an object are read as they are written. Other forms are read at the end.

    asked: as in `tool_grammar`. style: of the template. hidden: marks that are special tokens,
    which are no content.
    """

    def __init__(self, asked: Mapping[str, Any], style: str, hidden: Sequence[str] = ()) -> None:
        super().__init__(asked)
        self._forced, self._hidden = asked["choice"] == "required", hidden
        self._kind = "call" if self._forced or style == "llama" else "content"
        self._mark = ""  # of the call that begins
        self._json, self._in_object = _JsonText(), True  # the arguments, and what is around them
        self._has_content = self._follows_call = False

    def _advance(self, final: bool) -> bool:
        if self._kind == "content":
            return self._read_content(final)
        if self._kind == "call":
            return self._begin_call(final)
        if self._kind == "end":
            return self._end_call(final)
        count, text = self._json.read(self._rest)
        self._rest = self._rest[count:]
        if self._kind == "arguments":
            self._add("arguments", text)
        if not self._json.is_complete:
            return False
        has_more = self._kind == "arguments" and self._in_object
        self._kind, self._json = "object" if has_more else "end", _JsonText(depth=1)
        return True

    def _read_content(self, final: bool) -> bool:
        """Read up to what may begin a call, with the space before it."""
        mark = _BEGIN.search(self._rest)
        known = len(self._rest) - (0 if final else overlap(self._rest, *_BEGINS, *self._hidden))
        known = mark.start() if mark else known
        if mark or not final or self._follows_call:
            known = len(self._rest[:known].rstrip())
        self._say(self._rest[:known])
        self._rest = self._rest[known:]
        if mark:
            self._kind, self._mark = "call", mark[0]
        return mark is not None

    def _begin_call(self, final: bool) -> bool:
        """Read a call up to its arguments, at the end all of it; or find that it is none."""
        text, at = self._rest, self._rest.find(self._mark) + len(self._mark)
        found = _OBJECT.match(text, at)
        self._in_object = found is not None
        if found is None and self._mark:
            found = _NAMED.match(text, at)
        if found is not None:
            if self._is_named(found[1]):
                self._add("call", found[1])
                self._rest, self._kind, self._json = text[found.end() :], "arguments", _JsonText()
                return True
        elif not final and self._may_call(at):
            return False
        elif final and (read := self._read_calls(self._mark, at - len(self._mark))):
            for call in read[0]:
                self._add("call", call["name"])
                self._add("arguments", call["arguments"])
            self._rest, self._kind, self._follows_call = text[read[1] :], "content", True
            return True
        self._say(text[:at])
        self._rest, self._kind = text[at:], "content"
        return True

    def _may_call(self, at: int) -> bool:
        """Return whether a call may begin after a mark."""
        if self._mark in ("<function=", "<|python_tag|>") or self._forced:
            return True
        if self._mark:
            return _MAY_CALL.match(self._rest, at) is not None
        return self._rest.lstrip()[:1] in ("", "{")

    def _is_named(self, name: str) -> bool:
        """Return whether this is a call, where a mark says so or by its name."""
        return bool(self._mark or self._num_calls) or name in self._tools

    def _end_call(self, final: bool) -> bool:
        """Read what is between two calls, or behind the last one."""
        if (between := _BETWEEN.match(self._rest)) is not None:
            self._rest, self._kind, self._mark = self._rest[between.end() :], "call", ""
            return True
        closed = _CLOSED.match(self._rest)
        assert closed is not None  # it matches nothing, too
        behind = self._rest[closed.end() :]
        if not (final or closed[1]) and len(behind) == overlap(behind, *_ENDS):
            return False
        self._rest, self._kind, self._follows_call = behind, "content", True
        return True

    def _say(self, text: str) -> None:
        """Add content. Space beside a call is none."""
        for mark in self._hidden:
            text = text.replace(mark, "")
        if self._follows_call:
            text = text.lstrip()
            text = "\n" * bool(text and self._has_content) + text
        if text.strip():
            self._has_content, self._follows_call = True, False
        self._add("content", text)

    def _read_calls(self, mark: str, at: int) -> Found | None:
        """Return the calls after a mark, None if there are none."""
        text = self._rest
        if mark != "<function=":
            at = _after(_SPACE, text, at + len(mark))
        try:
            if text.startswith("<function=", at):
                calls, end = self._read_functions(at)
            elif mark == "<|tool_call_start|>" and not text.startswith(("{", "[{"), at):
                body = _PYTHON.match(text, at)
                assert body is not None  # it matches nothing, too
                calls, end = _read_python_calls(body[0]), body.end()
            elif text.startswith(("{", "["), at):
                calls, end = _read_objects(text, at)
                if not all(self._is_named(call["name"]) for call in calls):
                    return None  # an answer in JSON
            elif mark and (named := _NAMED.match(text, at)):
                arguments, end = _JSON.raw_decode(text, named.end())
                calls = [_as_call({"name": named[1], "arguments": arguments})]
            elif mark == "<|python_tag|>":
                calls, end = self._read_built_in(at)
            else:
                return None
        except (ValueError, RecursionError):
            return None
        return calls, _after(_END, text, end)

    def _read_functions(self, at: int) -> Found:
        """Read `<function=NAME><parameter=KEY>VALUE</parameter></function>`."""
        text, calls = self._rest, []
        while function := _FUNCTION.match(text, at):
            at, arguments = function.end(), {}
            schema = _parameters(self._tools.get(function[1], {"function": {}}))
            properties = schema.get("properties")
            while parameter := _PARAMETER.match(text, at):
                end = _PARAMETER_END.search(text, parameter.end())
                assert end is not None  # it matches at the end of the text
                value, at = text[parameter.end() : end.start()], end.end()
                inner = properties.get(parameter[1]) if isinstance(properties, Mapping) else None
                arguments[parameter[1]] = _as_typed(value, inner, schema)
            if not text.startswith("</function>", at):
                raise ValueError("the function is not closed")
            at += len("</function>")
            calls.append(_as_call({"name": function[1], "arguments": arguments}))
        if not calls:
            raise ValueError("the function has no name")
        return calls, at

    def _read_built_in(self, at: int) -> Found:
        """Read `NAME.call(KEY=VALUE, ...); ...`, or code for a tool that is an interpreter."""
        text, code, calls = self._rest, self._rest[at:], list[Call]()
        if not _BUILT_IN.match(text, at):
            name = next(name for name in (*_INTERPRETERS, None) if name in (*self._tools, None))
            if name is None:
                raise ValueError("no tool takes code")
            return [_as_call({"name": name, "arguments": {"code": code}})], len(text)
        end = at
        while named := _BUILT_IN.match(text, at):
            at, arguments = named.end(), {}
            while key := _KEYWORD.match(text, at):
                arguments[key[1]], at = _JSON.raw_decode(text, key.end())
                at = _after(_NEXT_KEYWORD, text, at)
            if not text.startswith(")", at):
                raise ValueError("the call is not closed")
            calls.append(_as_call({"name": named[1], "arguments": arguments}))
            end = at + 1
            at = _after(_NEXT_CALL, text, end)
        return calls, end


class _JsonText:
    """Follows an object of JSON, which models write with line ends within strings.

    depth: How many brackets are open. is_complete: Whether all of them were closed, or a "<" where
    JSON has none shows that the object ends without.
    """

    def __init__(self, depth: int = 0) -> None:
        self.is_complete, self._depth = False, depth
        self._in_string = self._is_escaped = False

    def read(self, text: str) -> tuple[int, str]:
        """Return how many characters of a text belong to the object, and these as JSON."""
        shown = list[str]()
        for at, char in enumerate(text):
            if self._in_string:
                char = json.dumps(char)[1:-1] if char < " " else char
                self._in_string = self._is_escaped or char != '"'
                self._is_escaped = char == "\\" and not self._is_escaped
            elif char == "<":
                self.is_complete = True
                return at, "".join(shown)
            else:
                self._in_string = char == '"'
                self._depth += (char in "{[") - (char in "}]")
                self.is_complete = char in "}]" and not self._depth
            shown.append(char)
            if self.is_complete:
                return at + 1, "".join(shown)
        return len(text), "".join(shown)


def _read_objects(text: str, at: int) -> Found:
    """Read one or several calls as JSON, or a list of them."""
    value, at = _JSON.raw_decode(text, at)
    calls = [_as_call(item) for item in (value if isinstance(value, list) else [value])]
    with suppress(ValueError):
        while between := _BETWEEN.match(text, at):
            value, end = _JSON.raw_decode(text, between.end())
            calls.append(_as_call(value))
            at = end
    if not calls:
        raise ValueError("an empty list")
    return calls, at


def _read_python_calls(text: str) -> list[Call]:
    """Read `[NAME(KEY=VALUE, ...), ...]`. Raises ValueError if a value is not a literal."""
    names = list[str]()  # of functions and arguments, which may be Python's keywords

    def replace(part: re.Match[str]) -> str:
        quoted, word, sign = part.groups()
        if sign:
            names.append(word)
            return f"n{len(names) - 1}{sign.strip()}"
        return quoted.replace("\n", "\\n") if quoted else word or " "

    tree, calls = _parse_python(_PYTHON_PART.sub(replace, text)), []
    for call in tree.elts if isinstance(tree, ast.List) else [tree]:
        match call:
            case ast.Call(func=ast.Name(id=name), args=[], keywords=keywords):
                values = [(key.arg or "", _read_literal(key.value)) for key in keywords]
            case _:
                raise ValueError("not a call with named arguments")
        arguments = {names[int(key[1:])]: value for key, value in values}
        calls.append(_as_call({"name": names[int(name[1:])], "arguments": arguments}))
    if not calls:
        raise ValueError("an empty list")
    return calls


def _parse_python(text: str) -> ast.expr:
    """Return the tree of an expression. Raises ValueError if it is none."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of unknown escapes
            return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError("not Python") from error


def _read_literal(node: ast.expr) -> Any:
    """Return the value of a literal that JSON has, too. Raises ValueError for other nodes."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_read_literal(item) for item in items]
        case ast.Dict(keys=keys, values=items):
            names = [key.value if isinstance(key, ast.Constant) else None for key in keys]
            if all(isinstance(name, str) for name in names):
                return dict(zip(names, map(_read_literal, items), strict=True))
    raise ValueError("not a literal")


def _as_call(item: Any) -> Call:
    """Return a call of a model's object. Raises ValueError for another value."""
    if not isinstance(item, dict) or not isinstance(name := item.get("name"), str):
        raise ValueError("not a call")
    arguments = item.get("arguments", item.get("parameters"))
    if not isinstance(arguments, str):  # some models write them as JSON text
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    return {"name": name, "arguments": arguments or "{}"}


def _as_typed(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the value that a text stands for under a schema, the text if none fits."""
    kinds = _find_kinds(schema, root)
    if "string" in kinds and not (text == "null" and "null" in kinds):
        return text
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    with suppress(ValueError, RecursionError):
        value = _read_literal(_parse_python(text))
        return value if value is None or isinstance(value, bool | list | dict) else text
    return text


def _find_kinds(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """Return the types that a schema allows, by JSON Schema's names."""
    if not isinstance(schema, Mapping) or depth > 8:
        return set()
    kinds = schema.get("type") or []
    names = {kinds} if isinstance(kinds, str) else {kind for kind in kinds if isinstance(kind, str)}
    listed = [schema["const"]] if "const" in schema else []
    for value in (*_items(schema.get("enum")), *listed):
        names.add({str: "string", type(None): "null"}.get(type(value), "other"))
    inner = [item for key in ("anyOf", "oneOf", "allOf") for item in _items(schema.get(key))]
    if isinstance(name := schema.get("$ref"), str):
        place: Any = root
        for key in name.removeprefix("#/").split("/"):
            place = place.get(key) if isinstance(place, Mapping) else None
        inner.append(place)
    return names.union(*(_find_kinds(item, root, depth + 1) for item in inner))


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _after(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return where a pattern's match at a place ends, the place itself if there is none."""
    match = pattern.match(text, at)
    return at if match is None else match.end()
