"""Sparse weights: storage, round trips, products and refused inputs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm.compress.pipeline import compress
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.evaluate import bench
from jaxllm.ops import native
from jaxllm.research.sparse.weight import TAIL_PADDING, SparseWeight, to_sparse
from jaxllm.weights.formats import as_format, parse_format, to_dense, weight_format
from jaxllm.weights.linear import embed, linear
from jaxllm.weights.types.int_weight import IntWeight
from tests.inside.test_edits import assert_edits_have_effect
from tests.tiny_models import random_model, save_random
from tests.weights import test_quantize, test_slicing as slicing
from tests.weights.products import assert_products_equal

PATTERNS = ("2:4", "bitmap")
NAMES = [f"{dtype}-{pattern}" for dtype in ("float32", "bfloat16", "int8") for pattern in PATTERNS]
SHAPE = (7, 203)  # outputs, columns: no multiple of anything


def pruned(seed: int, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    """Return normal numbers; the two smallest of every four columns and some others are 0."""
    rng = np.random.default_rng(seed)
    wide = rng.normal(0, 1, (*shape[:-1], -(-shape[-1] // 4), 4))
    wide[np.abs(wide) < np.sort(np.abs(wide), axis=-1)[..., 2:3]] = 0
    wide[rng.random(wide.shape) < 0.1] = 0
    return wide.reshape(*shape[:-1], -1)[..., : shape[-1]].astype(np.float32)


def leaf(seed: int, name: str, shape: tuple[int, ...] = SHAPE) -> Any:
    return as_format(jnp.asarray(pruned(seed, shape)), name)


@pytest.mark.parametrize("name", NAMES)
def test_sparse_weight_round_trips_bitwise(name: str) -> None:
    """Float values are stored exactly, and int8 values as int8 quantization rounds them."""
    for shape in (SHAPE, (3, 5, 130), (1, 1)):
        weight = leaf(0, name, shape)
        expected = as_format(jnp.asarray(pruned(0, shape)), name.split("-")[0])
        assert (weight.shape, weight.dtype) == (shape, to_dense(expected).dtype)
        assert weight_format(weight) == name == parse_format(name).name
        assert np.asarray(to_dense(weight)).tobytes() == np.asarray(to_dense(expected)).tobytes()
        assert as_format(weight, name) is weight


@pytest.mark.parametrize("pattern", PATTERNS)
def test_to_sparse_keeps_given_codes_and_scales(pattern: str) -> None:
    """Rounding again would choose another scale for a row whose largest code is not 127."""
    codes = np.round(pruned(1) * 20).astype(np.int8)
    scale = np.random.default_rng(1).normal(0, 1, (SHAPE[0], 1)).astype(np.float32)
    data = jnp.asarray(np.pad(codes, ((0, 0), (0, 256 - SHAPE[1]))))
    given = IntWeight(data, jnp.asarray(scale), None, 8, None, SHAPE[1])
    weight = to_sparse(given, pattern)
    back = weight.with_zeros()
    assert weight.format == f"int8-{pattern}" and isinstance(back, IntWeight)
    assert np.array_equal(back.data, given.data) and np.array_equal(back.scale, given.scale)
    assert np.array_equal(to_dense(weight), codes * scale)


def test_to_sparse_preserves_special_floats() -> None:
    """NaN payloads, infinities and subnormal numbers are preserved; zeros lose their sign."""
    bits = np.zeros((1, 8), np.uint32)
    bits[0, [0, 2, 5, 7]] = [0x7FC12345, 0xFF800000, 0x00000001, 0x80000000]
    expected = bits * (bits != 0x80000000)
    for pattern in PATTERNS:
        weight = to_sparse(jnp.asarray(bits.view(np.float32)), pattern)
        assert np.asarray(to_dense(weight)).tobytes() == expected.tobytes()


@pytest.mark.parametrize(("name", "bits"), [("bfloat16", 9), ("int8", 5), ("float32", 17)])
def test_sparse_memory_is_half_plus_mask(name: str, bits: int) -> None:
    """Memory is half of the values plus one mask bit per weight; bitmap adds row offsets and the
    tail padding.
    """
    rows, columns = 64, 1024
    numbers = np.resize([1.0, 0.0, 0.0, -2.0], (rows, columns)).astype(np.float32)
    scales = 4 * rows if name == "int8" else 0
    exact = rows * columns * bits // 8 + scales
    assert as_format(jnp.asarray(numbers), f"{name}-2:4").nbytes == exact
    width = {"bfloat16": 2, "int8": 1, "float32": 4}[name]
    extra = 4 * (rows + 1) + TAIL_PADDING * width  # row offsets, and padding for wide reads
    assert as_format(jnp.asarray(numbers), f"{name}-bitmap").nbytes == exact + extra


def test_non_2_4_matrix_error_counts_groups() -> None:
    numbers = pruned(2)
    numbers[0, :3] = numbers[5, 200:203] = 1
    for name in ("float32-2:4", "bfloat16-2:4", "int8-2:4"):
        with pytest.raises(ConfigError, match=r"2 of 357 groups of 4 columns have more than 2"):
            as_format(jnp.asarray(numbers), name)
    with pytest.raises(ConfigError, match="2 of 357 groups"):
        to_sparse(jnp.asarray(numbers), "2:4")
    assert np.array_equal(to_dense(to_sparse(jnp.asarray(numbers), "bitmap")), numbers)


def test_to_sparse_refuses_other_weights_and_patterns() -> None:
    numbers = jnp.asarray(pruned(2))
    with pytest.raises(ConfigError, match=r"int8 .one scale per row., got int4-g64"):
        to_sparse(as_format(numbers, "int4"), "2:4")
    with pytest.raises(ConfigError, match="got float16"):
        to_sparse(numbers.astype(jnp.float16), "bitmap")
    with pytest.raises(ConfigError, match="2:4 or bitmap, got '1:4'"):
        to_sparse(numbers, "1:4")
    with pytest.raises(ConfigError, match="float16-2:4"):
        parse_format("float16-2:4")
    with pytest.raises(ConfigError, match="requires a matrix with columns"):
        as_format(jnp.zeros((3, 0)), "int8-2:4")


@pytest.mark.parametrize("name", NAMES)
def test_sparse_products_and_rows_equal_dense(name: str) -> None:
    """Negative rows are outside the matrix, too."""
    weight = leaf(5, name)
    w = np.asarray(to_dense(weight), np.float32)
    with native.disable_kernels():
        assert_products_equal(weight, w, rows=(1, 3))
    assert np.isnan(np.asarray(embed(weight, jnp.array([[-1]])), np.float32)).all()


def test_int8_inputs_apply_only_to_integer_weights() -> None:
    x = jnp.asarray(np.random.default_rng(6).normal(0, 1, (2, SHAPE[1])).astype(np.float32))
    for pattern in PATTERNS:
        floats, integers = leaf(6, f"float32-{pattern}"), leaf(6, f"int8-{pattern}")
        same = linear(x, integers.with_zeros(), int8_inputs=True)
        assert np.array_equal(linear(x, floats, int8_inputs=True), linear(x, floats))
        np.testing.assert_allclose(
            linear(x, integers, int8_inputs=True), same, rtol=1e-5, atol=1e-5
        )


def _saved(weight: SparseWeight) -> dict[str, np.ndarray]:
    return {name: np.array(piece) for name, piece in weight.arrays().items()}


@pytest.mark.parametrize("name", NAMES)
def test_sparse_arrays_match_specs_and_restore_weight(name: str) -> None:
    weight = leaf(7, name, (2, 3, 140))
    pieces, format = _saved(weight), parse_format(name)
    for key, (shape, dtype) in format.array_specs(weight.shape).items():
        fits = [n is None or n == m for n, m in zip(shape, pieces[key].shape, strict=True)]
        assert all(fits) and pieces[key].dtype == dtype
    back = format.from_file("w", weight.shape, pieces)
    assert jax.tree.structure(back) == jax.tree.structure(weight)
    assert np.array_equal(to_dense(back), to_dense(weight))


def _beyond(pieces: dict[str, np.ndarray]) -> None:
    if ".begin" in pieces:
        pieces[".mask"][0, 203 // 8] |= 1 << 203 % 8
    else:
        pieces[".mask"][0, -1] = 0x66
        pieces[".values"][0, -3] = 1


def _crowded(pieces: dict[str, np.ndarray]) -> None:
    pieces[".mask"][0, 0] = 0x73


def _count(pieces: dict[str, np.ndarray]) -> None:
    pieces[".mask"][0, 0] ^= 1


def _begin(pieces: dict[str, np.ndarray]) -> None:
    pieces[".begin"][1:] += 1


def _short(pieces: dict[str, np.ndarray]) -> None:
    pieces[".values"] = pieces[".values"][:-1]


def _scale(pieces: dict[str, np.ndarray]) -> None:
    pieces[".scale"][0] = np.nan


@pytest.mark.parametrize(
    ("name", "corrupt", "what"),
    [
        ("float32-2:4", _beyond, "w.values has nonzero values beyond its 203 columns"),
        ("bfloat16-bitmap", _beyond, "w.mask has bits beyond its 203 columns"),
        ("int8-2:4", _crowded, "w.mask has 1 groups of 4 columns without exactly 2 bits"),
        ("bfloat16-bitmap", _count, "w.begin does not match the bits per row"),
        ("float32-bitmap", _begin, "w.begin does not match the bits per row"),
        ("int8-bitmap", _short, r"w.values has \d+ values, w.begin expects \d+ \+ 128"),
        ("int8-bitmap", _scale, "w.scale holds NaN"),
    ],
)
def test_sparse_from_file_refuses_inconsistent_arrays(
    name: str, corrupt: Callable[[dict[str, np.ndarray]], None], what: str
) -> None:
    weight = leaf(8, name)
    pieces = _saved(weight)
    corrupt(pieces)
    with pytest.raises(CheckpointError, match=what):
        parse_format(name).from_file("w", weight.shape, pieces)


@pytest.mark.parametrize("name", ["float32-2:4", "int8-2:4", "bfloat16-bitmap", "int8-bitmap"])
def test_sparse_slices_equal_dense(name: str) -> None:
    whole = leaf(9, name, slicing.SHAPE)
    slicing.assert_columns_equal_dense(whole)
    slicing.assert_rows_equal_dense(whole)
    slicing.assert_runs_merge(whole)
    for axis in (0, 1):
        slicing.assert_parts_join(whole, axis)


@pytest.mark.parametrize("name", NAMES)
def test_sparse_stacks_and_host_rows_equal_dense(name: str) -> None:
    test_quantize.assert_stack_equals_dense(pruned(4, (3, 7, 150)), name)
    test_quantize.assert_host_rows_equal(leaf(3, name, (11, 64)))


def test_edits_work_on_sparse_weights() -> None:
    model, params = random_model("llama")
    assert_edits_have_effect(model, jaxllm.quantize(params, "int8-bitmap"))


@pytest.mark.parametrize("name", ["bfloat16-2:4", "int8-bitmap"])
def test_pruned_model_keeps_larger_half(name: str, tmp_path: Path) -> None:
    """The largest half of each group stays; embeddings stay dense; weight bytes shrink."""
    save_random(tmp_path, "llama")
    lm = jaxllm.load(tmp_path)
    half = "2:4" if name.endswith("2:4") else "50%"
    small = compress(lm, [f"prune: magnitude {half}", f"quantize: rtn {name}"])
    before, after = (m.params["layers.0"]["mlp"]["up_proj"]["weight"] for m in (lm, small))
    w, kept = np.abs(np.asarray(before, np.float32)), np.asarray(to_dense(after), np.float32) != 0
    groups = (-1, 4) if name.endswith("2:4") else (1, -1)  # bitmap: the full matrix is one group
    for row, here in zip(w.reshape(groups), kept.reshape(groups), strict=True):
        half = len(row) // 2
        rounded = half // 20 + 1 if name.startswith("int8") else 0  # values that may round to 0
        assert half - rounded <= here.sum() <= half
        assert (row[~here] <= row[here].min()).all()
    assert weight_format(after) == name
    assert weight_format(small.params["embed_tokens"]["weight"]) == name.partition("-")[0]
    assert bench.weight_bytes(small) < bench.weight_bytes(lm)
