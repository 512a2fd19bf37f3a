"""Long texts over several windows, and the four models trained on them."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer

import jaxllm
from jaxllm.research.needle.haystack import MEETING, MEETING_QUESTION
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


def test_labels_equal_names_in_text(tokenizer: Tokenizer) -> None:
    """Every label is the name that the text before it gives for the kind in question."""
    for width in (96, 256, 512):
        rows = LongTextData(tokenizer, (Phase(1, 6, width),), 3).batch(0)
        num_labels = 0
        for token_T, label_T in zip(rows.token_BT, rows.label_BT, strict=True):
            for at in np.flatnonzero(label_T != IGNORED):
                text = tokenizer.decode(token_T[: at + 1].tolist())
                met = re.findall(FACT, text)
                assert len(dict(met)) == len(met) == len({name for _, name in met})
                kind = re.findall(QUESTION, text)[-1]
                assert text.endswith(kind)
                assert tokenizer.decode([int(label_T[at])]) == f" {dict(met)[kind]}"
                num_labels += 1
        assert num_labels >= 5 * (width // 64)  # the last question may lie beyond the row


@pytest.mark.full
def test_train_long_saves_loadable_models_and_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_long, "PHASES", SHORT)
    picture, report = tmp_path / "recall.png", tmp_path / "cells.json"
    given = ["--out", tmp_path, "--windows", 1, 2, "--tries", 2]
    outputs = ["--picture", picture, "--report", report]
    train_long.main([str(x) for x in (*given, *outputs)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[-4:]] == list(train_long.KINDS)
    assert picture.read_bytes().startswith(b"\x89PNG") and report.exists()
    for kind in train_long.KINDS:
        lm = jaxllm.load(tmp_path / f"long-{kind}")
        assert lm.config == train_long.make_config(kind, lm.config.vocab_size)
        assert all(jax.numpy.isfinite(x).all() for _, x in flatten(lm.params))
