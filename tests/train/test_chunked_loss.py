"""The cross-entropy in chunks of tokens, compared with that of all logits at once."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from jaxllm import models
from jaxllm.adapters import LoraConfig, attach_new_lora
from jaxllm.ops import native
from jaxllm.train import objective
from jaxllm.train.data.rows import Rows
from jaxllm.train.moe_losses import BalancedLoss
from jaxllm.train.objective import LossOutput, NextToken, cross_entropy, forward
from jaxllm.train.optimizer import Optimizer
from jaxllm.train.partition import ALL_PARAMS, combine, partition
from jaxllm.train.step import Setup, freeze_params, init_state, prepare_weights, train_step
from jaxllm.weights.precision import Precision, cast
from jaxllm.weights.quantize import quantize
from tests.tiny_models import VOCAB, random_model
from tests.train.test_step import BATCHES, KEY, padded, stacked

ROWS = padded((9, 4, 7), 9, prompt=2)  # 27 tokens: seven chunks of four, the last not full
ADAPTERS = ((r".*\.weight\.(a|b)", True),)


def whole_loss(model: Any, params: Any, extra_inputs: Any, rows: Any, key: Any) -> LossOutput:
    """Return the loss of all logits at once."""
    return LossOutput(*cross_entropy(forward(model, params, rows).logits, rows.label_BT))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let chunks have at most four tokens."""
    monkeypatch.setattr(objective, "CHUNK_BYTES", 4 * 4 * VOCAB)
    jax.clear_caches()
    yield
    jax.clear_caches()


def compare_gradients(model: Any, params: Any, rules: Any = ALL_PARAMS, near: float = 1e-6) -> None:
    """Check loss and gradients against those of all logits, relative to the largest number."""
    trained, rest = partition(params, rules)
    trained = {
        path: x if x.any() else 0.1 * jax.random.normal(KEY, x.shape) for path, x in trained.items()
    }
    still = freeze_params(rest)
    (found, grads), (wanted, expected) = (
        jax.jit(
            jax.value_and_grad(
                lambda trained, loss=loss: (
                    loss(model, combine(trained, still), None, ROWS, KEY).total
                )
            )
        )(trained)
        for loss in (NextToken(), whole_loss)
    )
    assert float(found) == pytest.approx(float(wanted), rel=near)
    for path, gradient in expected.items():
        scale = float(jnp.abs(gradient).max())
        assert scale > 0, path
        np.testing.assert_allclose(grads[path], gradient, atol=near * scale, err_msg=path)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    ("family", "dtype", "near"),
    [
        ("llama", "float32", 1e-6),
        ("gpt2", "float32", 1e-6),
        ("gemma2", "float32", 1e-6),
        ("granite", "float32", 3e-6),
        ("llama", "bfloat16", 0.02),
    ],
)
def test_chunked_gradients_equal_whole_logits(family: str, dtype: str, near: float) -> None:
    """Untied, tied, soft-capped and scaled heads, with ignored labels and a chunk that is not full,
    have the loss and gradients of all logits.
    """
    changes = {"final_logit_softcapping": 3.0} if family == "gemma2" else {}
    model, params = random_model(family, num_hidden_layers=1, **changes)
    precision = Precision.uniform(dtype)
    compare_gradients(model.clone(precision=precision), cast(params, precision), near=near)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("format", [None, "int8", "nf4"])
def test_chunked_gradients_of_adapted_head(format: str | None) -> None:
    """A frozen head with an adapter gives the adapters the gradients of all logits."""
    model, params = random_model("llama", num_hidden_layers=1)
    params = params if format is None else quantize(params, format)
    lora = LoraConfig(r=2, target_modules=("q_proj", "lm_head"))
    compare_gradients(model, attach_new_lora(model.config, params, lora, KEY), ADAPTERS, 1e-5)


def test_chunked_training_step_equals_whole_logits(
    monkeypatch: pytest.MonkeyPatch, afresh: None
) -> None:
    """With accumulated batches, remat and a balanced mixture, chunks change a step by rounding."""
    model, params = random_model("mixtral", num_hidden_layers=1)
    model = model.clone(remat=True)
    setup = Setup(model, BalancedLoss(0.1), Optimizer(steps=2, lr=1e-3, eps=1e-3, warmup=0.0))
    results = []
    for size in (objective.CHUNK_BYTES, 4 * 4 * VOCAB):
        monkeypatch.setattr(objective, "CHUNK_BYTES", size)
        jax.clear_caches()
        trained, rest = partition(params)
        state = init_state(trained, setup)
        results.append(train_step(state, rest, None, stacked(*BATCHES), KEY, setup=setup))
    (whole, wanted), (chunked, found) = results
    assert float(found.loss) == pytest.approx(float(wanted.loss), rel=1e-6)
    assert float(found.grad_norm) == pytest.approx(float(wanted.grad_norm), rel=1e-6)
    assert found.weight == wanted.weight
    for path, x in chunked.trained.items():
        np.testing.assert_allclose(x, whole.trained[path], atol=1e-6, err_msg=path)


def trace_gradient(loss: Any, vocab_size: int, rules: Any = ALL_PARAMS) -> Any:
    """Return the traced gradient of a Llama with a large vocabulary; nothing runs."""
    model, params = random_model("llama", num_hidden_layers=1, vocab_size=vocab_size)
    if rules is not ALL_PARAMS:
        lora = LoraConfig(r=2, target_modules=("q_proj",))
        params = attach_new_lora(model.config, params, lora, KEY)
    trained, rest = partition(params, rules)
    still = freeze_params(rest)

    def total(trained: Any, rows: Rows) -> jax.Array:
        return loss(model, combine(trained, still), None, rows, KEY).total

    ids = jax.ShapeDtypeStruct((16, 64), jnp.int32)
    return jax.jit(jax.grad(total)).trace(trained, Rows(ids, ids, ids, ids))


def test_chunked_loss_needs_less_memory() -> None:
    """With 410 MB of logits, the compiled gradient needs less than half of the temporary memory."""
    whole, chunked = (
        trace_gradient(loss, 100_003).lower().compile().memory_analysis().temp_size_in_bytes
        for loss in (whole_loss, NextToken())
    )
    assert chunked < whole / 2


def list_shapes(jaxpr: Any) -> set[tuple[int, ...]]:
    """Return the shapes of all values that a traced program computes, inner programs included."""
    found = {x.aval.shape for equation in jaxpr.eqns for x in equation.outvars}
    inner = (x for equation in jaxpr.eqns for x in jaxprs_in_params(equation.params))
    return found.union(*map(list_shapes, inner))


def test_frozen_head_has_no_gradient() -> None:
    """With adapters, no array of the head's shape is computed; training all weights needs one.

    Traced without kernels: a choice between platforms passes the head through.
    """
    shape = (20_011, 40)
    with native.disable_kernels():
        assert shape in list_shapes(trace_gradient(NextToken(), shape[0]).jaxpr.jaxpr)
        assert shape not in list_shapes(trace_gradient(NextToken(), shape[0], ADAPTERS).jaxpr.jaxpr)


@pytest.mark.usefixtures("small_chunks")
def test_chunks_draw_different_dropout_masks() -> None:
    """In a head that is only an adapter, the next chunk does not repeat the mask of the first."""
    model, params = random_model("llama", num_hidden_layers=1)
    lora = LoraConfig(r=2, target_modules=("lm_head",), lora_dropout=0.5)
    head = models.head_params(model, attach_new_lora(model.config, params, lora, KEY))
    weight = head["lm_head"]["weight"]
    weight = weight.replace(weight=jnp.zeros_like(weight.weight))
    weight = weight.replace(b=jax.random.normal(KEY, weight.b.shape))
    head = prepare_weights({"lm_head": {"weight": weight}}, KEY, jnp.int32(0))
    x_C1SD = jnp.ones((2, 1, 4, 40))
    labels = jnp.arange(8).reshape(2, 1, 4) + 2, jnp.arange(2)
    slope = jax.grad(objective._sum_chunks, 2)(model, head, x_C1SD, labels)
    first, second = np.asarray(slope != 0)
    assert 0.3 < first.mean() < 0.7
    assert (first != second).any()
