"""The leaf: LoRA and DoRA beside a weight, by the formula, its slopes, and rows that choose."""

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
)
from jaxllm.errors import ConfigError
from jaxllm.weights.formats import as_format, as_weight, to_dense
from jaxllm.weights.linear import embed, linear
from jaxllm.weights.paths import first_match, flatten
from jaxllm.weights.quantize import quantize
from jaxllm.weights.types.lora import LoraSite, keep_chosen_adapter
from tests.adapters.made import random_adapter
from tests.twins import assert_close, random_model, tokens
from tests.weights.products import plain_product

ROWS, COLUMNS, K = 37, 29, 3  # coprime
RNG = np.random.default_rng(0)
W, A, B, X = (
    RNG.normal(0, 1, shape).astype(np.float32)
    for shape in ((ROWS, COLUMNS), (K, COLUMNS), (ROWS, K), (6, COLUMNS))
)
SCALE = np.array([0.7, 1.3, 0.2], np.float32)


def leaf(weight: Any = W, site: LoraSite = "product", **more: Any) -> LoraWeight:
    arrays = (jnp.asarray(x) for x in (A, B, SCALE))
    held = jnp.asarray(weight) if isinstance(weight, np.ndarray) else weight
    return LoraWeight(held, *arrays, site=site, **more)


@pytest.mark.parametrize("format", ["float32", "bfloat16", "int8", "int4-g32-zp", "rank5/float32"])
def test_products_rows_and_the_matrix_are_those_of_the_sum(format: str) -> None:
    base = as_format(jnp.asarray(W), format)
    wide = np.asarray(to_dense(base, jnp.float32), np.float64)
    made, sum_OI = leaf(base), wide + (B * SCALE) @ A
    assert made.weight is base and made.shape == W.shape
    assert_close(linear(jnp.asarray(X), made), X @ sum_OI.T)
    assert_close(plain_product(jnp.asarray(X), made), X @ sum_OI.T)
    assert_close(made.to_dense(jnp.float32), sum_OI)
    taken_BTD = np.asarray(embed(made, jnp.array([[0, ROWS - 1], [5, ROWS]])), np.float32)
    tolerance = 0.05 if format == "bfloat16" else 1e-4
    np.testing.assert_allclose(taken_BTD[0], sum_OI[[0, ROWS - 1]], atol=tolerance)
    assert np.isnan(taken_BTD[1, 1]).all() and not np.isnan(taken_BTD[1, 0]).any()


@pytest.mark.parametrize("rows", [1, 70])
def test_bfloat16_adapters_keep_float32_between_their_products(rows: int) -> None:
    """What is between them is not rounded: the result is that of the rounded matrices' product."""
    a, b = (jnp.asarray(x, jnp.bfloat16) for x in (A, B))
    made = LoraWeight(jnp.asarray(W), a, b, jnp.asarray(SCALE))
    x_RI = RNG.normal(0, 1, (rows, COLUMNS)).astype(np.float32)
    wide_a, wide_b = (np.asarray(x, np.float64) for x in (a, b))
    assert_close(linear(jnp.asarray(x_RI), made), x_RI @ (W + (wide_b * SCALE) @ wide_a).T)


@pytest.mark.parametrize("site", ["product", "rows"])
def test_dora_gives_the_sum_lengths_of_its_own(site: LoraSite) -> None:
    """Liu et al. 2024, eq. 5; of a table of tokens the columns have them, as PEFT has it."""
    axis = 0 if site == "rows" else 1
    sum_OI = W.astype(np.float64) + (B * SCALE) @ A
    norm = np.linalg.norm(sum_OI, axis=axis)
    length = RNG.uniform(0.5, 2, norm.shape).astype(np.float32)
    expected = sum_OI * np.expand_dims(length / norm, axis)
    made = leaf(site=site, magnitude=jnp.asarray(length))
    assert_close(made.to_dense(), expected)
    assert_close(made.take(jnp.array([3, 0])), expected[[3, 0]])
    kept = X @ W.T if site == "rows" else X @ expected.T  # a tied head keeps its weight
    assert_close(linear(jnp.asarray(X), made), kept)
    known = leaf(site=site, magnitude=jnp.asarray(length), norm=made.norms())
    np.testing.assert_array_equal(known.to_dense(), made.to_dense())


def test_slopes_at_step_0() -> None:
    """d/db = s (dL/dy)^T (x A^T), and of a nothing, for b is zero there."""
    made = leaf().replace(b=jnp.zeros((ROWS, K)))
    weigh_RO = jnp.asarray(RNG.normal(0, 1, (6, ROWS)), jnp.float32)

    def loss(a: jax.Array, b: jax.Array) -> jax.Array:
        return (weigh_RO * linear(jnp.asarray(X), made.replace(a=a, b=b))).sum()

    slope_a, slope_b = jax.grad(loss, (0, 1))(made.a, made.b)
    np.testing.assert_array_equal(slope_a, 0)
    assert_close(slope_b, SCALE * (np.asarray(weigh_RO).T @ (X @ A.T)))


def test_slopes_of_dora_take_the_norm_as_it_is() -> None:
    """Section 4.3: the slope is that with the norm held, by differences of the sum as it is."""
    length = RNG.uniform(0.5, 2, ROWS).astype(np.float32)
    made = leaf(magnitude=jnp.asarray(length))
    weigh_RO = RNG.normal(0, 1, (6, ROWS)).astype(np.float32)

    def loss(b: jax.Array, magnitude: jax.Array) -> jax.Array:
        y_RO = linear(jnp.asarray(X), made.replace(b=b, magnitude=magnitude))
        return (jnp.asarray(weigh_RO) * y_RO).sum()

    slope_b, slope_m = jax.grad(loss, (0, 1))(made.b, made.magnitude)
    sum_OI = W.astype(np.float64) + (B * SCALE) @ A
    norm = np.linalg.norm(sum_OI, axis=1)
    assert_close(slope_b, (weigh_RO * (length / norm)).T @ (X @ A.T) * SCALE)
    assert_close(slope_m, (weigh_RO * (X @ sum_OI.T)).sum(0) / norm)


@pytest.mark.parametrize("dora", [False, True])
def test_dropout_is_of_the_inputs_of_what_is_added(dora: bool) -> None:
    """PEFT's formula (METHODS: out += (m/n - 1) W x' + m/n s B A x'), with the same mask."""
    length = jnp.asarray(RNG.uniform(0.5, 2, ROWS), jnp.float32) if dora else None
    made = leaf(magnitude=length, dropout=0.4)
    key = jax.random.key(3)
    training = made.for_training_step(key, jnp.zeros((), jnp.int32))
    kept = np.asarray(jax.random.bernoulli(key, 0.6, X.shape))
    dropped = np.where(kept, X / 0.6, 0)
    gain = np.ones(ROWS)
    if length is not None:
        gain = np.asarray(length) / np.linalg.norm(W + (B * SCALE) @ A, axis=1)
    added = gain * (dropped @ ((B * SCALE) @ A).T) + (gain - 1) * (dropped @ W.T)
    assert_close(linear(jnp.asarray(X), training), X @ W.T + added)
    assert_close(
        linear(jnp.asarray(X), made), X @ np.asarray(made.to_dense()).T
    )  # not in inference


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


def test_step_0_is_the_base_and_shares_its_leaves(tiny: tuple[Any, Any]) -> None:
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


def test_dora_begins_as_the_base(tiny: tuple[Any, Any]) -> None:
    model, params = tiny
    adapted = attach_new_lora(model.config, params, SECOND, jax.random.key(0))
    base = forward(model, params, None, TOKENS).logits
    assert_close(forward(model, adapted, None, TOKENS).logits, np.asarray(base))


def test_each_row_of_a_batch_takes_its_own(tiny: tuple[Any, Any], three: dict[str, Any]) -> None:
    """As each adapter alone makes it; where none is taken, bit for bit as without any."""
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
            alone_BTV = np.asarray(forward(model, own, None, TOKENS).logits)
            assert_close(found[row], alone_BTV[row])
            assert np.abs(found[row] - base[row]).max() > 0.1


def test_one_of_several_is_told_from_the_others(
    tiny: tuple[Any, Any], three: dict[str, Any]
) -> None:
    """Its fingerprint is that of the one that is chosen, whoever else is beside it."""
    from jaxllm.cache.files import fingerprint

    model, params = tiny
    several = with_adapters(model.config, params, three)
    prints = {
        name: fingerprint(choose_adapters(several, jnp.array([number])))
        for number, name in enumerate((*three, "base"), start=0)
        if name != "base"
    }
    prints["base"] = fingerprint(several)
    assert len(set(prints.values())) == 4
    assert prints["base"] == fingerprint(params)
    only = with_adapters(model.config, params, {"y": three["y"]})
    assert prints["y"] == fingerprint(choose_adapters(only, jnp.array([0])))
    own = keep_chosen_adapter(choose_adapters(several, jnp.array([1])))
    leaf = own["layers.0"]["self_attn"]["q_proj"]["weight"]
    np.testing.assert_array_equal(leaf.a, three["y"].matrices["layers.0.self_attn.q_proj"].a)


@pytest.mark.parametrize("format", ["int4", pytest.param("int8", marks=pytest.mark.full)])
def test_adapters_stand_beside_quantized_weights(
    tiny: tuple[Any, Any], three: dict[str, Any], format: str
) -> None:
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


def test_rules_of_our_own_name_what_is_adapted(tiny: tuple[Any, Any]) -> None:
    model, params = tiny
    rules = ((r".*self_attn\.o_proj", True), (r"lm_head", True), (r".*", False))
    adapted = attach_new_lora(model.config, params, LoraConfig(rules=rules), jax.random.key(0))
    for path, x in flatten(adapted):
        assert isinstance(x, LoraWeight) == bool(first_match(rules, path)), path


@pytest.mark.parametrize(
    ("asked", "said"),
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
def test_what_cannot_be_is_refused(tiny: tuple[Any, Any], asked: Any, said: str) -> None:
    model, params = tiny
    with pytest.raises(ConfigError) as caught:
        attach_new_lora(model.config, params, LoraConfig(**asked), jax.random.key(0))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_an_adapter_over_an_adapter_is_refused(
    tiny: tuple[Any, Any], three: dict[str, Any]
) -> None:
    model, params = tiny
    once = attach_adapter(model.config, params, three["x"])
    for again in (attach_adapter, lambda c, p, a: with_adapters(c, p, {"x": a})):
        with pytest.raises(ConfigError, match="has an adapter already"):
            again(model.config, once, three["x"])
    with pytest.raises(ConfigError, match="no adapter to merge"):
        merge_adapter(model.config, params)
    with pytest.raises(ConfigError, match="Choose the one"):
        merge_adapter(model.config, with_adapters(model.config, params, three))
    with pytest.raises(ConfigError, match="adapter name 'base' is reserved"):
        with_adapters(model.config, params, {"base": three["x"]})
