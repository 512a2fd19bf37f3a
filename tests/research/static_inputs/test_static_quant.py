"""Static quantization of inputs: exact integer products, slices, files, and the recipe's step."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm.compress.calibration import from_tokens
from jaxllm.compress.methods import rtn
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.research.static_inputs.method import QRANGE
from jaxllm.research.static_inputs.observers import Range, fake_quantize, find_qparams
from jaxllm.research.static_inputs.weight import add_input_grid
from jaxllm.weights.formats import as_format, parse_format, to_dense, weight_format
from jaxllm.weights.linear import linear
from jaxllm.weights.paths import flatten
from tests.compress.models import same
from tests.compress.test_layerwise import SQUARE, mean_kl, run_step
from tests.weights import test_slicing as slicing
from tests.weights.products import plain_product


@pytest.mark.parametrize("format", ["int8", "int8-g64"])
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("symmetric", [True, False])
def test_static_int8_matmul_equals_rounded_inputs(format: str, rows: int, symmetric: bool) -> None:
    """The integer product equals the product of the rounded inputs with the dequantized weight."""
    rng = np.random.default_rng(rows)
    x_RI = rng.standard_normal((rows, 200)).astype(np.float32) * 2 + 1.5
    grid = find_qparams(Range(jnp.float32(-3), jnp.float32(7)), QRANGE, symmetric=symmetric)
    weight = parse_format(format).quantize(jnp.asarray(rng.standard_normal((24, 200)), jnp.float32))
    leaf = add_input_grid(weight, grid.scale, grid.zero)
    wanted_RI = np.asarray(fake_quantize(jnp.asarray(x_RI), grid, QRANGE), np.float64)
    codes = np.asarray(leaf.input_codes(jnp.asarray(x_RI)), np.float32)
    rounded = (codes - np.float32(grid.zero)) * np.float32(grid.scale)
    np.testing.assert_array_equal(rounded, wanted_RI.astype(np.float32))
    wanted = wanted_RI @ np.asarray(weight.to_dense(), np.float64).T
    size = np.abs(wanted_RI) @ np.abs(np.asarray(weight.to_dense(), np.float64)).T
    for found in (linear(jnp.asarray(x_RI), leaf), plain_product(jnp.asarray(x_RI), leaf)):
        assert (np.abs(np.asarray(found) - wanted) <= 1e-5 * size).all()
    asked = linear(jnp.asarray(x_RI), leaf, int8_inputs=True)  # inputs are rounded already
    np.testing.assert_array_equal(asked, linear(jnp.asarray(x_RI), leaf))
    if symmetric:
        assert int(grid.zero) == 0
    jax.jit(linear)(jnp.asarray(x_RI, jnp.bfloat16), leaf)


def test_static_weight_round_trips_and_validates() -> None:
    """A static weight round-trips through its arrays; invalid arrays and formats raise errors."""
    weight = parse_format("int8").quantize(
        jnp.asarray(np.random.default_rng(0).standard_normal((3, 70)))
    )
    leaf = add_input_grid(weight, 0.5, -3)
    format = parse_format(leaf.format)
    pieces = {name: np.asarray(piece) for name, piece in leaf.arrays().items()}
    assert {n: (p.shape, p.dtype) for n, p in pieces.items()} == {
        n: (shape, np.dtype(dtype)) for n, (shape, dtype) in format.array_specs((3, 70)).items()
    }
    again = format.from_file("w", (3, 70), pieces)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), leaf, again))
    for name, value in ((".step", 0.0), (".step", np.nan), (".zero", 128), (".sum", np.inf)):
        broken = {**pieces, name: np.full_like(pieces[name], value)}
        with pytest.raises(CheckpointError, match="w"):
            format.from_file("w", (3, 70), broken)
    for name in ("static/int4-g64", "static/int8-zp", "static/float32"):
        with pytest.raises(ConfigError, match="int8 without a zero point"):
            parse_format(name)
    with pytest.raises(ConfigError, match="calibration"):
        format.quantize(jnp.zeros((2, 2)))


def test_static_weight_slices_equal_dense() -> None:
    whole = add_input_grid(parse_format("int8").quantize(jnp.asarray(slicing.ARRAY)), 0.1, 3)
    slicing.assert_columns_equal_dense(whole, products=False)  # they round their inputs
    slicing.assert_rows_equal_dense(whole)
    for axis in (0, 1):
        slicing.assert_parts_join(whole, axis)


def test_static_weight_converts_as_one_weight() -> None:
    """Another format is that of the matrix, without the grid."""
    array = jnp.asarray(slicing.ARRAY)
    weight = add_input_grid(parse_format("int8").quantize(array), 0.1, 3)
    made = rtn.convert_inner(weight, "int4-g64")
    same({"weight": made}, {"weight": as_format(to_dense(weight), "int4-g64")})


def test_static_activation_ranges_cost_little_accuracy(shallow_demos: Path) -> None:
    """Static activations with min-max or percentile ranges add a small KL divergence and need int8
    weights.
    """
    lm = jaxllm.load(shallow_demos / "gpt2", dtype="float32")
    rows = from_tokens(np.random.default_rng(0).integers(3, lm.config.vocab_size, (24, 48)))
    plain = run_step(lm, f"quantize: rtn int8 {SQUARE}", rows)
    base = mean_kl(lm, plain, rows.token_NT)
    for kind in ("minmax", "percentile"):
        made = run_step(lm, f"activations: static range={kind} {SQUARE}", rows, plain)
        assert base < mean_kl(lm, made, rows.token_NT) < base + 0.1
        assert "static/int8" in {weight_format(x) for _, x in flatten(made.params)}
    with pytest.raises(ConfigError, match="is not int8"):
        run_step(lm, "activations: static", rows)
