"""Teacher completions, and the vocabulary check."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import jaxllm
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.generation.completion import Completion
from jaxllm.research.distill import sequence_kd
from jaxllm.research.distill.job import common_vocab_size
from jaxllm.text.tokenizer import Tokenizer


class Writer:
    """A fake teacher that serves each pair of requests in reverse and echoes prompt and seed."""

    params: Any = {"weight": np.ones(3, np.float32)}  # noqa: RUF012
    config, model = "config", SimpleNamespace(precision="float32")
    stop = 3  # texts that it writes

    def with_adapter(self, adapter: None) -> "Writer":
        return self

    def serve(self, requests: Iterable[Any], rows: int) -> Iterator[tuple[Any, Any]]:
        served = 0
        for some in batched(requests, 2):
            for request in reversed(some):
                if (served := served + 1) > self.stop:
                    raise KeyboardInterrupt
                text = f"{request['prompt']}, seed {request['seed']}"
                yield request["id"], Completion(text, [1], [0.0], "stop", 1)


def batched(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    rest = iter(items)
    while some := list(islice(rest, size)):
        yield some


@pytest.mark.full
def test_write_completions_equals_generate(shallow: Callable[[str], Path], tmp_path: Path) -> None:
    teacher = jaxllm.load(shallow("llama"))
    prompts = ["Once upon a time", "One day"]
    sequence_kd.write_completions(teacher, prompts, tmp_path / "texts", OPTIONS)
    lines = [json.loads(line) for line in (tmp_path / "texts").read_text().splitlines()]
    expected_texts = [
        teacher.generate(p, max_new_tokens=4, temperature=1.0, seed=i).text
        for i, p in enumerate(prompts)
    ]
    assert [line["completion"] for line in lines] == expected_texts


OPTIONS = {"max_new_tokens": 4, "temperature": 1.0}


def test_write_completions_resumes_after_interruption(tmp_path: Path) -> None:
    """Completions stay in prompt order; a resumed run writes the same bytes, and mismatched or
    existing outputs are refused.
    """
    teacher: Any = Writer()
    prompts = ["Once upon a time", "One day", "The cat"]
    whole = tmp_path / "whole.jsonl"
    assert sequence_kd.write_completions(
        teacher, prompts, whole, OPTIONS, rows=2
    ) == sequence_kd.WriteSummary(3, 0)
    lines = [json.loads(line) for line in whole.read_text().splitlines()]
    assert [line["prompt"] for line in lines] == prompts
    assert [line["completion"] for line in lines] == [
        f"{p}, seed {i}" for i, p in enumerate(prompts)
    ]

    path, answers = tmp_path / "killed.jsonl", tmp_path / "killed.jsonl.answers"
    teacher.stop = 2
    with pytest.raises(KeyboardInterrupt):
        sequence_kd.write_completions(teacher, prompts, path, OPTIONS, rows=2)
    assert not path.exists()
    answers.write_bytes(answers.read_bytes()[:-9])
    teacher.stop = 3
    with pytest.raises(CheckpointError, match="belongs to another run: input was"):
        sequence_kd.write_completions(teacher, prompts[:1], path, OPTIONS, rows=2)
    sequence_kd.write_completions(teacher, prompts, path, OPTIONS, rows=2)
    assert path.read_bytes() == whole.read_bytes()
    assert {p.name for p in tmp_path.iterdir()} == {"whole.jsonl", "killed.jsonl"}
    with pytest.raises(CheckpointError, match="exists: name another"):
        sequence_kd.write_completions(teacher, prompts, path, OPTIONS)
    with pytest.raises(ConfigError, match="the seed must be a number, got 'random'"):
        sequence_kd.write_completions(
            teacher, prompts, tmp_path / "none", {**OPTIONS, "seed": "random"}
        )
    with pytest.raises(ConfigError, match="no prompt"):
        sequence_kd.write_completions(teacher, [], tmp_path / "none", OPTIONS)


def test_common_vocab_size_requires_equal_tokenizers(
    shallow: Callable[[str], Path], tmp_path: Path
) -> None:
    """Padding of the vocabulary is allowed; two tokenizers of one size with two ids exchanged are
    refused.
    """
    llama = jaxllm.load(shallow("llama"))
    tree = json.loads((shallow("llama") / "tokenizer.json").read_text())
    vocab = tree["model"]["vocab"]
    one, two = sorted(vocab, key=vocab.get)[-2:]
    vocab[one], vocab[two] = vocab[two], vocab[one]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    other = dataclasses.replace(llama, tokenizer=Tokenizer.from_directory(tmp_path))
    assert llama.tokenizer is not None
    size = llama.tokenizer.vocab_size
    padded = dataclasses.replace(llama, config=dataclasses.replace(llama.config, vocab_size=1600))
    assert common_vocab_size(padded, llama) == size == common_vocab_size(llama, padded)
    with pytest.raises(ConfigError, match=r"different tokenizers: 2 of \d+ ids differ"):
        common_vocab_size(llama, other)
    with pytest.raises(ConfigError, match=r"the student .* has no tokenizer"):
        common_vocab_size(llama, dataclasses.replace(llama, tokenizer=None))
