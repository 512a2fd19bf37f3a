"""GGUF's blocks of 256 columns as storage formats: quantizing, slices, stacks, files and rules."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm import models
from jaxllm.convert.gguf.blocks import BY_NAME
from jaxllm.convert.gguf.reader import open_gguf
from jaxllm.convert.gguf.writer import write_gguf
from jaxllm.convert.registry import open_checkpoint
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.ops import native
from jaxllm.sharding.shard_list import ShardList
from jaxllm.weights.experts import expert_linears, is_kernel_ready
from jaxllm.weights.formats import as_format, as_weight, parse_format, to_dense, weight_format
from jaxllm.weights.linear import linear
from jaxllm.weights.paths import flatten
from jaxllm.weights.quantize import find_format
from jaxllm.weights.types.block_weight import FALLBACKS, BlockWeight
from jaxllm.weights.types.lora import LoraWeight
from tests.tiny_models import save_random

RANDOM = np.random.default_rng(0)
NAMES = ("q4_k", "q5_k", "q6_k")
WIDE = {"num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


def draw(*shape: int) -> np.ndarray:
    return RANDOM.normal(0, 0.02, shape).astype(np.float32)


@pytest.mark.parametrize("name", NAMES)
def test_quantized_blocks_are_those_of_gguf_writer(name: str) -> None:
    """Matrices of several blocks of rows, stacks and bfloat16 have the bytes that the writer of
    GGUF files makes, and the numbers that ggml reads from them.
    """
    array = draw(515, 256)
    kind, weight = BY_NAME[name.upper()], as_weight(as_format(jnp.asarray(array), name))
    assert isinstance(weight, BlockWeight) and weight_format(weight) == name
    np.testing.assert_array_equal(weight.data, kind.quantize(array))
    np.testing.assert_array_equal(to_dense(weight), kind.dequantize(np.asarray(weight.data)))
    stack: Any = as_format(jnp.asarray(array[:6].reshape(2, 3, 256), jnp.bfloat16), name)
    rounded = np.asarray(jnp.asarray(array[:6], jnp.bfloat16), np.float32)
    np.testing.assert_array_equal(stack.data.reshape(6, -1), kind.quantize(rounded))
    assert stack.shape == (2, 3, 256) and to_dense(stack).shape == (2, 3, 256)


@pytest.mark.parametrize("name", NAMES)
def test_blocks_are_sliced_and_joined_bitwise(name: str) -> None:
    """Rows, whole blocks of columns and shards keep their bytes. A part of a block becomes integers
    of the same numbers; a stack's is refused, as experts cannot have offsets.
    """
    weight = as_weight(as_format(jnp.asarray(draw(6, 512)), name))
    sides = [weight.with_columns(*span) for span in ((0, 256), (256, 512))]
    np.testing.assert_array_equal(to_dense(sides[1]), to_dense(weight)[:, 256:])
    np.testing.assert_array_equal(sides[0].concatenate(sides[1:], 1).data, weight.data)
    rows = [weight.with_rows(np.arange(*span)) for span in ((0, 2), (2, 4), (4, 6))]
    np.testing.assert_array_equal(rows[0].concatenate(rows[1:], 0).data, weight.data)
    np.testing.assert_array_equal(
        weight.take(jnp.array([5, 0])), to_dense(weight)[jnp.array([5, 0])]
    )
    for axis, shares in ((0, rows), (1, sides)):
        joint = ShardList(
            jax.tree.map(lambda *x: jnp.stack(x), *shares), axis, 1, 6 if axis == 0 else 512
        )
        np.testing.assert_array_equal(as_weight(joint.merge()).data, weight.data)
    with pytest.raises(ConfigError, match=f"columns 0 to 128 of {name} would split a group of 256"):
        jax.tree.map(lambda x: x[None], weight).with_columns(0, 128)
    halves = [weight.with_columns(*span) for span in ((0, 128), (128, 512))]
    whole = halves[0].concatenate(halves[1:], 1)
    np.testing.assert_array_equal(to_dense(whole), to_dense(weight))


@pytest.mark.parametrize("name", NAMES)
def test_expert_stacks_multiply_their_blocks(name: str) -> None:
    """Products with stacks are those of their numbers, by kernels and in plain JAX."""
    stack = as_weight(as_format(jnp.asarray(draw(3, 5, 512)), name))
    assert not native.is_enabled() or is_kernel_ready(stack)
    x, expert = jnp.asarray(RANDOM.normal(0, 1, (5, 512)), jnp.float32), jnp.array([2, 0, 0, -1, 1])
    dense = np.concatenate([np.asarray(to_dense(stack), np.float64), np.zeros((1, 5, 512))])
    wanted = np.einsum("ai,aoi->ao", np.asarray(x, np.float64), dense[expert])
    for path in (nullcontext, native.disable_kernels):
        with path():
            np.testing.assert_allclose(expert_linears(x, [stack], expert)[0], wanted, atol=2e-5)
    each = jax.vmap(linear, (None, 0))(x, stack)
    np.testing.assert_allclose(each, np.einsum("ai,eoi->eao", x, dense[:3]), atol=2e-5)


def test_adapters_train_over_blocks() -> None:
    """Gradients of LoRA's matrices over a q4_k weight are those over its numbers."""
    weight = as_format(jnp.asarray(draw(7, 256)), "q4_k")
    x, factors = jnp.asarray(draw(3, 256)), (jnp.asarray(draw(2, 256)), jnp.asarray(draw(7, 2)))

    def loss(factors: Any, base: Any) -> jax.Array:
        adapted = LoraWeight(base, *factors, jnp.ones(2))
        return jnp.square(linear(x, adapted)).sum()

    found, wanted = (jax.grad(loss)(factors, base) for base in (weight, to_dense(weight)))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_part_of_a_block_are_refused(name: str) -> None:
    """`as_format` refuses them and names the format that rules fall back to."""
    with pytest.raises(ConfigError, match=f"whole blocks of 256 columns.*Use {FALLBACKS[name]}"):
        as_format(jnp.zeros((2, 384)), name)
    with pytest.raises(ConfigError, match="cannot hold weights beyond 65,504"):
        as_format(jnp.full((2, 256), 1e30), name)
    assert find_format([(".*", name)], "x.weight", (2, 384)) == FALLBACKS[name]
    assert find_format([(".*", name)], "x.weight", (2, 512)) == name
    arrays = {".blocks": np.full((2, 210), 0x7C, np.uint8)}
    with pytest.raises(CheckpointError, match="no blocks"):
        parse_format(name).from_file("w", (2, 384), arrays)


@pytest.mark.parametrize("family", models.FAMILIES)
def test_int4_gives_value_and_down_projections_six_bits(family: str) -> None:
    """In every family, `int4` stores value and down projections as q6_k, tables and the head as
    int8, other matrices as q4_k, or as what rows of part of a block fall back to.
    """
    config = models.get_family(family)
    for prefix in (f"{config.layers}.0.", f"{config.layers}.11."):
        for group in config.linear_groups:
            for name in group.linears:
                found = find_format("int4", f"{prefix}{name}.weight", (256, 512))
                last = name.rpartition(".")[2]
                more = name == config.mlp_down or last in ("v_proj", "down_proj")
                form = "q6_k" if more else "q4_k"
                assert found == (None if last == "shared_expert_gate" else form), name
        stack = find_format("int4", f"{prefix}mlp.experts.down_proj.weight", (2, 256, 512))
        assert stack == "q6_k"
    assert find_format("int4", f"{config.token_table}.weight", (131, 256)) == "int8"
    assert find_format("int4", "lm_head.weight", (131, 256)) == "int8"
    assert find_format("int4", f"{config.layers}.0.mlp.x.weight", (8, 384)) == "int4-g32-zp-f16"


def test_int4_model_round_trips_through_files(tmp_path: Path) -> None:
    """Saved and loaded again, weights are the same blocks; GGUF files take and return their bytes
    without rounding; logits stay.
    """
    save_random(tmp_path / "hf", "llama", **WIDE)
    lm = jaxllm.load(tmp_path / "hf", quantize="int4")
    formats = {path: weight_format(x) for path, x in flatten(lm.params) if x.ndim > 1}
    assert set(formats.values()) == {"q4_k", "q6_k", "int8"}
    lm.save(tmp_path / "native")
    again = jaxllm.load(tmp_path / "native")
    assert again.model == lm.model
    write_gguf(tmp_path / "a.gguf", open_checkpoint(tmp_path / "native"), "Q4_K")
    back = dict(flatten(jaxllm.load(open_gguf(tmp_path / "a.gguf")).params))
    for (path, a), (_, b) in zip(flatten(lm.params), flatten(again.params), strict=True):
        for name, array in as_weight(a).arrays().items():
            np.testing.assert_array_equal(as_weight(b).arrays()[name], array, err_msg=path)
        if formats.get(path) == "q4_k":
            assert weight_format(back[path]) == "q4_k"
            np.testing.assert_array_equal(back[path].rows, a.data, err_msg=path)


def test_older_int4_checkpoint_keeps_its_integers(tmp_path: Path) -> None:
    """Up to version 0.9, `int4` in a checkpoint's precision was int4-g64: it stays so."""
    save_random(tmp_path / "hf", "llama", **WIDE)
    jaxllm.load(tmp_path / "hf", quantize="int4-g64").save(tmp_path / "old")
    file = tmp_path / "old" / "config.json"
    settings = json.loads(file.read_text())
    assert settings["precision"]["quantize"] == "int4-g64"
    settings["precision"]["quantize"] = "int4"
    file.write_text(json.dumps(settings))
    params = jaxllm.load(tmp_path / "old").params
    assert weight_format(params["layers.0"]["mlp"]["up_proj"]["weight"]) == "int4-g64"
