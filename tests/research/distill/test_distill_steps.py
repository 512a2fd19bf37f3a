"""Distillation steps: online, self-distillation and on-policy."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.research.distill.losses import DistillLossConfig, HiddenLossConfig, OnlineTeacherLoss
from jaxllm.research.distill.on_policy import OnPolicySampler, prompt_lengths
from jaxllm.train import loop
from jaxllm.train.data.rows import IGNORED, Rows, blank_rows
from jaxllm.train.objective import NextToken
from jaxllm.train.optimizer import Optimizer
from jaxllm.train.partition import combine, partition
from jaxllm.train.step import Metrics, Setup, TrainState, init_state, train_step
from tests.research.distill.bigram_model import B, T, compute_logits, pairs, rows_of
from tests.tiny_models import VOCAB, random_model

ROWS, WIDTH, STEPS = 8, 8, 60
MODEL, TEACHER = random_model("llama", num_hidden_layers=1, spread=0.3)
ADAM = Optimizer(steps=STEPS, lr=5e-3, schedule="constant")
KEY = jax.random.key(3)
DISTILLED = Setup(
    MODEL,
    OnlineTeacherLoss(MODEL, VOCAB, DistillLossConfig(), HiddenLossConfig("cosine", ((1, 1),))),
    ADAM,
)


def texts_of(model: Any, params: Any, count: int) -> list[Rows]:
    """Return batches of texts sampled from the model."""
    rng, found = np.random.default_rng(0), []
    for seed in range(count):
        rows = random_rows(seed)
        for t in range(WIDTH):
            logits_BV = np.asarray(compute_logits(model, params, rows))[:, t]
            rows.label_BT[:, t] = (logits_BV + rng.gumbel(size=logits_BV.shape)).argmax(axis=1)
            rows.token_BT[:, t + 1 : t + 2] = rows.label_BT[:, t : t + 1][:, : WIDTH - t - 1]
        found.append(rows)
    return found


@pytest.fixture(scope="module")
def texts() -> list[Rows]:
    return [random_rows(seed) for seed in range(4)]


def random_rows(seed: int) -> Rows:
    """Return rows of random tokens."""
    token = np.random.default_rng(seed).integers(0, VOCAB, (ROWS, WIDTH + 1)).astype(np.int32)
    place = np.broadcast_to(np.arange(WIDTH, dtype=np.int32), (ROWS, WIDTH))
    return Rows(token[:, :-1].copy(), token[:, 1:].copy(), place, np.zeros_like(place))


def steps_of(
    setup: Setup, params: Any, given: Any, batches: list[Rows]
) -> tuple[TrainState, Any, Metrics]:
    trained, rest = partition(params)
    state = init_state(trained, setup)
    for batch in batches:
        rows = jax.tree.map(lambda x: x[None], batch)
        state, metrics = train_step(state, rest, given, rows, jax.random.key(0), setup=setup)
    return state, rest, metrics


def test_distillation_beats_training_on_teacher_texts() -> None:
    """After equal steps on equal texts, a narrower student has a lower KL(teacher || student) on
    unseen texts if it is distilled.
    """
    (large, teacher), (small, student) = pairs(0, 0.7), pairs(1, 0.2, width=12)
    *seen, held_out = texts_of(large, teacher, STEPS + 1)
    p_BTV, kl_of = jax.nn.log_softmax(compute_logits(large, teacher, held_out)), {}
    for name, objective in (
        ("alone", NextToken()),
        ("distilled", OnlineTeacherLoss(large, VOCAB, DistillLossConfig())),
    ):
        state, rest, _ = steps_of(Setup(small, objective, ADAM), student, teacher, seen)
        q_BTV = jax.nn.log_softmax(compute_logits(small, combine(state.trained, rest), held_out))
        kl_of[name] = float((jnp.exp(p_BTV) * (p_BTV - q_BTV)).sum(axis=-1).mean())
    assert kl_of["distilled"] < kl_of["alone"] - 0.1, kl_of


def test_self_distillation_step_has_zero_gradient(texts: list[Rows]) -> None:
    """With the teacher as the student, loss, divergence and gradient norm of a whole
    step are zero.
    """
    state, _, metrics = steps_of(DISTILLED, TEACHER, TEACHER, texts[:1])
    assert abs(float(metrics.loss)) < 1e-6
    assert float(metrics.grad_norm) < 1e-5, metrics.grad_norm
    assert float(metrics.extras["divergence"]) == pytest.approx(0, abs=1e-6)
    assert float(metrics.weight) == (np.asarray(texts[0].label_BT) != IGNORED).sum()
    assert int(state.step) == 1


def test_on_policy_sampler_continues_row_prompts() -> None:
    """The sampler keeps each prompt, masks its labels, is deterministic in the key, ends at eos and
    keeps accumulation axes.
    """
    model, params = MODEL, TEACHER
    rows = jax.tree.map(lambda x: np.tile(x, (ROWS // B, 1)), rows_of())
    assert prompt_lengths(rows, 1)[:2].tolist() == [3, 1]  # two labels of the first row are ignored
    assert prompt_lengths(rows, 99)[:2].tolist() == [4, 5]  # at most the first document
    assert prompt_lengths(blank_rows(B, T), 1).tolist() == [0, 0]
    sampler = OnPolicySampler(model, 1.0, prompt_tokens=2, new_tokens=99)
    sampled = sampler(params, rows, KEY)
    again = sampler(params, rows, KEY)
    for ours, theirs in zip(jax.tree.leaves(sampled), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for row, prompt in ((0, 3), (1, 2)):
        np.testing.assert_array_equal(
            sampled.token_BT[row, :prompt], np.asarray(rows.token_BT)[row, :prompt]
        )
        assert (sampled.label_BT[row, : prompt - 1] == IGNORED).all()
        np.testing.assert_array_equal(
            sampled.label_BT[row, prompt - 1 : -1], sampled.token_BT[row, prompt:]
        )
        assert sampled.label_BT[row, -1] >= 0  # the last label is not an input token
        np.testing.assert_array_equal(sampled.position_BT[row], np.arange(T))
    other = sampler(params, rows, jax.random.key(4))
    assert (np.asarray(other.token_BT) != np.asarray(sampled.token_BT)).any()
    ended = OnPolicySampler(
        model, 1.0, prompt_tokens=2, new_tokens=99, eos_token_ids=(int(sampled.label_BT[0, 2]),)
    )(params, rows, KEY)
    assert (ended.label_BT[0] != IGNORED).sum() == 1
    assert (ended.position_BT[0] >= 0).sum() == 3
    accumulated = jax.tree.map(lambda x: x[None], rows)  # as in gradient accumulation
    assert sampler(params, accumulated, KEY).token_BT.shape == (1, ROWS, T)


def test_on_policy_sampler_applies_to_given_fraction() -> None:
    """The sampler is used for the given fraction of steps; else the rows stay."""
    model = MODEL
    keys = list(jax.random.split(KEY, 40))
    half = OnPolicySampler(model, 0.5)
    assert 10 < sum(half.is_on_policy(key) for key in keys) < 30
    assert not any(OnPolicySampler(model, 0.0).is_on_policy(key) for key in keys)
    assert all(OnPolicySampler(model, 1.0).is_on_policy(key) for key in keys)
    rows = rows_of()
    assert OnPolicySampler(model, 0.0)({}, rows, KEY) is rows


class Texts:
    """The given batches, repeated."""

    digest, tokens = "texts", 1

    def __init__(self, batches: list[Rows]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def batch(self, number: int) -> Rows:
        return self.batches[number % len(self)]


def test_on_policy_run_resumes_bit_identically(
    texts: list[Rows], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed on-policy run repeats no finished step after resuming, and ends with the parameters
    of an uninterrupted run.
    """
    monkeypatch.setattr(loop, "SAVE_SECONDS", -1)
    monkeypatch.setattr(loop, "SAVE_FACTOR", -1)  # save the state after every step
    _, student = random_model("llama", seed=7, num_hidden_layers=1)
    sampler, prepared = OnPolicySampler(MODEL, 0.7, prompt_tokens=2, new_tokens=99), [0]

    plan = loop.TrainPlan(steps=4)

    def run(folder: Path, killed: int) -> Any:
        def prepare(params: Any, rows: Rows, key: jax.Array) -> Rows:
            prepared[0] += 1
            if prepared[0] == killed:
                raise KeyboardInterrupt
            return sampler(params, rows, key)

        return loop.train(
            student, Texts(texts), DISTILLED, plan, extra_inputs=TEACHER, prepare=prepare,
            directory=folder, show_progress=False,
        )  # fmt: skip

    whole = run(tmp_path / "whole", 0)
    prepared[0] = 0
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "killed", 3)
    again = run(tmp_path / "killed", 0)
    assert prepared[0] == 3 + 2  # two finished steps are not repeated
    assert [r.weight for r in again.records] == [r.weight for r in whole.records]
    for ours, theirs in zip(*map(jax.tree.leaves, (again.params, whole.params)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    alone = loop.train(
        student, Texts(texts), DISTILLED, plan, extra_inputs=TEACHER, show_progress=False
    )
    assert [r.weight for r in alone.records] != [r.weight for r in whole.records]
