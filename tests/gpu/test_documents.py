"""Attention among documents and its gradients as an accelerator computes them, run on a CPU."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm import ops
from jaxllm.models.run_blocks import _is_attention
from jaxllm.ops import documents, flash
from jaxllm.ops.masked import attend_with_mask, document_mask
from jaxllm.ops.target import trace_for
from jaxllm.train import jobs
from jaxllm.train.data.dataset import Dataset
from jaxllm.train.data.examples import from_ids
from jaxllm.train.loop import TrainPlan
from jaxllm.train.optimizer import Optimizer
from tests.gpu import cudnn


@pytest.fixture(scope="module", autouse=True)
def _accelerator() -> Iterator[None]:
    with trace_for("rocm"):
        yield


def draw(lengths: list[list[int]], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return positions and documents `[B, T]` of rows with documents of these lengths."""
    at, number = np.full((2, len(lengths), width), -1, np.int32)
    for row, sizes in enumerate(lengths):
        start = 0
        for i, size in enumerate(sizes):
            at[row, start : start + size] = np.arange(size)
            number[row, start : start + size] = i
            start += size
    return at, number


@pytest.mark.parametrize("scores", [documents.MAX_SCORES, 700])
@pytest.mark.parametrize(("window", "cap"), [(None, None), (5, None), (None, 2.0)])
def test_documents_and_gradients_equal_masked_attention(
    monkeypatch: pytest.MonkeyPatch, scores: int, window: int | None, cap: float | None
) -> None:
    """In one block or several, heads and gradients are those of one softmax under a mask."""
    monkeypatch.setattr(documents, "MAX_SCORES", scores)
    rng = np.random.default_rng(0)
    at, number = draw([[9, 4, 8], [17], [3, 3]], 21)
    q, slope = (jnp.asarray(rng.normal(0, 1, (3, 21, 6, 8)), jnp.float32) for _ in "qs")
    k, v = (jnp.asarray(rng.normal(0, 1, (3, 21, 2, 8)), jnp.float32) for _ in "kv")
    rules: Any = {"scale": 0.4, "cap": cap}

    def expected(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        parts = [ops.Part(k, v, jnp.asarray(at))]
        mask = document_mask(jnp.asarray(at), parts, jnp.asarray(number), window=window)
        return attend_with_mask(q, parts, mask, **rules)

    def found(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return documents.attend_documents(
            q, jnp.asarray(at), k, v, jnp.asarray(number), window=window, packed=False, **rules
        )

    theirs, ours = (jax.jit(lambda *x, f=f: jax.vjp(f, *x))(q, k, v) for f in (expected, found))
    np.testing.assert_allclose(ours[0], theirs[0], atol=1e-5)
    for mine, its in zip(ours[1](slope), theirs[1](slope), strict=True):
        np.testing.assert_allclose(mine, its, atol=2e-5)


def test_checkpointing_keeps_attention() -> None:
    """The blocks are gone through once forward and once backward, not a second time forward."""
    at, number = (jnp.asarray(x) for x in draw([[9, 8]], 17))
    q, k = jnp.ones((1, 17, 4, 8)), jnp.ones((1, 17, 2, 8))

    def loss(q: jax.Array) -> jax.Array:
        rules: Any = {"scale": 1.0, "window": None, "cap": None, "packed": False}
        return documents.attend_documents(2 * q, at, k, k, number, **rules).sum()

    def count(policy: Any) -> int:
        return str(jax.make_jaxpr(jax.grad(jax.checkpoint(loss, policy=policy)))(q)).count("scan[")

    assert (count(None), count(_is_attention)) == (3, 2)


def test_one_document_by_cudnn_equals_masked_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows with one document, then padding; also the gradients."""
    monkeypatch.setattr(flash, "_cudnn", lambda: cudnn)
    monkeypatch.setattr(flash, "is_supported", lambda *_: True)
    rng = np.random.default_rng(1)
    at, number = draw([[21], [9]], 21)
    q, slope = (jnp.asarray(rng.normal(0, 1, (2, 21, 6, 8)), jnp.float32) for _ in "qs")
    k, v = (jnp.asarray(rng.normal(0, 1, (2, 21, 2, 8)), jnp.float32) for _ in "kv")
    slope = jnp.where((at >= 0)[:, :, None, None], slope, 0)  # no loss reads padding

    def run(packed: bool) -> Any:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            rules: Any = {"scale": 0.4, "window": None, "cap": None, "packed": packed}
            return documents.attend_documents(
                q, jnp.asarray(at), k, v, jnp.asarray(number), **rules
            )

        out, back = jax.vjp(attend, q, k, v)
        return out, *back(slope)

    real = at >= 0
    plain, fast = run(False), run(True)
    np.testing.assert_allclose(fast[0][real], plain[0][real], atol=1e-5)
    for mine, its in zip(fast[1:], plain[1:], strict=True):
        np.testing.assert_allclose(mine, its, atol=2e-5)


def test_training_promises_rows_of_one_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only data that has no packed rows, for training and evaluation, is given to cuDNN."""
    lm = jaxllm.load("demo:llama", dtype="float32")
    monkeypatch.setattr(jobs, "train", lambda params, data, setup, plan, **_: setup.model.packed)

    def dataset(lengths: list[int]) -> Dataset:
        return Dataset(from_ids([np.arange(1, n) for n in lengths]), width=16)

    def run(*data: Dataset) -> bool:
        job, optimizer = jobs.full_finetune(lm), Optimizer(lr=1e-4, steps=1)
        evaluated = data[1] if len(data) > 1 else None
        packed: Any = jobs.run_job(job, data[0], optimizer, TrainPlan(steps=1), eval_data=evaluated)
        return bool(packed)

    whole, shared = dataset([18, 16]), dataset([6, 7])
    assert (whole.has_one_document, shared.has_one_document) == (True, False)
    assert not run(whole)  # here: an AMD GPU
    with trace_for("cuda"):
        assert run(whole) and run(whole, whole)
        assert not run(shared) and not run(whole, shared)
