"""The compiled training step compared with torch: losses, gradients, AdamW, frozen weights."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxllm.adapters import LoraConfig, attach_new_lora
from jaxllm.errors import ConfigError
from jaxllm.train.data.rows import IGNORED, Rows
from jaxllm.train.objective import NextToken
from jaxllm.train.optimizer import Optimizer, decay_mask
from jaxllm.train.partition import combine, partition, trainable_params
from jaxllm.train.step import (
    FrozenWeight,
    Setup,
    TrainedWeight,
    freeze_params,
    init_state,
    train_step,
    wrap_trained,
)
from jaxllm.weights.linear import linear
from jaxllm.weights.paths import flatten
from jaxllm.weights.precision import Precision, cast
from jaxllm.weights.quantize import quantize
from tests.tiny_models import Twin, make_twin, our_arrays, random_model, tokens

KEY = jax.random.key(0)
RATE = 1e-3


def padded(lengths: tuple[int, ...], width: int, seed: int = 0, prompt: int = 0) -> Rows:
    """Return rows with one text each, whose first `prompt` tokens are not learned."""
    rows = np.full((4, len(lengths), width), 0, np.int32)
    rows[1], rows[2], rows[3] = IGNORED, -1, -1
    for row, length in enumerate(lengths):
        ids = tokens(1, length, seed + row)[0]
        rows[0, row, :length] = ids
        rows[1, row, : length - 1] = ids[1:]
        rows[1, row, : max(prompt - 1, 0)] = IGNORED
        rows[2, row, :length] = np.arange(length)
        rows[3, row, :length] = 0
    return Rows(*rows)


def stacked(*batches: Rows) -> Rows:
    """Return batches stacked for accumulation, `[A, B, T]`."""
    rows: Rows = jax.tree.map(lambda *x: np.stack(x), *batches)
    return rows


BATCHES = (padded((9, 4), 9), padded((3, 7), 9, seed=5, prompt=2))
BLANK = dataclasses.replace(BATCHES[0], label_BT=np.full((2, 9), IGNORED, np.int32))


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return make_twin(tmp_path_factory.mktemp(request.param), request.param)


def torch_loss(model: Any, batches: tuple[Rows, ...]) -> torch.Tensor:
    """Return the mean loss over all labels of all batches."""
    total, count = torch.zeros(()), 0
    for rows in batches:
        ids, labels = (
            torch.tensor(np.asarray(x, np.int64)) for x in (rows.token_BT, rows.label_BT)
        )
        logits = model(ids).logits
        total = total + torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        count += int((labels != IGNORED).sum())
    return total / max(count, 1)


def setup_of(model: Any, **options: Any) -> Setup:
    optimizer = Optimizer(**{"steps": 10, "lr": RATE, "warmup": 0.0, **options})
    return Setup(model, NextToken(), optimizer)


def test_loss_and_gradient_equal_torch(twin: Twin) -> None:
    setup = setup_of(twin.model)
    trained, rest = partition(twin.params)

    def loss(trained: Any) -> jax.Array:
        found = [setup.objective(twin.model, combine(trained, rest), None, b, KEY) for b in BATCHES]
        return sum(f.total for f in found) / sum(f.weight for f in found)

    value, gradient = jax.jit(jax.value_and_grad(loss))(trained)
    twin.torch_model.zero_grad()
    expected = torch_loss(twin.torch_model, BATCHES)
    expected.backward()
    assert float(value) == pytest.approx(float(expected.detach()), rel=1e-5)
    named = {name: p.grad for name, p in twin.torch_model.named_parameters()}
    wanted = our_arrays(twin, named)
    assert gradient.keys() == wanted.keys()
    for path, array in gradient.items():
        scale = float(np.abs(wanted[path]).max())
        np.testing.assert_allclose(array, wanted[path], atol=2e-5 * scale, rtol=1e-4, err_msg=path)


def test_adamw_steps_equal_torch(twin: Twin) -> None:
    """Two steps with weight decay, clipping and two accumulated batches give the losses, norms and
    parameters of torch.
    """
    setup = setup_of(twin.model, schedule="constant", weight_decay=0.1, max_grad_norm=0.5, eps=1e-3)
    trained, rest = partition(twin.params)
    state = init_state(trained, setup)
    before = {path: np.array(x) for path, x in trained.items()}
    initial = {name: p.detach().clone() for name, p in twin.torch_model.named_parameters()}
    matrices, vectors = [], []
    for parameter in twin.torch_model.parameters():
        (matrices if parameter.ndim >= 2 else vectors).append(parameter)
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=RATE, eps=1e-3)
    for _ in range(2):
        state, metrics = train_step(state, rest, None, stacked(*BATCHES), KEY, setup=setup)
        adamw.zero_grad()
        loss = torch_loss(twin.torch_model, BATCHES)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(twin.torch_model.parameters(), 0.5)
        adamw.step()
        assert float(metrics.loss) == pytest.approx(float(loss.detach()), rel=1e-5)
        assert float(metrics.grad_norm) == pytest.approx(float(norm), rel=1e-4)
    assert int(metrics.weight) == sum(int((b.label_BT != IGNORED).sum()) for b in BATCHES)
    wanted = our_arrays(twin, dict(twin.torch_model.named_parameters()))
    with torch.no_grad():
        for name, parameter in twin.torch_model.named_parameters():
            parameter.copy_(initial[name])
    for path, array in state.trained.items():
        moved = wanted[path] - before[path]
        ours = np.asarray(array) - before[path]
        np.testing.assert_allclose(ours, moved, atol=RATE * 1e-3, rtol=1e-3, err_msg=path)


def test_step_without_labels_is_zero_and_finite(twin: Twin) -> None:
    setup = setup_of(twin.model, weight_decay=0.0)
    trained, rest = partition(twin.params)
    rows = stacked(BLANK, BLANK)
    state, metrics = train_step(init_state(trained, setup), rest, None, rows, KEY, setup=setup)
    assert float(metrics.loss) == float(metrics.grad_norm) == float(metrics.weight) == 0
    assert bool(metrics.finite)
    assert all(np.array_equal(x, trained[path]) for path, x in state.trained.items())


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any]:
    return random_model("llama", num_hidden_layers=1)


def test_nonfinite_step_changes_nothing(tiny: Any) -> None:
    model, params = tiny
    setup = setup_of(model)
    trained, rest = partition(params)
    broken = {**trained, "norm.weight": trained["norm.weight"].at[3].set(jnp.inf)}
    state, metrics = train_step(
        init_state(broken, setup), rest, None, stacked(*BATCHES), KEY, setup=setup
    )
    assert not bool(metrics.finite)
    assert int(state.step) == 0
    assert all(np.array_equal(x, broken[path]) for path, x in state.trained.items())
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(state.optimizer))


def test_float32_master_weights_accumulate_small_updates(tiny: Any) -> None:
    """Steps of 1e-6 accumulate in the float32 master weights of a bfloat16 model; combine rounds
    them to bfloat16.
    """
    model, params = tiny
    precision = Precision.uniform("bfloat16")
    half, model = cast(params, precision), model.clone(precision=precision)
    setup = setup_of(model, lr=1e-6, schedule="constant", weight_decay=0.0)
    trained, rest = partition(half)
    state = init_state(trained, setup)
    for _ in range(3):
        state, _ = train_step(state, rest, None, stacked(*BATCHES), KEY, setup=setup)
    moved = {path: np.asarray(x - trained[path]) for path, x in state.trained.items()}
    assert all(x.dtype == np.float32 for x in moved.values())
    path = "layers.0.mlp.up_proj.weight"
    assert 2.5e-6 < np.abs(moved[path]).max() < 3.5e-6  # three steps of about lr each
    initial = dict(flatten(combine(state.trained, rest)))[path]
    assert initial.dtype == jnp.bfloat16
    assert np.array_equal(initial, state.trained[path].astype(jnp.bfloat16))


def test_partition_trains_only_matching_parameters(tiny: Any) -> None:
    """Parameters without a matching rule are neither changed nor copied."""
    model, params = tiny
    setup = setup_of(model)
    trained, rest = partition(
        params, ((r"layers\.0\.mlp\.up_proj", False), (r"layers\.0\.mlp", True))
    )
    assert set(trained) == {f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "down")}
    state, _ = train_step(
        init_state(trained, setup), rest, None, stacked(*BATCHES), KEY, setup=setup
    )
    after = dict(flatten(combine(state.trained, rest)))
    for path, array in flatten(params):
        assert np.array_equal(after[path], array) == (path not in trained), path
        assert path in trained or after[path] is array  # never copied


def test_partition_refuses_rules_without_match(tiny: Any) -> None:
    _, params = tiny
    with pytest.raises(ConfigError, match=r"'layer\.0' matches no trainable parameter"):
        partition(params, ((r"layer.0", True),))
    with pytest.raises(ConfigError, match="nothing to train"):
        partition(params, ((r".*", False),))
    assert set(trainable_params(params)) == {path for path, _ in flatten(params)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": -1.0}, "lr must be a number >= 0.0"),
        ({"warmup": 2.0}, "warmup must be a number <= 1.0"),
        ({"steps": 0}, "steps must be a whole number >= 1"),
        ({"steps": 2.5}, "steps must be a whole number, got 2.5"),
        ({"steps": True}, "steps must be a whole number, got True"),
        ({"lr": "x"}, "lr must be a number, got 'x'"),
        ({"lr": True}, "lr must be a number, got True"),
        ({"warmup": None}, "warmup must be a number, got None"),
        ({"max_grad_norm": math.inf}, "max_grad_norm must be a number .*, got inf"),
        (
            {"b1": 2.0, "b2": math.nan},
            "b1 must be a number < 1.0, got 2.0.*b2 must be a number >= 0.0, got nan",
        ),
        ({"eps": -1.0}, "eps must be a number > 0.0"),
        ({"rates": 5}, "rates must be a list, got 5"),
        ({"rates": ((".*", "x"),)}, "rates.* must be a number"),
        ({"rates": (("(", 0.1),)}, "not a valid regex"),
        ({"schedule": ["sine"]}, "schedule must be one of"),
        ({"schedule": "sine"}, "schedule must be one of cosine, linear, constant"),
        (
            {"max_grad_norm": 0.0, "weight_decay": -1.0},
            "max_grad_norm must be a number .*, got 0.0; weight_decay must be a number >= 0.0",
        ),
    ],
)
def test_optimizer_refuses_invalid_options(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Optimizer(**{"steps": 10, **changes})


def test_weight_decay_applies_only_to_matrices() -> None:
    names = {"a.weight": 2, "norm.weight": 1, "a.bias": 1, "b.weight.scale": 2}
    found = decay_mask({name: jnp.zeros((3,) * ndim) for name, ndim in names.items()})
    assert [name for name, whether in found.items() if whether] == ["a.weight"]


def test_learning_rate_schedules_warm_up_and_decay() -> None:
    cosine = Optimizer(steps=100, lr=1.0, warmup=0.1, floor=0.1)
    rates = np.array([float(cosine.learning_rate(jnp.int32(n))) for n in (0, 9, 10, 55, 100)])
    np.testing.assert_allclose(rates, [1 / 11, 10 / 11, 1.0, 0.55, 0.1], rtol=1e-6)
    linear = Optimizer(steps=100, lr=2.0, warmup=0.0, schedule="linear", floor=0.0)
    np.testing.assert_allclose([linear.learning_rate(jnp.int32(n)) for n in (0, 25)], [2.0, 1.5])


ADAPTERS = ((r".*\.weight\.(a|b)", True),)


@pytest.mark.parametrize(
    ("dtype", "format"), [("float32", None), ("float32", "nf4"), ("bfloat16", "int4")]
)
def test_frozen_weights_keep_loss_and_gradients(dtype: str, format: str | None) -> None:
    """With frozen dense, nf4 or int4 weights, the loss is identical and the adapter gradients equal
    those without freezing.
    """
    model, params = random_model("llama", num_hidden_layers=1)
    precision = Precision.uniform(dtype)
    model, params = model.clone(precision=precision), cast(params, precision)
    params = params if format is None else quantize(params, format)
    lora = LoraConfig(r=2, target_modules=("q_proj", "down_proj"))
    trained, rest = partition(attach_new_lora(model.config, params, lora, KEY), ADAPTERS)
    trained = {
        path: 0.1 * jax.random.normal(jax.random.fold_in(KEY, n), x.shape)
        for n, (path, x) in enumerate(sorted(trained.items()))
    }

    def gradients(rest: Any) -> Any:
        def loss(trained: Any) -> jax.Array:
            return NextToken()(model, combine(trained, rest), None, BATCHES[0], KEY).total

        return jax.jit(jax.value_and_grad(loss))(trained)

    frozen_rest = freeze_params(rest)
    kinds = {path: type(leaf) for path, leaf in flatten(frozen_rest)}
    assert kinds["layers.0.mlp.up_proj.weight"] is FrozenWeight
    assert kinds["norm.weight"] is not FrozenWeight
    expected, found = gradients(rest), gradients(frozen_rest)
    assert float(found[0]) == float(expected[0])
    for path, gradient in expected[1].items():
        scale = float(jnp.abs(gradient).max())
        near = 1e-5 if dtype == "float32" else 0.05  # the gradient product is in bfloat16
        np.testing.assert_allclose(found[1][path], gradient, atol=near * scale, err_msg=path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trained_weight_gradients_equal_torch(dtype: str) -> None:
    """The product, its inputs' gradient and its weight's are those of torch's linear."""
    rng = np.random.default_rng(0)
    x, w, slope = (
        torch.tensor(rng.normal(0, 1, size), dtype=getattr(torch, dtype))
        for size in ((40, 70), (50, 70), (40, 50))
    )
    x.requires_grad_(), w.requires_grad_()
    torch.nn.functional.linear(x, w).backward(slope)
    ours = [jnp.asarray(a.detach().float().numpy(), dtype) for a in (x, w, slope)]

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        wrapped = wrap_trained({"up": {"weight": w}})["up"]["weight"]
        assert isinstance(wrapped, TrainedWeight)
        return (linear(x, wrapped) * ours[2].astype(jnp.float32)).sum()

    for found, wanted in zip(jax.jit(jax.grad(product, (0, 1)))(*ours[:2]), (x, w), strict=True):
        assert found.dtype == dtype and wanted.grad is not None
        expected = wanted.grad.float().numpy()
        near = {"float32": 1e-6, "bfloat16": 1 / 256}[dtype] * np.abs(expected).max()
        np.testing.assert_allclose(np.asarray(found, np.float32), expected, atol=near)


def test_step_copies_neither_moments_nor_gradients() -> None:
    """A compiled step needs less temporary memory than two copies of the trained arrays: the
    gradient is one.
    """
    model, params = random_model("llama", num_hidden_layers=1, vocab_size=40_009)
    setup = setup_of(model)
    trained, rest = partition(params)
    size = sum(x.nbytes for x in trained.values())
    state = jax.eval_shape(lambda: init_state(trained, setup))
    lowered = train_step.lower(state, rest, None, stacked(BATCHES[0]), KEY, setup=setup)
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 2 * size


def test_freeze_params_skips_trained_and_small_weights() -> None:
    """Trained weights and norms stay as they are; every other matrix becomes a FrozenWeight."""
    _, params = random_model("llama", num_hidden_layers=1)
    _, rest = partition(params, ((r"layers\.0\.mlp", True),))
    kinds = {path: isinstance(leaf, FrozenWeight) for path, leaf in flatten(freeze_params(rest))}
    assert not any(kinds[path] for path in kinds if ".mlp." in path or "norm" in path)
    assert kinds["lm_head.weight"]
    assert kinds["layers.0.self_attn.q_proj.weight"]
