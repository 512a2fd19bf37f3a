"""Distillation options: the run that they configure, and invalid combinations."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxllm
from jaxllm.errors import ConfigError
from jaxllm.lm import LM
from jaxllm.research.distill.job import Distillation, distill, extract_student
from jaxllm.research.distill.losses import (
    PARAMS_KEY,
    DistillLossConfig,
    DistillRows,
    HiddenLossConfig,
    OnlineTeacherLoss,
    RecordedTeacherLoss,
)
from jaxllm.research.distill.on_policy import OnPolicySampler
from jaxllm.research.distill.student import StudentSize, cut_student
from jaxllm.train.data.dataset import Dataset
from jaxllm.train.data.examples import from_ids
from jaxllm.train.objective import NextToken
from tests.compress.models import tiny

IDS = np.random.default_rng(0).integers(3, 1000, (6, 9))
DATA = Dataset(from_ids(IDS), 8, 2)


@pytest.fixture(scope="module")
def teacher(shallow: Callable[[str], Path]) -> LM:
    return jaxllm.load(shallow("llama"), dtype="float32")


@pytest.fixture(scope="module")
def student(teacher: LM) -> LM:
    return cut_student(teacher, StudentSize(layers=1))


def test_distillation_options_configure_run(teacher: LM, student: LM) -> None:
    """Options become the objective, sampler, extra inputs and data of a run; alpha 0 is plain
    next-token training.
    """
    options = Distillation(beta=0.5, temperature=2.0, on_policy=0.3, hidden="cosine", new_tokens=5)
    found = distill(teacher, student, DATA, options, eval_data=DATA)
    hidden = HiddenLossConfig("cosine", ((1, 2),), 1.0)
    assert found.objective == OnlineTeacherLoss(
        teacher.model, 1536, DistillLossConfig(0.5, 2.0, 1.0), hidden
    )
    assert found.prepare == OnPolicySampler(student.model, 0.3, 16, 5, 1.0, (2,))
    assert found.extra_inputs is teacher.params
    assert found.data is found.eval_data is DATA
    assert PARAMS_KEY not in found.params  # widths are equal
    other = dataclasses.replace(student, tokenizer=None)  # the teacher's texts are all there is
    texts = distill(teacher, other, DATA, Distillation(alpha=0.0))
    assert (texts.objective, texts.extra_inputs) == (NextToken(), ())
    plain = distill(teacher, student, DATA, Distillation())
    assert (plain.prepare, plain.objective) == (
        None,
        OnlineTeacherLoss(teacher.model, 1536, DistillLossConfig()),
    )


def test_projections_are_trained_and_not_saved(teacher: LM, student: LM) -> None:
    narrow = dataclasses.replace(tiny("llama", vocab_size=1536), tokenizer=teacher.tokenizer)
    found = distill(teacher, narrow, DATA, Distillation(hidden="mse"))
    assert found.params[PARAMS_KEY]["1"]["weight"].shape == (128, narrow.config.hidden_size)
    assert PARAMS_KEY not in extract_student(narrow, found.params).params


def test_topk_option_adds_recorded_teacher_to_data(
    teacher: LM, student: LM, tmp_path: Path
) -> None:
    options = Distillation(top_k=3)
    found = distill(teacher, student, DATA, options, eval_data=DATA, directory=tmp_path)
    assert found.objective == RecordedTeacherLoss(1536, DistillLossConfig())
    assert found.extra_inputs == ()
    for data in (found.data, found.eval_data):
        assert data is not None
        rows = data.batch(0)
        assert isinstance(rows, DistillRows)
        assert rows.teacher.token_BTk.shape == (2, 8, 3)
    with pytest.raises(ConfigError, match="outputs on disk: give a directory"):
        distill(teacher, student, DATA, options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"beta": 1.5}, "beta"),
        ({"temperature": 0.0}, "temperature"),
        ({"alpha": -0.1}, "alpha"),
        ({"hidden": "l1"}, "hidden must be one of .*'l1'"),
        ({"top_k": 4, "on_policy": 0.5}, "drop one of them"),
        ({"top_k": 4, "hidden": "mse"}, "need a running teacher"),
        ({"alpha": 0.0, "on_policy": 0.5}, "with alpha 0 the teacher's outputs are not used"),
        ({"pairs": ((1, 1),)}, "set it to mse or cosine"),
    ],
)
def test_distillation_refuses_invalid_options(options: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Distillation(**options)


def test_distillation_refuses_rows_beyond_teacher_context(teacher: LM, student: LM) -> None:
    wide = Dataset(from_ids([[3] * 600]), 513)
    with pytest.raises(ConfigError, match="rows of 513 tokens exceed the teacher's context of 512"):
        distill(teacher, student, wide, Distillation())
