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
    _, first = post(server, "/v1/responses", {"input": "Tell me", "max_output_tokens": 1})
    asked = {"input": "More", "instructions": "Be kind.", "previous_response_id": first["id"]}
    status, found = post(server, "/v1/responses/input_tokens", asked)
    _, whole = post(server, "/v1/responses", {**asked, "max_output_tokens": 1})
    count = whole["usage"]["input_tokens"]
    assert (status, found) == (200, {"object": "response.input_tokens", "input_tokens": count})


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


def test_fields_of_other_servers_are_honored(server: RunningServer, lm: Any) -> None:
    """vLLM's and llama.cpp's fields mean what they mean there (their documentation)."""
    greedy = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0,
              "return_token_ids": True}  # fmt: skip

    def ask(**fields: Any) -> tuple[Any, Any]:
        status, found = post(server, "/v1/completions", {**greedy, **fields})
        assert status == 200, found
        return found["choices"][0], found["usage"]

    plain = ask()[0]["token_ids"]
    end = next(i for i in range(1, 8) if plain[i] not in plain[:i])
    stopped = ask(stop_token_ids=[plain[end]])[0]
    assert (stopped["token_ids"], stopped["finish_reason"]) == (plain[: end + 1], "stop")
    word = lm.decode(plain[:1]).strip()
    assert plain[0] not in ask(bad_words=[word])[0]["token_ids"]
    assert ask(truncate_prompt_tokens=3)[1]["prompt_tokens"] == 3
    for limit in ({"max_tokens": None, "n_predict": 3}, {"max_tokens": None, "max_new_tokens": 3}):
        assert len(ask(**limit)[0]["token_ids"]) == 3
    for limit in ({"max_tokens": -1}, {"max_tokens": 32_000}):  # the context's, 512
        assert ask(prompt=[5] * 508, ignore_eos=True, **limit)[1]["total_tokens"] == 512
    drawn = {"temperature": 1.5, "seed": 7}
    assert ask(**drawn, top_k=-1)[0] == ask(**drawn)[0]


def test_prompts_name_special_tokens(server: RunningServer, lm: Any) -> None:
    """A text's special tokens are read as /tokenize, vLLM and llama.cpp read them."""
    text = "<|eos|>Once upon"
    _, found = post(server, "/tokenize", {"prompt": text})
    assert found["tokens"][:2] == [lm.tokenizer.bos_id, lm.tokenizer.eos_id]
    body = {"prompt": text, "max_tokens": 1}
    for adds, count in ((True, found["count"]), (False, found["count"] - 1)):
        asked = {**body, "add_special_tokens": adds}
        _, answer = post(server, "/v1/completions", asked)
        assert answer["usage"]["prompt_tokens"] == count


def test_text_offsets_index_the_text(server: RunningServer) -> None:
    """A token begins at its text; special ones have none, parts of a character begin with it."""
    echo = {"prompt": "Once", "max_tokens": 0, "echo": True, "logprobs": 0}
    _, found = post(server, "/v1/completions", echo)
    logprobs = found["choices"][0]["logprobs"]
    assert (logprobs["tokens"], logprobs["text_offset"]) == (["<|bos|>", "Once"], [0, 0])
    body = {"prompt": "Once", "regex": "早😊 a", "logprobs": 1, "max_tokens": 20}
    (choice,) = post(server, "/v1/completions", body)[1]["choices"]
    text, logprobs = choice["text"], choice["logprobs"]
    assert text == "早😊 a"
    parts = [(t, at) for t, at in zip(logprobs["tokens"], logprobs["text_offset"], strict=True)]
    offsets = [at for _, at in parts]
    assert offsets == sorted(offsets) and max(offsets) <= len(text)
    whole = [(t, at) for t, at in parts if "\ufffd" not in t and not t.startswith("<|")]
    assert whole and all(text.startswith(t, at) for t, at in whole)
    assert {at for t, at in parts if "\ufffd" in t} == {0, 1}


def test_two_answers_at_end_are_refused(server: RunningServer) -> None:
    """Which of the two goes on is unclear, so the client must choose."""
    answers = [{"role": "assistant", "content": "Once"}, {"role": "assistant", "content": "upon"}]
    body = {"messages": CHAT["messages"] + answers, "max_tokens": 2}
    status, found = post(server, "/v1/chat/completions", body)
    assert status == 400 and "two of the assistant" in found["error"]["message"]
    assert post(server, "/v1/chat/completions", {**body, "add_generation_prompt": True})[0] == 200


def test_template_gets_reasoning_effort(tmp_path: Path, shallow: Any) -> None:
    """OpenAI's field is a variable of the template; a capacity beyond the context is cut to it."""
    template = tmp_path / "chat.jinja"
    template.write_text("{{ reasoning_effort or 'no' }} {{ enable_thinking or 'off' }}", "utf-8")
    with start_server(
        "--chat-template",
        str(template),
        "--rows",
        "1",
        "--capacity",
        "4096",
        model=str(shallow("llama")),
    ) as server:
        body = {**CHAT, "add_generation_prompt": True}
        assert post(server, "/apply-template", body)[1]["prompt"] == "no off"
        asked = {**body, "reasoning_effort": "high"}
        asked["chat_template_kwargs"] = {"enable_thinking": "on"}
        assert post(server, "/apply-template", asked)[1]["prompt"] == "high on"
        assert json.loads(get(server, "/v1/models"))["data"][0]["max_model_len"] == 512
        status, found = post(server, "/v1/completions", {"prompt": [5] * 512})
        assert status == 400 and found["error"]["n_ctx"] == 512
        ends = post(server, "/v1/chat/completions", {**CHAT, "seed": 1, "ignore_eos": True})[1]
        assert ends["usage"]["total_tokens"] == 512
