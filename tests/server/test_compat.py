"""Spellings of other servers and clients: what they ask in their own words gets an answer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxllm
from tests.server.processes import RunningServer, start_server
from tests.server.test_openai import TOOLS, get, post
from tests.test_heads import (
    DOCUMENTS,
    LAST,
    QUERY,
    save_classifier,
    write_sentence_transformers,
    write_tokenizer,
)

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Tell me"}], "seed": 3}
TEXTS = ["One day", "Once upon a time"]


def test_forced_calls_are_compact(server: RunningServer) -> None:
    """A forced call spends no tokens on spaces, and comes before the form of a plain answer."""
    form = {"type": "json_schema", "json_schema": {"schema": {"const": "plain"}}}
    body = {**CHAT, "max_tokens": 60, "tools": TOOLS, "tool_choice": "required", "logprobs": True}
    for seed in range(4):
        status, found = post(
            server, "/v1/chat/completions", {**body, "seed": seed, "response_format": form}
        )
        assert status == 200, found
        (choice,) = found["choices"]
        (call,) = choice["message"]["tool_calls"]
        text = b"".join(bytes(token["bytes"]) for token in choice["logprobs"]["content"]).decode()
        whole = {"name": call["function"]["name"],
                 "arguments": json.loads(call["function"]["arguments"])}  # fmt: skip
        assert text.removesuffix("<|eos|>") == json.dumps(whole)


def test_rerank_answers_in_form_of_request(server: RunningServer) -> None:
    """`texts` is text-embeddings-inference's field, whose answer is a list of scores."""
    _, ours = post(server, "/rerank", {"query": "One day", "documents": TEXTS})
    asked = {"query": "One day", "texts": TEXTS}
    status, theirs = post(server, "/rerank", asked)
    assert status == 200
    assert theirs == [{"index": r["index"], "score": r["relevance_score"]} for r in ours["results"]]
    _, best = post(server, "/rerank", {**asked, "top_n": 1, "return_text": True})
    assert best == [{**theirs[0], "text": TEXTS[0]}]


def test_rerank_refuses_other_methods(server: RunningServer) -> None:
    """A request asks for its method; what the model or the server lacks is one line, status 400."""
    asked = {"query": "One day", "documents": TEXTS}
    for method, message in (
        ("best", "method must be yes-no, score or cosine"),
        ("score", "needs a score head of one label, there are 0"),
        ("yes-no", "no special token <|im_"),
        (5, "method must be"),
    ):
        status, found = post(server, "/rerank", {**asked, "method": method})
        assert status == 400 and message in found["error"]["message"], found
        assert "\n" not in found["error"]["message"]
    status, found = post(server, "/v1/embeddings", {"input": "x", "prompt_name": "query"})
    assert status == 400 and "has no prompt 'query'" in found["error"]["message"]


@pytest.mark.more
def test_server_of_a_reward_model_ranks_by_its_head(tmp_path: Path) -> None:
    """It ranks by its head, or by `--rerank`, and embeds as `LM` does; it refuses to generate."""
    size = {"vocab_size": 340, "max_position_embeddings": 512, "num_hidden_layers": 1}
    save_classifier(tmp_path, "qwen3", num_labels=1, pad_token_id=0, **size)
    write_tokenizer(tmp_path)
    write_sentence_transformers(tmp_path, LAST, "Normalize")
    lm = jaxllm.load(tmp_path)
    with start_server("--rerank", "cosine", model=str(tmp_path)) as running:
        asked = {"query": QUERY, "documents": DOCUMENTS, "instruction": "Find it"}
        for method in ("score", "cosine"):
            body = {**asked, "method": method} if method == "score" else asked
            status, found = post(running, "/rerank", body)
            assert status == 200
            scores = {r["index"]: r["relevance_score"] for r in found["results"]}
            expected = lm.rerank(QUERY, DOCUMENTS, method=method, instruction="Find it")
            np.testing.assert_allclose([scores[i] for i in range(3)], expected, rtol=1e-4)
            assert [*scores.values()] == sorted(scores.values(), reverse=True)
        _, found = post(running, "/v1/embeddings", {"input": [QUERY], "prompt_name": "query"})
        vector = lm.embed([QUERY], prompt_name="query")[0]
        np.testing.assert_allclose(found["data"][0]["embedding"], vector, rtol=1e-4, atol=1e-5)
        status, found = post(running, "/v1/completions", {"prompt": "x"})
        assert status == 400 and "predicts no tokens" in found["error"]["message"]


def test_conversations_are_counted(server: RunningServer) -> None:
    status, found = post(server, "/v1/chat/completions/input_tokens", CHAT)
    _, whole = post(server, "/v1/chat/completions", {**CHAT, "max_tokens": 1})
    assert (status, found["input_tokens"]) == (200, whole["usage"]["prompt_tokens"])


def test_timings_add_up(server: RunningServer) -> None:
    """An answer with one choice has llama.cpp's `timings`; a stream has them beside the usage."""
    body = {"prompt": "One day", "max_tokens": 5, "temperature": 0}
    _, whole = post(server, "/v1/completions", body)
    timings, used = whole["timings"], whole["usage"]
    assert timings["predicted_n"] == used["completion_tokens"] == 5
    assert timings["cache_n"] + timings["prompt_n"] == used["prompt_tokens"]
    assert timings["predicted_per_second"] == pytest.approx(4e3 / timings["predicted_ms"])
    assert timings["prompt_ms"] > 0
    _, several = post(server, "/v1/completions", {**body, "n": 2})
    assert "timings" not in several


def test_two_answers_at_end_are_refused(server: RunningServer) -> None:
    """Which of the two goes on is unclear, so the client must choose."""
    answers = [{"role": "assistant", "content": "Once"}, {"role": "assistant", "content": "upon"}]
    body = {"messages": CHAT["messages"] + answers, "max_tokens": 2}
    status, found = post(server, "/v1/chat/completions", body)
    assert status == 400 and "two of the assistant" in found["error"]["message"]
    assert post(server, "/v1/chat/completions", {**body, "add_generation_prompt": True})[0] == 200


def test_template_gets_reasoning_effort(tmp_path: Path) -> None:
    """OpenAI's field is a variable of the template; a capacity beyond the context is cut to it."""
    template = tmp_path / "chat.jinja"
    template.write_text("{{ reasoning_effort or 'no' }} {{ enable_thinking or 'off' }}", "utf-8")
    with start_server(
        "--chat-template", str(template), "--rows", "1", "--capacity", "4096"
    ) as server:
        body = {**CHAT, "add_generation_prompt": True}
        assert post(server, "/apply-template", body)[1]["prompt"] == "no off"
        asked = {**body, "reasoning_effort": "high"}
        asked["chat_template_kwargs"] = {"enable_thinking": "on"}
        assert post(server, "/apply-template", asked)[1]["prompt"] == "high on"
        assert json.loads(get(server, "/v1/models"))["data"][0]["max_model_len"] == 512
        status, found = post(server, "/v1/completions", {"prompt": "x", "max_tokens": 600})
        assert status == 400 and found["error"]["n_ctx"] == 512
        ends = post(server, "/v1/chat/completions", {**CHAT, "seed": 1, "ignore_eos": True})[1]
        assert ends["usage"]["total_tokens"] == 512


def test_adapters_by_number_are_refused(server: RunningServer) -> None:
    """llama.cpp's `lora` would change the answer, so it is not ignored."""
    body = {"prompt": "x", "lora": [{"id": 0, "scale": 0.5}]}
    status, found = post(server, "/v1/completions", body)
    assert status == 501 and "chooses the adapter" in found["error"]["message"]
