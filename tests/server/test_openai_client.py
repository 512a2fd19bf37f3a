"""Conveniences of OpenAI's client: parsed answers, stream events, raw answers, retries."""

import itertools
import json
import time
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.server.processes import make_client, start_server

ASK: dict[str, Any] = {
    "model": "demo", "messages": [{"role": "user", "content": "Tell me"}], "seed": 2,
}  # fmt: skip


class Paint(pydantic.BaseModel):
    """A tool, and the form of an answer."""

    color: Literal["red", "blue"]
    big: bool


def test_parse_returns_pydantic_model(client: Any) -> None:
    found = client.chat.completions.parse(**ASK, response_format=Paint, max_tokens=200)
    (choice,) = found.choices
    assert isinstance(choice.message.parsed, Paint)
    assert choice.message.parsed == Paint.model_validate_json(choice.message.content)


def test_stream_helper_builds_calls_and_content(client: Any) -> None:
    """The helper's events add up: arguments of a tool, parsed; content of a parsed answer."""
    with client.chat.completions.stream(
        **ASK, max_tokens=200, tools=[openai.pydantic_function_tool(Paint)], tool_choice="required"
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls
    assert call.function.name == "Paint" and isinstance(call.function.parsed_arguments, Paint)
    assert final.choices[0].finish_reason == "tool_calls"
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [event.parsed_arguments for event in done] == [call.function.parsed_arguments]
    with client.chat.completions.stream(**ASK, max_tokens=200, response_format=Paint) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert json.loads(deltas) == final.choices[0].message.parsed.model_dump()


def test_raw_answers_have_request_ids(client: Any) -> None:
    raw = client.completions.with_raw_response.create(model="demo", prompt="x", max_tokens=2)
    assert raw.request_id.startswith("req-") and raw.headers["x-request-id"] == raw.request_id
    assert raw.parse().choices[0].finish_reason and raw.parse()._request_id == raw.request_id
    given = client.models.with_raw_response.list(extra_headers={"X-Request-Id": "mine-7"})
    assert given.request_id == "mine-7"
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("other", extra_headers={"X-Request-Id": "mine-8"})
    assert error.value.request_id == "mine-8"
    with client.completions.with_streaming_response.create(
        model="demo", prompt="x", max_tokens=2, stream=True
    ) as streamed:
        assert streamed.request_id.startswith("req-")
        assert list(streamed.iter_lines())[-2] == "data: [DONE]"


def test_client_retries_until_row_is_free() -> None:
    """A full server answers 429 with Retry-After, which OpenAI's client waits for."""
    tries: list[Any] = []

    def record(response: Any) -> None:
        tries.append((response.status_code, time.monotonic(), response.headers))

    http = openai.DefaultHttpxClient(event_hooks={"response": [record]})
    options: Any = {"model": "demo", "prompt": "x"}
    with (
        start_server("--name", "demo", "--rows", "1", "--max-waiting", "0") as small,
        openai.OpenAI(
            base_url=f"{small.url}/v1", api_key="none", max_retries=60, http_client=http
        ) as client,
        make_client(small.url) as other,
    ):
        client.completions.create(**options, max_tokens=1)
        tries.clear()
        with other.completions.create(
            **options, max_tokens=500, stream=True, extra_body={"ignore_eos": True}
        ) as stream:
            next(stream)
            client.completions.create(**options, max_tokens=1)
    assert [status for status, _, _ in tries] == [429] * (len(tries) - 1) + [200]
    assert len(tries) > 1
    for (_, before, headers), (_, after, _) in itertools.pairwise(tries):
        assert int(headers["retry-after"]) == 2 <= after - before
