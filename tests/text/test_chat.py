"""Chat templates render as in transformers; no template escapes the sandbox or its limits."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxllm.errors import CheckpointError, TemplateError
from jaxllm.text import ChatTemplate
from jaxllm.text.template_limits import Budget
from tests.text.test_family_templates import CHATML, MIXTRAL, PHI

# Every feature that published templates use.
KITCHEN_SINK = """\
{%- macro describe(tool, depth=0) -%}
{{ '  ' * depth }}{{ tool.name | upper }}: {{ tool.parameters | tojson }}
{%- for key, value in (tool.parameters.properties or {}) | dictsort %}
 {{ key }}={{ value.type | default('any') }}{{ ', ' if not loop.last }}
{%- endfor %}
{%- endmacro -%}
{% set ns = namespace(count=0, text='', found=false, all=[]) %}
{% for tool in tools or [] if tool.name is defined %}
{{ describe(tool, loop.index0) }}
{% set ns.all = ns.all + [tool.name] %}
{% endfor %}
{{ tools | map(attribute='name') | join(', ') if tools is not none else 'no tools' }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{% for m in messages[::-1] %}
{% if m.role == 'system' %}{% continue %}{% endif %}
{% if loop.index > 3 %}{% break %}{% endif %}
{% set ns.count = ns.count + m.content | length %}
{% set ns.text = ns.text ~ m.content.split('\\n')[0].strip() ~ '|' %}
{% generation %}{{ loop.revindex }}/{{ loop.length }} {{ m.content | replace('a', 'A') }}
{% endgeneration %}
{% endfor %}
{{ ns.text }} {{ ns.count * 2 ** 3 % 7 }} {{ '%s-%d' % ('x', 3) }} {{ '{:>4}'.format('y') }}
{{ messages | tojson(indent=2) }}{{ {'html': '<&>'} | tojson }} {{ "a\\nb" | indent(2, true) }}
{% filter upper %}filtered {{ bos_token }}{% endfilter %}
{% set block | trim %}  set block {% endset %}[{{ block }}]
{% macro wrapped() %}<{{ caller(1) }}>{% endmacro %}{% call(x) wrapped() %}{{ x }}{% endcall %}
{{ 'yes' if messages is iterable and messages[0] is mapping and 'role' in messages[0] }}
{{ messages[-1].get('name', 'anonymous') }} {{ 7 // 2 }} {{ 3.14159 | round(2) }} {{ -3 | abs }}
{{ range(5) | list }} {{ range(2, 9, 3) | join('-') }} {{ (1, 2) }} {{ dict(a=1, b=[2]) }}
{{ ['b', 'a'] | sort | first }}{{ ns.all | unique | list }}{{ undefined_name }}{{ none }}{{ true }}
"""

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [
        {"role": "system", "content": "Be  kind.\n"},
        {"role": "user", "content": " What is <b>2 + 2</b>? 漢字 "},
        {"role": "assistant", "content": "4,\nI think."},
        {"role": "user", "content": "</s><s> {{ 7 * 7 }} {% if %}"},
    ],
]
TOOLS = [{"name": "add", "parameters": {"properties": {"b": {"type": "int"}, "a": {}}}}]
TOKENS = (("bos_token", "<s>"), ("eos_token", "</s>"))
HI = CONVERSATIONS[0]


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_chat_template_rendering_equals_transformers(
    messages: list[dict[str, Any]], prompt: bool, tools: Any
) -> None:
    reference = pytest.importorskip("transformers.utils.chat_template_utils")
    expected, _ = reference.render_jinja_template(
        [messages], tools, None, KITCHEN_SINK, add_generation_prompt=prompt, **dict(TOKENS)
    )
    template = ChatTemplate(KITCHEN_SINK, TOKENS)
    assert template.render(messages, add_generation_prompt=prompt, tools=tools) == expected[0]


def test_chat_template_renders_known_formats() -> None:
    """ChatML and the templates of Phi and Mixtral render to the strings written out here."""
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    assert ChatTemplate(CHATML).render(messages) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ChatTemplate(PHI, TOKENS).render(messages) == (
        "<|system|>\nS<|end|>\n<|user|>\nU<|end|>\n<|assistant|>\n"
    )
    assert ChatTemplate(MIXTRAL, TOKENS).render(messages[1:]) == "<s> [INST] U [/INST]"


def test_chat_template_is_found_in_every_file(
    write_json: Callable[[str, Any], Path],
) -> None:
    """The template is read from tokenizer_config.json, by name too, or from chat_template.jinja;
    tokens also from special_tokens_map.json.
    """
    named = [
        {"name": "default", "template": "{{ bos_token }}default"},
        {"name": "tool_use", "template": "tools"},
    ]
    config = {"bos_token": {"content": "<s>"}, "chat_template": "{{ bos_token }}{{ eos_token }}"}
    path = write_json("tokenizer_config.json", config)
    assert ChatTemplate.from_directory(path).render(HI) == "<s>"
    write_json("special_tokens_map.json", {"eos_token": "</s>"})
    assert ChatTemplate.from_directory(path).render(HI) == "<s></s>"
    write_json("tokenizer_config.json", config | {"chat_template": named})
    assert ChatTemplate.from_directory(path).render(HI) == "<s>default"
    assert ChatTemplate.from_directory(path, name="tool_use").render(HI) == "tools"
    (path / "chat_template.jinja").write_text("{{ bos_token }}jinja")
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "more.jinja").write_text("more")
    assert ChatTemplate.from_directory(path).render(HI) == "<s>jinja"
    with pytest.raises(TemplateError, match=r"'rag' in .*found only default, more"):
        ChatTemplate.from_directory(path, name="rag")


def test_missing_chat_template_error_names_searched_files(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match=r"chat_template\.jinja.*found none"):
        ChatTemplate.from_directory(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"chat_template": 3}', '{"chat_template": [3]}'])
def test_malformed_tokenizer_config_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises((CheckpointError, TemplateError), match=r"tokenizer_config\.json"):
        ChatTemplate.from_directory(tmp_path)


@pytest.mark.parametrize(
    "messages",
    [
        "hi",
        {"role": "user", "content": "hi"},
        None,
        ["hi"],
        [{"role": "user"}],
        [{"content": "hi"}],
        [{"role": 1, "content": "hi"}],
        [{"role": "user", "content": 1}],
        [{"role": "user", "content": [object()]}],
    ],
)
def test_render_refuses_malformed_messages(messages: Any) -> None:
    with pytest.raises(TemplateError) as error:
        ChatTemplate(CHATML).render(messages)
    assert "\n" not in str(error.value)


def test_messages_accept_content_parts_and_tool_calls() -> None:
    """Content may be a list of parts, and may be missing or None in a message with tool calls."""
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "tool_calls": []},
        {"role": "assistant", "content": None, "tool_calls": []},
    ]
    assert ChatTemplate("{{ messages[0].content[0].text }}").render(messages) == "hi"


def test_template_variables_must_be_plain_data() -> None:
    """Objects, functions, paths and recursive lists are refused as template variables."""
    loop: list[Any] = []
    loop.append(loop)
    for bad in (object(), loop, {"a": Path()}, len):
        with pytest.raises(TemplateError, match="tools"):
            ChatTemplate("").render(HI, tools=bad)


def test_raise_exception_message_is_one_printable_line() -> None:
    template = ChatTemplate("{{ raise_exception('no\n\x1b[31mway ' ~ 'x' * 9999) }}")
    with pytest.raises(TemplateError, match=r"rejected the messages: no \[31mway x") as error:
        template.render(HI)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{", "{{ 1 | no_such_filter }}", "(" * 99 + "{{" + "(" * 9999]
)
def test_malformed_template_is_refused_at_construction(source: str) -> None:
    with pytest.raises(TemplateError, match="malformed chat template"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages | map(attribute='__class__') | list | first.mro() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ raise_exception.__globals__.os }}",
        "{% set ns = namespace() %}{% set ns.__call__ = 1 %}",
        "{{ namespace(__html__=1) }}",
        "{{ (messages | attr('append'))(1) }}",
        "{% include 'tokenizer_config.json' %}",
        "{% import 'os' as os %}",
        "{{ lipsum(10 ** 9) }}",
        "{{ 1 / 0 }}",
        "{{ x.y.z }}",
    ],
)
def test_unsafe_expressions_raise_template_error(source: str) -> None:
    """Python internals, mutation, imports and failing expressions raise a printable error."""
    with pytest.raises(TemplateError) as error:
        ChatTemplate(source).render(HI)
    assert str(error.value).isprintable()


HOSTILE = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}",
    "loops over a string": "{% set s = 'x' * 9999 %}{% for a in s %}{% for b in s %}"
    "{% for c in s %}{% endfor %}{% endfor %}{% endfor %}",
    "a flood": "{% for i in range(99999) %}{% for j in range(99999) %}xx{% endfor %}{% endfor %}",
    "a captured flood": "{% set x %}{% for i in range(99999) %}{% for j in range(99999) %}"
    "{{ 'x' * 9999 }}{% endfor %}{% endfor %}{% endset %}",
    "captured long strings": "{% set s = 'x' * 8000000 %}{% set x %}{% for i in range(9999) %}"
    "{{ s }}{% endfor %}{% endset %}",
    "a macro's flood": "{% macro m() %}{% for i in range(99999) %}{{ messages }}{% endfor %}"
    "{% endmacro %}{% for i in range(99999) %}{% call m() %}{% endcall %}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "branching recursion": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}"
    "{% endmacro %}{{ f(64) }}",
    "recursive loops": "{% for x in range(50) recursive %}"
    "{% if loop.depth < 40 %}{{ loop(range(50)) }}{% endif %}{% endfor %}",
    "a long string": "{{ 'a' * 10**10 }}",
    "a long list": "{{ 10000000000 * [1] }}",
    "a large number": "{{ 10 ** (10 ** 8) }}",
    "squaring": "{% set ns = namespace(x=3) %}{% for i in range(99) %}"
    "{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}",
    "doubling by ~": "{% set ns = namespace(x='ab') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling by +": "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "nested lists": "{% set ns = namespace(x=1) %}{% for i in range(99) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "nested views": "{% set ns = namespace(x=1) %}{% for i in range(99) %}"
    "{% set ns.x = {1: ns.x, 2: ns.x}.items() %}{% endfor %}{{ ns.x }}",
    "nested namespaces": "{% set ns = namespace(x=namespace()) %}{% for i in range(99) %}"
    "{% set ns.x = namespace(a=ns.x, b=[ns.x, ns.x]) %}{% endfor %}{{ ns.x }}{{ 'a' * 10**9 }}",
    "center": "{{ 'x'.center(10000000000) }}",
    "zfill": "{{ 'x'.zfill(10000000000) }}",
    "indent": "{{ 'x' | indent(10000000000, true) }}",
    "tojson": "{{ messages | tojson(indent=10000000000) }}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10000000000, 1) }}",
    "percent filter": "{{ '%10000000000d' | format(1) }}",
    "format": "{{ '{:10000000000}'.format(1) }}",
    "nested format": "{{ '{:{w}}'.format(1, w=10000000000) }}",
    "format repeats": "{{ ('{0}' * 99999).format('x' * 99999) }}",
    "replace": "{{ ('a' * 999999).replace('a', 'b' * 999999) }}",
    "replace filter": "{{ ('a' * 999999) | replace('', 'b' * 999999) }}",
    "join": "{{ ('a' * 999999).join('b' * 99999) }}",
    "join filter": "{{ range(99999) | join('a' * 999999) }}",
    "map": "{{ range(99999) | map('indent', 'a' * 999999, true) | list }}",
    "round": "{{ 1.5 | round(10000000000, 'ceil') }}{{ 5 | round(-10000000000) }}",
    "comparison": "{% set a = range(99999) | list %}{% for i in range(99999) %}"
    "{% if a + [1] == a + [2] %}{% endif %}{% endfor %}",
    "a long source": "{{ x }}" * 99999,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_template_is_stopped_in_any_thread(name: str) -> None:
    """Unbounded time, memory or output raises TemplateError within 3 seconds of thread time."""
    outcome: list[BaseException | str] = []
    seconds: list[float] = []

    def render() -> None:
        try:
            outcome.append(ChatTemplate(HOSTILE[name], max_seconds=0.2).render(HI))
        except BaseException as error:
            outcome.append(error)
        seconds.append(time.thread_time())  # CPU time, independent of other load

    thread = threading.Thread(target=render, daemon=True)
    thread.start()
    thread.join()
    assert seconds[0] < 3
    assert isinstance(outcome[0], TemplateError), outcome


def test_template_deadline_counts_thread_cpu_time() -> None:
    budget = Budget(max_output=1, max_seconds=0.05)
    time.sleep(0.1)  # simulates a busy machine
    budget.check_time()
    with pytest.raises(TemplateError, match=r"more than 0\.05 seconds"):
        while True:
            budget.check_time()


def test_template_output_limit_is_exact() -> None:
    assert ChatTemplate("{{ 'ab' * 50 }}", max_output=100).render(HI) == "ab" * 50
    for source in ("{{ 'ab' * 50 }}c", "{{ 'ab' * 51 }}", "a" * 101):
        with pytest.raises(TemplateError, match="more than 100 characters"):
            ChatTemplate(source, max_output=100).render(HI)


def test_long_conversations_render_within_limits() -> None:
    """800 messages with 4 million characters in total render within the default limits."""
    turn = {"role": "user", "content": "word " * 1000}
    messages = [turn, turn | {"role": "assistant"}] * 400
    for source in (CHATML, PHI, MIXTRAL):
        assert len(ChatTemplate(source, TOKENS).render(messages)) > 3_990_000


def test_chat_templates_compare_and_hash_by_value() -> None:
    assert ChatTemplate(CHATML, TOKENS) == ChatTemplate(CHATML, TOKENS)
    assert len({ChatTemplate(CHATML), ChatTemplate(CHATML)}) == 1


METHOD = "''.join"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''|attr('format_map') }}", f"{{{{ {METHOD} }}}}", f"{{{{ [{METHOD}] }}}}",
        f"{{{{ {METHOD}|string }}}}", f"{{{{ {METHOD} ~ 'x' }}}}", f"{{{{ '%s' % {METHOD} }}}}",
        f"{{{{ '{{}}'.format({METHOD}) }}}}", f"{{{{ [{METHOD}]|join }}}}", "{{ range }}",
        f"{{{{ [{METHOD}]|map('string')|list }}}}", f"{{{{ {METHOD}|replace('a', 'b') }}}}",
        f"{{{{ '%s'|format({METHOD}) }}}}", "{{ cycler('a') }}", "{{ [1]|map('string') }}",
        f"{{{{ raise_exception({METHOD}) }}}}", f"{{{{ {{'a': [{METHOD}]}} }}}}", "{{ dict }}",
        f"{{{{ {METHOD}|e }}}}", f"{{{{ {METHOD}|upper }}}}", f"{{{{ {METHOD}|indent }}}}",
        f"{{{{ '{{a}}'.format_map({{'a': {METHOD}}}) }}}}",
    ],
)  # fmt: skip
def test_template_output_never_contains_memory_addresses(source: str) -> None:
    """Expressions that would print a function or method raise an error without an address."""
    with pytest.raises(TemplateError, match="which is not data") as caught:
        ChatTemplate(source).render([])
    assert "0x" not in str(caught.value)
