"""Students, the rows that they write, the texts that a teacher writes, and who may teach whom."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxllm
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.train.data.rows import IGNORED, blank
from jaxllm.train.distill import student, written
from jaxllm.train.distill.sampled import Sampled, prompt_lengths
from jaxllm.train.distill.student import Smaller
from jaxllm.train.distill.vocabulary import shared_size
from tests.compress.models import tiny
from tests.train.distill.small import B, T, rows_of
from tests.twins import cut_demo, random_model

KEY = jax.random.key(3)


def test_layers_are_taken_at_even_distances() -> None:
    """DistilBERT's own six of twelve layers (its script `extract.py`)."""
    assert student.even_layers(12, 6) == [0, 2, 4, 7, 9, 11]
    assert student.even_layers(6, 3) == [0, 2, 5]
    with pytest.raises(ConfigError, match="of 6 layers 1 to 6 can stay, got 7"):
        student.even_layers(6, 7)


def test_a_student_is_part_of_its_teacher() -> None:
    teacher = tiny("llama", num_hidden_layers=3)
    made = student.made_from(teacher, Smaller(layers=2, heads=1, channels=50, by="magnitude"))
    c = made.config
    assert (c.num_hidden_layers, c.num_key_value_heads, c.intermediate_size) == (2, 1, 50)
    assert (c.num_attention_heads, c.head_dim) == (4, 6)
    for ours, theirs in ((0, 0), (1, 2)):
        np.testing.assert_array_equal(
            made.params[f"layers.{ours}"]["input_layernorm"]["weight"],
            teacher.params[f"layers.{theirs}"]["input_layernorm"]["weight"],
        )
    assert np.isfinite(jaxllm.forward(made.model, made.params, None, [[1, 2]]).logits).all()
    with pytest.raises(ConfigError, match="seen on a text"):
        student.made_from(teacher, Smaller(channels=50))
    with pytest.raises(ConfigError, match="of 2 heads 1 at least stay, got 3"):
        student.made_from(teacher, Smaller(heads=3, by="magnitude"))


def test_a_student_from_nothing_has_the_statistics_of_gpt2() -> None:
    teacher = tiny("gpt2", num_hidden_layers=1)
    made = student.from_nothing(teacher, teacher.config, 0)
    layer = made.params["h.0"]
    assert (np.asarray(layer["ln_1"]["weight"]) == 1).all()
    assert not np.asarray(layer["attn"]["c_attn"]["bias"]).any()
    count = made.config.num_hidden_layers
    for name, wanted in (("c_fc", 0.02), ("c_proj", 0.02 / np.sqrt(2 * count))):
        assert np.std(layer["mlp"][name]["weight"]) == pytest.approx(wanted, rel=0.1)


def test_the_student_goes_on_from_the_prompts_of_rows() -> None:
    model, params = random_model("llama", num_hidden_layers=1, spread=0.5)
    rows = rows_of()
    assert prompt_lengths(rows, 1).tolist() == [3, 1]  # two of the first row's are only read
    assert prompt_lengths(rows, 99).tolist() == [4, 5]  # the first document, no more
    assert prompt_lengths(blank(B, T), 1).tolist() == [0, 0]
    writes = Sampled(model, 1.0, prompt=2, new=99)
    wrote = writes(params, rows, KEY)
    again = writes(params, rows, KEY)
    for ours, theirs in zip(jax.tree.leaves(wrote), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for row, prompt in ((0, 3), (1, 2)):
        np.testing.assert_array_equal(
            wrote.token_BT[row, :prompt], np.asarray(rows.token_BT)[row, :prompt]
        )
        assert (wrote.label_BT[row, : prompt - 1] == IGNORED).all()
        np.testing.assert_array_equal(
            wrote.label_BT[row, prompt - 1 : -1], wrote.token_BT[row, prompt:]
        )
        assert wrote.label_BT[row, -1] >= 0  # the last label has no column of its own
        np.testing.assert_array_equal(wrote.position_BT[row], np.arange(T))
    other = writes(params, rows, jax.random.key(4))
    assert (np.asarray(other.token_BT) != np.asarray(wrote.token_BT)).any()
    ended = Sampled(model, 1.0, prompt=2, new=99, eos=(int(wrote.label_BT[0, 2]),))(
        params, rows, KEY
    )
    assert (ended.label_BT[0] != IGNORED).sum() == 1
    assert (ended.position_BT[0] >= 0).sum() == 3
    taken_apart = jax.tree.map(lambda x: x[None], rows)  # as batches are accumulated
    assert writes(params, taken_apart, KEY).token_BT.shape == (1, B, T)


def test_a_share_of_all_steps_is_written_by_the_student() -> None:
    model, _ = random_model("llama", num_hidden_layers=1)
    keys = list(jax.random.split(KEY, 40))
    half = Sampled(model, 0.5)
    assert 10 < sum(half.writes(key) for key in keys) < 30
    assert not any(Sampled(model, 0.0).writes(key) for key in keys)
    assert all(Sampled(model, 1.0).writes(key) for key in keys)
    rows = rows_of()
    assert Sampled(model, 0.0)({}, rows, KEY) is rows
    with pytest.raises(ConfigError, match=r"a share of 0 to 1 of the rows, not 1\.5"):
        Sampled(model, 1.5)
    with pytest.raises(ConfigError, match="temperature must be above 0"):
        Sampled(model, 1.0, temperature=0.0)


OPTIONS = {"max_new_tokens": 4, "temperature": 1.0}


def test_a_teacher_writes_texts_and_goes_on_when_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = jaxllm.load(cut_demo("llama", tmp_path / "teacher", layers=1))
    prompts = ["Once upon a time", "One day", "The cat"]
    whole = tmp_path / "whole.jsonl"
    assert written.write(teacher, prompts, whole, OPTIONS, rows=2) == written.Wrote(3, 0)
    lines = [json.loads(line) for line in whole.read_text().splitlines()]
    assert [line["prompt"] for line in lines] == prompts

    path, append = tmp_path / "killed.jsonl", written._Answers.append

    def killed(self: Any, line: str) -> None:
        append(self, line if "owner" in line else line[:9])  # cut off in the middle of a line
        if "owner" not in line:
            raise KeyboardInterrupt

    monkeypatch.setattr(written._Answers, "append", killed)
    with pytest.raises(KeyboardInterrupt):
        written.write(teacher, prompts, path, OPTIONS, rows=2)
    assert not path.exists()
    monkeypatch.setattr(written._Answers, "append", append)
    with pytest.raises(ConfigError, match="of another teacher, or to other prompts"):
        written.write(teacher, prompts[:1], path, OPTIONS)
    written.write(teacher, prompts, path, OPTIONS, rows=2)
    assert path.read_bytes() == whole.read_bytes()
    assert {p.name for p in tmp_path.iterdir()} == {"teacher", "whole.jsonl", "killed.jsonl"}
    with pytest.raises(CheckpointError, match="exists: name another"):
        written.write(teacher, prompts, path, OPTIONS)
    with pytest.raises(ConfigError, match="no prompt"):
        written.write(teacher, [], tmp_path / "none", OPTIONS)
    assert written.prompts_of(teacher, ["Once upon a time there was", "x"], 4)[0] in prompts[0]


def test_only_teachers_that_speak_of_the_same_tokens_teach(
    shallow: Callable[[str], Path], tmp_path: Path
) -> None:
    """Two tokenizers of the same size in which two tokens have changed places."""
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
    assert shared_size(padded, llama) == size == shared_size(llama, padded)
    with pytest.raises(ConfigError, match=r"different tokenizers, 2 of \d+ ids are not the same"):
        shared_size(llama, other)
    with pytest.raises(ConfigError, match=r"the student .* has no tokenizer"):
        shared_size(llama, dataclasses.replace(llama, tokenizer=None))
