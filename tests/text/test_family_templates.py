"""Chat templates in the styles of published ones render as in transformers.

The templates were written for this test. They use the roles, special tokens and features
(namespaces, slices, dates, refusals) of the published templates, but copy none of them.
"""

from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import pytest
import transformers
from tokenizers import Tokenizer, models

from jaxllm.errors import TemplateError
from jaxllm.text import ChatTemplate
from jaxllm.text.formats import tokenizer_files

CHATML = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou answer.<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == "user" or (m.role == "system" and not loop.first) or m.role == "assistant" %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
# Qwen3 keeps the reasoning only after the last question.
THINKING = """\
{%- set ns = namespace(last=messages|length - 1, looking=true) %}
{%- for m in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.looking and m.role == "user" and m.content is string %}
        {%- set ns.looking = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- set content = m.content if m.content is string else '' %}
    {%- if m.role == "assistant" %}
        {%- set thought = '' %}
        {%- if m.reasoning_content is string %}
            {%- set thought = m.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
            {{- content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + m.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
GEMMA_2 = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}\
{{ raise_exception('There is no system role') }}{% endif %}\
{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Roles must take turns: user, assistant, ...') }}{% endif %}\
{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}\
{{ '<start_of_turn>' + role + '\\n' + m['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"""
GEMMA_3 = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set first = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set first, turns = "", messages -%}
{%- endif -%}
{%- for m in turns -%}
    {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Roles must take turns") }}
    {%- endif -%}
    {{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\\n' }}
    {{- (first if loop.first else '') }}
    {%- if m['content'] is string -%}
        {{ m['content'] | trim }}
    {%- elif m['content'] is iterable -%}
        {%- for item in m['content'] -%}
            {%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("No such content") }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""
PHI = """\
{% for m in messages %}{% if m['role'] == 'system' and m['content'] %}\
{{ '<|system|>\\n' + m['content'] + '<|end|>\\n' }}{% elif m['role'] in ['user', 'assistant'] %}\
{{ '<|' ~ m['role'] ~ '|>\\n' ~ m['content'] ~ '<|end|>\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""
SMOLLM = """\
{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}
{%- set mode = namespace(name="/think" if enable_thinking else "/no_think") -%}
{%- set said = messages[0].content if messages[0].role == "system" else "" -%}
{%- if "/no_think" in said -%}{%- set mode.name = "/no_think" -%}{%- endif -%}
{%- set said = said.replace("/no_think", "").replace("/think", "").rstrip() -%}
<|im_start|>system
## Metadata

Today: {{ strftime_now("%d %B %Y") }}
Reasoning: {{ mode.name }}

{% generation %}{{ said or "Answer briefly." }}{% endgeneration %}<|im_end|>
{% for m in messages if m.role != "system" %}
{%- set content = m.content if m.content is string else "" %}
{{ "<|im_start|>" + m.role + "\\n" + content.lstrip("\\n") + "<|im_end|>" }}
{% endfor %}
{%- if add_generation_prompt %}
{{- "<|im_start|>assistant\\n" }}{{ "<think>\\n\\n</think>\\n" if mode.name == "/no_think" }}
{%- endif %}"""
GRANITE = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set system_message = "Until April 2024.\\nToday is " + strftime_now('%B %d, %Y') %}
    {%- if documents %}{%- set system_message = system_message + ' Use them.' %}{%- endif %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>\\n' }}
{%- for message in loop_messages %}
    {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] }}
    {{- '<|end_of_text|>\\n' }}
    {%- if loop.last and add_generation_prompt %}
        {{- '<|start_of_role|>assistant' }}
        {%- if controls %}{{- ' ' + controls | tojson()}}{%- endif %}
        {{- '<|end_of_role|>' }}
    {%- endif %}
{%- endfor %}"""
LLAMA_3 = """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- set system, rest = ('', messages) if messages[0].role != 'system'
                       else (messages[0].content | trim, messages[1:]) %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + date_string + "\\n" + system }}
{{- "<|eot_id|>" }}
{%- for m in rest %}
    {{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n'+ m['content'] | trim }}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
MIXTRAL = """\
{{ bos_token }}
{%- for m in messages %}
    {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must take turns: user, assistant, ...') }}
    {%- endif %}
    {%- if m['role'] == 'user' %}{{- ' [INST] ' + m['content'] + ' [/INST]' }}
    {%- elif m['role'] == 'assistant' %}{{- ' ' + m['content'] + eos_token }}
    {%- else %}{{- raise_exception('Only user and assistant roles') }}{%- endif %}
{%- endfor %}"""
# gpt-oss: channels, tools as TypeScript, and thoughts only until a final answer.
HARMONY = """\
{{- '<|start|>system<|message|>You are ChatGPT.\\nCurrent date: ' }}
{{- strftime_now("%Y-%m-%d")[:2] }}
{{- '\\nReasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- set loop_messages = messages %}
{%- if messages[0].role in ['developer', 'system'] %}
    {{- '<|start|>developer<|message|># Instructions\\n\\n' + messages[0].content + '<|end|>' }}
    {%- set loop_messages = messages[1:] %}
{%- endif %}
{%- for m in loop_messages %}
    {%- if m.role == 'assistant' %}
        {%- if '<|channel|>analysis<|message|>' in m.content %}
            {{- raise_exception('Thoughts belong to thinking, not content') }}
        {%- endif %}
        {%- if loop.last and not add_generation_prompt and m.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
        {{- '<|return|>' if loop.last else '<|end|>' }}
    {%- elif m.role == 'tool' %}
        {{- '<|start|>functions.f to=assistant<|channel|>commentary<|message|>' }}
        {{- m.content | tojson + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""
GEMMA_4 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{{ m.content | trim + '<turn|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}"
)
# DeepSeek-V2's, and DeepSeek-V3's without tools.
DEEPSEEK_V2 = """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}\
{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}\
{{ 'User: ' + message['content'] + '\n\n' }}{% elif message['role'] == 'assistant' %}\
{{ 'Assistant: ' + message['content'] + eos_token }}{% elif message['role'] == 'system' %}\
{{ message['content'] + '\n\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""
DEEPSEEK_V3 = """\
{% set ns = namespace(system='') %}{%- for message in messages %}\
{%- if message['role'] == 'system' %}{% set ns.system = message['content'] %}{%- endif %}\
{%- endfor %}{{ bos_token }}{{ ns.system }}{%- for message in messages %}\
{%- if message['role'] == 'user' %}{{ '<\uff5cUser\uff5c>' + message['content'] }}{%- endif %}\
{%- if message['role'] == 'assistant' %}\
{{ '<\uff5cAssistant\uff5c>' + message['content'].split('</think>')[-1] }}\
{{ '<\uff5cend\u2581of\u2581sentence\uff5c>' }}{%- endif %}{%- endfor %}\
{% if add_generation_prompt %}{{ '<\uff5cAssistant\uff5c>' }}{% endif %}"""
# Qwen3.5: the prompt opens a thought, and calls are XML.
QWEN_3_5 = """\
{%- macro show(value) %}{{- value | tojson | safe if value is mapping or (value is sequence and
    value is not string) else value | string }}{%- endmacro %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' + (m.content | trim if m.content is string else '') }}
    {%- for call in m.tool_calls or [] %}
        {%- set call = call.function if call.function is defined else call %}
        {{- '<tool_call>\\n<function=' + call.name + '>\\n' }}
        {%- for name, value in call.arguments | items %}
            {{- '<parameter=' + name + '>\\n' + show(value) + '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
# LFM2.5: calls are Python's.
LFM2 = """\
{{- bos_token -}}
{%- for m in messages -%}
    {{- "<|im_start|>" + m["role"] + "\\n" -}}
    {%- if m.tool_calls is defined and m.tool_calls -%}
        {%- set ns = namespace(calls=[]) -%}
        {%- for call in m.tool_calls -%}
            {%- set given = namespace(arguments=[]) -%}
            {%- for name, value in call.function.arguments.items() -%}
                {%- set shown = '"' + value + '"' if value is string else value | string -%}
                {%- set given.arguments = given.arguments + [name + "=" + shown] -%}
            {%- endfor -%}
            {%- set shown = call.function.name + "(" + given.arguments | join(", ") + ")" -%}
            {%- set ns.calls = ns.calls + [shown] -%}
        {%- endfor -%}
        {{- "<|tool_call_start|>[" + ns.calls | join(", ") + "]<|tool_call_end|>" -}}
    {%- endif -%}
    {%- set content = m["content"] if m["content"] is string else m["content"] | tojson -%}
    {{- content.split("</think>")[-1] | trim + "<|im_end|>\\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\\n" -}}{%- endif -%}
"""
TEMPLATES = {
    "chatml": CHATML,
    "mixtral": MIXTRAL,
    "llama 3": LLAMA_3,
    "qwen 3": THINKING,
    "gemma 2": GEMMA_2,
    "gemma 3": GEMMA_3,
    "gemma 4": GEMMA_4,
    "phi": PHI,
    "smollm": SMOLLM,
    "granite": GRANITE,
    "gpt-oss": HARMONY,
    "deepseek 2": DEEPSEEK_V2,
    "deepseek 3": DEEPSEEK_V3,
    "qwen 3.5": QWEN_3_5,
    "lfm2": LFM2,
}
THOUGHT = "<think>\nTwo and two.\n</think>\n\n4."
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "a question": [{"role": "user", "content": " What is <b>2 + 2</b>? \n"}],
    "a system": [
        {"role": "system", "content": "Be kind. /no_think"},
        {"role": "user", "content": "Hi 漢字"},
    ],
    "three turns": [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": THOUGHT},
        {"role": "user", "content": "</s>{{ 7 * 7 }}{% if %}"},
        {"role": "assistant", "content": THOUGHT},
    ],
    "thoughts": [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "reasoning_content": "\nTwo.\n", "content": "4"},
    ],
    "thoughts by another name": [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "thinking": "Two.", "content": "4"},
    ],
    "two users": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
    "a tool": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}],
    "calls": [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "type": "function",
                    "function": {"name": "f", "arguments": {"a": "<b>", "n": [1, True]}},
                },
                {
                    "type": "function",
                    "function": {"name": "g", "arguments": {"c": None, "d": {"e": "ä"}}},
                },
            ],
        },
    ],
    "parts": [
        {"role": "system", "content": [{"type": "text", "text": "Be kind."}]},
        {"role": "user", "content": [{"type": "text", "text": " Hi "}, {"type": "image"}]},
    ],
}
VARIABLES: list[dict[str, Any]] = [{}, {"enable_thinking": False, "controls": {"length": "long"}}]


def save_tokenizer(template: str | dict[str, str], directory: Path) -> Any:
    """Save a transformers tokenizer with this template to `directory` and return it."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>")),
        bos_token="<s>",
        eos_token="</s>",
        chat_template=template,
    )
    tokenizer.save_pretrained(directory)
    return tokenizer


@pytest.mark.parametrize("style", TEMPLATES)
def test_family_template_rendering_equals_transformers(style: str, tmp_path: Path) -> None:
    """Conversations render as in transformers, and raise where transformers refuses them."""
    tokenizer = save_tokenizer(TEMPLATES[style], tmp_path)
    ours = ChatTemplate.from_directory(tmp_path)
    rendered = 0
    for name, conversation in CONVERSATIONS.items():
        for prompt in (True, False):
            for given in VARIABLES:
                options = {"add_generation_prompt": prompt, **given}
                found = _text(lambda t=conversation, o=options: ours.render(t, **o))
                same = _text(
                    lambda c=conversation, o=options: tokenizer.apply_chat_template(
                        c, tokenize=False, **o
                    )
                )
                # If transformers refuses or fails, we raise a one-line TemplateError.
                assert found == same, (name, prompt, given)
                rendered += found is not None
    assert rendered >= 12


@pytest.mark.parametrize("jinja", [True, False])
def test_tool_template_is_selected_as_transformers_does(jinja: bool, tmp_path: Path) -> None:
    """The template "tool_use", from a list or a folder, is rendered where tools are given."""
    templates = {"default": "plain {{ tools }}", "tool_use": "tools {{ tools | tojson }}"}
    tokenizer = save_tokenizer(templates, tmp_path)
    tokenizer.save_pretrained(tmp_path / "b", save_jinja_files=jinja)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "b")
    ours, question = ChatTemplate.from_directory(tmp_path / "b"), CONVERSATIONS["a question"]
    for tools in (None, [], [{"type": "function"}]):
        expected = theirs.apply_chat_template(question, tools=tools, tokenize=False)
        assert ours.render(question, tools=tools) == expected
    assert tokenizer_files(tmp_path / "b")[-1].is_dir() is jinja


def _text(render: Any) -> str | None:
    """Return the rendered text, or None if the template refuses the messages or fails."""
    try:
        text: str = render()
    except TemplateError as error:
        assert "\n" not in str(error)
        return None
    except (jinja2.TemplateError, TypeError):
        return None
    return text


def test_strftime_now_gives_current_date(tmp_path: Path) -> None:
    save_tokenizer(GRANITE, tmp_path)
    before = datetime.now()
    text = ChatTemplate.from_directory(tmp_path).render(CONVERSATIONS["a question"])
    assert any(f"Today is {day:%B %d, %Y}" in text for day in (before, datetime.now()))


def test_template_refusals_keep_template_message(tmp_path: Path) -> None:
    save_tokenizer(GEMMA_2, tmp_path)
    ours = ChatTemplate.from_directory(tmp_path)
    with pytest.raises(TemplateError, match="rejected the messages: There is no system role"):
        ours.render(CONVERSATIONS["a system"])
    with pytest.raises(TemplateError, match="rejected the messages: Roles must take turns"):
        ours.render(CONVERSATIONS["two users"])


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{% include 'x' %}", "cannot include, import or extend another .'x'"),
        ("{% include 'x' ignore missing %}", "cannot include"),
        ("{% import 'x' as x %}", "cannot include, import"),
        ("{% extends 'x' %}", "cannot include, import or extend"),
        ("{{ messages | pprint }}", "pprint"),
        ("{{ messages | xmlattr }}", "xmlattr"),
        ("{{ 'a'.encode() }}", "encode"),
        ("{{ messages is odd_one }}", "odd_one"),
        ("{% trans %}a{% endtrans %}", "trans"),
        ("{% do messages.append(1) %}", "do"),
    ],
)
def test_unsupported_template_features_are_refused_by_name(source: str, said: str) -> None:
    with pytest.raises(TemplateError, match=said) as caught:
        ChatTemplate(source).render(CONVERSATIONS["a question"])
    assert "\n" not in str(caught.value)
