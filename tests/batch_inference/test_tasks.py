"""Each row's answer equals that of the model alone; rows that fail have an error."""

import io
import json
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest

import jaxllm
from jaxllm.batch_inference.rows import BatchRow, parse_lines
from jaxllm.batch_inference.tasks import Answer, BatchJob, answer_rows, row_seed
from jaxllm.errors import ConfigError, SamplingError
from jaxllm.generation import embeddings

LINES = [
    '{"prompt": [5], "id": 1}',
    '{"prompt": [6]}',  # id 2 by default
    "[" * 100_000,
    '{"prompt": [5], "seed": ' + "9" * 5000 + "}",
    '{"prompt": [5], "id": [1]}',
    '{"prompt": [5], "stop_strings": 5}',
    '{"prompt": [5], "eos_token_id": 1.5}',
    '{"prompt": [5], "eos_token_id": "12"}',
    '{"prompt": [5], "num_return_sequences": 1000000000}',
    '{"prompt": [5], "max_new_tokens": 1e300}',
    '{"prompt": [5], "cache": {}}',
    '{"prompt": [5], "overflow": []}',
    '{"prompt": [1000000000000000000000000000000]}',
    '{"prompt": {"a": 1}}',
    '{"prompt": [5], "is_cancelled": true}',
    '{"prompt": [5], "on_text": true}',
    '{"prompt": [5], "seed": "random"}',
    '{"prompt": "\\ud800"}',
    "null",
    "5",
    "",
    "[7, 8]",
]


@pytest.fixture(scope="module")
def lm(model: Any) -> Any:
    return jaxllm.load(model)


def answer(
    lm: Any, lines: Iterable[str], task: str = "generate", batch_size: int = 2, **options: Any
) -> list[tuple[BatchRow, Answer]]:
    if task == "generate":
        options = {"max_new_tokens": 3, **options}
    job = BatchJob(task=task, options=options, batch_size=batch_size)
    return list(answer_rows(lm, job, parse_lines(io.BytesIO("\n".join(lines).encode()))))


def test_invalid_row_leaves_other_rows_unaffected(lm: Any) -> None:
    """Each invalid row gets an error, and all other rows equal single requests."""
    found = answer(lm, LINES)
    assert sorted(row.line for row, _ in found) == [*range(1, 21), 22]
    answered = {row.line: (row.id, x["tokens"]) for row, x in found if "error" not in x}
    assert set(answered) == {1, 2, 5, 22}
    for line, prompt, name in ((1, [5], 1), (2, [6], 2), (5, [5], [1]), (22, [7, 8], 22)):
        assert answered[line] == (name, lm.generate(prompt, max_new_tokens=3).tokens)


def test_row_seed_derives_from_id_unless_given(lm: Any) -> None:
    """A row samples with the seed derived from its id, or with its own seed field."""
    lines = ['{"prompt": [5], "id": "a"}', '{"prompt": [5]}', '{"prompt": [5], "seed": 7}']
    found = answer(lm, lines, max_new_tokens=5, temperature=1.5, seed=3)
    seeds = {row.line: x["seed"] for row, x in found}
    assert seeds == {1: row_seed(3, "a"), 2: row_seed(3, 2), 3: 7}
    assert len({row_seed(3, 1), row_seed(3, "1"), row_seed(4, 1), row_seed(31, None)}) == 4
    for _, x in found:
        single = lm.generate([5], max_new_tokens=5, temperature=1.5, seed=x["seed"])
        assert x["tokens"] == single.tokens


def test_rows_are_read_as_others_finish(lm: Any) -> None:
    """A short row is answered before a long one, and few rows are read ahead."""
    read = 0

    def rows() -> Iterator[BatchRow]:
        nonlocal read
        for line in range(1, 41):
            read += 1
            yield BatchRow(line, line, {"prompt": [5], "max_new_tokens": 30 if line == 1 else 2})

    answers = answer_rows(lm, BatchJob(task="generate", options={}, batch_size=2), rows())
    order = [next(answers)[0].line]
    assert read <= 4
    order += [row.line for row, _ in answers]
    assert order[0] == 2
    assert order.index(1) > 5
    assert sorted(order) == [*range(1, 41)]


def test_score_and_embed_equal_model_results(lm: Any) -> None:
    """Batch scores and embeddings equal log_probs and embed, and invalid rows get an error."""
    texts = [[5, 6, 7], [8], [9] * 12, [10**6]]
    lines = [json.dumps(text) for text in texts]
    scored = [x for _, x in answer(lm, lines, "score")]
    assert [x.get("tokens") for x in scored[:3]] == texts[:3]
    for x, text in zip(scored[:3], texts, strict=False):
        np.testing.assert_allclose(np.float32(x["logprobs"]), lm.log_probs(text), atol=1e-6)
        assert x["logprob"] == pytest.approx(lm.log_probs(text).sum(), abs=1e-5)
    options: dict[str, Any] = {"layer": 1, "pooling": "last", "normalize": True}
    embedded = [x for _, x in answer(lm, lines, "embed", **options)]
    expected = lm.embed(texts[:3], **options)
    np.testing.assert_allclose(
        np.float32([x["embedding"] for x in embedded[:3]]), expected, atol=1e-6
    )
    assert "vocabulary" in scored[3]["error"] and "vocabulary" in embedded[3]["error"]


def test_rows_of_text_tasks_have_own_options(lm: Any) -> None:
    """A row's options override the job's; an invalid one fails this row alone."""
    lines = [
        "[5, 6]",
        '{"prompt": [5, 6], "layer": 0}',
        '{"prompt": [5, 6], "temperature": 1}',
        "{",
    ]
    found = {row.line: x for row, x in answer(lm, lines, "embed", layer=1)}
    for line, layer in ((1, 1), (2, 0)):
        assert np.array_equal(
            np.float32(found[line]["embedding"]), lm.embed([[5, 6]], layer=layer)[0]
        )
    assert "embed has no option temperature" in found[3]["error"]
    assert "line 4 is not valid JSON" in found[4]["error"]


def test_scoring_buckets_lengths_into_few_programs(lm: Any) -> None:
    """Scoring 40 texts of 1 to 30 tokens compiles three shapes at most; each equals log_probs."""
    texts = [[(7 * n + i) % 100 for i in range(1 + n % 30)] for n in range(40)]
    before = embeddings._log_probs._cache_size()
    found = answer(lm, map(json.dumps, texts), "score", batch_size=8)
    assert embeddings._log_probs._cache_size() - before <= 3  # 8 rows of 8, 16 and 32 columns
    for (_, x), text in zip(found, texts, strict=True):
        np.testing.assert_allclose(np.float32(x["logprobs"]), lm.log_probs(text), rtol=0, atol=1e-5)


def test_invalid_job_options_are_refused_before_running(lm: Any) -> None:
    """Options that no row could use raise an error before any row runs."""
    for task, options, message in (
        ("scores", {}, "generate, score, embed, classify: got 'scores': did you mean score"),
        ("embed", {"pool": "mean"}, "embed has no option pool"),
        ("embed", {"pooling": "max"}, "pooling must be one of"),
        ("score", {"adapter": "none"}, "none"),
        ("generate", {"adapter": "none"}, "none"),
        ("classify", {}, "no score head"),
    ):
        with pytest.raises(ConfigError, match=message):
            answer(lm, ["[5]"], task, **options)
    with pytest.raises(SamplingError, match="seed must be a number"):
        answer(lm, ["[5]"], seed="random")
