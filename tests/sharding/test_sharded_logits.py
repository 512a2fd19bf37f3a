"""Logits that stay sharded over the vocabulary: equal losses, and no gathered logits."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxllm.evaluate.likelihood.data import Batch
from jaxllm.evaluate.likelihood.divergence import _compare
from jaxllm.evaluate.likelihood.score import _score, score
from jaxllm.generation.embeddings import log_probs
from jaxllm.ops.token_logprobs import log_likelihood
from jaxllm.research.distill.losses import DistillLossConfig, OnlineTeacherLoss
from jaxllm.research.pipeline.objective import ScheduledLoss
from jaxllm.sharding import ShardedModel
from jaxllm.sharding.collective_stats import count_collectives
from jaxllm.sharding.mesh_spec import build_mesh, parse_mesh
from jaxllm.train.checkpointing import StateLayout
from jaxllm.train.data.rows import IGNORED, Rows
from jaxllm.train.objective import NextToken
from jaxllm.train.optimizer import Optimizer
from jaxllm.train.partition import ALL_PARAMS, combine, partition
from jaxllm.train.step import Setup, init_state, train_step
from jaxllm.weights.precision import Precision
from tests.sharding.tiny_models import load_weights, make_model, shard_model
from tests.tiny_models import tokens

pytestmark = pytest.mark.devices
FULL = pytest.mark.full
NEXT, SCHEDULED, DISTILL = (
    NextToken(),
    ScheduledLoss("1f1b", 2),
    DistillLossConfig(alpha=0.7, temperature=2.0),
)
TRANSFERS = ("all-gather", "all-to-all", "reduce-scatter", "collective-permute")


def texts(rows: int, width: int, vocabulary: int = 131) -> Rows:
    """Return rows of which the last is half padding, with some tokens without a label."""
    token = tokens(rows, width).astype(np.int32) % vocabulary
    position = np.tile(np.arange(width, dtype=np.int32), (rows, 1))
    position[-1, width // 2 :] = -1
    label = np.where(position < 0, IGNORED, np.roll(token, -1, axis=1)).astype(np.int32)
    label[:, -1] = IGNORED
    return Rows(token, label, position, np.zeros_like(token))


def depth(family: str, mesh: str) -> dict[str, int]:
    """Return the configuration of one layer, or of one on each of two stages."""
    return {"n_layer" if family == "gpt2" else "num_hidden_layers": 2 if "stage" in mesh else 1}


def compiled_step(model: ShardedModel, params: Any, objective: Any, given: Any, rows: Rows) -> str:
    trained, rest = partition(params, ALL_PARAMS, None, model.unsharded_paths)
    setup = Setup(model, objective, Optimizer(steps=3))
    rows = jax.tree.map(lambda x: x[None], rows)
    args = (init_state(trained, setup), rest, given, rows, jax.random.key(0))
    return train_step.lower(*args, setup=setup).compile().as_text()


def bytes_sent(text: str) -> int:
    """Return the bytes of the largest array that is sent without a sum."""
    found = count_collectives(text)
    return max((found[kind].largest for kind in TRANSFERS if kind in found), default=0)


@pytest.mark.parametrize(
    ("family", "mesh", "how"),
    [
        ("llama", "tensor=2", "next"),
        ("gpt2", "tensor=4", "next"),
        pytest.param("gpt2", "data=2,tensor=2", "next", marks=FULL),
        pytest.param("gemma2", "data=2,tensor=4", "next", marks=FULL),  # soft-capped logits
        pytest.param("llama", "stage=2,tensor=2", "next", marks=FULL),
        pytest.param("llama", "stage=2,tensor=2", "schedule", marks=FULL),
        ("gpt2", "data=2,stage=2,tensor=2", "schedule"),
        pytest.param("llama", "data=2,sequence=2,tensor=2", "next", marks=FULL),
        pytest.param("llama", "data=2,tensor=4:tokens", "next", marks=FULL),
        ("llama", "data=2,tensor=2", "teacher"),
        pytest.param("llama", "data=4", "teacher", marks=FULL),  # a row of each device at a time
    ],
)
def test_train_step_gathers_no_logits(family: str, mesh: str, how: str) -> None:
    """No array as large as a device's shard of the logits is sent, but once around a ring."""
    model, params = make_model(family, vocab_size=1001, **depth(family, mesh))
    many, shared = shard_model(model, params, mesh)
    rows = texts(8, 64)
    objective: Any = {"next": NEXT, "schedule": SCHEDULED}.get(how) or OnlineTeacherLoss(
        many, 1001, DISTILL
    )
    text = compiled_step(many, shared, objective, shared if how == "teacher" else None, rows)
    split_over = many.axes.data * many.axes.sequence
    tokens_here = 8 * 64 // split_over // (2 if how == "schedule" else 1)
    parts = many.axes.num_devices // split_over // (many.axes.stage if how == "schedule" else 1)
    part = tokens_here * 1001 * 4 // parts
    # With a ring, the halves of a shard return to plain order.
    assert bytes_sent(text) < part * (1.01 if many.axes.sequence > 1 else 0.99)


def test_exact_mode_gathers_logits() -> None:
    small = make_model("llama", vocab_size=1001, **depth("llama", ""))
    many, shared = shard_model(*small, "tensor=2", exact=True)
    assert bytes_sent(compiled_step(many, shared, NEXT, None, texts(8, 64))) >= 8 * 64 * 1001 * 4


def losses(model: Any, params: Any, objective: Any, given: Any, rows: Rows) -> Any:
    """The loss of a token, and its gradient by every parameter in one device's form."""
    trained, rest = partition(params, ALL_PARAMS, None, model.unsharded_paths)

    def loss(trained: Any, rest: Any) -> jax.Array:
        found = objective(model, combine(trained, rest), given, rows, jax.random.key(0))
        return found.total / found.weight

    found, gradient = jax.jit(jax.value_and_grad(loss))(trained, rest)
    if objective is NEXT and isinstance(model, ShardedModel):
        for path, x in gradient.items():
            assert x.sharding.is_equivalent_to(trained[path].sharding, x.ndim), path
    return float(found), load_weights(StateLayout.from_model(model, rest).gather_lazy(gradient))


@pytest.mark.parametrize(
    ("family", "dtype", "mesh", "how", "vocabulary"),
    [
        ("llama", "bfloat16", "data=2,tensor=2", "next", 131),
        pytest.param("gpt2", "bfloat16", "data=2,tensor=2", "next", 131, marks=FULL),
        pytest.param("gpt2", "bfloat16", "stage=2,tensor=2", "schedule", 131, marks=FULL),
        pytest.param("llama", "bfloat16", "stage=2,tensor=2", "next", 131, marks=FULL),
        ("llama", "float32", "data=2,tensor=2", "teacher", 131),
        pytest.param("llama", "float32", "data=2,tensor=2", "teacher", 128, marks=FULL),
        ("llama", "float32", "tensor=8", "next", 9),  # three devices have no token
        ("gpt2", "float32", "stage=2,tensor=4", "schedule", 9),  # a third is beyond the vocabulary
        # Both kinds of biases, fused matrices, a tied table.
        ("gpt2", "float32", "data=2,tensor=4", "fsdp", 131),
        *(pytest.param(family, "float32", mesh, how, 131, marks=FULL) for family, mesh, how in (
            ("llama", "tensor=8", "next"),  # key/value heads on several devices
            ("llama", "data=2,stage=2,tensor=2", "fsdp"),
            ("olmo2", "data=2,tensor=4", "next"),  # norms over all heads
            ("mixtral", "data=2,expert=2,tensor=2", "fsdp"),
            ("mixtral", "expert=4,tensor=2", "next"),
            ("gemma2", "data=2,tensor=2", "fsdp"),
            ("phi3", "data=4,tensor=2", "next"),
            ("qwen2", "stage=2,tensor=4", "next"),
            ("llama", "data=2,sequence=2,tensor=2", "fsdp"),
            ("gpt2", "data=2,tensor=4:tokens", "fsdp"),
            ("gpt_neox", "data=2,tensor=2", "fsdp"),
            ("gpt2", "data=2,stage=2,tensor=2", "next"))),
    ],
)  # fmt: skip
def test_losses_and_gradients_equal_those_of_one_device(
    family: str, dtype: str, mesh: str, how: str, vocabulary: int
) -> None:
    """Next-token, scheduled and distillation losses on sharded logits have one device's value and
    gradients; next-token gradients have the sharding of their parameters.
    """
    precision = Precision() if dtype == "float32" else Precision.uniform(dtype)
    experts = {"num_local_experts": 4} if family == "mixtral" else {}
    changes = {**experts, **depth(family, mesh), "vocab_size": vocabulary}
    model, params = make_model(family, precision, **changes)
    many, shared = shard_model(model, params, mesh, fsdp=how == "fsdp")
    rows, found = texts(4, 8, vocabulary), []
    for mine, there in ((model, params), (many, shared)):
        teacher = OnlineTeacherLoss(mine, vocabulary, DISTILL) if how == "teacher" else None
        known = {"schedule": SCHEDULED if mine is many else NEXT, "teacher": teacher}
        # The teacher is the student with negated parameters, so that their logits differ.
        given = jax.tree.map(lambda x: -x, there) if teacher else None
        found.append(losses(mine, there, known.get(how, NEXT), given, rows))
    (expected, gradients), (loss, mine) = found
    off, least = (3e-5, 1e-7) if dtype == "float32" else (3e-2, 1e-4)
    assert loss == pytest.approx(expected, rel=off)
    assert mine.keys() == gradients.keys()
    for path, x in mine.items():
        error, scale = np.abs(x - gradients[path]).max(), np.abs(gradients[path]).max()
        assert error <= off * scale + least, (path, error, scale)


def test_log_likelihood_with_uneven_shares_equals_dense() -> None:
    """11 tokens over 8 devices, at most two each and on two devices none: values and gradients are
    exact, without NaN.
    """
    rng, size, over = np.random.default_rng(0), 11, ("tensor",)
    whole = rng.normal(size=(3, 5, size)).astype(np.float32) * 30
    token = rng.integers(0, size, (3, 5)).astype(np.int32)
    padded = np.pad(whole, [(0, 0), (0, 0), (0, 5)], constant_values=-np.inf)
    sharded = jax.shard_map(
        lambda x, t: log_likelihood(x, t, over),
        mesh=build_mesh(parse_mesh("tensor=8")),
        in_specs=(P(None, None, over), P()),
        out_specs=P(),
        check_vma=False,
    )
    wide = whole.astype(np.float64)
    top = wide.max(axis=-1, keepdims=True)
    chance = np.exp(wide - top) / np.exp(wide - top).sum(axis=-1, keepdims=True)
    picked = np.take_along_axis(chance, token[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(sharded(padded, token), np.log(picked), rtol=1e-5)
    gradient = np.asarray(jax.grad(lambda x: sharded(x, token).sum())(padded))
    np.testing.assert_allclose(gradient[..., :size], np.eye(size)[token] - chance, atol=1e-6)
    assert not gradient[..., size:].any()


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("llama", "data=2,tensor=2"),
        pytest.param("gpt2", "data=2,tensor=4", marks=FULL),
        pytest.param("llama", "stage=2,tensor=2", marks=FULL),
    ],
)
def test_scoring_gathers_no_logits(family: str, mesh: str) -> None:
    """score, log_probs and the divergence equal one device, and their programs send less than half
    a shard of logits.
    """
    model, params = make_model(family, vocab_size=1001, **depth(family, mesh))
    other = jax.tree.map(lambda x: x * 0.9, params)
    many, shared = shard_model(model, params, mesh)
    length = np.array([33, 33, 33, 16], np.int32)
    token = tokens(4, 33).astype(np.int32)
    batch = Batch(token, length, np.arange(33) < length[:, None], np.arange(4))
    position = batch.position_BT
    expected, found = score(model, params, batch), score(many, shared, batch)
    np.testing.assert_allclose(found.logprob_BT, expected.logprob_BT, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(found.greedy_BT, expected.greedy_BT)
    prompts = list(token[:, :20])
    for a, b in zip(
        log_probs(many, shared, prompts), log_probs(model, params, prompts), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    theirs = many.shard(other)
    for a, b in zip(
        _compare(many, many, shared, theirs, token, position),
        _compare(model, model, params, other, token, position),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
    part = 4 // many.axes.data * 32 * 1001 * 4 * many.axes.data // many.axes.num_devices
    for program, models, given in (
        (_score, (many,), (shared,)),
        (_compare, (many, many), (shared, theirs)),
    ):
        text = program.lower(*models, *given, token, position).compile().as_text()
        assert bytes_sent(text) < part // 2
