"""FP8 checkpoints: codes times scales, in every shape of scales; what does not fit is refused."""

import itertools
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import jaxllm
from jaxllm.convert.fp8 import Fp8Scheme, read_fp8_scheme, scale_fp8
from jaxllm.convert.hf import open_hf
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.weights.formats import to_dense
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.paths import flatten
from tests.convert.test_convert import edit_config, edit_tensors
from tests.tiny_models import save_random

COMPRESSED: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "float-quantized"}
BLOCKS = [16, 24]  # neither divides the matrices


def compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    settings = {"num_bits": 8, "type": "float", "strategy": strategy, **weights}
    inputs = {"num_bits": 8, "type": "float", "dynamic": False}
    group = {"targets": ["Linear"], "weights": settings, "input_activations": inputs}
    return {**COMPRESSED, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


# Family, settings, the block that shares a scale (0: all rows or columns), the scales' dtype.
CASES: dict[str, tuple[str, dict[str, Any], tuple[int, int], Any]] = {
    "blocks": ("qwen3", {"weight_block_size": BLOCKS, "fmt": "e4m3"}, (16, 24), torch.float32),
    "blocks, e8m0": (
        "qwen3_moe", {"weight_block_size": BLOCKS, "scale_fmt": "ue8m0"}, (16, 24),
        torch.float8_e8m0fnu,
    ),
    "blocks of the default size": ("qwen3", {}, (128, 128), torch.bfloat16),
    "a scale for the tensor": (
        "ministral3", {"weight_block_size": None, "activation_scheme": "static"}, (0, 0),
        torch.bfloat16,
    ),
    "compressed, rows": ("qwen3", compressed("channel"), (1, 0), torch.float32),
    "compressed, a scale": ("qwen3", compressed("tensor"), (0, 0), torch.bfloat16),
    "compressed, blocks": (
        "qwen3", compressed("block", block_structure=BLOCKS), (16, 24), torch.float32,
    ),
}  # fmt: skip


def write_fp8(directory: Path, case: str) -> dict[str, np.ndarray]:
    """Write a checkpoint with FP8 matrices; return the products, computed block by block."""
    family, settings, (height, width), dtype = CASES[case]
    save_random(directory, family)
    suffix = "_scale" if settings.get("quant_method") else "_scale_inv"
    expected: dict[str, np.ndarray] = {}

    def quantize(state: dict[str, torch.Tensor]) -> None:
        for name in [n for n in state if n.endswith("_proj.weight")]:
            weight = state[name].float()
            rows, columns = weight.shape
            high, wide = height or rows, width or columns
            grid = (-(-rows // high), -(-columns // wide))
            scale = torch.zeros(grid)
            codes, product = torch.zeros_like(weight), torch.zeros_like(weight)
            for i, j in itertools.product(*map(range, grid)):
                block = np.s_[i * high : (i + 1) * high, j * wide : (j + 1) * wide]
                scale[i, j] = (weight[block].abs().max() / 448).to(dtype).float()
                codes[block] = weight[block] / scale[i, j]
                product[block] = codes[block].to(torch.float8_e4m3fn).float() * scale[i, j]
            state[name] = codes.to(torch.float8_e4m3fn)
            shaped = scale.reshape(()) if (height, width) == (0, 0) else scale
            state[f"{name}{suffix}"] = shaped.to(dtype)
            stem = name.removesuffix("weight")
            state[f"{stem}activation_scale"] = torch.tensor(0.5)
            expected[name.removeprefix("model.")] = product.numpy()

    edit_tensors(directory, quantize)
    edit_config(directory, quantization_config={"quant_method": "fp8", **settings})
    return expected


@pytest.mark.parametrize("case", CASES)
def test_fp8_matrices_are_codes_times_scales(case: str, tmp_path: Path) -> None:
    """Matrices equal torch's products bit for bit, also of experts, in blocks that do not divide
    them.
    """
    expected = write_fp8(tmp_path, case)
    lm = jaxllm.load(tmp_path)
    params = {path: np.asarray(to_dense(x)) for path, x in flatten(lm.params)}
    for path, array in expected.items():
        *stem, number, name = path.removesuffix(".weight").split(".")
        if stem[-1:] == ["experts"]:
            found = params[".".join([*stem, name, "weight"])][int(number)]
        else:
            found = params[path]
        np.testing.assert_array_equal(found, array, path)


def test_fp8_matrices_take_the_dtype_of_other_tensors(tmp_path: Path) -> None:
    """A checkpoint with bfloat16 embeddings loads in bfloat16, or in float32 without rounding."""
    expected = write_fp8(tmp_path, "blocks")
    edit_tensors(
        tmp_path,
        lambda state: state.update(
            {n: x.bfloat16() for n, x in state.items() if x.dtype == torch.float32}
        ),
    )
    path = "layers.0.mlp.up_proj.weight"
    lm = jaxllm.load(tmp_path)
    found = dict(flatten(lm.params))[path]
    assert found.dtype == ml_dtypes.bfloat16
    scale = dict(flatten(jaxllm.load(tmp_path, dtype="float32").params))[path]
    np.testing.assert_array_equal(np.asarray(found), np.asarray(scale).astype(ml_dtypes.bfloat16))
    np.testing.assert_allclose(np.asarray(scale), expected[path], rtol=2**-8)


def test_stacked_matrices_have_a_scale_for_each_block() -> None:
    """A stack's blocks begin anew in each matrix, and rows may be read apart."""
    rng, (E, rows, columns) = np.random.default_rng(0), (3, 5, 7)
    codes = rng.normal(size=(E, rows, columns)).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.uniform(1, 2, (E, 3, 2)).astype(np.float32)
    stored = {"x": LazyTensor.from_array(codes), "x_scale_inv": LazyTensor.from_array(scale)}
    stored["x_activation_scale"] = LazyTensor.from_array(np.ones((), np.float32))
    read = scale_fp8(stored, Fp8Scheme("_scale_inv", (2, 4)), "here")
    assert read.keys() == {"x"}
    expected = np.zeros(codes.shape, np.float32)
    for e, i, j in np.ndindex(*codes.shape):
        expected[e, i, j] = np.float32(codes[e, i, j]) * scale[e, i // 2, j // 4]
    np.testing.assert_array_equal(read["x"].read(), expected)
    np.testing.assert_array_equal(np.concatenate([*read["x"].blocks(2)]), expected.reshape(-1, 7))


def test_codes_and_scales_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Codes without a scale, a scale without codes, other shapes and dtypes, a file without its
    settings, or settings without codes: each raises an error with the tensors' names.
    """
    write_fp8(tmp_path, "blocks")
    mlp = "model.layers.0.mlp."

    def spoil(state: dict[str, torch.Tensor]) -> None:
        del state[f"{mlp}up_proj.weight_scale_inv"]
        state[f"{mlp}down_proj.weight"] = state[f"{mlp}down_proj.weight"].float()
        state[f"{mlp}gate_proj.weight_scale_inv"] = torch.ones(7, 1)
        name = "model.layers.1.mlp.up_proj.weight_scale_inv"
        state[name] = state[name].to(torch.int32)

    edit_tensors(tmp_path, spoil)
    with pytest.raises(CheckpointError) as caught:
        open_hf(tmp_path)
    for message in (
        f"{mlp}up_proj.weight is float8_e4m3fn, but {mlp}up_proj.weight_scale_inv is missing",
        f"{mlp}down_proj.weight_scale_inv has no tensor of float8_e4m3fn",
        f"{mlp}gate_proj.weight_scale_inv has shape (7, 1), expected (4, 2)",
        "layers.1.mlp.up_proj.weight_scale_inv is int32, expected float32",
    ):
        assert message in str(caught.value)
    edit_config(tmp_path, quantization_config="delete")
    with pytest.raises(CheckpointError, match=r"up_proj.weight is float8.*no quantization_config"):
        open_hf(tmp_path)
    save_random(tmp_path, "qwen3")
    edit_config(tmp_path, quantization_config={"quant_method": "fp8"})
    with pytest.raises(CheckpointError, match="no tensor is float8_e4m3fn"):
        open_hf(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fmt": "e5m2"}, "fmt must be 'e4m3'"),
        ({"expert_dtype": "fp4"}, "expert_dtype must be 'fp8'"),
        ({"weight_block_size": [128]}, "weight_block_size"),
        ({"weight_block_size": [128, 0]}, r"weight_block_size must be positive, got \[128, 0\]"),
        ({"rotation": True}, "rotation is not supported"),
    ],
)
def test_unsupported_fp8_settings_are_named(settings: dict[str, Any], message: str) -> None:
    """A setting that changes the numbers, or that is unknown, is refused by its name."""
    with pytest.raises(ConfigError, match=message):
        read_fp8_scheme({"quant_method": "fp8", **settings}, "config.json: quantization_config")
