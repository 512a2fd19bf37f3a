"""Texts of several windows, and four models that are trained on them from one command."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest
import train_long
from demo_data import train_tokenizer
from long_data import Lasting, Stretch, corpus
from tokenizers import Tokenizer

import jaxllm
from jaxllm.evaluate.recall.stories import ASKED, FRIENDS, MET
from jaxllm.evaluate.recall.texts import probe
from jaxllm.longer import LongAttention
from jaxllm.train.data.rows import IGNORED
from jaxllm.weights.paths import flatten

SHORT = (Stretch(2, 3, 96),)
FACT = re.escape(MET).replace(r"\{kind\}", r"(\w+)").replace(r"\{name\}", r"(\w+)")
QUESTION = re.escape(ASKED.strip()).replace(r"\{kind\}", r"(\w+)")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(corpus(0), train_long.VOCAB_SIZE)


def test_every_label_is_the_name_that_its_kind_was_met_with(tokenizer: Tokenizer) -> None:
    """Read from the text alone: facts before their questions, names and kinds once each."""
    for width in (96, 256, 512):
        rows = Lasting(tokenizer, (Stretch(1, 6, width),), 3).batch(0)
        asked = 0
        for token_T, label_T in zip(rows.token_BT, rows.label_BT, strict=True):
            for at in np.flatnonzero(label_T != IGNORED):
                text = tokenizer.decode(token_T[: at + 1].tolist())
                met = re.findall(FACT, text)
                assert len(dict(met)) == len(met) == len({name for _, name in met})
                kind = re.findall(QUESTION, text)[-1]
                assert text.endswith(kind)
                assert tokenizer.decode([int(label_T[at])]) == f" {dict(met)[kind]}"
                asked += 1
        assert asked >= 5 * (width // 64)  # a last one may lie beyond the row


def test_a_batch_depends_on_its_number_alone(tokenizer: Tokenizer) -> None:
    data, same = (Lasting(tokenizer, (*SHORT, Stretch(1, 2, 200)), 5) for _ in range(2))
    assert (len(data), data.digest) == (3, same.digest)
    assert data.digest != Lasting(tokenizer, data.stretches, 6).digest
    first, again, other = data.batch(1), same.batch(1), data.batch(0)
    assert np.array_equal(first.token_BT, again.token_BT)
    assert np.array_equal(first.label_BT, again.label_BT)
    assert not np.array_equal(first.token_BT, other.token_BT)
    assert data.batch(2).token_BT.shape == (2, 200)


def test_rows_are_as_the_tokenizer_writes_the_whole_text(tokenizer: Tokenizer) -> None:
    rows = Lasting(tokenizer, SHORT, 1).batch(0)
    for row in rows.token_BT:
        text = tokenizer.decode(row[1:].tolist())
        assert tokenizer.encode(text).ids == row.tolist()


def test_names_and_what_asks_for_them_are_one_token_each(tokenizer: Tokenizer) -> None:
    for name in FRIENDS:
        assert len(tokenizer.encode(f" {name}", add_special_tokens=False).ids) == 1
    made = probe(lambda text: tokenizer.encode(text).ids, "meetings", length=90, depth=0, seed=0)
    assert {len(ids) for ids in made.answers} == {1}


def test_the_four_have_one_size_and_attention_of_their_own(tokenizer: Tokenizer) -> None:
    sizes = {}
    for kind in train_long.KINDS:
        config = train_long.config_of(kind, tokenizer.get_vocab_size())
        shapes = jaxllm.param_shapes(jaxllm.build(config))
        sizes[kind] = sum(x.size for path, x in flatten(shapes) if "memory_gate" not in path)
        attention = config.long_attention(0)
        assert isinstance(attention, LongAttention) == (kind in ("dilated", "infini"))
        assert (config.window(0) == train_long.WINDOW) == (kind == "window")
    assert len(set(sizes.values())) == 1


def test_the_same_seed_gives_the_same_bits(tokenizer: Tokenizer) -> None:
    one, same, other = (
        dict(flatten(train_long.learned("infini", tokenizer, SHORT, seed))) for seed in (0, 0, 1)
    )
    assert all(np.array_equal(one[path], same[path]) for path in one)
    assert not np.array_equal(one["embed_tokens.weight"], other["embed_tokens.weight"])
    gates = np.concatenate([np.asarray(x) for path, x in one.items() if "memory_gate" in path])
    assert (np.abs(gates) > 1e-3).all()


@pytest.mark.full
def test_the_command_trains_saves_measures_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_long, "STRETCHES", SHORT)
    picture, report = tmp_path / "recall.png", tmp_path / "cells.json"
    given = ["--out", tmp_path, "--windows", 1, 2, "--tries", 2]
    drawn = ["--picture", picture, "--report", report]
    train_long.main([str(x) for x in (*given, *drawn)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-6].split() == ["|", "attention", "|", "1", "|", "2", "|"]
    assert [line.split()[1] for line in lines[-4:]] == list(train_long.KINDS)
    assert picture.read_bytes().startswith(b"\x89PNG") and report.exists()
    for kind in train_long.KINDS:
        lm = jaxllm.load(tmp_path / f"long-{kind}")
        assert lm.config == train_long.config_of(kind, lm.config.vocab_size)
        assert all(jax.numpy.isfinite(x).all() for _, x in flatten(lm.params))
    train_long.main([str(x) for x in (*given, "--measure-only", "--kinds", "infini")])
    assert capsys.readouterr().out.splitlines()[-1] == lines[-1]
