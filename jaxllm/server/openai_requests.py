"""Requests in OpenAI's JSON, as frames for the model process.

msgspec checks the types of the classes here. Unknown fields are ignored, as clients expect; fields
that would change the answer and are not supported are refused. All other
options of `LM.generate` are taken under their own names.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta, Struct

from jaxllm.errors import JaxllmError
from jaxllm.files import parse_json
from jaxllm.generation.option_table import OPTIONS
from jaxllm.runtime.schema import describe_problem
from jaxllm.server.errors import invalid, unsupported

Body = Mapping[str, Any]
Fields = TypeVar("Fields")
MAX_CHOICES = 128
MAX_ARGUMENTS = 1 << 20  # characters of a call that was cut off
DEFAULT_COMPLETION_TOKENS = 16  # as in OpenAI's interface
# What would change the answer and is not there; what a value asks for in vain is no reason.
_REFUSED = {"audio": "audio", "modalities": "audio", "web_search_options": "web search",
            "functions": "functions (use tools)", "max_length": "max_length (use max_tokens)",
            "lora": "lora (the model's name chooses the adapter)",
            "ebnf": "ebnf (use lark or gbnf)", "n_probs": "n_probs (use logprobs)",
            "allowed_token_ids": "allowed_token_ids (use a grammar or logit_bias)",
            **{name: name for name in ("use_beam_search", "prediction", "samplers",
            "prompt_logprobs", "structural_tag", "guided_whitespace_pattern",
            "thinking_token_budget", "include_stop_str_in_output")}}  # fmt: skip
_STRUCTURES = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "lark"}
# Names of other servers -> ours.
_ALIASES = {"typical": "typical_p", "repeat_penalty":
            "repetition_penalty", "min_tokens": "min_new_tokens", "guided_json": "json_schema",
            "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "lark",
            "grammar": "gbnf"}  # fmt: skip
# Options whose values are narrower here, and those that have fields of other names.
_RANGES = {name: option.served for name, option in OPTIONS.items() if option.served is not None}
_Served = msgspec.defstruct(
    "_Served",
    [(name, Annotated[float, Meta(ge=low, le=high)], 0) for name, (low, high) in _RANGES.items()],
)
_OTHERS = {name for name, option in OPTIONS.items() if option.clients}
_OTHERS -= {"seed", "max_new_tokens"}

Limit = Annotated[int, Meta(ge=-1)] | None  # of new tokens; -1 is the context's
Top = Annotated[int, Meta(ge=0, le=20)]
Text = Annotated[str, Meta(min_length=1)]


class ModelFields(Struct):
    """The field of every request to the model. model: its name, "" for the default."""

    model: str = ""


class StreamOptions(Struct, frozen=True):
    """The fields of `stream_options`."""

    include_usage: bool | None = False


class Steering(Struct, forbid_unknown_fields=True):
    """A steering vector of a request, by name. layers: None for all of the vector's."""

    vector: str
    scale: float = 1.0
    layers: list[int] | None = None


class GenerationFields(ModelFields, kw_only=True):
    """The fields of every request for text whose types are checked here."""

    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    seed: int = -1  # another one each time
    stop: str | Annotated[list[str], Meta(max_length=16)] = ""
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_completion_tokens: Limit = None
    max_tokens: Limit = None
    max_new_tokens: Limit = None
    n_predict: Limit = None
    echo: bool = False
    ignore_eos: bool = False
    add_special_tokens: bool = True
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    reasoning_format: Literal["auto", "deepseek", "none"] = "auto"  # as in llama.cpp
    bad_words: list[str] = []
    stop_token_ids: list[int] = []
    truncate_prompt_tokens: Limit = None
    structured_outputs: dict[str, Any] = {}
    best_of: int | None = None
    steering: list[Steering] | None = None


class CompletionFields(GenerationFields, kw_only=True):
    """The fields of /v1/completions. A prompt is a text or token ids."""

    prompt: Any = None
    suffix: str = ""
    logprobs: Top | None = None


class ChatFields(GenerationFields, kw_only=True):
    """The fields of /v1/chat/completions, without those of the conversation."""

    logprobs: bool = False
    top_logprobs: Top = 0


class _Function(Struct):
    name: str
    arguments: str | dict[str, Any] | None = None
    parameters: dict[str, Any] | None = None


class _Call(Struct):
    function: _Function


class _Message(Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Any] | None = None
    tool_calls: list[_Call] | None = None


class _Conversation(Struct):
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    tools: list[_Call] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    continue_final_message: bool = False


class GenerationCall(NamedTuple):
    """A checked request for text.

    Attributes:
        fields: Its fields.
        frames: One frame of `ModelProcess` per choice, in order.
        logprobs: Number of likeliest tokens to show per token; None shows no log-probabilities.
        tools: Arguments of `tools.tool_grammar`; None without tools.
    """

    fields: GenerationFields
    frames: list[dict[str, Any]]
    logprobs: int | None
    tools: dict[str, Any] | None = None


def check_fields(body: Body, kind: type[Fields], name: str = "") -> Fields:
    """Return the fields of a request that a class has; null is a field's default. Raises ApiError.

    name: The object's field in the request.
    """
    given = {field: value for field, value in body.items() if value is not None}
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as problem:
        message = describe_problem(problem, given, name)
        place = re.search(r"\$\.(\w+)", str(problem)) or re.search(r"`(\w+)`", str(problem))
        param = place[1] if place else ""
        if str(problem) == f"Invalid enum value {given.get(param)!r} - at `$.{param}`":
            known = ", ".join(get_args(get_type_hints(kind)[param]))
            field = f"{name}.{param}".removeprefix(".")
            message = f"{field} must be one of {known}, got {given[param]!r:.40}"
        raise invalid(message, name.partition("[")[0] or param) from None


def read_completion(body: Body) -> GenerationCall:
    """Read the body of /v1/completions. Raises ApiError."""
    fields = check_fields(body, CompletionFields)
    prompts = [fields.prompt] if is_prompt(fields.prompt) else fields.prompt
    if not isinstance(prompts, list) or not prompts or not all(map(is_prompt, prompts)):
        raise invalid("prompt must be a text, token ids, or a list of them, not empty", "prompt")
    if fields.best_of not in (None, fields.n):
        raise unsupported("best_of", "best_of")
    if fields.suffix and (fields.echo or not all(isinstance(text, str) for text in prompts)):
        raise unsupported("suffix with echo, or with token ids,", "suffix")
    frame = _read_frame(body, fields, DEFAULT_COMPLETION_TOKENS, fields.logprobs)
    frame["suffix"] = fields.suffix
    frames = [
        {**choice, "prompt": prompt} for prompt in prompts for choice in _choices(frame, fields.n)
    ]
    if len(frames) > MAX_CHOICES:
        raise invalid(f"{len(frames)} choices are too many: expected at most {MAX_CHOICES}", "n")
    return GenerationCall(fields, frames, fields.logprobs)


def read_chat(body: Body) -> GenerationCall:
    """Read the body of /v1/chat/completions. Raises ApiError."""
    fields = check_fields(body, ChatFields)
    if fields.top_logprobs and not fields.logprobs:
        raise invalid("top_logprobs requires logprobs=true", "top_logprobs")
    if body.get("add_special_tokens"):
        what = "add_special_tokens of a chat (its template adds them)"
        raise unsupported(what, "add_special_tokens")
    if body.get("suffix"):
        raise unsupported("suffix of a chat", "suffix")
    fields.echo = False
    logprobs = fields.top_logprobs if fields.logprobs else None
    frame = _read_frame(body, fields, None, logprobs) | read_conversation(body)
    frame["tools"] = _read_tools(body)
    return GenerationCall(fields, _choices(frame, fields.n), logprobs, frame["tools"])


def _choices(frame: dict[str, Any], n: int) -> list[dict[str, Any]]:
    """Return the frames of n choices: the first has the given seed, the others the next ones."""
    options = frame["options"]
    seeds = [(options["seed"] + i) % (1 << 64) for i in range(n)]
    return [{**frame, "options": {**options, "seed": seed}} for seed in seeds]


def _read_frame(
    body: Body, fields: GenerationFields, default: int | None, logprobs: int | None
) -> dict[str, Any]:
    """Return a frame without its prompt. default: The limit of new tokens; None: the context's."""
    refuse_fields(body, _REFUSED)
    if fields.stop_token_ids and fields.ignore_eos:
        raise unsupported("stop_token_ids with ignore_eos", "stop_token_ids")
    if not fields.skip_special_tokens:
        raise unsupported("skip_special_tokens=false", "skip_special_tokens")
    if fields.truncate_prompt_tokens == 0:
        message = "truncate_prompt_tokens must be -1 or at least 1, got 0"
        raise invalid(message, "truncate_prompt_tokens")
    options = {
        option: value
        for name, value in body.items()
        if (option := _ALIASES.get(name, name)) in _OTHERS and value not in (None, {})
    }
    if body.get("repeat_last_n") not in (None, -1) and options.get("repetition_penalty", 1) != 1:
        what = "repeat_last_n (the penalty counts the whole text: send -1)"
        raise unsupported(what, "repeat_last_n")
    if options.get("top_k") == -1:  # vLLM's word for all
        del options["top_k"]
    check_fields(body, _Served)
    stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop
    if any(stops):
        options["stop_strings"] = [text for text in stops if text]
    options["seed"] = secrets.randbits(32) if fields.seed == -1 else fields.seed
    options["max_new_tokens"] = _read_limit(fields, default)
    return {
        "options": options | _read_structure(body, fields),
        "logprobs": logprobs,
        "ignore_eos": fields.ignore_eos,
        "add_special": fields.add_special_tokens,
        "stop_token_ids": fields.stop_token_ids,
        "bad_words": fields.bad_words,
        "truncate": fields.truncate_prompt_tokens,
        "steering": msgspec.to_builtins(fields.steering),
    }


def refuse_fields(body: Body, refused: Mapping[str, str]) -> None:
    """Raise ApiError for a field that is set. refused: What each asks for, by its name."""
    for name, what in refused.items():
        if body.get(name) and body[name] != ["text"]:
            raise unsupported(what, name)


def _read_limit(fields: GenerationFields, default: int | None) -> int | None:
    """Return the limit of new tokens under its first name here; None is the context's."""
    for name in ("max_completion_tokens", "max_tokens", "max_new_tokens", "n_predict"):
        limit: int | None = getattr(fields, name)
        if limit == 0 and not fields.echo:
            raise invalid(f"{name} must be at least 1, or -1, got 0", name)
        if limit is not None:
            return None if limit == -1 else limit
    return default


def read_conversation(body: Body) -> dict[str, Any]:
    """Return messages, the template's variables, and whether the last message goes on."""
    fields = check_fields(body, _Conversation)
    messages = [_read_message(message, i) for i, message in enumerate(fields.messages)]
    variables = fields.chat_template_kwargs
    if taken := {"self", "messages"} & variables.keys():
        raise invalid(f"chat_template_kwargs cannot set {', '.join(taken)}", "chat_template_kwargs")
    if body.get("reasoning_effort") is not None:  # OpenAI's field, which some templates show
        variables.setdefault("reasoning_effort", body["reasoning_effort"])
    continues, last_answers = fields.continue_final_message, messages[-1]["role"] == "assistant"
    if continues and (not last_answers or body.get("add_generation_prompt")):
        raise invalid(
            "continue_final_message requires an assistant message at the end and"
            " add_generation_prompt=false",
            "continue_final_message",
        )
    # As llama.cpp: an answer at the end is one to go on with, unless the client says otherwise.
    if not continues and last_answers and "add_generation_prompt" not in body:
        continues = not messages[-1].get("tool_calls")
        if continues and [message["role"] for message in messages[-2:-1]] == ["assistant"]:
            what = "messages end with two of the assistant: expected one to go on with"
            raise invalid(what, "messages")
    if continues and not isinstance(messages[-1].get("content"), str):
        raise invalid("the message to continue has no text", "messages")
    if fields.tools and fields.tool_choice != "none":
        variables["tools"] = body["tools"]
    adds = bool(body.get("add_generation_prompt", True))
    variables = {"add_generation_prompt": adds, **variables}
    return {"messages": messages, "continues": continues, "variables": variables}


def _read_message(message: Body, index: int) -> dict[str, Any]:
    """Return a message whose content is a text, as templates take it."""
    where = f"messages[{index}]"
    fields = check_fields(message, _Message, where)
    content, calls = fields.content, message.get("tool_calls")
    if isinstance(content, list):
        content = join_text(content, where=where)
    if content is None and not (fields.role == "assistant" and (calls or len(message) > 1)):
        raise invalid(f"{where}.content is missing", "messages")
    if content is None and not calls:  # templates take no null; what OpenAI's model refused is text
        refusal = message.get("refusal")
        content = refusal if isinstance(refusal, str) else ""
    plain = {name: value for name, value in message.items() if value not in (None, [])}
    plain["content"] = content
    if calls:
        plain["tool_calls"] = [_read_call(call, where) for call in calls]
    return plain


def join_text(
    content: Any, *, where: str, param: str = "messages", kinds: Sequence[str] = ("text", "refusal")
) -> str:
    """Return the text of a message's content, itself one or parts. Raises ApiError.

    Parts are lines, as in vLLM and llama.cpp: clients do not write the space between them.
    where: Its place in the request. kinds: The types of parts that are texts.
    """
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, Mapping) else part
        if kind not in kinds:
            raise invalid(f"{where}: a part must be a text, got {kind!r:.40}", param)
        if not isinstance(text := part.get("refusal" if kind == "refusal" else "text"), str):
            raise invalid(f"{where}: a part has no text", param)
        texts.append(text)
    return "\n".join(texts)


def _read_call(call: Body, where: str) -> dict[str, Any]:
    """Return a call whose arguments are an object, as templates take them.

    A call that a limit cut off has no JSON; its arguments stay a string.
    """
    arguments = call["function"].get("arguments") or {}  # none of a function without parameters
    if isinstance(arguments, str) and not arguments.strip():
        arguments = {}
    if isinstance(arguments, str):
        text = arguments
        try:
            arguments = parse_json(text, "arguments")
        except JaxllmError:
            if len(text) <= MAX_ARGUMENTS and text.lstrip()[0] == "{":
                return dict(call)
        if not isinstance(arguments, Mapping):
            what = "the arguments of a tool call must be an object"
            raise invalid(f"{where}: {what}, got {text!r:.60}", "messages")
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _read_tools(body: Body) -> dict[str, Any] | None:
    """Return what `tools.tool_grammar` takes; None without tools."""
    fields = check_fields(body, _Conversation)
    tools, choice = body.get("tools"), fields.tool_choice
    if not tools or choice == "none":
        if choice not in ("none", "auto"):
            raise invalid("tool_choice requires tools", "tool_choice")
        return None
    named: Any = choice if isinstance(choice, Mapping) else {}
    try:
        if named.get("type") == "allowed_tools":
            allowed = named.get("allowed_tools", named)
            names = [item.get("function", item).get("name") for item in allowed.get("tools", [])]
            tools, choice = _pick_tools(tools, names), allowed.get("mode", "auto")
        elif named.get("type") == "function":
            names = [named.get("function", named).get("name")]
            tools, choice = _pick_tools(tools, names), "required"
    except (AttributeError, TypeError):  # what should be an object or a list is not
        raise invalid(f"tool_choice is malformed: got {choice!r:.60}", "tool_choice") from None
    if choice not in ("auto", "required"):
        raise invalid(f"tool_choice is unknown: got {choice!r:.60}", "tool_choice")
    return {"tools": tools, "choice": choice, "parallel": fields.parallel_tool_calls}


def _pick_tools(tools: Sequence[Any], names: Sequence[Any]) -> list[Any]:
    chosen = [tool for tool in tools if tool["function"]["name"] in names]
    if not chosen or len(chosen) < len(set(names)):
        raise invalid(
            f"tool_choice names a tool that is not among tools: {names!r:.80}", "tool_choice"
        )
    return chosen


def _read_structure(body: Body, fields: GenerationFields) -> dict[str, Any]:
    """Return the grammar option of response_format and of structured_outputs."""
    wanted = body.get("response_format")
    if isinstance(body.get("structured_outputs"), Mapping):
        given = fields.structured_outputs
        return {x: given[name] for name, x in _STRUCTURES.items() if given.get(name) is not None}
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    if wanted is None or kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": wanted.get("schema") or {"type": "object"}}
    if kind != "json_schema":
        raise invalid(f"response_format is unknown: got {wanted!r:.60}", "response_format")
    outer = wanted.get("json_schema", wanted)
    schema = outer.get("schema") if isinstance(outer, Mapping) else None
    if not isinstance(schema, Mapping | bool):
        message = "response_format.json_schema.schema must be a JSON schema"
        raise invalid(message, "response_format")
    return {"json_schema": schema}


def is_prompt(value: Any) -> bool:
    """Whether this is a text or a list of token ids, not empty."""
    if isinstance(value, list):
        return bool(value) and all(type(token) is int for token in value)
    return isinstance(value, str) and bool(value)
