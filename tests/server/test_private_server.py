"""A server on a Unix socket with keys, an adapter and a public prefix: who shares what."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest

import jaxllm
from jaxllm.adapters import LoraConfig, write_adapter
from tests.adapters.random_adapters import random_adapter
from tests.server.processes import start_server

KEYS = ("alpha-1", "beta-2")
TALE = "Once upon a time there was a girl. She had a red ball and a small dog. " * 12
RULES = "Be brief. Tell stories of animals. Never talk about the sea. " * 14


class Private(NamedTuple):
    """The server's socket, and a model with its adapter."""

    socket: str
    lm: Any

    @contextlib.contextmanager
    def client(self, key: str) -> Iterator[Any]:
        transport = httpx.HTTPTransport(uds=self.socket)
        with openai.OpenAI(
            base_url="http://localhost/v1", api_key=key, max_retries=0,
            http_client=httpx.Client(transport=transport, trust_env=False),
        ) as client:  # fmt: skip
            yield client

    def ask(self, prompt: str, key: str = KEYS[0], model: str = "demo:llama") -> Any:
        with self.client(key) as client:
            return client.completions.create(
                model=model, prompt=prompt, max_tokens=6, temperature=0, logprobs=2
            )


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory, lm: Any, shallow: Any) -> Iterator[Private]:
    folder: Path = tmp_path_factory.mktemp("private")
    made = random_adapter(lm.config, lm.params, LoraConfig(r=2, target_modules="all-linear"))
    write_adapter(folder / "style", made, lm.config)
    (folder / "keys").write_text(f"# of the tests\n{KEYS[0]}\n\n{KEYS[1]} # the second\n")
    (folder / "rules").write_text(RULES)
    with start_server(
        "--unix", str(folder / "s"), "--adapter", f"style={folder / 'style'}",
        "--api-key-file", str(folder / "keys"), "--public-prefix", str(folder / "rules"),
        "--rows", "2", "--draft", "lookup", "--draft-tokens", "3", "--name", "demo:llama",
        model=str(shallow("llama")),
    ) as running:  # fmt: skip
        assert running.url == f"unix:{folder / 's'}"
        both = jaxllm.load(shallow("llama"), adapters={"style": folder / "style"})
        yield Private(str(folder / "s"), both)
    assert not (folder / "s").exists()


def cached(answer: Any) -> int:
    tokens: int = answer.usage.prompt_tokens_details.cached_tokens
    return tokens


def test_cached_prompt_keeps_bits_and_stays_with_its_key(private: Private) -> None:
    """The second answer runs few tokens of the prompt and has the same log-probabilities."""
    first, again = private.ask(TALE), private.ask(TALE)
    assert cached(first) == 1 and cached(again) >= 128  # the public prefix begins with it too
    assert again.choices == first.choices
    other = private.ask(TALE, KEYS[1])
    assert cached(other) == 1
    assert other.choices == first.choices
    assert private.ask(TALE, model="style").usage.prompt_tokens_details.cached_tokens == 0


def test_metrics_count_drafts(private: Private) -> None:
    """A text that repeats itself is drafted; it is that of a model without a draft."""
    options: dict[str, Any] = {"regex": "(One day, a cat. ){40}", "seed": 1}
    with private.client(KEYS[0]) as client:
        answer = client.completions.create(
            model="demo:llama", prompt="Once", max_tokens=40, logprobs=2, extra_body=options
        )
    request = {"prompt": "Once", "max_new_tokens": 40, "temperature": 1.0, "adapter": "base"}
    [(_, alone)] = private.lm.serve([{**request, **options}])
    assert answer.choices[0].text == alone.text
    assert answer.choices[0].logprobs.token_logprobs == alone.logprobs
    transport = httpx.HTTPTransport(uds=private.socket)
    with httpx.Client(transport=transport, trust_env=False) as client:
        headers = {"X-Api-Key": KEYS[0]}
        page = client.get("http://localhost/metrics", headers=headers).text
    counts = {
        name: float(re.search(rf"^jaxllm:spec_decode_num_{name}_total{{.*}} (.*)$", page, re.M)[1])
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    }
    assert 0 < counts["accepted_tokens"] <= counts["draft_tokens"] <= 3 * counts["drafts"]


def test_public_prefix_is_shared_between_keys(private: Private) -> None:
    first = private.ask(RULES + "A cat")
    assert cached(first) >= 128
    assert cached(private.ask(RULES + "A dog", KEYS[1])) >= 128
    assert (
        private.ask(RULES + "A cat", model="style").usage.prompt_tokens_details.cached_tokens == 0
    )


def test_adapter_is_a_model(private: Private) -> None:
    with private.client(KEYS[0]) as client:
        assert [model.id for model in client.models.list()] == ["demo:llama", "style"]
    texts = {}
    for name, adapter in (("demo:llama", "base"), ("style", "style")):
        texts[name] = private.ask("One day", model=name).choices[0].text
        expected = private.lm.generate("One day", max_new_tokens=6, adapter=adapter).text
        assert texts[name] == expected
    assert texts["style"] != texts["demo:llama"]
