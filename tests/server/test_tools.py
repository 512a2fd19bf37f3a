"""Calls of tools in the text of models: every published form, as their model cards show it."""

import json
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from jaxllm.grammar import Grammar
from jaxllm.server.gemma4 import Gemma4Text, open_turn
from jaxllm.server.harmony import HarmonyText, as_rendered
from jaxllm.server.openai_requests import read_conversation
from jaxllm.server.text_reader import TextReader, ThoughtText
from jaxllm.server.tools import (
    FORMS,
    ToolText,
    fill_content,
    find_style,
    find_thought_marks,
    tool_grammar,
)
from jaxllm.text import ChatTemplate

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"},
                   "exact": {"type": ["boolean", "null"]}},
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}
    for name in ("weather", "time")
]
ASKED = {"tools": TOOLS, "choice": "auto", "parallel": True}
THINK = ("<think>", "</think>")
CALL, CITY = ("weather", {"city": "Bonn"}), '{"city": "Bonn"}'
BOTH = [CALL, ("time", {"city": "Ulm", "days": 2})]
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
# style, text, content, calls
CASES: list[tuple[str, str, str, list[Any]]] = [
    ("hermes", "Hello.", "Hello.", []),
    ("hermes", HERMES, "", [CALL]),
    ("hermes", f"I look.\n{HERMES}", "I look.", [CALL]),
    ("hermes", HERMES + '\n<tool_call>\n{"name": "time", "arguments": {"city": "Ulm", "days": 2}}'
     "\n</tool_call>", "", BOTH),
    ("hermes", HERMES.removesuffix("\n</tool_call>"), "", [CALL]),
    ("hermes", HERMES.replace(CITY, json.dumps(CITY)), "", [CALL]),
    ("hermes", f"<think>I could <tool_call> now</think>{HERMES}",
     "<think>I could <tool_call> now</think>", [CALL]),
    ("hermes", "A <tool_call> is a mark.", "A <tool_call> is a mark.", []),
    ("llama", '{"name": "weather", "parameters": {"city": "Bonn"}}', "", [CALL]),
    ("llama", '<|python_tag|>{"name": "weather", "parameters": {"city": "Bonn"}}; '
     '{"name": "time", "parameters": {"city": "Ulm", "days": 2}}', "", BOTH),
    ("llama", '<|python_tag|>weather.call(city="Bonn")', "", [CALL]),
    ("llama", '{"name": "Anna", "age": 5}', '{"name": "Anna", "age": 5}', []),
    ("mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Bonn"}}, '
     '{"name": "time", "arguments": {"city": "Ulm", "days": 2}}]', "", BOTH),
    ("mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Bonn"}}]', "", [CALL]),
    ("mistral_args", '[TOOL_CALLS]weather[ARGS]{"city": "Bonn"}', "", [CALL]),
    ("mistral_args", '[TOOL_CALLS]weather[ARGS]{"city": "Bonn"}[TOOL_CALLS]time[ARGS]'
     '{"city": "Ulm", "days": 2}', "", BOTH),
    ("granite", '<|tool_call|>[{"name": "weather", "arguments": {"city": "Bonn"}}]', "", [CALL]),
    ("granite", '<|tool_call|>[{"name": "weather", "arguments": {"city": "Bonn"}}]<|/tool_call|>',
     "", [CALL]),
    ("parameters", "<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n</parameter>\n"
     "</function>\n</tool_call>\n<tool_call>\n<function=time>\n<parameter=city>\nUlm\n</parameter>"
     "\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>", "", BOTH),
    ("parameters", "<tool_call>\n<function=weather>\n<parameter=city>\n7\n</parameter>\n"
     "<parameter=exact>\nTrue\n</parameter>\n</function>\n</tool_call>", "",
     [("weather", {"city": "7", "exact": True})]),
    *(("parameters", f"<tool_call>\n<function=weather>\n<parameter=city>\n{value}\n</parameter>\n"
       "<parameter=exact>\nTrue\n</parameter>\n</function>\n</tool_call>", "",
       [("weather", {"city": value, "exact": True})])
      for value in ("</function>1", "see <parameter=x> here", "a\n\nb\n")),
    ("parameters", "<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n<parameter=exact>\n"
     "True\n</function>\n</tool_call>", "", [("weather", {"city": "Bonn", "exact": True})]),
    ("parameters", "<think>Hm, <tool_call>?\n</think>\n\nI look.\n<tool_call>\n<function=weather>\n"
     "<parameter=city>\n5\n</parameter>\n<parameter=near>\n{'Ulm': True, \"n\": [1]}\n</parameter>"
     "\n</function>\n</tool_call>", "<think>Hm, <tool_call>?\n</think>\n\nI look.",
     [("weather", {"city": "5", "near": {"Ulm": True, "n": [1]}})]),
    ("python", 'I look. <|tool_call_start|>[weather(city="Bonn"), time(city=\'Ulm\', days=2)]'
     "<|tool_call_end|>Wait.", "I look.\nWait.", BOTH),
    ("python", '<|tool_call_start|>[get-it(from="<|tool_call_end|>\n\\d", '
     'in=[-1, {"a": true}], b=None)]<|tool_call_end|>', "",
     [("get-it", {"from": "<|tool_call_end|>\n\\d", "in": [-1, {"a": True}], "b": None})]),
    *(("python", f"<|tool_call_start|>{text}<|tool_call_end|>",
       f"<|tool_call_start|>{text}<|tool_call_end|>", [])
      for text in ("[f(x=open('a'))]", "[f('Bonn')]", "[f(x=1]", "[f(**{'x': 1})]", "[]",
                   "[f(x=y)]")),
    ("llama", '<|python_tag|>weather.call(city="Bonn"); time.call(city="Ulm", days=2)', "", BOTH),
    ("hermes", f"\n\n{HERMES}B", "B", [CALL]),
]  # fmt: skip


def read_parts(reader: TextReader, pieces: Iterable[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """Return the content, the thought, and the calls of a text that comes in pieces."""
    parts = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
    said = {
        kind: "".join(text for k, text in parts if k == kind) for kind in ("content", "thought")
    }
    calls = list[tuple[str, str]]()
    for kind, text in parts:
        if kind == "call":
            calls.append((text, ""))
        elif kind == "arguments":
            calls[-1] = (calls[-1][0], calls[-1][1] + text)
    return said["content"], said["thought"], calls


def cut(text: str, step: int) -> list[str]:
    return [text[i : i + step] for i in range(0, len(text), step)]


def read_json(reader: TextReader, pieces: Iterable[str]) -> tuple[str, str, list[Any]]:
    content, thought, calls = read_parts(reader, pieces)
    return content, thought, [(name, json.loads(arguments)) for name, arguments in calls]


def read(text: str, step: int, style: str, **changes: Any) -> tuple[str, list[Any]]:
    """Return the content and the calls of a text that comes in pieces of `step` characters."""
    reader = ThoughtText(ToolText({**ASKED, **changes}, style), THINK, separates=False)
    content, thought, calls = read_json(reader, cut(text, step))
    assert not thought
    return content, calls


@pytest.mark.parametrize("case", range(len(CASES)))
def test_calls_are_read_in_published_forms(case: int) -> None:
    """Whole or in pieces, a text gives the same content and calls."""
    style, text, content, calls = CASES[case]
    for step in (len(text), 1, 3, 7):
        assert read(text, step, style) == (content, calls)


def test_tools_that_bind_nothing_are_not_read() -> None:
    """A schema whose properties are no object neither fails nor types its values."""
    text = "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>"
    for parameters in (None, {"properties": None}, {"properties": [1]}):
        tools = [{"function": {"name": "f", "parameters": parameters}}]
        assert read(text, 1, "parameters", tools=tools) == ("", [("f", {"a": 1})])


@pytest.mark.parametrize(
    ("fields", "rendered"),
    [
        ({"content": None, "reasoning_content": "Hm."}, ""),
        ({"content": None, "refusal": "No."}, "No."),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, "No."),
        ({"content": "Yes.", "tool_calls": None}, "Yes."),
        ({"content": "Yes.", "tool_calls": [], "refusal": None}, "Yes."),
    ],
)
def test_templates_get_texts_for_null(fields: Any, rendered: str) -> None:
    """What clients send back of an answer without calls is a text, and has no calls."""
    template = ChatTemplate(
        "{{ 'a' + messages[0].content }}{% if 'tool_calls' in messages[0] %}calls{% endif %}"
    )
    user = {"role": "user", "content": "x"}
    messages = read_conversation({"messages": [{"role": "assistant", **fields}, user]})["messages"]
    assert template.render(messages) == "a" + rendered


def test_templates_get_text_beside_calls() -> None:
    """An answer of calls alone is a text in Qwen3's and GLM's words, and null in DeepSeek's."""
    for source, rendered in (
        ("{% if '</think>' not in m.content %}{{ m.content }}calls{% endif %}", "calls"),
        ("{% if m['content'] is not none %}text{% else %}calls{% endif %}", "calls"),
    ):
        template = ChatTemplate("{% set m = messages[1] %}" + source)
        call = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "time"}}],
        }
        user = {"role": "user", "content": "x"}
        messages = read_conversation({"messages": [user, call]})["messages"]
        assert template.render(fill_content(messages, template.source)) == rendered


def test_single_call_where_parallel_is_off() -> None:
    assert read(CASES[3][1], 5, "hermes", parallel=False) == ("", [CALL])


def test_styles_are_found_by_their_signs() -> None:
    """What published templates contain: Llama 3.1, Hermes, Qwen3-Coder, Mistral, Granite, LFM2."""
    for sign, style in (
        ("<|start|>assistant<|channel|>", "harmony"),
        ("Environment: ipython", "llama"), ("<tool_call>\n{\"name\"", "hermes"),
        ("<tool_call>\n<function=f>\n<parameter=a>", "parameters"), ("[TOOL_CALLS] [", "mistral"),
        ("[TOOL_CALLS]f[ARGS]", "mistral_args"), ("'<|tool_call>call:'", "gemma4"),
        ("<|tool_call|>", "granite"), ("plain", ""),
        ("List of tools: <|tool_list_start|>[", "python"), ("<|tool_call_start|>[", "python"),
    ):  # fmt: skip
        assert find_style(sign) == style


ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
CALLED = f"commentary to=functions.weather <|constrain|>json<|message|>{CITY}<|call|>"
# text, content, thought, calls
HARMONY: list[tuple[str, str, str, list[Any]]] = [
    (f"{FINAL}Hello.<|return|>", "Hello.", "", []),
    (f"{ANALYSIS}Hm.<|end|><|start|>assistant{FINAL}Hello.", "Hello.", "Hm.", []),
    (f"<|channel|>{CALLED}", "", "", [CALL]),
    (f"{ANALYSIS}Hm.<|end|><|start|>assistant<|channel|>{CALLED}", "", "Hm.", [CALL]),
    (f" to=functions.weather<|channel|>commentary json<|message|>{CITY}<|call|>", "", "", [CALL]),
    (f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>{CALLED}",
     "I look.", "", [CALL]),
    ("<|channel|>commentary to=assistant<|message|>Note.<|end|><|start|>assistant"
     f"{FINAL}A < b", "A < b", "Note.", []),
    (f"<|channel|>{CALLED}<|start|>assistant<|channel|>commentary to=functions.time json<|message|>"
     '{"city": "Ulm", "days": 2}<|call|>', "", "", BOTH),
    (f"{ANALYSIS}cut", "", "cut", []),
    ('{"x": 1}', '{"x": 1}', "", []),
    ("<|channel|>commentary to=functions.other<|message|>{}<|call|>", "", "{}", []),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(HARMONY)))
def test_channels_of_harmony_are_split(case: int) -> None:
    """Whole or in pieces, content, thought and calls are apart; unknown recipients are thought."""
    text, content, thought, calls = HARMONY[case]
    for step in (len(text), 1, 3, 7):
        assert read_json(HarmonyText(ASKED), cut(text, step)) == (content, thought, calls)


def test_prompt_of_gemma_4_ends_in_the_models_turn() -> None:
    """Where the template ends a turn of a call with text, the model's is opened."""
    result, opened = "21<tool_response|>I look.<turn|>\n", "<|turn>model\n"
    assert open_turn(result) == result + opened
    for prompt in ("21<tool_response|>", f"Hi<turn|>\n{opened}"):
        assert open_turn(prompt) == prompt


Q = '<|"|>'
WEATHER = f"<|tool_call>call:weather{{city:{Q}Bonn{Q}}}<tool_call|>"
ULM = f"<|tool_call>call:time{{city:{Q}Ulm{Q},days:2}}<tool_call|>"
ODD = (f'<|tool_call>call:f{{a:[{Q}}},"<tool_call|>\n{Q},-1.5e3,{{}}], {Q}b c{Q}:{{d e:null}},'
       f"g:true,h:[]}}<tool_call|>")  # fmt: skip
WORD = "<|tool_call>call:weather{city:Bonn}<tool_call|>"
# text, content, thought, calls
GEMMA_4: list[tuple[str, str, str, list[Any]]] = [
    ("Hello.\n", "Hello.\n", "", []),
    ("<|channel>thought\nI'm\nthinking.\n<channel|>Hello, world!", "Hello, world!",
     "I'm\nthinking.", []),
    ("<|channel>thought<channel|>Hello.", "Hello.", "", []),
    (f"<|channel>thought\nHm.<channel|>{WEATHER}{ULM}", "", "Hm.", BOTH),
    (f"I look.\n{WEATHER}", "I look.", "", [CALL]),
    (WEATHER.removesuffix("<tool_call|>"), "", "", [CALL]),
    ("<|tool_call>call:f{}<tool_call|>", "", "", [("f", {})]),
    (ODD, "", "", [("f", {"a": ['},"<tool_call|>\n', -1500.0, {}], "b c": {"d e": None},
                          "g": True, "h": []})]),
    ("<|channel><|channel>thought\n<channel|>Hello.<|channel>thought\n<channel|><channel|>",
     "Hello.", "", []),
    (f"<|channel>thought\nI could {WEATHER} now", "", f"I could {WEATHER} now", []),
    (f"<|channel>{'a' * 40}<channel|>b < c", "b < c", "a" * 40, []),
    (WORD, "", "", [CALL]),
    *((text, text, "", []) for text in ("<|tool_call>f(x=1)<tool_call|>", '{"x": 1}')),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(GEMMA_4)))
def test_channels_of_gemma_4_are_split(case: int) -> None:
    """Whole or in pieces, content, thought and calls are apart; what is no call is content."""
    text, content, thought, calls = GEMMA_4[case]
    for step in (len(text), 1, 3, 7):
        assert read_json(Gemma4Text(ASKED), cut(text, step)) == (content, thought, calls)
    assert read_parts(Gemma4Text(), [WEATHER]) == (WEATHER, "", [])


# The reader of each form, for which some of its texts are.
READERS: list[tuple[Callable[[], TextReader], str]] = [
    *((lambda s=style: ThoughtText(ToolText(ASKED, s), THINK, separates=True), text)  # type: ignore[misc]
      for style, text, _, _ in CASES),
    *((lambda: HarmonyText(ASKED), text) for text, *_ in HARMONY),
    *((lambda: Gemma4Text(ASKED), text) for text, *_ in GEMMA_4),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(READERS)))
def test_stream_adds_up_to_whole_answer(case: int) -> None:
    """However a text is cut, and where a limit ends it, the parts add up to the same answer."""
    make, text = READERS[case]
    draw = random.Random(case)
    for end in (len(text), *draw.choices(range(len(text)), k=6)):
        whole = read_parts(make(), [text[:end]])
        for _ in range(4):
            cuts = sorted(draw.choices(range(end + 1), k=draw.randrange(12)))
            ends = zip([0, *cuts], [*cuts, end], strict=True)
            assert read_parts(make(), [text[a:b] for a, b in ends]) == whole


def test_arguments_are_streamed_as_they_are_written() -> None:
    """The name comes before the arguments, of which each piece is there at once."""
    for reader, begin, written, shown in (
        (ToolText(ASKED, "hermes"), '<tool_call>{"name": "weather", "arguments": ', '{"a": "b',
         '{"a": "b'),
        (ToolText({**ASKED, "choice": "required"}, ""), '{"name": "weather", "arguments": ',
         '{"a": "b', '{"a": "b'),
        (HarmonyText(ASKED), "<|channel|>commentary to=functions.weather<|message|>", '{"a": "b',
         '{"a": "b'),
        (Gemma4Text(ASKED), "<|tool_call>call:weather", "{a:" + Q + "b", '{"a": "b'),
    ):  # fmt: skip
        before = reader.push(begin)
        after = [part for char in written for part in reader.push(char)]
        assert [kind for kind, _ in before + after][:2] == ["call", "arguments"]
        assert "".join(text for kind, text in after if kind == "arguments") == shown
        assert reader.finish() == []  # a limit cut it off


def test_arguments_of_objects_are_json() -> None:
    """Models write line ends within strings, JSON within a string, and one bracket too many."""
    for written, arguments in (
        ('{"a": "b\n\\"}c"}}', {"a": 'b\n"}c'}),
        ('"{\\"a\\": 1}"}', {"a": 1}),
        ('{"a": [{}]}, "id": {"x": "}"}}', {"a": [{}]}),
        ('{"a": 1}}}', {"a": 1}),
    ):
        text = f'<tool_call>{{"name": "weather", "arguments": {written}</tool_call>'
        for step in (1, len(text)):
            assert read(text, step, "hermes") == ("", [("weather", arguments)])


THOUGHTS = [
    ("<think>\nHm.\n</think>\n\nYes.\n", "Yes.\n", "Hm."),
    ("\n<think>Hm. </thin> </think>Yes.", "Yes.", "Hm. </thin>"),
    ("<think>\n\n</think>\n\nYes.", "Yes.", ""),
    ("<think>Hm. <", "", "Hm. <"),
    ("A <think> is a mark.</think>", "A <think> is a mark.</think>", ""),
    ("<th", "<th", ""),
    (" Yes.", " Yes.", ""),
]


@pytest.mark.parametrize("case", range(len(THOUGHTS)))
def test_thoughts_are_split_off(case: int) -> None:
    """No piece has a part of a mark; what the prompt opens is a thought from the beginning."""
    text, content, thought = THOUGHTS[case]
    for step in (1, 3, len(text)):
        reader = ThoughtText(TextReader(), THINK, separates=True)
        assert read_parts(reader, cut(text, step)) == (content, thought, [])
        reader = ThoughtText(TextReader(), THINK, separates=False)
        assert read_parts(reader, cut(text, step)) == (text, "", [])
        if text.lstrip().startswith("<think>"):
            reader = ThoughtText(TextReader(), THINK, separates=True)
            reader.open_thought()
            opened = cut(text.lstrip().removeprefix("<think>"), step)
            assert read_parts(reader, opened) == (content, thought, [])


def test_marks_of_thoughts_are_found() -> None:
    """A template shows them, or the vocabulary has both as tokens."""
    assert find_thought_marks("{{ '<think>\\n\\n</think>' }}", None) == THINK
    assert find_thought_marks("[THINK]{{ x }}[/THINK]", None) == ("[THINK]", "[/THINK]")

    class Vocabulary:
        def id(self, token: str) -> int | None:
            return {"<seed:think>": 5, "</seed:think>": 6, "<think>": 7}.get(token)

    assert find_thought_marks("plain", Vocabulary()) == ("<seed:think>", "</seed:think>")
    assert find_thought_marks("plain", None) is None


def test_required_call_of_harmony_fits_its_schema() -> None:
    """A required call is in its channel, at once or after a thought, and fits its schema."""
    asked = {**ASKED, "choice": "required"}
    (grammar,) = (Grammar.lark(v) for v in tool_grammar(asked, "harmony", {}).values() if v)
    call = f"<|channel|>{CALLED}".removesuffix("<|call|>")
    for good in (call, f"{ANALYSIS}Hm.<|end|><|start|>assistant{call}"):
        assert grammar.complete(good)
    assert not grammar.complete("Hello.") and not grammar.complete(call.replace('"Bonn"', "5"))


def test_thoughts_of_harmony_are_rendered() -> None:
    """A client's `reasoning_content` has the template's name, and null stays out."""
    call = {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [{}]}
    assert as_rendered(call) == {"role": "assistant", "thinking": "Hm.", "tool_calls": [{}]}
    both = as_rendered({**call, "content": "I look."})
    assert both == {"role": "assistant", "content": "I look.", "tool_calls": [{}]}


@pytest.mark.parametrize("style", sorted(FORMS))
def test_grammar_takes_calls_that_fit(style: str) -> None:
    """A strict tool's arguments fit its schema; the text of an answer without calls is free."""
    strict = {**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}  # type: ignore[dict-item]
    asked = {**ASKED, "tools": [strict, TOOLS[1]]}
    (grammar,) = (Grammar.lark(v) for v in tool_grammar(asked, style, {}).values() if v)
    good = next(text for s, text, _, calls in CASES if s == style and len(calls) == 1
                and "python_tag" not in text and "/tool_call|>" not in text)  # fmt: skip
    assert grammar.complete(good) and grammar.complete("Hello.")
    assert not grammar.complete(good.replace('"Bonn"', "5"))
    assert tool_grammar(ASKED, style, {}) == {}
    if style == "llama":  # calls and answers both begin with a brace: no calls
        assert tool_grammar(ASKED, style, {}, {"type": "object"}) == {}
        return
    only = tool_grammar(ASKED, style, {}, {"type": "object", "required": ["x"]})
    answer = Grammar.lark(only["lark"])
    assert answer.complete('{"x": 1}') and answer.complete(good) and not answer.complete("Hello.")
