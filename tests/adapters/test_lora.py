"""LoRA weights: products, gradients, DoRA, dropout, merging, and one adapter per batch row."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import forward
from jaxllm.adapters import (
    LoraConfig,
    LoraWeight,
    attach_adapter,
    attach_new_lora,
    choose_adapters,
    extract_adapter,
    merge_adapter,
    with_adapters,
    write_adapter,
    write_gguf_adapter,
)
from jaxllm.errors import ConfigError
from jaxllm.weights.formats import as_format, as_weight, to_dense
from jaxllm.weights.linear import embed, linear
from jaxllm.weights.paths import first_match, flatten
from jaxllm.weights.quantize import quantize
from jaxllm.weights.types.lora import LoraSite
from tests.adapters.random_adapters import random_adapter
from tests.tiny_models import assert_close, random_model, tokens
from tests.weights.products import plain_product

ROWS, COLUMNS, K = 37, 29, 3  # coprime
RNG = np.random.default_rng(0)
W, A, B, X = (
    RNG.normal(0, 1, shape).astype(np.float32)
    for shape in ((ROWS, COLUMNS), (K, COLUMNS), (ROWS, K), (6, COLUMNS))
)
SCALE = np.array([0.7, 1.3, 0.2], np.float32)


def make_lora(weight: Any = W, site: LoraSite = "product", **more: Any) -> LoraWeight:
    arrays = (jnp.asarray(x) for x in (A, B, SCALE))
    base = jnp.asarray(weight) if isinstance(weight, np.ndarray) else weight
    return LoraWeight(base, *arrays, site=site, **more)


@pytest.mark.parametrize("format", ["float32", "bfloat16", "int8", "int4-g32-zp", "rank5/float32"])
def test_lora_products_equal_dense_sum(format: str) -> None:
    """Products, row lookups and the dense matrix of a LoRA weight equal those of W + B diag(s) A,
    for every base format.
    """
    base = as_format(jnp.asarray(W), format)
    wide = np.asarray(to_dense(base, jnp.float32), np.float64)
    made, sum_OI = make_lora(base), wide + (B * SCALE) @ A
    assert made.weight is base and made.shape == W.shape
    assert_close(linear(jnp.asarray(X), made), X @ sum_OI.T)
    assert_close(plain_product(jnp.asarray(X), made), X @ sum_OI.T)
    assert_close(made.to_dense(jnp.float32), sum_OI)
    rows_BTD = np.asarray(embed(made, jnp.array([[0, ROWS - 1], [5, ROWS]])), np.float32)
    tolerance = 0.05 if format == "bfloat16" else 1e-4
    np.testing.assert_allclose(rows_BTD[0], sum_OI[[0, ROWS - 1]], atol=tolerance)
    assert np.isnan(rows_BTD[1, 1]).all() and not np.isnan(rows_BTD[1, 0]).any()


@pytest.mark.parametrize("rows", [1, 70])
def test_bfloat16_adapter_accumulates_in_float32(rows: int) -> None:
    """The result between the products with A and B is not rounded: bfloat16 adapters give the
    product of their rounded matrices.
    """
    a, b = (jnp.asarray(x, jnp.bfloat16) for x in (A, B))
    made = LoraWeight(jnp.asarray(W), a, b, jnp.asarray(SCALE))
    x_RI = RNG.normal(0, 1, (rows, COLUMNS)).astype(np.float32)
    wide_a, wide_b = (np.asarray(x, np.float64) for x in (a, b))
    assert_close(linear(jnp.asarray(x_RI), made), x_RI @ (W + (wide_b * SCALE) @ wide_a).T)


@pytest.mark.parametrize("site", ["product", "rows"])
def test_dora_normalizes_sum_to_magnitude(site: LoraSite) -> None:
    """DoRA scales the sum to its own magnitudes (Liu et al. 2024, eq. 5): per row, or per column of
    an embedding table, as in PEFT.
    """
    axis = 0 if site == "rows" else 1
    sum_OI = W.astype(np.float64) + (B * SCALE) @ A
    norm = np.linalg.norm(sum_OI, axis=axis)
    length = RNG.uniform(0.5, 2, norm.shape).astype(np.float32)
    expected = sum_OI * np.expand_dims(length / norm, axis)
    made = make_lora(site=site, magnitude=jnp.asarray(length))
    assert_close(made.to_dense(), expected)
    assert_close(made.take(jnp.array([3, 0])), expected[[3, 0]])
    product = X @ W.T if site == "rows" else X @ expected.T  # a tied head keeps its weight
    assert_close(linear(jnp.asarray(X), made), product)
    known = make_lora(site=site, magnitude=jnp.asarray(length), norm=made.norms())
    np.testing.assert_array_equal(known.to_dense(), made.to_dense())


def test_initial_lora_gradients_match_closed_form() -> None:
    """With B = 0, the gradient of B is s (dL/dy)^T (x A^T) and that of A is zero."""
    made = make_lora().replace(b=jnp.zeros((ROWS, K)))
    cotangent_RO = jnp.asarray(RNG.normal(0, 1, (6, ROWS)), jnp.float32)

    def loss(a: jax.Array, b: jax.Array) -> jax.Array:
        return (cotangent_RO * linear(jnp.asarray(X), made.replace(a=a, b=b))).sum()

    grad_a, grad_b = jax.grad(loss, (0, 1))(made.a, made.b)
    np.testing.assert_array_equal(grad_a, 0)
    assert_close(grad_b, SCALE * (np.asarray(cotangent_RO).T @ (X @ A.T)))


def test_dora_gradient_treats_norm_as_constant() -> None:
    """DoRA's gradient treats the norm as a constant (Liu et al. 2024, section 4.3) and matches the
    closed form.
    """
    length = RNG.uniform(0.5, 2, ROWS).astype(np.float32)
    made = make_lora(magnitude=jnp.asarray(length))
    cotangent_RO = RNG.normal(0, 1, (6, ROWS)).astype(np.float32)

    def loss(b: jax.Array, magnitude: jax.Array) -> jax.Array:
        y_RO = linear(jnp.asarray(X), made.replace(b=b, magnitude=magnitude))
        return (jnp.asarray(cotangent_RO) * y_RO).sum()

    grad_b, grad_m = jax.grad(loss, (0, 1))(made.b, made.magnitude)
    sum_OI = W.astype(np.float64) + (B * SCALE) @ A
    norm = np.linalg.norm(sum_OI, axis=1)
    assert_close(grad_b, (cotangent_RO * (length / norm)).T @ (X @ A.T) * SCALE)
    assert_close(grad_m, (cotangent_RO * (X @ sum_OI.T)).sum(0) / norm)


@pytest.mark.parametrize("dora", [False, True])
def test_dropout_masks_adapter_inputs_only(dora: bool) -> None:
    """With the same mask, dropout follows PEFT's formula out += (m/n - 1) W x' + m/n s B A x', and
    is off in inference.
    """
    length = jnp.asarray(RNG.uniform(0.5, 2, ROWS), jnp.float32) if dora else None
    made = make_lora(magnitude=length, dropout=0.4)
    key = jax.random.key(3)
    training = made.for_training_step(key, jnp.zeros((), jnp.int32))
    mask = np.asarray(jax.random.bernoulli(key, 0.6, X.shape))
    dropped = np.where(mask, X / 0.6, 0)
    gain = np.ones(ROWS)
    if length is not None:
        gain = np.asarray(length) / np.linalg.norm(W + (B * SCALE) @ A, axis=1)
    added = gain * (dropped @ ((B * SCALE) @ A).T) + (gain - 1) * (dropped @ W.T)
    assert_close(linear(jnp.asarray(X), training), X @ W.T + added)
    # Not in inference.
    assert_close(linear(jnp.asarray(X), made), X @ np.asarray(made.to_dense()).T)


FIRST = LoraConfig(r=2, target_modules=("q_proj", "down_proj"))
SECOND = LoraConfig(r=5, target_modules="all-linear", use_dora=True, use_rslora=True)
THIRD = LoraConfig(r=3, target_modules=("embed_tokens", "lm_head"))
TOKENS = tokens(4, 9)


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any]:
    return random_model("llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def three(tiny: tuple[Any, Any]) -> dict[str, Any]:
    model, params = tiny
    return {
        name: random_adapter(model.config, params, lora, seed)
        for seed, (name, lora) in enumerate((("x", FIRST), ("y", SECOND), ("z", THIRD)))
    }


def test_new_lora_shares_weights_and_preserves_logits(tiny: tuple[Any, Any]) -> None:
    """A new adapter leaves the logits unchanged bit for bit, shares the base weights, and starts
    with B = 0 and A within its bound.
    """
    model, params = tiny
    lora = LoraConfig(r=2, target_modules=(*FIRST.target_modules, *THIRD.target_modules))
    adapted = attach_new_lora(model.config, params, lora, jax.random.key(0), dtype="bfloat16")
    base = forward(model, params, None, TOKENS).logits
    np.testing.assert_array_equal(forward(model, adapted, None, TOKENS).logits, base)
    before, after = dict(flatten(params)), dict(flatten(adapted))
    assert sum(isinstance(x, LoraWeight) for x in after.values()) == 4
    for path, x in after.items():
        assert (x.weight if isinstance(x, LoraWeight) else x) is before[path]
    matrices = extract_adapter(model.config, adapted, lora).matrices
    low = matrices["layers.0.self_attn.q_proj"]
    bound = 40**-0.5 * (1 + 2**-8)  # bfloat16 may round up
    assert 0.1 < np.abs(np.asarray(low.a, np.float32)).max() <= bound and not low.b.any()
    assert matrices["embed_tokens"].b.shape == (131, 2)


def test_new_dora_preserves_logits(tiny: tuple[Any, Any]) -> None:
    model, params = tiny
    adapted = attach_new_lora(model.config, params, SECOND, jax.random.key(0))
    base = forward(model, params, None, TOKENS).logits
    assert_close(forward(model, adapted, None, TOKENS).logits, np.asarray(base))


def test_batch_rows_select_their_own_adapter(tiny: tuple[Any, Any], three: dict[str, Any]) -> None:
    """Each row gives the logits of its adapter run separately; a row without an adapter matches the
    base model bit for bit.
    """
    model, params = tiny
    several = with_adapters(model.config, params, three)
    choice = np.array([1, -1, 2, 0], np.int32)
    found = np.asarray(
        forward(model, choose_adapters(several, jnp.asarray(choice)), None, TOKENS).logits
    )
    base = np.asarray(forward(model, params, None, TOKENS).logits)
    np.testing.assert_array_equal(found[1], base[1])
    np.testing.assert_array_equal(forward(model, several, None, TOKENS).logits, base)
    for row, number in enumerate(choice):
        if number >= 0:
            own = attach_adapter(model.config, params, list(three.values())[number])
            single_BTV = np.asarray(forward(model, own, None, TOKENS).logits)
            assert_close(found[row], single_BTV[row])
            assert np.abs(found[row] - base[row]).max() > 0.1


@pytest.mark.parametrize("format", ["int4", pytest.param("int8", marks=pytest.mark.full)])
def test_adapters_attach_and_merge_over_quantized_weights(
    tiny: tuple[Any, Any], three: dict[str, Any], format: str
) -> None:
    """Merging an adapter into quantized weights gives their dequantized sum, equal logits, and an
    int8 LM head.
    """
    model, params = tiny
    base = quantize(params, format)
    adapted = attach_adapter(model.config, base, three["x"])
    wide = {path: to_dense(x, jnp.float32) for path, x in flatten(base)}
    logits = np.asarray(forward(model, adapted, None, TOKENS).logits)
    config, one = merge_adapter(model.config, adapted)
    assert config == model.config
    path = "layers.0.self_attn.q_proj.weight"
    low = three["x"].matrices["layers.0.self_attn.q_proj"]
    expected = np.asarray(wide[path]) + FIRST.scale(2, 8.0) * np.asarray(low.b) @ np.asarray(low.a)
    assert_close(dict(flatten(one))[path], expected)
    assert as_weight(dict(flatten(one))["lm_head.weight"]).format.startswith("int8")
    assert_close(forward(model, one, None, TOKENS).logits, logits)


def test_rules_select_adapted_modules(tiny: tuple[Any, Any]) -> None:
    """Rules decide which modules get an adapter; the first rule that matches wins."""
    model, params = tiny
    rules = ((r".*self_attn\.o_proj", True), (r"lm_head", True), (r".*", False))
    adapted = attach_new_lora(model.config, params, LoraConfig(rules=rules), jax.random.key(0))
    for path, x in flatten(adapted):
        assert isinstance(x, LoraWeight) == bool(first_match(rules, path)), path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"target_modules": ("c_attn",)},
            "'c_attn' matches no module of this model; expected one of",
        ),
        ({"rules": ((r"nothing", True),)}, "select no module; expected one of"),
        ({"r": 0}, "r must be a whole number >= 1"),
        ({"target_modules": "("}, "target_modules"),
        ({"layers_to_transform": 1}, "require a list of target_modules"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights must be one of kaiming, gaussian"),
    ],
)
def test_invalid_lora_config_is_refused(tiny: tuple[Any, Any], options: Any, message: str) -> None:
    """An impossible LoRA configuration raises a one-line error that names the problem."""
    model, params = tiny
    with pytest.raises(ConfigError) as caught:
        attach_new_lora(model.config, params, LoraConfig(**options), jax.random.key(0))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_adapters_of_other_models_are_refused(
    tiny: tuple[Any, Any], three: dict[str, Any], tmp_path: Path
) -> None:
    """Every operation on an adapter and a model raises ConfigError, naming what differs, if the
    adapter or the parameters belong to another model: another family, more layers, or wider ones.
    """
    model, params = tiny
    wider = dataclasses.replace(model.config, intermediate_size=2 * model.config.intermediate_size)
    deeper = dataclasses.replace(model.config, num_hidden_layers=2)
    others = random_model("gpt2", num_hidden_layers=1)[0].config, wider, deeper
    on = attach_adapter(model.config, params, three["x"])
    uses: tuple[Callable[[Any], object], ...] = (
        lambda config: write_adapter(tmp_path / "x", three["x"], config),
        lambda config: write_gguf_adapter(tmp_path / "x.gguf", three["x"], config),
        lambda config: attach_adapter(config, params, three["x"]),
        lambda config: with_adapters(config, params, three),
        lambda config: extract_adapter(config, on, FIRST),
        lambda config: merge_adapter(config, on),
    )
    for config, word in zip(others, ("c_attn", "mlp", "layers.1"), strict=True):
        for use in uses:
            with pytest.raises(ConfigError, match=word):
                use(config)
    assert not list(tmp_path.iterdir())


def test_conflicting_adapter_operations_are_refused(
    tiny: tuple[Any, Any], three: dict[str, Any]
) -> None:
    """Attaching twice and merging nothing or several adapters raise errors."""
    model, params = tiny
    once = attach_adapter(model.config, params, three["x"])
    for again in (attach_adapter, lambda c, p, a: with_adapters(c, p, {"x": a})):
        with pytest.raises(ConfigError, match="has an adapter already"):
            again(model.config, once, three["x"])
    with pytest.raises(ConfigError, match="no adapter to merge"):
        merge_adapter(model.config, params)
    with pytest.raises(ConfigError, match="Choose the one"):
        merge_adapter(model.config, with_adapters(model.config, params, three))
