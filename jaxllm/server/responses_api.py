"""OpenAI's Responses API: a request is read as a chat; the answer is written as items.

Responses are kept in memory, so that `previous_response_id` can go on from one.
"""

import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from jaxllm.server.backend import json_response, read_body
from jaxllm.server.errors import ApiError, invalid, unsupported
from jaxllm.server.generation_routes import GenerationRoutes
from jaxllm.server.openai_requests import (
    GenerationCall,
    Limit,
    check_fields,
    join_text,
    read_chat,
    refuse_fields,
)
from jaxllm.server.openai_responses import ItemWriter, encode_json

Json = dict[str, Any]
MAX_RESPONSES, MAX_RESPONSE_BYTES = 1000, 64 << 20  # that are kept, with their conversations
_REFUSED = {name: name for name in ("background", "conversation", "prompt", "top_logprobs")}
# Fields that this interface lacks, but that a chat's body would have.
_OTHERS = {"messages", "n", "logprobs", "echo", "response_format", "add_generation_prompt",
           "continue_final_message"}  # fmt: skip


class _Fields(Struct):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    text: dict[str, Any] = {}
    reasoning: dict[str, Any] = {}
    include: list[str] = []
    metadata: dict[str, Any] = {}
    max_output_tokens: Limit = None
    truncation: Literal["disabled", "auto"] = "disabled"
    store: bool = True
    temperature: float | None = None
    top_p: float | None = None


class ResponseStore:
    """Responses with their conversations, by the client's key; the oldest ones give way."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._num_bytes = 0

    def find(self, request: Request, name: str) -> Any:
        """Return a response with its conversation; of another key's there are none."""
        if (kept := self._kept.get(_key(request, name))) is None:
            message = f"there is no response {name!r:.80}"
            raise ApiError(404, message, type="not_found_error", param="previous_response_id")
        return json.loads(kept)

    def keep(self, request: Request, name: str, response: Json) -> None:
        """Keep a response with its conversation."""
        data = encode_json(response)
        self._kept[_key(request, name)] = data
        self._num_bytes += len(data)
        while len(self._kept) > MAX_RESPONSES or self._num_bytes > MAX_RESPONSE_BYTES:
            self._drop(next(iter(self._kept)))

    def delete(self, request: Request, name: str) -> None:
        """Forget a response. Raises ApiError if there is none."""
        self.find(request, name)
        self._drop(_key(request, name))

    def _drop(self, key: tuple[str, str]) -> None:
        self._num_bytes -= len(self._kept.pop(key))


class ResponsesRoutes:
    """The functions of the routes for responses."""

    def __init__(self, generation: GenerationRoutes, store: ResponseStore) -> None:
        self._generation, self._store = generation, store

    async def create(self, request: Request) -> Response:
        body, fields, messages = await self._read(request)

        def keep(response: Json) -> None:
            if fields.store:
                said = [*messages, *_read_items(response["output"])]
                kept = {"response": response, "messages": said}
                self._store.keep(request, response["id"], kept)

        write = partial(ResponseWriter, fields=fields, keep=keep)
        return await self._generation.answer(request, _read_call(body, fields, messages), write)

    async def count(self, request: Request) -> Response:
        call = _read_call(*await self._read(request))
        count = await self._generation.count_tokens(call.frames[0])
        return json_response({"object": "response.input_tokens", "input_tokens": count})

    async def _read(self, request: Request) -> tuple[Json, _Fields, list[Json]]:
        """Return a request's body, its fields, and its messages after those it goes on from."""
        body = await read_body(request)
        fields = check_fields(body, _Fields)
        messages = _read_items(fields.input)
        if fields.previous_response_id is not None:
            messages = self._store.find(request, fields.previous_response_id)["messages"] + messages
        return body, fields, messages

    async def retrieve(self, request: Request) -> Response:
        return json_response(self._store.find(request, request.path_params["name"])["response"])

    async def delete(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._store.delete(request, name)
        return json_response({"id": name, "object": "response", "deleted": True})


def _key(request: Request, name: str) -> tuple[str, str]:
    return request.scope.get("namespace", ""), name


def _read_call(
    body: Mapping[str, Any], fields: _Fields, messages: Sequence[Json]
) -> GenerationCall:
    """Return the chat that a request asks for. Raises ApiError."""
    refuse_fields(body, _REFUSED)
    if fields.truncation == "auto":
        raise unsupported("truncation=auto", "truncation")
    if "message.output_text.logprobs" in fields.include:
        raise unsupported("message.output_text.logprobs", "include")
    system = [] if fields.instructions is None else [_message("system", fields.instructions)]
    chat = {
        **{name: value for name, value in body.items() if name not in _OTHERS},
        "messages": [*system, *messages],
        "tools": [_read_tool(tool) for tool in fields.tools],
        "max_completion_tokens": fields.max_output_tokens,
        "response_format": fields.text.get("format"),
        "reasoning_effort": fields.reasoning.get("effort"),
        "add_generation_prompt": True,
    }
    return read_chat(chat)


def _read_tool(tool: Json) -> Json:
    if tool.get("type") != "function":
        raise unsupported(f"a tool of the type {tool.get('type')!r:.40}", "tools")
    function = {k: v for k, v in tool.items() if k != "type" and v is not None}
    return {"type": "function", "function": function}


def _message(role: str, content: str) -> Json:
    return {"role": role, "content": content}


def _read_items(items: str | Sequence[Json]) -> list[Json]:
    """Return a chat's messages: an answer's thought, text and calls are one of them."""
    if isinstance(items, str):
        return [_message("user", items)]
    messages: list[Json] = []
    for i, item in enumerate(items):
        where, kind = f"input[{i}]", item.get("type", "message")
        read = partial(join_text, where=where, param="input", kinds=_TEXTS)
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        if kind == "message":
            content, role = read(item.get("content")), item.get("role", "")
            if role == "assistant" and last and not {"content", "tool_calls"} & last.keys():
                last["content"] = content
            else:
                messages.append(_message(role, content))
        elif kind == "reasoning":
            thought = read(item.get("content") or item.get("summary") or "")
            messages.append({"role": "assistant", "reasoning_content": thought})
        elif kind == "function_call":
            if last is None:
                last = {"role": "assistant"}
                messages.append(last)
            function = {name: item.get(name) for name in ("name", "arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            last["tool_calls"] = [*last.get("tool_calls", ()), call]
        elif kind == "function_call_output":
            output = _message("tool", read(item.get("output")))
            messages.append({**output, "tool_call_id": item.get("call_id")})
        else:
            raise unsupported(f"{where} of the type {kind!r:.40}", "input")
    if not messages:
        raise invalid("input must be a text or items, not empty", "input")
    return messages


_TEXTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
# Of an item: the prefix of its id, its fields, its part of content, and what its events are about.
_ITEMS: dict[str, tuple[str, Json, Json, str]] = {
    "content": ("msg", {"type": "message", "role": "assistant", "content": []},
                {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
                "output_text"),
    "thought": ("rs", {"type": "reasoning", "summary": [], "content": []},
                {"type": "reasoning_text", "text": ""}, "reasoning_text"),
    "call": ("fc", {"type": "function_call", "arguments": ""}, {}, "function_call_arguments"),
}  # fmt: skip


class ResponseWriter(ItemWriter):
    """Writes a response: its items, and their events in OpenAI's order.

    keep: Takes the whole response.
    """

    last_event = b""

    def __init__(
        self, *args: Any, fields: _Fields, keep: Callable[[Json], None], **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._keep, self._number = keep, -1
        echoed = ("instructions", "previous_response_id", "tools", "tool_choice",
                  "parallel_tool_calls", "metadata", "max_output_tokens", "truncation",
                  "store")  # fmt: skip
        options = self.call.frames[0]["options"]
        self._response: Json = {
            "id": f"resp_{secrets.token_hex(24)}", "object": "response",
            "created_at": int(time.time()), "status": "in_progress", "background": False,
            "error": None, "incomplete_details": None, "model": self.model, "output": [],
            **{name: getattr(fields, name) for name in echoed},
            "reasoning": {"effort": None, "summary": None, **fields.reasoning},
            "text": {"format": {"type": "text"}, **fields.text},
            "temperature": options.get("temperature", 1.0), "top_p": options.get("top_p", 1.0),
            "usage": None,
        }  # fmt: skip

    def begin(self, frame: Mapping[str, Any]) -> Iterable[Json]:
        yield self._event("response.created", response=self._response)
        yield self._event("response.in_progress", response=self._response)

    def open_item(self, kind: str, call: Json | None) -> Iterable[Json]:
        prefix, fields, part, self._about = _ITEMS[kind]
        item = {"id": f"{prefix}_{secrets.token_hex(24)}", "status": "in_progress", **fields}
        if call is not None:
            item |= {"call_id": call["id"], "name": call["function"]["name"]}
        self._place = {"item_id": item["id"], "output_index": len(self._response["output"])}
        self._item, self._text = item, ""
        self._logprobs: Json = {"logprobs": []} if kind == "content" else {}
        self._response["output"].append(item)
        yield self._item_event("added")
        if part:
            self._place["content_index"] = 0
            item["content"] = [dict(part)]
            yield self._event("response.content_part.added", **self._place, part=item["content"][0])

    def extend_item(self, text: str) -> Iterable[Json]:
        self._text += text
        event = f"response.{self._about}.delta"
        yield self._event(event, **self._place, delta=text, **self._logprobs)

    def close_item(self, *, complete: bool) -> Iterable[Json]:
        item, done = self._item, f"response.{self._about}.done"
        item["status"] = "completed" if complete else "incomplete"
        if "arguments" in item:
            item["arguments"] = self._text
            yield self._event(done, **self._place, name=item["name"], arguments=self._text)
        else:
            (part,) = item["content"]
            part["text"] = self._text
            yield self._event(done, **self._place, text=self._text, **self._logprobs)
            yield self._event("response.content_part.done", **self._place, part=part)
        yield self._item_event("done")

    def finish(self) -> Iterable[Json]:
        (choice,), end = self.choices, self.ends[0]
        complete = choice.finish_reason != "length"
        yield from self.close(complete=complete)
        status = "completed" if complete else "incomplete"
        prompt, new = end["prompt_tokens"], end["completion_tokens"]
        self._response |= {
            "status": status,
            "completed_at": int(time.time()) if complete else None,
            "incomplete_details": None if complete else {"reason": "max_output_tokens"},
            "usage": {
                "input_tokens": prompt, "output_tokens": new, "total_tokens": prompt + new,
                "input_tokens_details": {"cached_tokens": end["cached_tokens"],
                                         "cache_write_tokens": 0},
                "output_tokens_details": {"reasoning_tokens": choice.thought_tokens},
            },
        }  # fmt: skip
        self._keep(self._response)
        yield self._event(f"response.{status}", response=self._response)

    def fail(self, error: ApiError) -> Json:
        if not self._begun:
            return self._event("error", code=str(error.status), message=str(error), param=None)
        why = {"code": "server_error", "message": str(error)}
        return self._event(
            "response.failed", response={**self._response, "status": "failed", "error": why}
        )

    def format_answer(self) -> Json:
        return self._response

    def _item_event(self, what: str) -> Json:
        index = self._place["output_index"]
        return self._event(f"response.output_item.{what}", output_index=index, item=self._item)

    def _event(self, kind: str, **fields: Any) -> Json:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **fields}
