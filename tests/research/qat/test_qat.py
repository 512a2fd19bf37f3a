"""Quantization-aware training: gradients equal PyTorch, converted integers equal training."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jaxllm
from jaxllm.convert.registry import open_checkpoint
from jaxllm.errors import ConfigError
from jaxllm.research.qat.job import convert, prepare
from jaxllm.research.qat.weights import FakeQuantWeight, fake_quantize
from jaxllm.train.data.rows import Rows
from jaxllm.train.objective import NextToken
from jaxllm.train.optimizer import Optimizer
from jaxllm.train.partition import combine, partition
from jaxllm.train.step import Setup, eval_step, init_state, train_step
from jaxllm.weights.formats import as_format, parse_format, weight_format
from jaxllm.weights.linear import linear, round_to_int8
from jaxllm.weights.paths import Params, flatten
from jaxllm.weights.precision import Precision, cast
from jaxllm.weights.quantize import quantize
from jaxllm.weights.types.int_weight import IntWeight
from tests.compress.models import same
from tests.conftest import Run, assert_refused
from tests.tiny_models import random_model, tokens

# One model with every format; the same rules fit both families.
MIXED = [
    (r"wpe\.weight", None),
    (r"(embed_tokens|wte)\.weight", "int8-g32-zp"),
    (r".*(q_proj|c_attn)\.weight", "int4-g32"),
    (r".*k_proj\.weight", "int4-g64-zp-f16"),
    (r".*(v_proj|c_fc)\.weight", "int3-g32"),
    (r".*(o_proj|attn\.c_proj)\.weight", "int3-g64-zp"),
    (r".*(gate_proj)\.weight", "int2-g32-f16"),
    (r".*(down_proj|mlp\.c_proj)\.weight", "int8"),
    (r".*", "int8-g64-f16"),
]


ONE_LAYER = {"llama": {"num_hidden_layers": 1}, "gpt2": {"n_layer": 1}}


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.1, 1, shape).astype(np.float32)


def near(ours: Any, theirs: Any) -> None:
    theirs = np.asarray(theirs)
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5 * np.abs(theirs).max())


@pytest.mark.parametrize("levels", [(-127, 127), (-8, 7), (0, 15)])
def test_fake_quantize_gradients_equal_pytorch_learnable(levels: tuple[int, int]) -> None:
    """Values and gradients to weights and scales equal
    _fake_quantize_learnable_per_channel_affine.
    """
    w, g, factor = numbers(5, 96), numbers(5, 96, seed=1), 0.37
    scale = np.abs(w).max(1) / (0.7 * levels[1]) * np.linspace(0.3, 1.2, 5, dtype=np.float32)
    zero = np.full(5, 0 if levels[0] else 6, np.float32)
    theirs = [torch.tensor(x, requires_grad=True) for x in (w, scale, zero)]
    y = torch._fake_quantize_learnable_per_channel_affine(*theirs, 0, *levels, factor)
    (y * torch.tensor(g)).sum().backward()

    def value(w: jax.Array, scale: jax.Array) -> jax.Array:
        return fake_quantize(w, scale[:, None], jnp.asarray(zero)[:, None], levels, factor)

    def total(w: jax.Array, scale: jax.Array) -> jax.Array:
        return (value(w, scale) * g).sum()

    near(value(w, jnp.asarray(scale)), y.detach())
    for ours, their in zip(jax.grad(total, (0, 1))(w, scale), theirs, strict=False):
        near(ours, their.grad)
    cut = np.asarray(jax.grad(total)(w, scale)) == 0
    assert 0 < cut.mean() < 0.9, "some codes are clipped, some are not"


def test_fake_quantize_negative_scale_gradient_equals_lsq() -> None:
    """Equations 1 to 3 of LSQ by autograd, except in the half step where the clipping ranges
    differ.
    """
    w = np.concatenate([np.linspace(-1.7, 1.8, 75), [2.6, 3.0, -2.4, -3.2]]).astype(np.float32)
    g, factor, scale = numbers(79, seed=1), (79 * 7) ** -0.5, -0.25
    their_w, their_s = (torch.tensor(x, requires_grad=True) for x in (w, np.float32(scale)))
    s = their_s * factor + (their_s - their_s * factor).detach()
    v = torch.clamp(their_w / s, -8, 7)
    v = v + (torch.round(v) - v).detach()
    (v * s * torch.tensor(g)).sum().backward()

    def total(w: jax.Array, scale: jax.Array) -> jax.Array:
        zero = jnp.full((1,), 8, jnp.uint8)
        return (fake_quantize(w, scale[None], zero, (0, 15), factor) * g).sum()

    to_w, to_s = jax.grad(total, (0, 1))(jnp.asarray(w), jnp.float32(scale))
    near(to_w, their_w.grad)
    near(to_s, their_s.grad)


@pytest.mark.parametrize("dynamic", [False, True])
def test_fake_quant_linear_gradients_equal_torch(dynamic: bool) -> None:
    """Gradients to inputs, weights and scales equal torch, with float and dynamic inputs."""
    to: Any = parse_format("int8-g64" if dynamic else "int4-g64")
    w = numbers(5, 128)
    scale = np.asarray(to.quantize(jnp.asarray(w)).scale) * np.float32(0.8)
    assert_gradients_equal_torch(
        FakeQuantWeight(
            jnp.asarray(w), jnp.asarray(scale), None, target_format=to, dynamic_inputs=dynamic
        )
    )


def assert_gradients_equal_torch(leaf: Any, step: float | None = None, zero: float = 0.0) -> None:
    """Check gradients of a product with a weight `[5, 128]` in groups of 64.

    step, zero: the grid of static inputs, if they have one.
    """
    w, scale, to = np.asarray(leaf.weight), np.asarray(leaf.scale), leaf.target_format
    x, g = numbers(9, 128, seed=1), numbers(9, 5, seed=2)
    floats = {"weight": leaf.weight, "scale": leaf.scale}
    if step is not None:
        floats["step"] = jnp.float32(step)

    def total(x: jax.Array, floats: Any) -> jax.Array:
        return (linear(x, leaf.replace(**floats), int8_inputs=leaf.dynamic_inputs) * g).sum()

    to_x, found = jax.jit(jax.grad(total, (0, 1)))(jnp.asarray(x), floats)

    their_w = torch.tensor(w.reshape(10, 64), requires_grad=True)
    # torch needs positive scales: move their sign to the weights.
    sign = torch.tensor(np.sign(scale.reshape(10, 1)))
    their_s = torch.tensor(np.abs(scale.reshape(10)), requires_grad=True)
    levels = (-8, 7) if to.bits == 4 else (-127, 127)
    their_rounded = torch._fake_quantize_learnable_per_channel_affine(
        their_w * sign, their_s, torch.zeros(10), 0, *levels, (64 * levels[1]) ** -0.5
    )
    used = their_x = torch.tensor(x, requires_grad=True)
    their_step = torch.tensor([step or 0.0], requires_grad=True)
    if step is not None:
        used = torch._fake_quantize_learnable_per_tensor_affine(
            their_x, their_step, torch.tensor([zero]), -127, 127, (128 * 127) ** -0.5
        )
    if leaf.dynamic_inputs:
        rounded = np.asarray(round_to_int8(jnp.asarray(x), 64))
        used = their_x + (torch.tensor(rounded) - their_x).detach()
    (used @ (their_rounded * sign).reshape(5, 128).T * torch.tensor(g)).sum().backward()
    near(to_x, their_x.grad)
    near(found["weight"], their_w.grad.reshape(5, 128))
    near(found["scale"], (their_s.grad.reshape(10, 1) * sign).reshape(5, 2))
    if step is not None:
        near(found["step"], their_step.grad[0])


def test_fixed_scale_gradient_is_straight_through() -> None:
    """With fixed scales, the weight gradient is the input sum inside the range and zero outside;
    the weight that sets the scale is inside.
    """
    w, x = jnp.asarray(numbers(3, 64)), jnp.asarray(numbers(2, 64, seed=1))
    leaf = prepare({"a": w}, [(".*", "int4-g64")])["a"]
    to_w = jax.grad(lambda w: linear(x, leaf.replace(weight=w)).sum())(w)
    q = as_format(w, "int4-g64")
    assert isinstance(q, IntWeight)
    steps = np.asarray(w) / np.repeat(np.asarray(q.scale)[:, :1], 64, 1)
    inside = np.abs(np.round(steps)) < 8
    inside |= np.round(steps) == -8
    near(to_w, np.where(inside, np.asarray(x).sum(0), 0))
    assert inside[np.arange(3), np.abs(np.asarray(w)).argmax(1)].all(), "the largest, too"


@pytest.mark.parametrize(
    ("family", "dtype", "learned", "dynamic"),
    [
        ("llama", "float32", False, True),
        pytest.param("llama", "bfloat16", True, False, marks=pytest.mark.full),
        pytest.param("gpt2", "float32", False, True, marks=pytest.mark.full),
        ("gpt2", "bfloat16", True, False),
    ],
)
def test_converted_model_equals_qat_forward_bitwise(
    family: str, dtype: str, learned: bool, dynamic: bool
) -> None:
    """The converted integer model gives the logits of the fake-quantized one bit for bit, in every
    format; in float32, XLA may round GPT-2's sum of two embeddings differently in the last bit.
    """
    precision = dataclasses.replace(Precision.uniform(dtype), int8_inputs=dynamic)
    model, params = random_model(family, precision=precision, **ONE_LAYER[family])
    params = cast(params, precision)
    fake = prepare(params, MIXED, learn_scales=learned, dynamic_inputs=dynamic)
    same(convert(fake), quantize(params, MIXED))
    formats = assert_converted_bits_equal(model, fake, exact=(family, dtype) != ("gpt2", "float32"))
    assert "int8" in formats and len(formats) > 1


def assert_converted_bits_equal(model: Any, fake: Params, *, exact: bool) -> set[str]:
    """Check the logits of moved weights against those converted; return the converted formats."""
    trained, rest = partition(fake)
    moved = {path: x * (1 + 0.2 * numbers(*x.shape, seed=3)) for path, x in trained.items()}
    fake = combine(moved, rest)
    converted = convert(fake)
    for length in (1, 11):
        ids = tokens(1, length)
        ours, theirs = (jaxllm.forward(model, p, None, ids).logits for p in (fake, converted))
        if exact:
            assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes(), length
        else:
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6, err_msg=str(length))
    assert np.isfinite(np.asarray(ours)).all()
    return {weight_format(leaf) for _, leaf in flatten(converted)}


def test_qat_start_step_delays_quantization() -> None:
    """Before start_step, products and rows use the float weights, with straight gradients; from
    then on the quantized ones.
    """
    w, x = jnp.asarray(numbers(3, 64)), jnp.asarray(numbers(2, 64, seed=1))
    leaf = prepare({"a": w}, [(".*", "int2-g32")], start_step=5)["a"]
    key = jax.random.key(0)
    before, after = (leaf.for_training_step(key, jnp.int32(step)) for step in (4, 5))
    rows = jnp.array([[2, 0]])
    np.testing.assert_array_equal(linear(x, before), linear(x, w))
    np.testing.assert_array_equal(before.take(rows), w[rows])
    for on in (after, leaf):
        np.testing.assert_array_equal(linear(x, on), linear(x, as_format(w, "int2-g32")))
        np.testing.assert_array_equal(on.take(rows), as_format(w, "int2-g32").take(rows))
    to_w = jax.grad(lambda w: linear(x, before.replace(weight=w)).sum())(w)
    near(to_w, np.broadcast_to(np.asarray(x).sum(0), w.shape))


def test_qat_prepare_refuses_unsupported_weights() -> None:
    params = {"a": {"weight": jnp.ones((4, 32))}, "b": jnp.ones(3)}
    with pytest.raises(ConfigError, match=r"a\.weight: nf4 is not an integer format"):
        prepare(params, [(".*", "nf4")])
    with pytest.raises(ConfigError, match=r"a\.weight is int8: .* dequantize it"):
        prepare(quantize(params, [(".*", "int8")]), [(".*", "int4")])
    with pytest.raises(ConfigError, match="match no matrix"):
        prepare(params, [("c", "int4")])
    with pytest.raises(ConfigError, match="convert it to integers"):
        prepare(params, "int8")["a"]["weight"].arrays()


def test_qat_training_halves_initial_loss() -> None:
    """Thirty steps on one batch at 3 bits halve the loss of rounding, and the converted model has
    the trained loss.
    """
    model, params = random_model("llama", num_hidden_layers=1, spread=0.2)
    fake = prepare(params, [(r".*mlp.*", "int3-g32")], learn_scales=True)
    trained, rest = partition(fake)
    assert "layers.0.mlp.up_proj.weight.scale" in trained
    setup = Setup(model, NextToken(), Optimizer(steps=30, lr=1e-2))
    ids = tokens(2, 13).astype(np.int32)
    at = np.broadcast_to(np.arange(12, dtype=np.int32), (2, 12))
    rows = Rows(ids[:, :-1], ids[:, 1:], at, np.zeros((2, 12), np.int32))
    key = jax.random.key(0)
    state = init_state(trained, setup)
    first = eval_step(state.trained, rest, None, rows, key, setup=setup)
    batches = jax.tree.map(lambda x: x[None], rows)
    losses = []
    for _ in range(30):
        state, metrics = train_step(state, rest, None, batches, key, setup=setup)
        losses.append(float(metrics.loss))
    assert losses[-1] < 0.5 * float(first.total / first.weight)
    converted = convert(combine(state.trained, rest))
    logits = jaxllm.forward(model, converted, None, ids[:, :-1]).logits
    logprobs = jax.nn.log_softmax(logits)
    chosen = np.take_along_axis(np.asarray(logprobs), ids[:, 1:, None], -1)
    last = eval_step(state.trained, rest, None, rows, key, setup=setup)
    # Log-probabilities near 0 keep the absolute rounding error of the logits.
    np.testing.assert_allclose(-chosen.mean(), last.total / last.weight, rtol=1e-5, atol=1e-6)


TEXT = "Lily saw a red ball. Her cat Max ran to the ball and she laughed. " * 12


def test_train_qat_writes_integer_checkpoint(
    run: Run, shallow: Callable[[str], Path], tmp_path: Path
) -> None:
    """The result has the formats of the rules and records its recipe."""
    (tmp_path / "text.txt").write_text(TEXT)
    rules = [[r"layers\.0\.mlp\..*", "int3-g32"], [r"layers\.1\.mlp\.up_proj", "int8"]]
    (tmp_path / "rules.json").write_text(json.dumps(rules))
    out = tmp_path / "small"
    status, printed, err = run(
        "train", "qat", shallow("llama"), out, "--data", tmp_path / "text.txt",
        "--rules", tmp_path / "rules.json", "--steps", 2, "--batch-size", 1, "--length", 32,
        "--eval-split", 0, "--learned-scales",
    )  # fmt: skip
    assert status == 0, err
    assert "loss" in printed
    loaded = jaxllm.load(out)
    formats = {path: weight_format(leaf) for path, leaf in flatten(loaded.params)}
    assert formats["layers.0.mlp.up_proj.weight"] == "int3-g32"
    assert formats["layers.1.mlp.up_proj.weight"] == "int8"
    assert formats["layers.1.mlp.down_proj.weight"] == "float32"
    assert open_checkpoint(out).recipe == ("train: qat by rules",)
    assert not out.with_name("small.parts").exists()
    words = ("train", "qat", shallow("llama"), tmp_path / "x", "--data", tmp_path / "text.txt")
    assert_refused(run, "is not an integer format", *words, "--format", "bf16-packed")
