"""Texts of several windows, and four models that are trained on them from one command."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer

import jaxllm
from jaxllm.evaluate.needle.stories import MEETING, MEETING_QUESTION
from jaxllm.train.data.rows import IGNORED
from jaxllm.weights.paths import flatten
from scripts.demo_models import train_long
from scripts.demo_models.demo_data import train_tokenizer
from scripts.demo_models.long_data import LongTextData, Phase, draw_tokenizer_texts

SHORT = (Phase(2, 3, 96),)
FACT = re.escape(MEETING).replace(r"\{kind\}", r"(\w+)").replace(r"\{name\}", r"(\w+)")
QUESTION = re.escape(MEETING_QUESTION.strip()).replace(r"\{kind\}", r"(\w+)")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(draw_tokenizer_texts(0), train_long.VOCAB_SIZE)


def test_every_label_is_the_name_that_its_kind_was_met_with(tokenizer: Tokenizer) -> None:
    """Read from the text alone: facts before their questions, names and kinds once each."""
    for width in (96, 256, 512):
        rows = LongTextData(tokenizer, (Phase(1, 6, width),), 3).batch(0)
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


@pytest.mark.full
def test_the_command_trains_saves_measures_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_long, "PHASES", SHORT)
    picture, report = tmp_path / "recall.png", tmp_path / "cells.json"
    given = ["--out", tmp_path, "--windows", 1, 2, "--tries", 2]
    drawn = ["--picture", picture, "--report", report]
    train_long.main([str(x) for x in (*given, *drawn)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[-4:]] == list(train_long.KINDS)
    assert picture.read_bytes().startswith(b"\x89PNG") and report.exists()
    for kind in train_long.KINDS:
        lm = jaxllm.load(tmp_path / f"long-{kind}")
        assert lm.config == train_long.make_config(kind, lm.config.vocab_size)
        assert all(jax.numpy.isfinite(x).all() for _, x in flatten(lm.params))
