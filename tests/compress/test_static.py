"""Static quantization: the product of integers is that of the rounded numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.compress.methods.observers import Range, fake_quantize, find_qparams
from jaxllm.compress.methods.static_activations import QRANGE
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.weights.formats import parse_format
from jaxllm.weights.linear import linear
from jaxllm.weights.types.static_quant import StaticQuantWeight


@pytest.mark.parametrize("format", ["int8", "int8-g64"])
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("symmetric", [True, False])
def test_integers_multiply_as_the_rounded_numbers_do(
    format: str, rows: int, symmetric: bool
) -> None:
    rng = np.random.default_rng(rows)
    x_RI = rng.standard_normal((rows, 200)).astype(np.float32) * 2 + 1.5
    grid = find_qparams(Range(jnp.float32(-3), jnp.float32(7)), QRANGE, symmetric=symmetric)
    weight = parse_format(format).quantize(jnp.asarray(rng.standard_normal((24, 200)), jnp.float32))
    leaf = StaticQuantWeight.from_grid(weight, grid.scale, grid.zero)
    wanted_RI = np.asarray(fake_quantize(jnp.asarray(x_RI), grid, QRANGE), np.float64)
    np.testing.assert_array_equal(
        leaf.round_inputs(jnp.asarray(x_RI)), wanted_RI.astype(np.float32)
    )
    wanted = wanted_RI @ np.asarray(weight.to_dense(), np.float64).T
    size = np.abs(wanted_RI) @ np.abs(np.asarray(weight.to_dense(), np.float64)).T
    for found in (linear(jnp.asarray(x_RI), leaf), leaf.matmul(jnp.asarray(x_RI))):
        assert (np.abs(np.asarray(found) - wanted) <= 1e-5 * size).all()
    asked = linear(jnp.asarray(x_RI), leaf, int8_inputs=True)  # they are rounded already
    np.testing.assert_array_equal(asked, linear(jnp.asarray(x_RI), leaf))
    if symmetric:
        assert int(grid.zero) == 0
    jax.jit(linear)(jnp.asarray(x_RI, jnp.bfloat16), leaf)


def test_it_is_stored_and_checked() -> None:
    weight = parse_format("int8").quantize(
        jnp.asarray(np.random.default_rng(0).standard_normal((3, 70)))
    )
    leaf = StaticQuantWeight.from_grid(weight, 0.5, -3)
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
