"""Quantized weights: formula, rounding, rules, saving and forward pass."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import re2

import jaxllm
from jaxllm import Override, Precision
from jaxllm.checkpoints.native import load_params, open_native, save, with_params
from jaxllm.convert.registry import open_checkpoint
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.weights.formats import as_format, parse_format, to_dense, weight_format
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.linear import linear
from jaxllm.weights.paths import first_match, flatten
from jaxllm.weights.safetensors import open_tensors, write_tensors
from jaxllm.weights.types.packed_bf16 import NAME


def formats(params: Any) -> dict[str, str]:
    return {path: weight_format(leaf) for path, leaf in flatten(params)}


def test_bf16_packed_is_lossless_and_saves_quarter() -> None:
    """Packed bfloat16 restores every bit in less than 77 percent of the bytes; other dtypes and
    wide ranges are refused.
    """
    rng = np.random.default_rng(2)
    array = jnp.asarray(rng.normal(0, 0.02, (300, 512)).astype(np.float32)).astype(jnp.bfloat16)
    array = array.at[0, :4].set(jnp.array([0.0, -0.0, 1e-38, -3e38], jnp.bfloat16))
    weight = as_format(array, "bf16-packed")
    for back in (weight.to_dense(), weight.take(jnp.arange(300))):
        assert np.asarray(back).tobytes() == np.asarray(array).tobytes()
    assert weight.nbytes < 0.77 * array.nbytes
    assert np.isnan(np.asarray(weight.take(jnp.array([300]))).astype(np.float32)).all()
    with pytest.raises(ConfigError, match="requires bfloat16 weights, got float32"):
        as_format(array.astype(jnp.float32), "bf16-packed")
    wide = jnp.exp(jnp.linspace(-60, 60, 4096)).reshape(8, 512).astype(jnp.bfloat16)
    with pytest.raises(ConfigError, match="outside any 16"):
        as_format(wide, "bf16-packed")


@pytest.mark.parametrize("least", [-126, -20, 0, 112])
def test_bf16_packed_sixteen_exponents_need_no_escape(least: int) -> None:
    """Any 16 consecutive exponents fit; with a seventeenth, the rarest one is stored
    as an escape.
    """
    weights = 2.0 ** jnp.arange(least, least + 16, dtype=jnp.float32)
    packed: Any = as_format(jnp.tile(weights, (3, 8)).astype(jnp.bfloat16), NAME)
    assert packed.escape_column.size == 0
    rare = 2.0 ** jnp.float32(least + 16 if least < 100 else least - 1)
    packed = as_format(jnp.append(jnp.tile(weights, 80), rare)[None].astype(jnp.bfloat16), NAME)
    assert packed.escape_value.tolist() == [rare], "the rarest exponent becomes the escape"


def test_quantizing_matrix_without_columns_is_refused() -> None:
    with pytest.raises(ConfigError, match="requires a matrix with columns"):
        as_format(jnp.ones((4, 0)), "int8")
    with pytest.raises(ConfigError, match="requires a nonempty matrix"):
        as_format(jnp.ones((4, 0)), "nf4")
    assert as_format(jnp.ones((0, 4)), "int8").shape == (0, 4)


@pytest.mark.parametrize(
    "name", ["int7", "int8-g48", "int3-g16", "int4-g", "float8", "", "int4-f16-zp", None]
)
def test_parse_format_refuses_unknown_names(name: Any) -> None:
    with pytest.raises(ConfigError):
        parse_format(name)


def test_first_match_takes_names_and_patterns_alike() -> None:
    """An escaped name matches its own path and what is in it, as any other pattern."""
    paths = ["h.1", "h.1.attn.weight", "h.10.attn.weight", "hx1", "h-1.w", "h.1.attn"]
    for regex in ("h", r"h\.1", "h.1", r"h\.1\d*", r"h\-1", r"h\.1\.attn", r"h\.1.*", r"h\Q.1\E"):
        for path in paths:
            names = path.split(".")
            whole = (".".join(names[:n]) for n in range(1, len(names) + 1))
            expected = any(re2.fullmatch(regex, name) for name in whole)
            assert first_match([(regex, True)], path) == (expected or None), (regex, path)


def test_quantize_first_matching_rule_wins(tmp_path: Path) -> None:
    """The first matching rule applies, vectors stay unquantized, embeddings stay at int8, and
    invalid rules are refused.
    """
    params = jaxllm.load("demo:gpt2").params
    rules = [(r"h\.0\..*", None), (r".*c_proj\.weight", "int4-g32"), (r"h\..*", "int8")]
    result = formats(jaxllm.quantize(params, rules))
    dtype_name = str(params["wte"]["weight"].dtype)
    assert result["h.0.mlp.c_proj.weight"] == dtype_name
    assert result["h.1.mlp.c_proj.weight"] == "int4-g32"
    assert result["h.1.attn.c_attn.weight"] == "int8"
    assert result["h.1.attn.c_attn.bias"] == result["wte.weight"] == dtype_name
    result = formats(jaxllm.quantize(params, "int4-g64"))
    assert result["wte.weight"] == "int8"
    assert result["wpe.weight"] == dtype_name
    assert result["h.1.mlp.c_proj.weight"] == "int4-g64"
    with pytest.raises(ConfigError, match="weight format"):
        jaxllm.quantize(params, [(".*", "int5")])
    for wrong in ([("(", "int8")], [(".*",)], [(1, "int8")], [(".*", ["int8"])], [5], "nonsense"):
        with pytest.raises(ConfigError):
            jaxllm.quantize(params, wrong)
        with pytest.raises(ConfigError):
            jaxllm.load("demo:gpt2", quantize=wrong)
    back = jaxllm.dequantize(jaxllm.quantize(params, "int8"))
    assert back["h.1"]["mlp"]["c_proj"]["weight"].dtype == jnp.float32


@pytest.mark.parametrize(
    ("quantize", "dtype"),
    [
        ("int4-g32-zp", None), ("int8-f16", None), ("bf16-packed", "bfloat16"),
        ("int3-g32-zp", None), ("int2", None), ("int8-g64-zp-f16", None), ("nf4", None),
        ([(r"layers\.0\.mlp\.up_proj", "rank9/int8"), (r".*o_proj", "rank7/bfloat16")], None),
    ],
)  # fmt: skip
def test_quantized_checkpoint_round_trips_bitwise(
    quantize: Any, dtype: str | None, tmp_path: Path, shallow: Any
) -> None:
    lm = jaxllm.load(shallow("llama"), dtype=dtype, quantize=quantize)
    opened = open_checkpoint(shallow("llama"))
    save(tmp_path / "q", with_params(opened, lm.params, lm.model.precision))
    again = jaxllm.load(tmp_path / "q")
    assert again.model == lm.model
    for (path, a), (_, b) in zip(flatten(lm.params), flatten(again.params), strict=True):
        assert weight_format(a) == weight_format(b), path
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), path
    if quantize in ("int2", "nf4"):
        assert weight_format(again.params["embed_tokens"]["weight"]) == "int8"
    if isinstance(quantize, str):  # another dtype changes the activations only
        again = jaxllm.load(tmp_path / "q", dtype="float32")
        assert again.model.precision.activations == "float32"
        found, wanted = (x.params["embed_tokens"]["weight"] for x in (again, lm))
        assert weight_format(found) == weight_format(wanted)


def test_crafted_quantized_tensors_are_refused(tmp_path: Path, shallow: Any) -> None:
    """NaN scales, zero points out of range, wrong shapes and inconsistent escapes raise an error
    that names the tensor.
    """

    def crafted(quantize: str, change: Any, dtype: str | None = None) -> None:
        lm = jaxllm.load(shallow("llama"), dtype=dtype, quantize=quantize)
        opened = open_checkpoint(shallow("llama"))
        directory = tmp_path / f"{quantize}-{len(list(tmp_path.iterdir()))}"
        save(directory, with_params(opened, lm.params, lm.model.precision))
        tensors = {n: t.read() for n, t in open_tensors(directory / "model.safetensors").items()}
        settings = json.loads((directory / "config.json").read_text())
        change(tensors, settings)
        write_tensors(
            directory / "model.safetensors",
            {n: LazyTensor.from_array(a) for n, a in tensors.items()},
        )
        (directory / "config.json").write_text(json.dumps(settings))
        load_params(open_native(directory), lm.model.precision)

    path = "layers.1.mlp.up_proj.weight"

    def item(name: str, index: Any, value: Any) -> Any:
        def change(tensors: Any, _: Any) -> None:
            tensors[path + name] = tensors[path + name].copy()
            tensors[path + name][index] = value

        return change

    def renamed(_: Any, settings: Any) -> None:
        settings["formats"][path] = "int8-g32"

    for quantize, change, message in (
        ("int8", item(".scale", (0, 0), np.nan), "up_proj.weight.scale holds NaN"),
        ("int4-g32-zp", item(".zero", (0, 0), 16), "zero holds 16"),
        ("int3-g32-zp", item(".zero", (0, 0), 8), "zero holds 8: zero points must be at most 7"),
        ("nf4", item(".mean", (), np.nan), "up_proj.weight.mean holds NaN"),
        ("int8", renamed, "up_proj.weight.scale has shape"),
        ("bf16-packed", item(".escape_begin", 1, 10**6), "escapes .* do not match"),
        ("bf16-packed", item(".escape_begin", 0, 1), "escapes .* do not match"),
        ("bf16-packed", item(".base", (), 250), "escapes .* do not match"),
    ):
        with pytest.raises(CheckpointError, match=message):
            crafted(quantize, change, "bfloat16" if quantize == "bf16-packed" else None)


def test_overrides_quantize_module_and_set_output_dtype(shallow: Any) -> None:
    precision = Precision(
        weights="bfloat16",
        activations="bfloat16",
        quantize="int4",
        overrides=(
            (r"layers\.0", Override(weights="float32")),
            (r".*down_proj", Override(weights="int8", output="float32")),
        ),
    )
    assert precision.param_format("layers.0.mlp.down_proj.weight", (256, 256)) == "float32"
    assert precision.param_format("layers.1.mlp.down_proj.weight", (256, 256)) == "int8"
    assert precision.param_format("layers.1.mlp.up_proj.weight", (256, 256)) == "q4_k"
    assert precision.param_format("layers.1.mlp.up_proj.bias", (256,)) == "bfloat16"
    assert precision.param_format("embed_tokens.weight", (256, 256)) == "int8"
    assert precision.output_dtype("layers.1.mlp.down_proj") == "float32"
    lm = jaxllm.load(shallow("llama"), dtype=precision)
    assert weight_format(lm.params["layers.1"]["mlp"]["down_proj"]["weight"]) == "int8"
    assert jaxllm.forward(lm.model, lm.params, None, [[1, 2, 3]]).logits.shape == (1, 3, 1536)
    twice = jaxllm.cast(lm.params, precision)
    assert [weight_format(x) for _, x in flatten(twice)] == [
        weight_format(x) for _, x in flatten(lm.params)
    ]
    with pytest.raises(ConfigError, match="output must be one of"):
        Override(output="int8")


def test_without_quantization_drops_quantizing_overrides() -> None:
    precision = Precision(
        quantize="int4",
        overrides=(
            ("lm_head", Override(weights="int8", output="bfloat16")),
            ("norm", Override(weights="float16")),
        ),
    )
    plain = precision.without_quantization()
    assert plain.param_format("lm_head.weight", (256, 256)) == "float32"
    assert plain.param_format("norm.weight", (256,)) == "float16"
    assert plain.output_dtype("lm_head") == "bfloat16"


def test_precision_round_trips_through_json() -> None:
    import dataclasses

    precision = Precision(
        quantize=((r"lm_head\.weight", None), (".*", "int4-g32")),
        overrides=((".*norm", Override(activations="float32")),),
    )
    data = json.loads(json.dumps(dataclasses.asdict(precision)))
    assert Precision.from_dict(data) == precision
    for wrong in ({"wieghts": "float32"}, {"overrides": [[1]]}, {"quantize": [["a"]]}):
        with pytest.raises(ConfigError):
            Precision.from_dict(wrong)


@pytest.mark.parametrize("name", ["int8", "int4-g32-zp", "nf4", "bf16-packed"])
def test_quantized_take_accepts_numpy_arrays(name: str) -> None:
    """A model gathered to the host has weights of NumPy arrays, and runs like any other."""
    dtype = "bfloat16" if name == "bf16-packed" else "float32"
    dense = np.random.default_rng(3).normal(size=(11, 64)).astype(np.float32)
    assert_host_rows_equal(as_format(jnp.asarray(dense, dtype), name))


def assert_host_rows_equal(weight: Any) -> None:
    host, rows = jax.tree.map(np.asarray, weight), jnp.array([[4, 0], [10, 4]])
    np.testing.assert_array_equal(host.take(rows), weight.take(rows))


@pytest.mark.parametrize(
    "name",
    ["int8", "int3-g32-zp", "int4-g64", "nf4", "nf4-f32", "rank5/float32"],
)
def test_stacks_blocks_and_gradients_equal_dense(name: str) -> None:
    """A stack has the numbers and products of its matrices, quantizing by blocks of rows gives the
    same arrays, and inputs have the gradients of the dense matrix.
    """
    array = np.random.default_rng(4).normal(0, 1, (3, 7, 150)).astype(np.float32)
    stack = assert_stack_equals_dense(array, name)
    several = jax.vmap(linear, in_axes=(None, 0))(jnp.asarray(array[0, :2]), stack)
    wanted = np.einsum("ri,eoi->ero", array[0, :2], to_dense(stack))
    np.testing.assert_allclose(several, wanted, rtol=1e-4, atol=1e-5)


def assert_stack_equals_dense(array: np.ndarray, name: str) -> Any:
    """Check a format's stack of 3 matrices `[7, 150]` against each and its blocks; return it."""
    x, stack = jnp.asarray(array[0, :2]), as_format(jnp.asarray(array), name)
    for one, dense in zip(array, np.asarray(to_dense(stack), np.float32), strict=True):
        weight = as_format(jnp.asarray(one), name)
        np.testing.assert_allclose(np.asarray(to_dense(weight), np.float32), dense, 1e-5, 1e-6)
        gradient = jax.grad(lambda x, weight=weight: linear(x, weight).sum())(x)
        np.testing.assert_allclose(gradient[0], dense.sum(0), rtol=1e-4, atol=1e-5)
    rows = array.reshape(-1, 150)
    for size in (1, 4, 21):
        blocks = [rows[i : i + size] for i in range(0, 21, size)]
        cut = parse_format(name).quantize_blocks(array.shape, partial(iter, blocks))
        for piece, same in zip(jax.tree.leaves(cut), jax.tree.leaves(stack), strict=True):
            assert piece.dtype == same.dtype and np.array_equal(piece, same)
    return stack
