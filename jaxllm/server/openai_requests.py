"""Requests in OpenAI's JSON, as frames for the model process.

What is unknown is ignored, as clients expect; what would change the answer and is not there is
refused. All other options of `LM.generate` are taken under their own names.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxllm.errors import JaxllmError
from jaxllm.files import parse_json
from jaxllm.server.errors import invalid, unsupported

Body = Mapping[str, Any]
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_ARGUMENTS = 1 << 20  # characters of a call that was cut off
MAX_COMPLETION_LOGPROBS = 20
MAX_TOP_LOGPROBS = 20
DEFAULT_COMPLETION_TOKENS = 16  # as in OpenAI's interface
# What would change the answer and is not there; what a value asks for in vain is no reason.
_REFUSED = {"audio": "audio", "modalities": "audio", "web_search_options": "web search",
            "functions": "functions (use tools)", "max_length": "max_length (use max_tokens)",
            "lora": "lora (the model's name chooses the adapter)",
            "ebnf": "ebnf (use lark or gbnf)", "n_probs": "n_probs (use logprobs)",
            "allowed_token_ids": "allowed_token_ids (use a grammar or logit_bias)",
            **{name: name for name in ("suffix", "use_beam_search", "prediction", "samplers",
            "prompt_logprobs", "structural_tag", "guided_whitespace_pattern",
            "thinking_token_budget", "include_stop_str_in_output")}}  # fmt: skip
_RANGES = {"temperature": (0, 100), "top_p": (0, 1), "presence_penalty": (-10, 10),
           "frequency_penalty": (-10, 10)}  # fmt: skip
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# Names of other servers -> ours.
_ALIASES = {"typical": "typical_p", "repeat_penalty":
            "repetition_penalty", "min_tokens": "min_new_tokens", "guided_json": "json_schema",
            "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "lark",
            "grammar": "gbnf"}  # fmt: skip
_STRUCTURES = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "lark"}


class GenerationCall(NamedTuple):
    """A checked request for text.

    Attributes:
        model: The requested model's name, "" for the default.
        frames: One frame of `ModelProcess` per choice, in order.
        stream, include_usage: Whether to stream, and to end the stream with the usage.
        logprobs: Number of likeliest tokens to show per token; None shows no log-probabilities.
        echo: Whether each choice begins with its prompt.
        tools: What `tools.tool_grammar` takes; None without tools.
        shows_ids: Whether each choice has the ids of its tokens (vLLM's return_token_ids).
    """

    model: str
    frames: list[dict[str, Any]]
    stream: bool
    include_usage: bool
    logprobs: int | None
    echo: bool = False
    tools: dict[str, Any] | None = None
    shows_ids: bool = False


def read_completion(body: Body) -> GenerationCall:
    """Read the body of /v1/completions. Raises ApiError."""
    prompts = _read_prompts(body)
    n, best_of = _integer(body, "n", 1, 1, MAX_CHOICES), body.get("best_of")
    if best_of not in (None, n):
        raise unsupported("best_of", "best_of")
    logprobs = body.get("logprobs")
    if logprobs is not None:
        logprobs = _integer(body, "logprobs", 0, 0, MAX_COMPLETION_LOGPROBS)
    options = _read_options(body)
    echo = _boolean(body, "echo")
    options["max_new_tokens"] = _read_limit(body, DEFAULT_COMPLETION_TOKENS, 0 if echo else 1)
    base = {"extra": _read_extra(body), "logprobs": logprobs, **_read_flags(body)}
    frames = [
        {**base, "prompt": prompt, "options": {**options, "seed": _nth_seed(options["seed"], i)}}
        for prompt in prompts
        for i in range(n)
    ]
    if len(frames) > MAX_CHOICES:
        raise invalid(f"{len(frames)} choices are too many: expected at most {MAX_CHOICES}", "n")
    shows_ids = _boolean(body, "return_token_ids")
    return GenerationCall(
        read_model_name(body), frames, *_read_stream(body), logprobs, echo, None, shows_ids
    )


def read_chat(body: Body) -> GenerationCall:
    """Read the body of /v1/chat/completions. Raises ApiError."""
    logprobs = None
    if _boolean(body, "logprobs"):
        logprobs = _integer(body, "top_logprobs", 0, 0, MAX_TOP_LOGPROBS)
    elif body.get("top_logprobs"):
        raise invalid("top_logprobs requires logprobs=true", "top_logprobs")
    options = _read_options(body)
    options["max_new_tokens"] = _read_limit(body, None, 1)
    if body.get("add_special_tokens"):
        raise unsupported("add_special_tokens of a chat (its template adds them)",
                          "add_special_tokens")  # fmt: skip
    tools = _read_tools(body)
    conversation = read_conversation(body)
    frame = {**conversation, "extra": _read_extra(body), "logprobs": logprobs, "tools": tools,
             **_read_flags(body)}  # fmt: skip
    n = _integer(body, "n", 1, 1, MAX_CHOICES)
    frames = [
        {**frame, "options": {**options, "seed": _nth_seed(options["seed"], i)}} for i in range(n)
    ]
    return GenerationCall(
        read_model_name(body), frames, *_read_stream(body), logprobs, False, tools,
        _boolean(body, "return_token_ids"),
    )  # fmt: skip


def _read_limit(body: Body, default: int | None, low: int) -> int | None:
    """Return the limit of new tokens under its first name here; None or -1 is the context's."""
    for name in ("max_completion_tokens", "max_tokens", "max_new_tokens", "n_predict"):
        if (value := body.get(name)) is not None:
            return None if value == -1 else _integer(body, name, 1, low, None)
    return default


def read_conversation(body: Body) -> dict[str, Any]:
    """Return messages, the template's variables, and whether the last message goes on."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("messages must be a list of messages, not empty", "messages")
    plain = [_read_message(message, i) for i, message in enumerate(messages)]
    variables = body.get("chat_template_kwargs") or {}
    if not isinstance(variables, Mapping):
        raise invalid("chat_template_kwargs must be an object", "chat_template_kwargs")
    if taken := {"self", "messages"} & variables.keys():
        raise invalid(f"chat_template_kwargs cannot set {', '.join(taken)}", "chat_template_kwargs")
    variables = dict(variables)
    if body.get("reasoning_effort") is not None:  # OpenAI's field, which some templates show
        variables.setdefault("reasoning_effort", body["reasoning_effort"])
    continues = _boolean(body, "continue_final_message")
    adds = body.get("add_generation_prompt", True)
    last_answers = plain[-1]["role"] == "assistant"
    if continues and (not last_answers or body.get("add_generation_prompt")):
        raise invalid(
            "continue_final_message requires an assistant message at the end and"
            " add_generation_prompt=false",
            "continue_final_message",
        )
    # As llama.cpp: an answer at the end is one to go on with, unless the client says otherwise.
    if not continues and last_answers and "add_generation_prompt" not in body:
        continues = not plain[-1].get("tool_calls")
        if continues and [message["role"] for message in plain[-2:-1]] == ["assistant"]:
            raise invalid("messages end with two of the assistant: expected one to go on with",
                          "messages")  # fmt: skip
    if continues and not isinstance(plain[-1].get("content"), str):
        raise invalid("the message to continue has no text", "messages")
    tools = body.get("tools")
    if tools and body.get("tool_choice") != "none":
        variables["tools"] = tools
    return {"messages": plain, "continues": continues,
            "variables": {"add_generation_prompt": bool(adds), **variables}}  # fmt: skip


def _read_message(message: Any, index: int) -> dict[str, Any]:
    """Return a message whose content is a text, as templates take it."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise invalid(f"{where} must be an object, got {message!r:.40}", "messages")
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise invalid(f"{where}.role must be one of {', '.join(_ROLES)}, got {role!r:.40}",
                      "messages")  # fmt: skip
    if isinstance(content, list):
        content = "".join(_read_part(part, where) for part in content)
    if content is not None and not isinstance(content, str):
        raise invalid(f"{where}.content must be a text or a list of parts", "messages")
    calls = message.get("tool_calls")
    if content is None and not (role == "assistant" and (calls or len(message) > 1)):
        raise invalid(f"{where}.content is missing", "messages")
    if content is None and not calls:  # templates take no null; what OpenAI's model refused is text
        refusal = message.get("refusal")
        content = refusal if isinstance(refusal, str) else ""
    plain = {name: value for name, value in message.items() if value not in (None, [])}
    plain["content"] = content
    if calls is not None and not isinstance(calls, list):
        raise invalid(f"{where}.tool_calls must be a list, got {calls!r:.40}", "messages")
    if calls:
        plain["tool_calls"] = [_read_call(call, where) for call in calls]
    return plain


def _read_part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else part
    if kind not in ("text", "refusal"):
        raise invalid(f"{where}: a part must be a text, got {kind!r:.40}", "messages")
    if not isinstance(text := part.get(kind), str):
        raise invalid(f"{where}: a part has no text", "messages")
    return text


def _read_call(call: Any, where: str) -> dict[str, Any]:
    """Return a call whose arguments are an object, as templates take them.

    Those of a call that a limit cut off are no JSON and stay a text.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise invalid(f"{where}: a tool call is malformed: {call!r:.60}", "messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = parse_json(arguments, "arguments")
        except JaxllmError:
            if len(arguments) > MAX_ARGUMENTS or arguments.lstrip()[0] != "{":
                raise invalid(f"{where}: the arguments of a tool call are not an object:"
                              f" {arguments!r:.60}", "messages") from None  # fmt: skip
            return {**call, "function": {**function, "arguments": arguments}}
    if arguments in (None, "") or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}  # of a function without parameters
    if not isinstance(arguments, Mapping):
        raise invalid(f"{where}: the arguments of a tool call must be an object, got"
                      f" {arguments!r:.60}", "messages")  # fmt: skip
    return {**call, "function": {**function, "arguments": arguments}}


def _read_tools(body: Body) -> dict[str, Any] | None:
    """Return what `tools.tool_grammar` takes; None without tools."""
    tools, choice = body.get("tools"), body.get("tool_choice")
    if not tools or choice == "none":
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice requires tools", "tool_choice")
        return None
    if not isinstance(tools, list):
        raise invalid("tools must be a list", "tools")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise invalid(f"a tool must be a function with a name, got {tool!r:.60}", "tools")
        if not isinstance(function.get("parameters") or {}, Mapping):
            raise invalid("a tool's parameters must be a JSON schema", "tools")
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
    if choice not in (None, "auto", "required"):
        raise invalid(f"tool_choice is unknown: got {choice!r:.60}", "tool_choice")
    parallel = body.get("parallel_tool_calls") is None or _boolean(body, "parallel_tool_calls")
    return {"tools": tools, "choice": choice or "auto", "parallel": parallel}


def _pick_tools(tools: Sequence[Any], names: Sequence[Any]) -> list[Any]:
    chosen = [tool for tool in tools if tool["function"]["name"] in names]
    if not chosen or len(chosen) < len(set(names)):
        raise invalid(f"tool_choice names a tool that is not among tools: {names!r:.80}",
                      "tool_choice")  # fmt: skip
    return chosen


def _read_options(body: Body) -> dict[str, Any]:
    """Return options of `LM.generate` from OpenAI's fields, with a seed."""
    for name, what in _REFUSED.items():
        if body.get(name) and body[name] != ["text"]:
            raise unsupported(what, name)
    if body.get("stop_token_ids") and body.get("ignore_eos"):
        raise unsupported("stop_token_ids with ignore_eos", "stop_token_ids")
    if body.get("skip_special_tokens") is False:
        raise unsupported("skip_special_tokens=false", "skip_special_tokens")
    repetition = body.get("repeat_penalty", body.get("repetition_penalty"))
    if body.get("repeat_last_n") not in (None, -1) and repetition not in (None, 1):
        raise unsupported("repeat_last_n (the penalty counts the whole text: send -1)",
                          "repeat_last_n")  # fmt: skip
    options: dict[str, Any] = {}
    for name, (low, high) in _RANGES.items():
        if body.get(name) is not None:
            options[name] = _number(body, name, low, high)
    if body.get("stop") is not None:
        options["stop_strings"] = _read_stops(body["stop"])
    if body.get("logit_bias"):
        options["logit_bias"] = body["logit_bias"]
    seed = body.get("seed")
    if seed is None or seed == -1:
        options["seed"] = secrets.randbits(32)
    else:
        options["seed"] = _integer(body, "seed", 0, -(1 << 63), (1 << 64) - 1) % (1 << 64)
    return options | _read_structure(body)


def _read_structure(body: Body) -> dict[str, Any]:
    """Return the grammar option of response_format and of structured_outputs."""
    wanted = body.get("response_format")
    structured = body.get("structured_outputs")
    if isinstance(structured, Mapping):
        return {
            ours: structured[theirs]
            for theirs, ours in _STRUCTURES.items()
            if structured.get(theirs) is not None
        }
    if wanted is None:
        return {}
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": wanted.get("schema") or {"type": "object"}}
    if kind == "json_schema":
        outer = wanted.get("json_schema", wanted)
        schema = outer.get("schema") if isinstance(outer, Mapping) else None
        if isinstance(schema, Mapping | bool):
            return {"json_schema": schema}
        raise invalid("response_format.json_schema.schema must be a JSON schema",
                      "response_format")  # fmt: skip
    raise invalid(f"response_format is unknown: got {wanted!r:.60}", "response_format")


def _read_flags(body: Body) -> dict[str, bool]:
    """Return whether ends of text are ignored, and whether a prompt gets a begin-of-text token."""
    adds = body.get("add_special_tokens") is None or _boolean(body, "add_special_tokens")
    return {"ignore_eos": _boolean(body, "ignore_eos"), "add_special": adds}


def _read_extra(body: Body) -> dict[str, Any]:
    """Return all fields, for the options of `LM.generate` among them, under our names."""
    extra = {_ALIASES.get(name, name): body[name] for name in body if name not in _OURS}
    if extra.get("top_k") == -1:  # vLLM's word for all
        del extra["top_k"]
    return extra


# Fields that have a meaning of their own here.
_OURS = {"model", "messages", "prompt", "n", "best_of", "logprobs", "top_logprobs", "echo", "stop",
         "seed", "temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias",
         "max_tokens", "max_completion_tokens", "max_new_tokens", "n_predict", "tools",
         "tool_choice", "response_format", "structured_outputs", "stream", "stream_options",
         "user", "metadata", "return_token_ids", "add_special_tokens"}  # fmt: skip


def read_model_name(body: Body) -> str:
    """Return the requested model's name, "" for the default. Raises ApiError."""
    name = body.get("model") or ""
    if not isinstance(name, str):
        raise invalid(f"model must be a name, got {name!r:.40}", "model")
    return name


def _read_stream(body: Body) -> tuple[bool, bool]:
    stream, options = _boolean(body, "stream"), body.get("stream_options") or {}
    if not isinstance(options, Mapping):
        raise invalid("stream_options must be an object", "stream_options")
    return stream, bool(options.get("include_usage"))


def _read_prompts(body: Body) -> list[Any]:
    """Return the prompts: texts or lists of token ids."""
    prompt = body.get("prompt")
    if is_prompt(prompt):
        return [prompt]
    if isinstance(prompt, list) and prompt and all(map(is_prompt, prompt)):
        return prompt
    raise invalid("prompt must be a text, token ids, or a list of them, not empty", "prompt")


def is_prompt(value: Any) -> bool:
    """Whether this is a text or a list of token ids, not empty."""
    if isinstance(value, list):
        return bool(value) and all(type(token) is int for token in value)
    return isinstance(value, str) and bool(value)


def _read_stops(stop: Any) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(text, str) for text in stops):
        raise invalid("stop must be a text or a list of texts", "stop")
    if len(stops) > MAX_STOPS:
        raise invalid(f"stop has {len(stops)} texts: expected at most {MAX_STOPS}", "stop")
    return [text for text in stops if text]


def _nth_seed(seed: int, i: int) -> int:
    """Return the seed of the i-th choice: the first has the given one."""
    return (seed + i) % (1 << 64)


def _integer(body: Body, name: str, default: int, low: int, high: int | None) -> int:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or value < low or (high is not None and value > high):
        upper = "" if high is None else f" to {high}"
        raise invalid(f"{name} must be a whole number from {low}{upper}, got {value!r:.40}", name)
    return value


def _number(body: Body, name: str, low: float, high: float) -> float:
    value = body.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise invalid(f"{name} must be a number from {low} to {high}, got {value!r:.40}", name)
    return float(value)


def _boolean(body: Body, name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise invalid(f"{name} must be true or false, got {value!r:.40}", name)
    return bool(value)
