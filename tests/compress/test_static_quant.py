"""Static quantization: the integer product equals that of the rounded numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.compress.methods.observers import Range, fake_quantize, find_qparams
from jaxllm.compress.methods.static_activations import QRANGE
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.weights.formats import parse_format
from jaxllm.weights.linear import linear
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
    leaf = weight.with_input_grid(grid.scale, grid.zero)
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
    leaf = weight.with_input_grid(0.5, -3)
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
