"""OpenAI's client gets what `LM.generate` returns: tokens, log-probabilities, tools, vectors."""

import asyncio
import base64
import dataclasses
import json
import re
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest

from jaxllm.models.invariance import make_invariant
from jaxllm.server.openai_responses import encode_json
from tests.server.conftest import NAMES
from tests.server.processes import RunningServer

PROMPT = "Once upon a time"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}, "big": {"type": "boolean"}},
    "required": ["color", "big"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "paint", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "wait", "parameters": {"type": "object",
     "properties": {}, "additionalProperties": False}}},
]  # fmt: skip


def test_answer_is_one_line_for_any_client() -> None:
    """Clients that split a stream by `str.splitlines` read whole events, whatever the text."""
    text = "".join(map(chr, [*range(0x500), *range(0x2000, 0x2100), 0x1F600]))
    line = encode_json({"text": text}).decode()
    assert line.splitlines() == [line] and json.loads(line) == {"text": text}


def post(server: RunningServer, path: str, body: Any) -> tuple[int, Any]:
    """Return status and JSON of a plain request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(server.url + path, data), timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def get(server: RunningServer, path: str) -> bytes:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(server.url + path, timeout=120) as answer:
        body: bytes = answer.read()
        return body


def test_answers_equal_generate_alone_and_in_crowd(client: Any, lm: Any) -> None:
    """A request's text is `LM.generate`'s for its seed, alone and among 15 others."""
    asked = [
        {"prompt": PROMPT, "seed": 7 + n, "max_tokens": 10 + n, "temperature": 0.5 + n / 10,
         "top_p": 0.9, "extra_body": {"top_k": 50, "min_p": 0.01}}
        for n in range(16)
    ]  # fmt: skip

    def ask(request: Any) -> Any:
        return client.completions.create(model="demo", logprobs=0, **request).choices[0]

    with ThreadPoolExecutor(16) as threads:
        crowd = list(threads.map(ask, asked))
    for request, found in zip(asked, crowd, strict=True):
        options = dict(request)
        extra = options.pop("extra_body")
        expected = lm.generate(
            options.pop("prompt"), max_new_tokens=options.pop("max_tokens"), **options, **extra
        )
        assert found.text == expected.text
        np.testing.assert_allclose(found.logprobs.token_logprobs, expected.logprobs, atol=1e-4)
    alone = ask(asked[3])
    assert alone == crowd[3]  # the log-probabilities too, bit by bit


def test_stream_equals_whole_answer(client: Any) -> None:
    """Texts and log-probabilities of a stream add up to the whole answer, for each choice."""
    request = {"model": "demo", "prompt": [PROMPT, "One day"], "n": 2, "seed": 5, "max_tokens": 9,
               "logprobs": 2}  # fmt: skip
    whole = client.completions.create(**request)
    chunks = list(
        client.completions.create(**request, stream=True, stream_options={"include_usage": True})
    )
    *chunks, last = chunks
    assert last.choices == [] and last.usage == whole.usage
    assert {chunk.usage for chunk in chunks} == {None}
    assert len({chunk.id for chunk in chunks}) == 1
    assert whole.usage.completion_tokens == 36
    for index, choice in enumerate(whole.choices):
        mine = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert "".join(c.text for c in mine) == choice.text
        assert [x for c in mine for x in c.logprobs.tokens] == choice.logprobs.tokens
        assert [x for c in mine for x in c.logprobs.token_logprobs] == pytest.approx(
            choice.logprobs.token_logprobs, abs=1e-4
        )
        assert [x for c in mine for x in c.logprobs.text_offset] == choice.logprobs.text_offset
        assert [c.finish_reason for c in mine] == [None] * (len(mine) - 1) + ["length"]
    assert whole.choices[0].index == 0 and whole.choices[0].text != whole.choices[1].text


def test_logprobs_are_those_of_generate(client: Any, lm: Any) -> None:
    """Both forms have the likeliest tokens of each step, best first."""
    expected = lm.generate(PROMPT, max_new_tokens=6, top_logprobs=3)
    text = client.completions.create(model="demo", prompt=PROMPT, temperature=0, max_tokens=6,
                                     logprobs=3)  # fmt: skip
    for shown, top in zip(
        text.choices[0].logprobs.top_logprobs, expected.top_logprobs, strict=True
    ):
        assert [*shown.values()] == pytest.approx([lp for _, lp in top], abs=1e-4)
    messages = [{"role": "user", "content": "Tell me"}]
    ids = lm.chat_prompt(messages)
    expected = lm.generate(ids, max_new_tokens=6, top_logprobs=2)
    request = {"model": "demo", "messages": messages, "max_tokens": 6, "temperature": 0,
               "logprobs": True, "top_logprobs": 2}  # fmt: skip
    whole = client.chat.completions.create(**request)
    content = whole.choices[0].logprobs.content
    assert [t.logprob for t in content] == pytest.approx(expected.logprobs, abs=1e-4)
    assert b"".join(bytes(t.bytes) for t in content).decode() == expected.text
    streamed = [
        t
        for chunk in client.chat.completions.create(**request, stream=True)
        if chunk.choices[0].logprobs
        for t in chunk.choices[0].logprobs.content
    ]
    assert streamed == content


def test_chat_equals_generate_of_template(client: Any, lm: Any) -> None:
    """Parts of a content are lines of one text, as in vLLM and llama.cpp."""
    messages = [{"role": "system", "content": "Be kind."},
                {"role": "user", "content": [{"type": "text", "text": "A"},
                                             {"type": "text", "text": "story"}]}]  # fmt: skip
    plain = [messages[0], {"role": "user", "content": "A\nstory"}]
    expected = lm.generate(lm.chat_prompt(plain), max_new_tokens=12).text
    request = {"model": "gpt-4o", "messages": messages, **GREEDY}
    whole = client.chat.completions.create(**request)
    assert whole.choices[0].message.content == expected
    assert whole.choices[0].message.role == "assistant"
    first, *middle, last = client.chat.completions.create(**request, stream=True)
    assert first.choices[0].delta.role == "assistant" and first.choices[0].delta.content is None
    assert "".join(c.choices[0].delta.content for c in middle) == expected
    assert last.choices[0].finish_reason == "length" and last.choices[0].delta.content is None


def test_assistant_prefill_is_continued(client: Any, lm: Any) -> None:
    messages = [{"role": "user", "content": "A story"},
                {"role": "assistant", "content": "Once upon"}]  # fmt: skip
    text = lm.tokenizer.decode(lm.chat_prompt(messages[:1]), skip_special=False)
    ids = lm.tokenizer.encode(text + "Once upon", parse_special=True)
    expected = lm.generate(ids, max_new_tokens=12).text
    found = client.chat.completions.create(
        model="demo", messages=messages, **GREEDY,
        extra_body={"add_generation_prompt": False, "continue_final_message": True},
    )  # fmt: skip
    assert found.choices[0].message.content == expected


def test_echo_scores_prompt(client: Any, lm: Any) -> None:
    """As lm-evaluation-harness asks: the prompt's log-probabilities, then one token."""
    ids = lm.encode("Once upon a time there was a zebra")
    found = client.completions.create(model="demo", prompt=[ids], max_tokens=1, temperature=0,
                                      logprobs=1, echo=True, seed=1)  # fmt: skip
    logprobs = found.choices[0].logprobs
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    np.testing.assert_array_equal(np.float32(logprobs.token_logprobs[1:-1]), lm.log_probs(ids))
    greedy = [lp == max(top.values()) for lp, top in
              zip(logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True)]  # fmt: skip
    likeliest = [lm.generate(ids[:t], max_new_tokens=1).tokens[0] for t in range(1, len(ids))]
    assert greedy == [*(a == b for a, b in zip(likeliest, ids[1:], strict=True)), True]
    assert False in greedy
    assert found.choices[0].text.startswith("Once upon a time there was a zebra")
    alone = client.completions.create(model="demo", prompt=[ids], max_tokens=0, echo=True)
    assert alone.choices[0].text == "Once upon a time there was a zebra"


def test_structured_answers_follow_schema(client: Any) -> None:
    for form in (
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
        {"type": "json_object", "schema": SCHEMA},
    ):
        found = client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "x"}], max_tokens=200, seed=2,
            response_format=form,
        )  # fmt: skip
        value = json.loads(found.choices[0].message.content)
        assert value["color"] in ("red", "blue") and isinstance(value["big"], bool)
    regex = {"structured_outputs": {"regex": "[ab]{4}"}}
    found = client.completions.create(model="demo", prompt="x", max_tokens=50, extra_body=regex)
    assert set(found.choices[0].text) <= set("ab") and len(found.choices[0].text) == 4


def test_tools_are_called(client: Any) -> None:
    """A forced call has the tool's arguments; a stream of it has the same."""
    request: dict[str, Any] = {
        "model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 300,
        "seed": 4, "tools": TOOLS,
    }  # fmt: skip
    whole = client.chat.completions.create(**request, tool_choice="required").choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.content is None
    (call,) = whole.message.tool_calls
    assert call.function.name in ("paint", "wait") and re.fullmatch("[0-9a-f]{9}", call.id)
    named: Any = {"type": "function", "function": {"name": "paint"}}
    *pieces, last = (
        chunk.choices[0]
        for chunk in client.chat.completions.create(**request, tool_choice=named, stream=True)
    )
    assert last.finish_reason == "tool_calls" and last.delta.tool_calls is None
    call, *rest = (call for piece in pieces for call in piece.delta.tool_calls or ())
    assert (call.function.name, call.function.arguments, call.index) == ("paint", "", 0)
    assert len(rest) > 1 and {(piece.index, piece.id) for piece in rest} == {(0, None)}
    call.function.arguments += "".join(piece.function.arguments for piece in rest)
    assert json.loads(call.function.arguments)["color"] in ("red", "blue")
    plain = client.chat.completions.create(**request, tool_choice="none")
    assert plain.choices[0].message.tool_calls is None
    answered = [*request["messages"],
                {"role": "assistant", "content": None, "tool_calls": [call.to_dict()]},
                {"role": "tool", "tool_call_id": call.id, "content": "done"}]  # fmt: skip
    assert client.chat.completions.create(**{**request, "messages": answered, "max_tokens": 3})


def test_stop_bias_and_seed(client: Any, lm: Any) -> None:
    whole = lm.generate(PROMPT, max_new_tokens=12).text
    stopped = client.completions.create(model="demo", prompt=PROMPT, stop=[whole[9:13]], **GREEDY)
    assert stopped.choices[0].text == whole[:9] and stopped.choices[0].finish_reason == "stop"
    pieces = client.completions.create(model="demo", prompt=PROMPT, stop=whole[9:13], **GREEDY,
                                       stream=True)  # fmt: skip
    assert "".join(piece.choices[0].text for piece in pieces) == whole[:9]
    token = lm.tokenizer.encode(" the")[0]
    biased = client.completions.create(model="demo", prompt=PROMPT, **GREEDY,
                                       logit_bias={str(token): 100})  # fmt: skip
    assert biased.choices[0].text == lm.decode([token] * 12)
    one, two = (client.completions.create(model="demo", prompt=PROMPT, max_tokens=12).choices[0]
                for _ in range(2))  # fmt: skip
    assert one.text != two.text  # no seed: another text each time


def test_async_client_streams(server: RunningServer, lm: Any) -> None:
    async def run() -> list[str]:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

        async def read(n: int) -> str:
            stream = await client.completions.create(
                model="demo", prompt=PROMPT, seed=n, max_tokens=9, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        async with client:
            return await asyncio.gather(*map(read, range(6)))

    for n, text in enumerate(asyncio.run(run())):
        assert text == lm.generate(PROMPT, max_new_tokens=9, seed=n, temperature=1.0).text


def test_embeddings_equal_embed(client: Any, server: RunningServer, lm: Any) -> None:
    texts = ["One day", "The little cat sat", "One day"]
    served = dataclasses.replace(lm, model=make_invariant(lm.model))
    expected = served.embed(texts, normalize=True)
    found = client.embeddings.create(model="demo", input=texts)  # asks for base64
    np.testing.assert_allclose([item.embedding for item in found.data], expected, rtol=1e-6)
    _, plain = post(server, "/v1/embeddings", {"input": [lm.encode(t) for t in texts]})
    np.testing.assert_array_equal(
        np.float32([item["embedding"] for item in plain["data"]]), expected
    )
    _, packed = post(server, "/embeddings", {"input": "One day", "encoding_format": "base64"})
    vector = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(np.linalg.norm(vector), 1, rtol=1e-6)
    short = client.embeddings.create(model="demo", input="One day", dimensions=5)
    first = vector[:5] / np.linalg.norm(vector[:5])
    np.testing.assert_allclose(short.data[0].embedding, first, rtol=1e-5)
    status, ranked = post(server, "/rerank", {"query": "One day", "documents": texts[1::-1]})
    assert status == 200 and [r["index"] for r in ranked["results"]] == [1, 0]
    assert ranked["results"][0]["relevance_score"] == pytest.approx(1, abs=1e-5)


def test_tokens_and_models(client: Any, server: RunningServer, lm: Any) -> None:
    _, found = post(server, "/tokenize", {"prompt": PROMPT})
    assert found["tokens"] == lm.encode(PROMPT) and found["count"] == len(found["tokens"])
    _, found = post(server, "/tokenize", {"content": PROMPT, "with_pieces": True})
    assert "".join(token["piece"] for token in found["tokens"]) == " " + PROMPT or PROMPT
    ids = [token["id"] for token in found["tokens"]]
    assert post(server, "/detokenize", {"tokens": ids})[1]["content"].strip() == PROMPT
    messages = [{"role": "user", "content": "x"}]
    _, found = post(server, "/tokenize", {"messages": messages})
    assert found["tokens"] == lm.chat_prompt(messages)
    _, found = post(server, "/apply-template", {"messages": messages})
    assert lm.tokenizer.encode(found["prompt"], parse_special=True) == lm.chat_prompt(messages)
    assert [model.id for model in client.models.list()] == [*NAMES]
    assert client.models.retrieve("gpt-4o").id == "gpt-4o"
    info = json.loads(get(server, "/tokenizer_info"))
    assert info["bos_token"] and info["chat_template"] == lm.chat_template.source
    assert json.loads(get(server, "/health")) == {"status": "ok"}
    assert json.loads(get(server, "/version"))["version"]
    props = json.loads(get(server, "/props"))
    assert (props["total_slots"], props["chat_template"]) == (16, lm.chat_template.source)
    assert props["default_generation_settings"]["n_ctx"] == 512 and props["model_alias"] == "demo"
    metrics = get(server, "/metrics").decode()
    assert 'jaxllm:num_requests_running{model_name="demo"} 0.0' in metrics
    assert "jaxllm:time_to_first_token_seconds_bucket" in metrics


CHAT = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/completions", {}, 400, "prompt must be"),
        ("/v1/completions", b"{", 400, "not valid JSON"),
        ("/v1/completions", b"[1]", 400, "must be a JSON object"),
        ("/v1/completions", b'{"prompt": "\\ud800"}', 400, "not valid JSON"),
        ("/v1/completions", {"prompt": "x", "n": 100}, 400, "expected at most"),
        ("/v1/completions", {"prompt": "x" * 3000}, 400, "do not fit"),
        ("/v1/completions", {"prompt": "x", "n": 1000}, 400, "n must be"),
        ("/v1/completions", {"prompt": "x", "model": "other"}, 404, "demo, gpt-4o, demo:llama"),
        ("/v1/completions", {"prompt": [99999]}, 400, "outside the vocabulary"),
        ("/v1/completions", {"prompt": "x", "regex": "("}, 400, "unterminated"),
        ("/v1/completions", {"prompt": "x", "min_p": 7}, 400, "min_p"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages must be"),
        ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_schema",
         "json_schema": {"schema": {"type": "nothing"}}}}, 400, "nothing"),
        ("/v1/embeddings", {"input": []}, 400, "input must be"),
        ("/v1/embeddings", {"input": "x", "dimensions": 5000}, 400, "dimensions"),
        ("/v1/completions", {"prompt": "x", "suffix": "y"}, 400, "no tokens for filling in"),
        ("/rerank", {"query": "x", "documents": []}, 400, "documents must be"),
        ("/tokenize", {"text": "x"}, 400, "prompt (or content)"),
        ("/detokenize", {"tokens": [99999]}, 400, "outside the vocabulary"),
        ("/v1/nothing", {}, 404, "/v1/nothing"),
        ("/health", {}, 405, "Method Not Allowed"),
    ],
)  # fmt: skip
def test_bad_requests_get_openai_errors(
    server: RunningServer, path: str, body: Any, status: int, message: str
) -> None:
    """Status, OpenAI's four fields and the reason; also as the first answer to a stream."""
    bodies = [body, {**body, "stream": True}] if isinstance(body, dict) and body else [body]
    for asked in bodies:
        found, answer = post(server, path, asked)
        assert (found, message in answer["error"]["message"]) == (status, True), answer
        assert {"message", "type", "param", "code"} <= answer["error"].keys()
