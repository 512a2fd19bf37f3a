"""lm-evaluation-harness's `local-completions` client gets the numbers of our own harness."""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jaxllm.evaluate.lm_eval import JaxLM
from tests.server.processes import start_server

pytestmark = pytest.mark.full
WORDS = ["Once", "upon", "a", "time", "there", "was", "girl", "Lily", "who", "saw", "ball", "."]
DOCUMENTS = 50


class Request(NamedTuple):
    args: tuple[Any, ...]


def make_pairs() -> list[tuple[str, str]]:
    """Return contexts and continuations; the first three are those that tokenizers differ on."""
    random_words = random.Random(1)

    def draw(low: int, high: int) -> str:
        return " ".join(random_words.choices(WORDS, k=random_words.randint(low, high)))

    pairs = [("Once upon a time, there was a", " little girl"), ("", "Once"), ("Once upon a ", "t")]
    return pairs + [(draw(3, 60), f" {draw(1, 8)}") for _ in range(DOCUMENTS - len(pairs))]


def test_client_scores_equal_harness_exactly(
    data: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-likelihoods are equal float by float, whatever the client's batch, as are greedy flags.

    Continuations are equal but for the leading space, which the harness's decoding drops.
    """
    models = pytest.importorskip(
        "lm_eval.models.openai_completions", reason="lm_eval is not installed"
    )
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setitem(os.environ, "no_proxy", "*")
    directory = str(data("stories260K"))
    asked: Any = [Request(pair) for pair in make_pairs()]
    # The server scores each prompt in a batch of its own; the remote tokenizer adds no bos token.
    harness = JaxLM(directory, batch_size=1, add_bos_token=False)
    options = {"until": ["."], "max_gen_toks": 16}
    prompts: Any = [Request((context or "One day", options)) for context, _ in make_pairs()]
    expected = harness.loglikelihood(asked, disable_tqdm=True)
    texts = harness.generate_until(prompts, disable_tqdm=True)
    assert {greedy for _, greedy in expected} == {True, False}
    with start_server("--name", "stories", model=directory) as server:
        for batch, concurrent in ((1, 1), (4, 3)):
            client = models.LocalCompletionsAPI(
                base_url=f"{server.url}/v1/completions", model="stories", max_length=512,
                batch_size=batch, num_concurrent=concurrent,
            )  # fmt: skip
            assert client.tokenizer_backend == "remote"
            assert [tuple(found) for found in client.loglikelihood(asked)] == expected
        assert [text.removeprefix(" ") for text in client.generate_until(prompts)] == texts
