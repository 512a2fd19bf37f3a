"""Requests with wrong fields: each error names the field, and has it as OpenAI's `param`."""

from typing import Any

import pytest

from jaxllm.server.errors import ApiError
from jaxllm.server.openai_requests import read_chat, read_completion

TOOLS = [{"type": "function", "function": {"name": "f"}}]
CHAT = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS}
COMPLETION = {"prompt": "x"}
DEEP = {"function": {"name": "f", "arguments": "[" * 100_000}}
# Field -> values that no request may have.
WRONG: dict[str, list[Any]] = {
    "prompt": ["", [], [[]], 5, [1.5], ["x", 5]],
    "n": [0, 1000, 1.5, True],
    "max_tokens": ["5", 0, -2],
    "temperature": [-1, 101, "hot"],
    "top_p": [2],
    "frequency_penalty": [-11],
    "logprobs": [21, "x"],
    "stop": [5, ["x"] * 17, [5]],
    "seed": ["x", 1.5],
    "stream_options": [5, {"include_usage": "x"}],
    "echo": [1],
    "best_of": [2],
    "suffix": [5],
    "allowed_token_ids": [[5]],
    "lora": [[{"id": 0, "scale": 0.5}]],
    "skip_special_tokens": [False],
    "truncate_prompt_tokens": [0, -2, "x"],
    "bad_words": ["x", [5]],
    "stop_token_ids": [["x"]],
    "steering": [{"vector": "x"}, [{"scale": 1}], [{"vector": "x", "strength": 1}]],
    "model": [5],
}
WRONG_CHAT: dict[str, list[Any]] = {
    "messages": [
        "x", [], [5], [{"role": "x"}], [{"role": "user"}], [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
        [{"role": "assistant", "tool_calls": True}],
        [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}],
        [{"role": "assistant", "tool_calls": [DEEP]}],
    ],
    "tools": ["x", [5], [{"function": {}}]],
    "tool_choice": [
        "x", 5, {"type": "allowed_tools", "allowed_tools": {"tools": [5]}},
        {"type": "allowed_tools", "allowed_tools": 5}, {"type": "function", "function": "f"},
        {"type": "function", "function": {"name": ["f"]}},
        {"type": "function", "function": {"name": "g"}},
    ],
    "chat_template_kwargs": [5, {"messages": []}, {"self": 1}],
    "response_format": ["x", {"type": "xml"}, {"type": "json_schema", "json_schema": {}}],
    "top_logprobs": [3],
    "add_special_tokens": [True],
    "continue_final_message": [True, 1],
}  # fmt: skip


@pytest.mark.parametrize("field", [*WRONG, *WRONG_CHAT])
def test_wrong_fields_are_refused_by_name(field: str) -> None:
    read, usual = (read_completion, COMPLETION) if field in WRONG else (read_chat, CHAT)
    for value in (WRONG | WRONG_CHAT)[field]:
        with pytest.raises(ApiError, match=field) as error:
            read({**usual, field: value})
        assert (error.value.status, error.value.body["error"]["param"]) == (400, field)
        assert "\n" not in str(error.value) and len(str(error.value)) < 200


def test_fields_that_exclude_each_other_are_refused() -> None:
    penalty = {"repeat_penalty": 1.1, "repeat_last_n": 64}
    for more in (penalty, {"stop_token_ids": [5], "ignore_eos": True}):
        with pytest.raises(ApiError, match="is not supported"):
            read_completion({**COMPLETION, **more})
    for more in ({"suffix": "y", "echo": True}, {"suffix": "y", "prompt": [5]}):
        with pytest.raises(ApiError, match="suffix"):
            read_completion({**COMPLETION, **more})
    with pytest.raises(ApiError, match="requires tools"):
        read_chat({"messages": CHAT["messages"], "tool_choice": "required"})
    with pytest.raises(ApiError, match="200 choices are too many"):
        read_completion({"prompt": ["x"] * 100, "n": 2})


def test_options_keep_their_names_and_null_is_the_default() -> None:
    """Names of other servers become ours; each choice has its own seed."""
    names = {"min_tokens": 3, "guided_regex": "a", "top_k": -1, "min_p": 0.1, "edits": {"embed": 1}}
    body = {"n": 2, "seed": -1 << 63, "temperature": None, "stop": None, **names}
    first, second = read_completion({**COMPLETION, **body}).frames
    assert first["options"] == {"min_new_tokens": 3, "regex": "a", "min_p": 0.1, "seed": 1 << 63,
                                "max_new_tokens": 16}  # fmt: skip
    assert second["options"]["seed"] == (1 << 63) + 1
