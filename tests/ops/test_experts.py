"""expert_linears: each row times one matrix of a stack."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.ops import native
from jaxllm.weights.experts import expert_linears
from jaxllm.weights.formats import as_format, as_weight, parse_format, to_dense
from jaxllm.weights.linear import linear
from jaxllm.weights.quantize import quantize

E, F, D = 5, 33, 200
FORMATS = ["float32", "bfloat16", "float16", "int8", "int8-g64-f16", "int4", "int4-g32-zp", "mxfp4"]
DAILY = ["bfloat16", "int4-g32-zp", "mxfp4"]
apply = jax.jit(expert_linears, static_argnames="int8_inputs")


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def stack(name: str, outputs: int = F, seed: int = 0) -> Any:
    if name == "mxfp4":  # which files have, and quantizing does not make
        rng, format = np.random.default_rng(seed), parse_format(name)
        specs = format.array_specs((E, outputs, D))
        ranges = {".data": (0, 256), ".scale": (120, 130)}
        arrays = {n: rng.integers(*ranges[n], s, dtype) for n, (s, dtype) in specs.items()}
        return format.from_arrays((E, outputs, D), jax.tree.map(jnp.asarray, arrays))
    return as_format(jnp.asarray(numbers(E, outputs, D, seed=seed)), name)


def expert_slice(weight: Any, expert: int) -> Any:
    return jax.tree.map(lambda piece: piece[expert], weight)


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(n, marks=[] if n in DAILY else pytest.mark.full) for n in FORMATS),
        "int2-g32",
        pytest.param("nf4", marks=pytest.mark.full),
    ],
)
def test_expert_linears_multiply_each_row_with_its_expert(name: str) -> None:
    """Products are right in any order, for few and many rows, with native kernels and in plain JAX;
    rows without an expert are 0.
    """
    weight, rng = stack(name), np.random.default_rng(1)
    wide = np.asarray(to_dense(weight, jnp.float32), np.float64)
    for rows in (3, 41) if name in DAILY else (41,):
        x, expert = numbers(rows, D, seed=2), rng.integers(-1, E, rows).astype(np.int32)
        expert[0] = -1
        whole = wide[np.maximum(expert, 0)]
        exact = np.einsum("aoi,ai->ao", whole, x) * (expert >= 0)[:, None]
        bound = np.einsum("aoi,ai->ao", np.abs(whole), np.abs(x))
        for disabled in (False, True):
            y = _run(disabled, lambda x=x, at=expert: apply(jnp.asarray(x), [weight], at)[0])
            assert (np.abs(y - exact) <= 1e-6 * bound).all(), (rows, disabled)
            assert not y[expert < 0].any()


def _run(disabled: bool, run: Any) -> np.ndarray:
    if not disabled:
        return np.asarray(run())
    with native.disable_kernels():
        return np.asarray(run())


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in DAILY else pytest.mark.full) for n in FORMATS]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_row_bits_equal_linear_on_every_isa(name: str, dtype: str) -> None:
    gate, down = stack(name), stack(name, 7, seed=3)
    x = jnp.asarray(numbers(6, D, seed=2)).astype(dtype)
    expert = np.array([1, 1, 4, -1, 0, 1], np.int32)
    rounded = name.startswith(("int4", "mxfp4")) and dtype == "float32"
    before = native.isa()
    try:
        for isa in native.available_isas():
            native.isa(isa)
            both = expert_linears(x, [gate, down], expert, int8_inputs=rounded)
            for y, weight in zip(both, (gate, down), strict=True):
                for row, number in enumerate(expert):
                    if number >= 0:
                        one = linear(
                            x[row : row + 1], expert_slice(weight, number), int8_inputs=rounded
                        )
                        np.testing.assert_array_equal(np.asarray(y)[row], np.asarray(one)[0])
    finally:
        native.isa(before)


def test_bias_is_that_of_each_rows_expert() -> None:
    """Each stack adds the biases of its own; a row of no expert has none."""
    gate, down = stack("float32"), stack("float32", 7, seed=3)
    x, expert = jnp.asarray(numbers(4, D, seed=2)), jnp.asarray([1, 4, -1, 0])
    bias = jnp.asarray(numbers(gate.shape[0], gate.shape[1], seed=5))
    plain = expert_linears(x, [gate, down], expert)
    added = expert_linears(x, [gate, down], expert, biases=[bias, None])
    wanted = np.asarray(plain[0]) + np.asarray(bias)[np.asarray(expert)]
    np.testing.assert_allclose(added[0][np.array([0, 1, 3])], wanted[[0, 1, 3]], rtol=1e-6)
    assert not np.asarray(added[0])[2].any()
    np.testing.assert_array_equal(added[1], plain[1])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["bfloat16", "int4-g64"])
def test_many_rows_equal_single_expert_kernel_bitwise(name: str) -> None:
    """Each expert's rows equal a native product with that expert's matrix, with the matrix unit if
    there is one.
    """
    weight, expert = (
        stack(name),
        np.sort(np.random.default_rng(1).integers(0, E, 90)).astype(np.int32),
    )
    x = jnp.asarray(numbers(90, D, seed=2)).astype(jnp.bfloat16)
    if native.has_matrix_unit():
        assert (
            native.kernel_path(as_weight(weight).native_matrix().kind, "bfloat16").fallback
            == "matrix_unit"
        )
    (y,) = expert_linears(x, [weight], expert)
    many = native.has_matrix_unit()
    for number in range(E):
        mine = expert == number
        one = as_weight(expert_slice(weight, number)).native_matrix()
        (alone,) = native.linear(x[mine], [one], columns=D, matrix_unit=many)
        np.testing.assert_array_equal(np.asarray(y)[mine], np.asarray(alone))


@pytest.mark.usefixtures("kernels")
def test_experts_are_not_copied_from_stack() -> None:
    """The compiled program has the custom call, and no slice or gather of a matrix."""
    weight, expert = stack("int4"), jnp.asarray([1, 4], jnp.int32)
    x = jnp.zeros((2, D))
    text = apply.lower(x, [weight], expert).compile().as_text()
    assert "jaxllm_experts" in text
    assert "dynamic-slice" not in text and "gather" not in text


def losses(expert: np.ndarray) -> tuple[Any, Any]:
    """Return a loss of a product with all experts and a mask, and the same loss of ours."""

    def masked(x: jax.Array, weight: jax.Array) -> jax.Array:
        chosen_AE = jax.nn.one_hot(expert, E)
        return jnp.square(jnp.einsum("eoi,ai,ae->ao", weight, x, chosen_AE)).sum()

    def ours(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.square(expert_linears(x, [weight], expert)[0]).sum()

    return masked, ours


def test_value_and_gradient_equal_masked_dense_experts() -> None:
    """Values and gradients equal a product with all experts and a mask, also for int8 weights."""
    weight, x = stack("float32"), jnp.asarray(numbers(23, D, seed=2))
    expert = np.random.default_rng(1).integers(-1, E, 23).astype(np.int32)

    masked, ours = losses(expert)
    wanted, found = (jax.jit(jax.value_and_grad(f, (0, 1)))(x, weight) for f in (masked, ours))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-2), found, wanted)
    small = as_format(weight, "int8")
    wide = jnp.asarray(small.to_dense())
    pair = (jax.jit(jax.grad(f))(x, w) for f, w in ((masked, wide), (ours, small)))
    np.testing.assert_allclose(*pair, rtol=2e-4, atol=1e-2)


def test_bfloat16_gradients_stay_bfloat16() -> None:
    """Gradients of bfloat16 inputs are bfloat16, within 2% of the float32 gradients."""
    weight, x = stack("bfloat16"), jnp.asarray(numbers(6, D, seed=2)).astype(jnp.bfloat16)
    expert = np.array([1, 0, 4, -1, 1, 1], np.int32)
    masked, ours = losses(expert)
    found = jax.jit(jax.grad(ours, (0, 1)))(x, weight)
    wide = jax.grad(masked, (0, 1))(x.astype(jnp.float32), weight.astype(jnp.float32))
    for mine, exact in zip(found, wide, strict=True):
        assert mine.dtype == jnp.bfloat16
        off = np.abs(np.asarray(mine, np.float32) - np.asarray(exact)).max()
        assert off < 0.02 * np.abs(np.asarray(exact)).max()


def test_expert_linears_refuse_invalid_stacks() -> None:
    """Packed formats and weights without an expert axis raise errors."""
    x, expert = jnp.zeros((2, D)), jnp.zeros(2, jnp.int32)
    with pytest.raises(ConfigError, match=r"format of experts must be .*, got bf16-packed"):
        packed = as_format(jnp.ones((E, F, D), jnp.bfloat16), "bf16-packed")
        expert_linears(x, [packed], expert)
    with pytest.raises(ValueError, match=r"expert stack \(33, 200\) does not match"):
        expert_linears(x, [jnp.zeros((F, D))], expert)
    with pytest.raises(ConfigError, match=r"mlp\.experts: experts cannot be bf16-packed"):
        quantize({"mlp.experts": jnp.zeros((E, F, D), jnp.bfloat16)}, "bf16-packed")
