"""Input and output rows as JSON lines and Parquet; unreadable rows get an error in place."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import jaxllm
from jaxllm.batch_inference.job import BatchJob, row_seed
from jaxllm.batch_inference.processes import InProcessWorkers
from jaxllm.batch_inference.rows import Row, read_lines, read_rows
from jaxllm.batch_inference.runner import run_job, stream
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.files import split_lines
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
def lm(model: Path) -> Any:
    return jaxllm.load(model)


def job(task: str = "generate", **changes: Any) -> BatchJob:
    options = {"max_new_tokens": 3} if task == "generate" else {}
    return BatchJob(**{"task": task, "options": options, "rows": 2, "group": 8, **changes})


def test_invalid_line_leaves_other_rows_unaffected(lm: Any) -> None:
    """Each unreadable line gets an error in its place, and all other rows equal single requests."""
    found = list(stream(read_lines(LINES), job(), InProcessWorkers(lambda: lm)))
    assert [a["line"] for a in found] == [*range(1, 21), 22]
    answered = {a["line"]: a for a in found if "error" not in a}
    assert set(answered) == {1, 2, 5, 22}
    for line, prompt, name in ((1, [5], 1), (2, [6], 2), (5, [5], [1]), (22, [7, 8], 22)):
        assert answered[line]["tokens"] == lm.generate(prompt, max_new_tokens=3).tokens
        assert answered[line]["id"] == name


def test_row_seed_derives_from_id_unless_given(lm: Any) -> None:
    """A row samples with the seed derived from its id, or with its own seed field."""
    lines = ['{"prompt": [5], "id": "a"}', '{"prompt": [5]}', '{"prompt": [5], "seed": 7}']
    options = {"max_new_tokens": 5, "temperature": 1.5, "seed": 3}
    found = list(stream(read_lines(lines), job(options=options), InProcessWorkers(lambda: lm)))
    assert [a["seed"] for a in found] == [row_seed(3, "a"), row_seed(3, 2), 7]
    assert len({row_seed(3, 1), row_seed(3, "1"), row_seed(4, 1), row_seed(31, None)}) == 4
    for a in found:
        single = lm.generate([5], max_new_tokens=5, temperature=1.5, seed=a["seed"])
        assert a["tokens"] == single.tokens


SEPARATORS = "\u2028\u2029\x85\v\f"


def test_rows_end_at_line_feeds_only(tmp_path: Path) -> None:
    """Unicode separators that JSON strings may contain unescaped do not end a row."""
    texts = [f"one{c}two" for c in "\u2028\u2029\x85"]
    lines = [json.dumps(text, ensure_ascii=False) for text in texts]
    assert split_lines(f"a{SEPARATORS}b\r\nc\n") == [f"a{SEPARATORS}b", "c"]
    for end in ("\n", "\r\n"):
        file = tmp_path / "rows.jsonl"
        file.write_bytes("".join(line + end for line in lines).encode())
        rows = read_rows(file)
        assert [row.request["prompt"] for row in rows] == texts
        assert [(row.line, row.id) for row in rows] == [(1, 1), (2, 2), (3, 3)]


def test_invalid_prompt_type_is_reported_by_line() -> None:
    """A row with a missing prompt, or one of a wrong type, reports its line number."""
    rows = read_lines(['{"prompt": 5}', '{"prompt": null}', '{"text": "x"}'])
    assert rows[0].complaint == ("line 1: prompt must be a text or a list of token ids, got 5")
    assert [row.complaint for row in rows[1:]] == ["line 2 has no prompt", "line 3 has no prompt"]


def test_rows_with_equal_ids_get_distinct_seeds(lm: Any) -> None:
    """Seeds of rows with the same id differ and do not depend on rows with other ids."""
    lines = [json.dumps({"prompt": [5], "id": name}) for name in ("a", "b", "a", "a")]
    options = {"max_new_tokens": 3, "temperature": 1.5, "seed": 3}
    found = list(stream(read_lines(lines), job(options=options), InProcessWorkers(lambda: lm)))
    seeds = [a["seed"] for a in found]
    assert seeds == [row_seed(3, "a"), row_seed(3, "b"), row_seed(3, "a", 1), row_seed(3, "a", 2)]
    assert len(set(seeds)) == 4
    assert [a["id"] for a in found] == ["a", "b", "a", "a"]


def test_score_and_embed_equal_model_results(lm: Any) -> None:
    """Batch scores and embeddings equal log_probs and embed, and invalid rows get an error."""
    texts = [[5, 6, 7], [8], [9] * 12, [10**6]]
    rows = read_lines(map(json.dumps, texts))
    scored = list(stream(rows, job("score"), InProcessWorkers(lambda: lm)))
    assert [a.get("tokens") for a in scored[:3]] == texts[:3]
    for answer, text in zip(scored[:3], texts, strict=False):
        expected = lm.log_probs(text)
        # Rows of one batch: the last bits depend on the other rows.
        np.testing.assert_allclose(np.float32(answer["logprobs"]), expected, rtol=0, atol=1e-5)
        assert answer["logprob"] == pytest.approx(float(expected.sum()), abs=1e-5)
    options = {"layer": 1, "normalize": True}
    embedded = list(stream(rows, job("embed", options=options), InProcessWorkers(lambda: lm)))
    expected = lm.embed(texts[:3], **options)
    found = np.float32([a["embedding"] for a in embedded[:3]])
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert "vocabulary" in scored[3]["error"] and "vocabulary" in embedded[3]["error"]
    odd = read_lines(['{"prompt": [5], "temperature": 1}'])
    for task in ("score", "embed"):
        (answer,) = stream(odd, job(task), InProcessWorkers(lambda: lm))
        assert answer["error"] == f"line 1: {task} does not support temperature in a row"


def test_scoring_buckets_lengths_into_few_programs(lm: Any) -> None:
    """Scoring 40 texts of 1 to 30 tokens compiles at most three shapes, and each result equals
    log_probs of its text.
    """
    texts = [[(7 * n + i) % 100 for i in range(1 + n % 30)] for n in range(40)]
    rows = read_lines(map(json.dumps, texts))
    before = embeddings._log_probs._cache_size()
    found = list(stream(rows, job("score", rows=8, group=40), InProcessWorkers(lambda: lm)))
    assert embeddings._log_probs._cache_size() - before <= 3  # 8 rows of 8, 16 and 32 columns
    for answer, text in zip(found, texts, strict=True):
        expected = lm.log_probs(text)
        np.testing.assert_allclose(np.float32(answer["logprobs"]), expected, rtol=0, atol=1e-5)


def test_invalid_job_options_are_refused_before_running(lm: Any) -> None:
    """Options that no row could use raise an error before any row runs."""
    rows, here = read_lines(["[5]"]), InProcessWorkers(lambda: lm)
    for asked, message in (
        (job("scores"), "generate, score, embed, classify: got 'scores': did you mean score"),
        (job("embed", options={"pool": "mean"}), "embed has no option pool"),
        (job("embed", options={"pooling": "max"}), "pooling must be one of"),
        (job("score", options={"adapter": "none"}), "none"),
    ):
        with pytest.raises(ConfigError, match=message):
            list(stream(rows, asked, here))
    with pytest.raises(jaxllm.errors.SamplingError, match="seed must be a number"):
        job(options={"seed": "random"})


def test_parquet_equals_json_lines(lm: Any, tmp_path: Path) -> None:
    """Parquet and JSON lines with the same rows give the same output, as input and as output."""
    prompts: list[Any] = [[5, 6], [7], [10**6], [8, 9, 10]]
    table = {"prompt": prompts, "id": ["a", "b", "c", None], "seed": [1, None, None, 4]}
    parquet, lines = tmp_path / "in.parquet", tmp_path / "in.jsonl"
    pyarrow.parquet.write_table(pyarrow.table(table), parquet)
    rows = [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = job(options={"max_new_tokens": 3, "temperature": 1.0})
    for number, source in enumerate((parquet, lines)):
        found = read_rows(source)
        assert [row.id for row in found] == ["a", "b", "c", 4]
        ran = run_job(found, asked, InProcessWorkers(lambda: lm), tmp_path / f"{number}.parquet")
        assert ran == (4, 1)
    assert (tmp_path / "0.parquet").read_bytes() == (tmp_path / "1.parquet").read_bytes()
    run_job(read_rows(parquet), asked, InProcessWorkers(lambda: lm), tmp_path / "out.jsonl")
    json_rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    parquet_rows = pyarrow.parquet.read_table(tmp_path / "0.parquet").to_pylist()
    assert [row.pop("id") for row in parquet_rows] == ["a", "b", "c", "4"]  # mixed ids as str
    assert [row.pop("id") for row in json_rows] == ["a", "b", "c", 4]
    for one, other in zip(parquet_rows, json_rows, strict=True):  # missing fields are null
        assert {k: v for k, v in one.items() if v is not None} == {
            k: v for k, v in other.items() if v is not None
        }


def test_embeddings_round_trip_exactly_in_both_formats(lm: Any, tmp_path: Path) -> None:
    """Embeddings written to Parquet or JSON lines read back bit for bit."""
    rows = read_lines(["[5, 6, 7]", "[8, 9]"])
    for name in ("a.parquet", "a.jsonl"):
        run_job(rows, job("embed"), InProcessWorkers(lambda: lm), tmp_path / name)
    table = pyarrow.parquet.read_table(tmp_path / "a.parquet")
    assert table.schema.field("id").type == pyarrow.int64()
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    expected = lm.embed([[5, 6, 7], [8, 9]], batch=2)
    for found in (table.column("embedding").to_pylist(), [x["embedding"] for x in lines]):
        assert np.array_equal(np.float32(found), expected)


def test_field_option_reads_prompts_from_column(tmp_path: Path) -> None:
    """With field, the named column is the prompt and other columns are ignored; missing columns and
    invalid files raise errors.
    """
    table = pyarrow.table({"id": [4, 5], "text": ["one", None], "url": [b"x", b"y"]})
    pyarrow.parquet.write_table(table, tmp_path / "set.parquet")
    one, two = read_rows(tmp_path / "set.parquet", field="text")
    assert one == Row(1, 4, {"prompt": "one"})
    assert (two.id, two.complaint) == (5, "line 2 has no text")
    (line,) = read_lines(['{"text": "a", "id": 9, "temperature": 2}'], "text")
    assert line == Row(1, 9, {"prompt": "a"})
    with pytest.raises(ConfigError, match=r"no column prompt: it has id, text, url\. Name one"):
        read_rows(tmp_path / "set.parquet")
    (tmp_path / "no.parquet").write_text("no parquet")
    with pytest.raises(CheckpointError, match="cannot be read as Parquet"):
        read_rows(tmp_path / "no.parquet")
