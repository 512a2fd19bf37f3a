"""Offset weights and groups of 16: values, products, rows, stacks and files."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.lm import LM
from jaxllm.weights.formats import parse_format, to_dense, weight_format
from jaxllm.weights.paths import flatten, map_leaves
from jaxllm.weights.precision import match_precision
from jaxllm.weights.types.int_weight import IntWeight
from tests.tiny_models import random_model
from tests.weights.products import assert_products_equal

FORMATS = ["offset/int4-g32-zp", "offset/int4-g32-zp-f16", "offset/int8-g32"]
ROWS, COLUMNS = 7, 96  # padded with 32 columns to a chunk of 128


def pieces(name: str, lead: tuple[int, ...] = ()) -> dict[str, np.ndarray]:
    rng, found = np.random.default_rng(0), {}
    for piece, (shape, dtype) in parse_format(name).array_specs((*lead, ROWS, COLUMNS)).items():
        size = tuple(n or 0 for n in shape)
        if piece.endswith(".data"):
            found[piece] = rng.integers(0, 100, size).astype(dtype)
        elif piece.endswith(".zero"):
            found[piece] = np.zeros(size, dtype)
        else:
            found[piece] = rng.standard_normal(size).astype(dtype)
    return found


def make_weight(name: str, lead: tuple[int, ...] = ()) -> tuple[Any, np.ndarray]:
    """Return a weight and its expected dense values."""
    arrays, shape = pieces(name, lead), (*lead, ROWS, COLUMNS)
    leaf = parse_format(name).from_file("w", shape, arrays)
    data = arrays[".weight.data"]
    if "int4" in name:  # byte j of each 16 has columns j and j + 16
        byte = data.reshape(*lead, ROWS, -1, 16)
        data = np.concatenate([byte & 15, byte >> 4], axis=-1).reshape(*lead, ROWS, -1)
    scale, offset = (
        np.repeat(arrays[key].astype(np.float32), 32, axis=-1)
        for key in (".weight.scale", ".offset")
    )
    numbers = data.astype(np.float32) * scale + offset
    return leaf, numbers[..., :COLUMNS]


@pytest.mark.parametrize("name", FORMATS)
def test_offset_values_products_and_rows_equal_dense(name: str) -> None:
    leaf, numbers = make_weight(name)
    assert weight_format(leaf) == name and leaf.shape == (ROWS, COLUMNS)
    np.testing.assert_array_equal(to_dense(leaf), numbers)
    assert_products_equal(leaf, numbers)


def test_offset_stack_equals_dense() -> None:
    leaf, numbers = make_weight("offset/int4-g32-zp", (2,))
    assert leaf.shape == (2, ROWS, COLUMNS)
    np.testing.assert_array_equal(to_dense(leaf), numbers)


def test_offset_checkpoint_round_trips(tmp_path: Path) -> None:
    model, params = random_model("llama", num_hidden_layers=1, hidden_size=COLUMNS)
    name, path = "offset/int4-g32-zp", "layers.0.self_attn.q_proj.weight"

    def leaf(where: str, x: Any) -> Any:
        if where != path:
            return x
        arrays = {}
        for piece, (shape, dtype) in parse_format(name).array_specs(x.shape).items():
            arrays[piece] = np.ones(tuple(n or 0 for n in shape), dtype)
        return parse_format(name).from_file(where, x.shape, arrays)

    params = map_leaves(leaf, params)
    model = jaxllm.build(model.config, match_precision(params, model.precision))
    lm = LM(model.config, model, params, None, {}, tmp_path)
    lm.save(tmp_path / "saved")
    again = jaxllm.load(tmp_path / "saved")
    found = again.params["layers.0"]["self_attn"]["q_proj"]["weight"]
    assert isinstance(found, IntWeight) and found.format == name
    np.testing.assert_array_equal(to_dense(found), to_dense(dict(flatten(params))[path]))


def test_offset_refuses_invalid_formats_and_values() -> None:
    for name in ("offset/int8", "offset/bfloat16"):
        with pytest.raises(ConfigError, match="integers in groups"):
            parse_format(name)
    with pytest.raises(ConfigError, match="it comes from GGUF files"):
        parse_format("offset/int4-g32-zp").quantize(jnp.zeros((2, 32)))
    arrays = pieces("offset/int4-g32-zp")
    arrays[".offset"][0, 0] = np.inf
    with pytest.raises(CheckpointError, match=r"w\.offset holds NaN or infinity"):
        parse_format("offset/int4-g32-zp").from_file("w", (ROWS, COLUMNS), arrays)


def test_int8_g16_equals_dense_and_refuses_quantization() -> None:
    """Stacked and single int8-g16 weights have the dense values, products and rows; quantizing to
    it and non-finite scales are refused.
    """
    rng, found = np.random.default_rng(0), {}
    for piece, (shape, dtype) in parse_format("int8-g16").array_specs((2, ROWS, COLUMNS)).items():
        size = tuple(n or 0 for n in shape)
        values = rng.integers(-127, 128, size) if piece == ".data" else rng.standard_normal(size)
        found[piece] = values.astype(dtype)
    stack = parse_format("int8-g16").from_file("w", (2, ROWS, COLUMNS), found)
    scale = np.stack([found[".first"], found[".second"]], axis=-1).reshape(2, ROWS, -1)
    numbers = (found[".data"] * np.repeat(scale, 16, axis=-1))[..., :COLUMNS]
    np.testing.assert_array_equal(to_dense(stack), numbers)
    leaf: Any = jax.tree.map(lambda x: x[1], stack)
    assert weight_format(leaf) == "int8-g16" and leaf.shape == (ROWS, COLUMNS)
    assert_products_equal(leaf, numbers[1])
    with pytest.raises(ConfigError, match="it comes from GGUF files"):
        parse_format("int8-g16").quantize(jnp.zeros((2, 32)))
    for piece, wrong in {".first": np.nan, ".second": np.inf}.items():
        bad = {name: array.copy() for name, array in found.items()}
        bad[piece][0, 0, 0] = wrong
        with pytest.raises(CheckpointError, match=f"w{piece} holds"):
            parse_format("int8-g16").from_file("w", (2, ROWS, COLUMNS), bad)
