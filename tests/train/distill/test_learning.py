"""Whole steps: a student learns more of a teacher than of its texts, and nothing of itself."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.train.data.rows import IGNORED, Rows
from jaxllm.train.distill.divergences import Mix
from jaxllm.train.distill.hidden import Hidden
from jaxllm.train.distill.objectives import FromTeacher
from jaxllm.train.objective import NextToken
from jaxllm.train.optimizer import Optimizer
from jaxllm.train.step import Metrics, Setup, TrainState, start, train_step
from jaxllm.train.trained import join, split
from tests.train.distill.small import ask
from tests.twins import VOCAB, random_model

ROWS, WIDTH, STEPS = 8, 8, 60
MODEL, TEACHER = random_model("llama", num_hidden_layers=1, spread=0.3)
ADAM = Optimizer(steps=STEPS, rate=5e-3, schedule="constant")
DISTILLED = Setup(
    MODEL, FromTeacher(MODEL, VOCAB, Mix(0.5), Hidden("cosine", ((0, 0), (1, 1)))), ADAM
)


@pytest.fixture(scope="module")
def texts() -> list[Rows]:
    """Batches of what the teacher writes, drawn from its own distribution."""
    rng, found = np.random.default_rng(0), []
    for _ in range(STEPS + 1):
        token = rng.integers(0, VOCAB, (ROWS, WIDTH + 1)).astype(np.int32)
        place = np.broadcast_to(np.arange(WIDTH, dtype=np.int32), (ROWS, WIDTH))
        rows = Rows(token[:, :-1], token[:, 1:], place, np.zeros_like(place))
        for t in range(WIDTH):
            logits_BV = np.asarray(ask(MODEL, TEACHER, rows))[:, t]
            token[:, t + 1] = (logits_BV + rng.gumbel(size=logits_BV.shape)).argmax(axis=1)
        found.append(rows)
    return found


def steps_of(setup: Setup, params: Any, batches: list[Rows]) -> tuple[TrainState, Any, Metrics]:
    trained, rest = split(params)
    state, given = start(trained, setup), TEACHER if setup is DISTILLED else ()
    for number in range(len(batches)):
        rows = jax.tree.map(lambda x: x[None], batches[number])
        state, metrics = train_step(state, rest, given, rows, jax.random.key(0), setup=setup)
    return state, rest, metrics


def test_a_student_learns_more_of_its_teacher_than_of_the_same_texts(texts: list[Rows]) -> None:
    """KL(teacher || student) on texts that it has not seen, after as many steps."""
    _, student = random_model("llama", seed=7, num_hidden_layers=1, spread=0.05)
    *seen, held_out = texts
    p_BTV, apart = jax.nn.log_softmax(ask(MODEL, TEACHER, held_out)), {}
    for name, setup in (("alone", Setup(MODEL, NextToken(), ADAM)), ("distilled", DISTILLED)):
        state, rest, _ = steps_of(setup, student, seen)
        q_BTV = jax.nn.log_softmax(ask(MODEL, join(state.trained, rest), held_out))
        apart[name] = float((jnp.exp(p_BTV) * (p_BTV - q_BTV)).sum(axis=-1).mean())
    assert apart["distilled"] < apart["alone"] - 0.1, apart


def test_a_step_of_self_distillation_changes_nothing(texts: list[Rows]) -> None:
    """Loss and gradient are zero through the whole step: what stays is the weights' own decay."""
    state, _, metrics = steps_of(DISTILLED, TEACHER, texts[:1])
    assert abs(float(metrics.loss)) < 1e-6
    assert float(metrics.norm) < 1e-5, metrics.norm
    assert float(metrics.also["divergence"]) == pytest.approx(0, abs=1e-6)
    assert float(metrics.weight) == (np.asarray(texts[0].label_BT) != IGNORED).sum()
    assert int(state.step) == 1
