"""OpenAI's Responses API and Anthropic's Messages API, asked by their own clients.

The model is a stub that says a given text, a few characters a frame.
"""

import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

import openai
import pydantic
import pytest

from jaxllm.server.errors import ApiError
from jaxllm.server.messages_api import _read_chat_body
from jaxllm.server.openai_requests import GenerationCall, read_chat
from jaxllm.server.responses_api import _Fields, _read_call, _read_items
from tests.server.servers import Endpoint, StubModel, say, serve_stub

pytestmark = pytest.mark.anyio
THINK, CALL = "<think>\nHm.\n</think>\n\n", '{"city": "Bonn"}'
CALLS = (f'I look.\n<tool_call>\n{{"name": "weather", "arguments": {CALL}}}\n</tool_call>\n'
         '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>')  # fmt: skip
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FLAT: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}
TOOL: Any = {"name": "weather", "description": "It tells", "input_schema": SCHEMA}
USER = {"role": "user", "content": "Hi"}


def use_openai(endpoint: Endpoint, key: str = "none") -> openai.AsyncOpenAI:
    url = f"http://{endpoint.host}:{endpoint.port}/v1"
    return openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0)


async def test_chat_has_thoughts_and_streamed_calls() -> None:
    """OpenAI's client builds the whole answer from a stream; "none" leaves the thought in."""
    asked: Any = {"model": "stub", "messages": [USER],
                  "tools": [{"type": "function", "function": {"name": "weather"}}]}  # fmt: skip
    async with serve_stub(say(THINK + CALLS)) as endpoint, use_openai(endpoint) as client:
        (choice,) = (await client.chat.completions.create(**asked)).choices
        assert choice.message.reasoning_content == "Hm." and choice.message.content == "I look."
        calls = [call.function.arguments for call in choice.message.tool_calls]
        assert calls == [CALL, "{}"] and choice.finish_reason == "tool_calls"
        async with client.chat.completions.stream(**asked) as stream:
            events = [event async for event in stream]
            streamed = (await stream.get_final_completion()).choices[0].message
        assert [call.function.arguments for call in streamed.tool_calls] == calls
        assert streamed.content == "I look." and streamed.reasoning_content == "Hm."
        deltas = [e for e in events if e.type == "tool_calls.function.arguments.delta"]
        assert len(deltas) > 4
        one = await client.chat.completions.create(**asked, parallel_tool_calls=False)
        assert [call.function.arguments for call in one.choices[0].message.tool_calls] == [CALL]
        plain = await client.chat.completions.create(
            **asked, extra_body={"reasoning_format": "none"}
        )
        assert plain.choices[0].message.content == THINK + "I look."


async def test_responses_are_streamed_in_order() -> None:
    """Events come in OpenAI's documented order, and add up to the whole response."""
    asked: Any = {"model": "stub", "input": "Hi", "tools": [FLAT], "temperature": 0.5}
    async with serve_stub(say(THINK + CALLS)) as endpoint, use_openai(endpoint) as client:
        whole = await client.responses.create(**asked, metadata={"a": "b"}, instructions="Be kind.")
        async with client.responses.stream(**asked) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
    thought, _, first, second = whole.output
    assert thought.content[0].text == "Hm." and whole.output_text == "I look."
    assert (first.name, first.arguments, second.arguments) == ("weather", CALL, "{}")
    assert whole.status == "completed" and whole.metadata == {"a": "b"}
    assert (whole.temperature, whole.instructions) == (0.5, "Be kind.")
    assert whole.usage.input_tokens == 9 and whole.usage.input_tokens_details.cached_tokens == 4
    assert 2 <= whole.usage.output_tokens_details.reasoning_tokens <= 4
    assert [event.sequence_number for event in events] == [*range(len(events))]
    kinds = [event.type.removeprefix("response.") for event in events]
    kinds = [kind for i, kind in enumerate(kinds) if kinds[i - 1] != kind]
    part = ["output_item.added", "content_part.added", "{0}.delta", "{0}.done",
            "content_part.done", "output_item.done"]  # fmt: skip
    call = [kind for kind in part if "content" not in kind]
    expected = ["created", "in_progress", *(k.format("reasoning_text") for k in part),
                *(k.format("output_text") for k in part),
                *2 * [k.format("function_call_arguments") for k in call], "completed"]  # fmt: skip
    assert kinds == expected
    for mine, other in zip(final.output, whole.output, strict=True):
        for field in {"type", "status", "content", "arguments", "name"} & other.to_dict().keys():
            shown = [getattr(item, field) for item in (mine, other)]
            if field == "content":
                shown = [content[0].text for content in shown]
            assert shown[0] == shown[1]


async def test_responses_are_kept_for_their_key() -> None:
    """A response goes on from an earlier one of the same key, until it is deleted."""
    model = say("Yes.")
    async with serve_stub(model, keys=("a", "b")) as endpoint:
        client, other = use_openai(endpoint, "a"), use_openai(endpoint, "b")
        async with client, other:
            first = await client.responses.create(model="stub", input="Hi", instructions="Shout.")
            found = await client.responses.retrieve(first.id)
            assert found == first
            asked: Any = {"model": "stub", "input": "More", "previous_response_id": first.id}
            second = await client.responses.create(**asked, store=False)
            assert model.asked[-1]["messages"] == [
                USER, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "More"},
            ]  # fmt: skip
            assert second.previous_response_id == first.id
            with pytest.raises(openai.NotFoundError):
                await other.responses.create(**asked)
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(second.id)
            await client.responses.delete(first.id)
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(first.id)


async def test_oldest_responses_give_way(monkeypatch: Any) -> None:
    monkeypatch.setattr("jaxllm.server.responses_api.MAX_RESPONSES", 2)
    async with serve_stub(say("Yes.")) as endpoint, use_openai(endpoint) as client:
        ids = [(await client.responses.create(model="stub", input="x")).id for _ in range(3)]
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(ids[0])
        assert (await client.responses.retrieve(ids[1])).id == ids[1]


async def test_cut_and_parsed_responses() -> None:
    """A limit makes a response incomplete; a form is parsed; a failure is an event."""

    class City(pydantic.BaseModel):
        city: str

    async with serve_stub(say(CALL, "length")) as endpoint, use_openai(endpoint) as client:
        cut = await client.responses.create(model="stub", input="x", max_output_tokens=16)
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert cut.output[0].status == "incomplete"
    model = say(CALL)
    async with serve_stub(model) as endpoint, use_openai(endpoint) as client:
        parsed = await client.responses.parse(model="stub", input="x", text_format=City)
        assert parsed.output_parsed == City(city="Bonn")
        assert model.asked[-1]["options"]["json_schema"]["required"] == ["city"]

    async def fail(fields: Any) -> AsyncGenerator[dict[str, Any]]:
        yield {"started": True}
        yield {"chunk": ["x", 5, None]}
        raise ApiError(500, "broken")

    async with serve_stub(StubModel(fail)) as endpoint, use_openai(endpoint) as client:
        stream = await client.responses.create(model="stub", input="x", stream=True)
        last = [event async for event in stream][-1]
        assert (last.type, last.response.error.message) == ("response.failed", "broken")


def test_items_are_read_as_messages() -> None:
    """Thought, text and calls of an answer are one message; results follow."""
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "c"},
    ]
    calls = [{"id": i, "type": "function", "function": {"name": name, "arguments": "{}"}}
             for i, name in (("1", "f"), ("2", "g"))]  # fmt: skip
    assert _read_items(items) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "reasoning_content": "Hm.", "content": "b", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "c"},
    ]


def read_response(body: Any) -> GenerationCall:
    fields = _Fields(**{k: v for k, v in body.items() if k in _Fields.__struct_fields__})
    return _read_call(body, fields, _read_items(fields.input))


def read_message(body: Any) -> GenerationCall:
    return read_chat(_read_chat_body({"messages": [USER], "max_tokens": 5, **body}))


@pytest.mark.parametrize(
    ("read", "body", "param"),
    [
        (read_response, {"tools": [{"type": "web_search"}]}, "tools"),
        (read_response, {"background": True}, "background"),
        (read_response, {"truncation": "auto"}, "truncation"),
        (read_response, {"conversation": "x"}, "conversation"),
        (read_response, {"include": ["message.output_text.logprobs"]}, "include"),
        (read_response, {"input": []}, "input"),
        (read_response, {"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        (read_response, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input"),
        (read_message, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools"),
        (read_message, {"mcp_servers": [{}]}, "mcp_servers"),
        (read_message, {"messages": []}, "messages"),
        (read_message, {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
         "messages"),
        (read_message, {"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named(
    read: Callable[[Any], GenerationCall], body: Any, param: str
) -> None:
    with pytest.raises(ApiError) as error:
        read({"input": "x", **body})
    assert (error.value.status, error.value.body["error"]["param"]) == (400, param)


def test_messages_are_read_as_chat() -> None:
    """Blocks of a conversation, the tools and the options have their names in a chat."""
    body = {
        "system": [{"type": "text", "text": "Be kind."}],
        "messages": [
            USER,
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Bonn"}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": "21"},
                {"type": "text", "text": "So?"}]},
        ],
        "tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "stop_sequences": ["END"], "top_k": 5, "thinking": {"type": "disabled"},
    }  # fmt: skip
    call = read_message(body)
    (frame,) = call.frames
    system, user, answer, result, more = frame["messages"]
    assert system == {"role": "system", "content": "Be kind."} and user == USER
    assert (answer["reasoning_content"], answer["content"]) == ("Hm.", "I look.")
    assert answer["tool_calls"][0]["function"]["arguments"] == {"city": "Bonn"}
    assert (result["content"], result["tool_call_id"], more["content"]) == ("21", "1", "So?")
    assert (frame["options"]["stop_strings"], frame["options"]["top_k"]) == (["END"], 5)
    assert frame["variables"]["enable_thinking"] is False
    assert (call.tools or {})["choice"] == "required" and not (call.tools or {})["parallel"]


async def test_messages_are_streamed_in_blocks() -> None:
    """Anthropic's client builds the whole message from the events of its blocks."""
    anthropic = pytest.importorskip("anthropic")
    asked: Any = {"model": "stub", "max_tokens": 99, "messages": [USER], "tools": [TOOL]}
    async with serve_stub(say(THINK + CALLS), keys=("k",)) as endpoint:
        url = f"http://{endpoint.host}:{endpoint.port}"
        async with anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=0) as client:
            whole = await client.messages.create(**asked)
            async with client.messages.stream(**asked) as stream:
                events = [event async for event in stream]
                final = await stream.get_final_message()
            async with anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0) as other:
                with pytest.raises(anthropic.AuthenticationError) as refused:
                    await other.messages.create(**asked)
            assert refused.value.body["error"]["type"] == "authentication_error"
            for body, error in (({"model": "other"}, anthropic.NotFoundError),
                                ({"max_tokens": 0}, anthropic.BadRequestError)):  # fmt: skip
                with pytest.raises(error) as refused:
                    await client.messages.create(**{**asked, **body})
                assert refused.value.body["type"] == "error"
    thought, text, first, second = whole.content
    assert (thought.thinking, text.text) == ("Hm.", "I look.")
    assert (first.name, first.input, second.input) == ("weather", {"city": "Bonn"}, {})
    assert (whole.stop_reason, whole.usage.input_tokens) == ("tool_use", 5)
    assert whole.usage.cache_read_input_tokens == 4
    assert [block.type for block in final.content] == [block.type for block in whole.content]
    assert (final.content[2].input, final.stop_reason) == ({"city": "Bonn"}, "tool_use")
    assert final.usage.output_tokens == whole.usage.output_tokens
    kinds = [event.type for event in events if event.type.startswith(("message", "content_block"))]
    kinds = [kind for i, kind in enumerate(kinds) if kinds[i - 1] != kind or "delta" not in kind]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert kinds == ["message_start", *4 * block, "message_delta", "message_stop"]


async def test_messages_tell_what_ended_them() -> None:
    """The sequence that stopped a message is named; a limit, and a failure within a stream."""
    anthropic = pytest.importorskip("anthropic")
    asked: Any = {
        "model": "stub",
        "max_tokens": 9,
        "messages": [USER],
        "stop_sequences": ["E", "F"],
    }
    for finish, done, expected in (
        ("stop", {"stop_string": "F"}, ("stop_sequence", "F")),
        ("length", {}, ("max_tokens", None)),
        ("eos", {}, ("end_turn", None)),
    ):
        async with serve_stub(say("Yes.", finish, **done)) as endpoint:
            answer = await endpoint.ask("POST", "/v1/messages", asked)
            found = json.loads(answer.body)
            assert (found["stop_reason"], found["stop_sequence"]) == expected

    async def fail(fields: Any) -> AsyncGenerator[dict[str, Any]]:
        yield {"started": True}
        raise ApiError(503, "gone")

    async with serve_stub(StubModel(fail)) as endpoint:
        url = f"http://{endpoint.host}:{endpoint.port}"
        async with anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=0) as client:
            stream = await client.messages.create(**asked, stream=True)
            with pytest.raises(anthropic.APIStatusError, match="gone"):
                [event async for event in stream]
