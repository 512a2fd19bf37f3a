"""Objectives through a whole model: hidden states against torch, self-distillation, buckets."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from jaxllm.errors import ConfigError
from jaxllm.train.data.rows import IGNORED, Rows
from jaxllm.train.distill import hidden as states
from jaxllm.train.distill.buckets import buckets
from jaxllm.train.distill.divergences import Mix
from jaxllm.train.distill.hidden import Hidden
from jaxllm.train.distill.objectives import FromBuckets, FromTeacher, Taught
from tests.train.distill.small import B, T, ask, rows_of
from tests.twins import VOCAB, random_model

KEY = jax.random.key(0)


def test_hidden_states_are_compared_as_torch_does() -> None:
    rng = np.random.default_rng(0)
    student = [rng.standard_normal((B, T, 6), np.float32) for _ in range(3)]
    teacher = [rng.standard_normal((B, T, 10), np.float32) for _ in range(5)]
    rows = rows_of()
    counted = torch.tensor(np.asarray(rows.label_BT) != IGNORED)
    matrix = {n: rng.standard_normal((10, 6), np.float32) for n in (1, 2)}
    params = {states.PLACE: {str(n): {"weight": jnp.asarray(x)} for n, x in matrix.items()}}
    pairs = ((1, 2), (2, 4))
    for by in ("mse", "cosine"):
        wanted = torch.zeros(())
        for s, t in pairs:
            ours = torch.tensor(student[s]) @ torch.tensor(matrix[s]).T
            theirs = torch.tensor(teacher[t])
            each = ((ours - theirs) ** 2).mean(-1)
            if by == "cosine":
                each = 1 - F.cosine_similarity(ours, theirs, dim=-1)
            wanted += each[counted].sum() / len(pairs)
        found = states.apart(
            Hidden(by, pairs), params, *map(_arrays, (student, teacher)), rows.label_BT
        )
        np.testing.assert_allclose(found, wanted.item(), rtol=1e-5)


def _arrays(each: list[np.ndarray]) -> list[jax.Array]:
    return list(map(jnp.asarray, each))


def test_a_model_learns_nothing_of_itself() -> None:
    """Through the whole model: logits by every divergence, and hidden states by both measures."""
    model, params = random_model("llama", num_hidden_layers=1)
    rows = rows_of()

    def losses(params: Any, given: Any) -> jax.Array:
        each = [
            FromTeacher(model, VOCAB, Mix(beta, 2.0), Hidden(by, ((0, 0), (1, 1))))
            for beta, by in ((0.0, "mse"), (0.5, "cosine"), (1.0, "mse"))
        ]
        return sum((f(model, params, given, rows, KEY).total for f in each), jnp.zeros(()))

    value, slope = jax.jit(jax.value_and_grad(losses))(params, params)
    assert abs(value) < 1e-5
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(slope))
    assert largest < 1e-4, largest
    other = jax.jit(losses)(params, jax.tree.map(lambda x: x * 1.1, params))
    assert other > 1


def test_what_is_in_buckets_teaches_as_the_teacher_does() -> None:
    """With a bucket for each token: the loss and the gradient of the teacher itself. Batches that
    are taken apart add up to the whole."""
    model, params = random_model("llama", num_hidden_layers=1, spread=0.2)
    _, teacher = random_model("llama", seed=1, num_hidden_layers=1, spread=0.2)
    rows, mix = rows_of(), Mix(0.5, 2.0, 0.8)
    logits = ask(model, teacher, rows)
    told = Taught(
        rows.token_BT, rows.label_BT, rows.position_BT, rows.document_BT,
        told=buckets(logits, VOCAB, 2.0, VOCAB),
    )  # fmt: skip

    @jax.jit
    def both(params: Any, teacher: Any, told: Any) -> Any:
        def one(f: Any, rows: Rows) -> Any:
            return jax.value_and_grad(
                lambda p: (m := f(model, p, teacher, rows, KEY)).total / m.weight
            )(params)

        plain = rows_of().replace(token_BT=told.token_BT)
        return one(FromTeacher(model, VOCAB, mix), plain), one(FromBuckets(VOCAB, mix), told)

    (value, slope), (cached, slope_too) = both(params, teacher, told)
    np.testing.assert_allclose(cached, value, rtol=2e-3)
    for a, b in zip(jax.tree.leaves(slope), jax.tree.leaves(slope_too), strict=True):
        np.testing.assert_allclose(b, a, atol=3e-3 * float(jnp.abs(a).max()) + 1e-5)


def test_projections_live_beside_the_model() -> None:
    """They are drawn where widths differ, and go when they are no longer wanted."""
    model, params = random_model("llama", num_hidden_layers=1)
    wider = dataclasses.replace(model.config, hidden_size=56)
    hidden = Hidden("mse", ((1, 1),))
    both = states.with_projections(params, hidden, model.config, wider, KEY)
    assert both[states.PLACE]["1"]["weight"].shape == (56, model.config.hidden_size)
    assert states.without_projections(both).keys() == params.keys()
    same = states.with_projections(params, hidden, model.config, model.config, KEY)
    assert same.keys() == params.keys()
    with pytest.raises(ConfigError, match="the teacher has hidden states 0 to 1, not 2"):
        states.check(Hidden("mse", ((1, 2),)), model.config, model.config)
    with pytest.raises(ConfigError, match="name pairs of layers"):
        states.check(Hidden(), model.config, model.config)
    with pytest.raises(ConfigError, match="compared by mse or cosine, not 'l1'"):
        Hidden("l1")  # type: ignore[arg-type]


def test_student_layers_meet_the_teacher_s_evenly() -> None:
    assert states.evenly(3, 6) == ((1, 2), (2, 4), (3, 6))
    assert states.evenly(2, 2) == ((1, 1), (2, 2))
