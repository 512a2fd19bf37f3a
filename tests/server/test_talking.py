"""The server with a model that talks like published ones: their vocabulary, templates and calls."""

import json
from pathlib import Path
from typing import Any

import pytest

import jaxllm
from tests.server.processes import make_client, start_server
from tests.server.test_openai import get, post
from tests.talking_model import MARKS, PADDING, write_talker

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}}}}  # fmt: skip
QUESTION = {"role": "user", "content": "Is it warm in Bonn?"}
ARGUMENTS = '{"city": "Bonn"}'
SAYS = {
    "hermes": "<think>\nHm.\n</think>\n\nI look.\n<tool_call>\n"
    f'{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "llama": f'{{"name": "weather", "parameters": {ARGUMENTS}}}',
    "mistral": f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}}}]',
    "granite": f'<|tool_call|>[{{"name": "weather", "arguments": {ARGUMENTS}}}]',
    "harmony": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary"
    f" to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}",
    "qwen3-coder": "<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n</parameter>\n"
    "</function>\n</tool_call>",
    "gemma4": '<|channel>thought\nHm.\n<channel|><|tool_call>call:weather{city:<|"|>Bonn<|"|>}'
    "<tool_call|>",
    "lfm2": '<|tool_call_start|>[weather(city="Bonn")]<|tool_call_end|>',
}


def make_talker(path: Path, style: str, **options: Any) -> int:
    """Write a model that calls the tool after `QUESTION`; return the size of its tokenizer."""
    write_talker(path, style, "", 1)  # whose prompts have as many tokens
    prompt = jaxllm.load(path).chat_prompt([QUESTION], tools=[TOOL])
    return write_talker(path, style, SAYS[style], len(prompt), **options)


# test_tools.py reads their calls; special tokens as their marks are in other styles too.
FULL = ("granite", "lfm2", "mistral")


@pytest.mark.parametrize(
    "style",
    [
        "hermes",
        *(pytest.param(s, marks=pytest.mark.full if s in FULL else pytest.mark.more)
          for s in SAYS if s != "hermes"),
    ],
)  # fmt: skip
def test_default_request_with_tools_gets_call(tmp_path: Path, style: str) -> None:
    """OpenAI's client gets the call, streamed or not, and its second turn is rendered. A draft
    changes nothing, an id without a token is never drawn, and a schema still binds an answer.
    """
    size = make_talker(tmp_path / "m", style)
    content = "I look." if style == "hermes" else None
    drafts = ("--draft", "lookup") if style == "hermes" else ()
    with start_server("--rows", "2", *drafts, model=str(tmp_path / "m")) as server:
        chat = make_client(server.url).chat.completions
        asked: Any = {"model": "m", "messages": [QUESTION], "tools": [TOOL], "temperature": 0}
        choice = chat.create(**asked).choices[0]
        (call,) = choice.message.tool_calls
        assert (choice.message.content, choice.finish_reason) == (content, "tool_calls")
        assert (call.function.name, json.loads(call.function.arguments)) == (
            "weather", json.loads(ARGUMENTS))  # fmt: skip
        thought = getattr(choice.message, "reasoning_content", None)
        assert thought == ("Hm." if style in ("hermes", "harmony", "gemma4") else None)
        with chat.stream(**asked) as stream:
            streamed = stream.get_final_completion().choices[0].message
        assert (streamed.content or None, streamed.tool_calls[0].function.arguments) == (
            content, call.function.arguments)  # fmt: skip
        history = [QUESTION, choice.message.model_dump(exclude_none=True),
                   {"role": "tool", "tool_call_id": call.id, "content": "21"}]  # fmt: skip
        status, found = post(server, "/apply-template", {"messages": history, "tools": [TOOL]})
        assert status == 200 and "Bonn" in found["prompt"].split("warm in Bonn?")[1]
        assert ("<think>\nHm.\n</think>" in found["prompt"]) == (style == "hermes")
        bias = {str(token): 100 for token in range(size, size + PADDING)}
        body = {"prompt": "Once", "max_tokens": 3, "logit_bias": bias, "return_token_ids": True}
        status, found = post(server, "/v1/completions", body)
        assert status == 200 and max(found["choices"][0]["token_ids"]) < size
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": [1]}}}
        assert (
            chat.create(**{**asked, "tools": []}, response_format=form).choices[0].message.content
            == "[1]"
        )
        assert json.loads(get(server, "/health")) == {"status": "ok"}


@pytest.mark.more
def test_vocabulary_of_published_size_loads(tmp_path: Path) -> None:
    """150,000 entries load, and greedy decoding says the text, with drafts and beams as well."""
    size = make_talker(tmp_path, "hermes", entries=150_000)
    lm = jaxllm.load(tmp_path)
    assert size > 150_000 and lm.config.vocab_size == size + PADDING
    prompt = lm.chat_prompt([QUESTION], tools=[TOOL])
    for options in ({}, {"prompt_lookup_num_tokens": 3}, {"num_beams": 2}):
        assert lm.generate(prompt, max_new_tokens=150, **options).text == SAYS["hermes"]
    assert not set(MARKS) - set(SAYS)
