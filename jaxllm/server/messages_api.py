"""Anthropic's Messages API: a request is read as a chat; the answer is written as blocks."""

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from jaxllm.server.backend import json_response, read_body
from jaxllm.server.errors import ApiError, unsupported
from jaxllm.server.generation_routes import GenerationRoutes
from jaxllm.server.openai_requests import (
    check_fields,
    join_text,
    read_chat,
    read_conversation,
    refuse_fields,
)
from jaxllm.server.openai_responses import ItemWriter
from jaxllm.server.streams import format_event

Json = dict[str, Any]
Content = str | list[dict[str, Any]]
_REFUSED = {name: name for name in ("mcp_servers", "container")}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
# Fields that this interface lacks, but that a chat's body would have.
_OTHERS = {"n", "logprobs", "top_logprobs", "echo", "stop", "add_generation_prompt",
           "continue_final_message", "max_completion_tokens"}  # fmt: skip


class _Message(Struct):
    role: Literal["user", "assistant", "system"]
    content: Content


class _ToolChoice(Struct, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool = False


class _Tool(Struct):
    name: str
    input_schema: dict[str, Any] | None = None
    type: str = "custom"
    description: str = ""
    strict: bool | None = None


class _Prompt(Struct):
    messages: Annotated[list[_Message], Meta(min_length=1)]
    system: Content = ""
    tools: list[_Tool] = []
    tool_choice: _ToolChoice = _ToolChoice("auto")
    thinking: dict[str, Any] = {}
    output_config: dict[str, Any] = {}
    stop_sequences: list[str] = []


class _Limit(Struct):
    max_tokens: Annotated[int, Meta(ge=1)]


class MessagesRoutes:
    """The functions of the routes for messages."""

    def __init__(self, generation: GenerationRoutes) -> None:
        self._generation = generation

    async def create(self, request: Request) -> Response:
        body = await read_body(request)
        check_fields(body, _Limit)
        chat = _read_chat_body(body)
        write = partial(MessageWriter, stops=chat["stop"])
        return await self._generation.answer(request, read_chat(chat), write)

    async def count(self, request: Request) -> Response:
        chat = read_conversation(_read_chat_body(await read_body(request)))
        return json_response({"input_tokens": await self._generation.count_tokens(chat)})


def _read_chat_body(body: Mapping[str, Any]) -> Json:
    """Return the body of the chat that a request asks for. Raises ApiError."""
    refuse_fields(body, _REFUSED)
    fields = check_fields(body, _Prompt)
    messages = [m for i, message in enumerate(fields.messages) for m in _read_message(message, i)]
    if fields.system:
        system = join_text(fields.system, where="system", param="system", kinds=("text",))
        messages.insert(0, {"role": "system", "content": system})
    choice = fields.tool_choice
    named = {"type": "function", "function": {"name": choice.name}}
    chat = {
        **{name: value for name, value in body.items() if name not in _OTHERS},
        "messages": messages,
        "tools": [_read_tool(tool) for tool in fields.tools],
        "tool_choice": _CHOICES.get(choice.type, named),
        "parallel_tool_calls": not choice.disable_parallel_tool_use,
        "stop": fields.stop_sequences,
        "response_format": fields.output_config.get("format"),
        "reasoning_effort": fields.output_config.get("effort"),
    }
    if thinking := fields.thinking.get("type"):  # templates that can, leave the thought out
        given = body.get("chat_template_kwargs") or {}
        chat["chat_template_kwargs"] = {"enable_thinking": thinking != "disabled", **given}
    return chat


def _read_tool(tool: _Tool) -> Json:
    if tool.type != "custom":
        raise unsupported(f"a tool of the type {tool.type!r:.40}", "tools")
    function = {"name": tool.name, "description": tool.description,
                "parameters": tool.input_schema, "strict": tool.strict}  # fmt: skip
    given = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": given}


def _read_message(message: _Message, index: int) -> list[Json]:
    """Return a chat's messages: results of tools are messages of their own."""
    read = partial(join_text, where=f"messages[{index}]", param="messages", kinds=("text",))
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results, texts, thoughts, calls = list[Json](), [], [], []
    for block in message.content:
        kind = block.get("type")
        if kind == "tool_result":
            result = read(block.get("content") or "")
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"),
                            "content": result})  # fmt: skip
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind != "redacted_thinking":
            texts.append(block)
    said: Json = {"role": message.role, "content": read(texts) if texts else None}
    if thoughts:
        said["reasoning_content"] = "".join(thoughts)
    if calls:
        said["tool_calls"] = calls
    return results if results and not texts else [*results, said]


class MessageWriter(ItemWriter):
    """Writes a message: its blocks, and their events.

    stops: The request's stop sequences.
    """

    ping = format_event({"type": "ping"})
    last_event = b""

    def __init__(self, *args: Any, stops: Sequence[str], **options: Any) -> None:
        super().__init__(*args, **options)
        self._stops, self._blocks = stops, list[Json]()
        self._end: Json = {"stop_reason": None, "stop_sequence": None}
        self._usage: Json = {"input_tokens": 0, "output_tokens": 0}
        self._id = f"msg_{secrets.token_hex(12)}"

    def begin(self, frame: Mapping[str, Any]) -> Iterable[Json]:
        self._usage["input_tokens"] = frame.get("prompt_tokens", 0)
        yield {"type": "message_start", "message": self.format_answer()}
        yield {"type": "ping"}

    def open_item(self, kind: str, call: Json | None) -> Iterable[Json]:
        block: Json = {"type": "text", "text": ""}
        if kind == "thought":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        elif call is not None:
            name = call["function"]["name"]
            block = {"type": "tool_use", "id": call["id"], "name": name, "input": {}}
        yield self._event("content_block_start", content_block=block)
        self._blocks.append(block)
        self._text = ""

    def extend_item(self, text: str) -> Iterable[Json]:
        kind, name = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking"),
                      "tool_use": ("input_json_delta", "partial_json"),
                      }[self._blocks[-1]["type"]]  # fmt: skip
        self._text += text
        yield self._event("content_block_delta", -1, delta={"type": kind, name: text})

    def close_item(self, *, complete: bool) -> Iterable[Json]:
        block = self._blocks[-1]
        if block["type"] == "tool_use":
            with suppress(ValueError, RecursionError):  # a limit may have cut it off
                block["input"] = json.loads(self._text)
        else:
            block[block["type"]] = self._text
        yield self._event("content_block_stop", -1)

    def finish(self) -> Iterable[Json]:
        (choice,), end = self.choices, self.ends[0]
        yield from self.close(complete=choice.finish_reason != "length")
        self._end["stop_reason"] = _REASONS[choice.finish_reason or "stop"]
        if end["finish_reason"] == "stop" and (stop := end.get("stop_string")) in self._stops:
            self._end = {"stop_reason": "stop_sequence", "stop_sequence": stop}
        cached = end["cached_tokens"]
        self._usage = {
            "input_tokens": end["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": end["completion_tokens"],
        }
        yield {"type": "message_delta", "delta": self._end, "usage": self._usage}
        yield {"type": "message_stop"}

    def fail(self, error: ApiError) -> Json:
        return error.as_anthropic()

    def format_answer(self) -> Json:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self.model,
                "content": self._blocks, **self._end, "usage": self._usage}  # fmt: skip

    def _event(self, kind: str, offset: int = 0, **fields: Any) -> Json:
        return {"type": kind, "index": len(self._blocks) + offset, **fields}
