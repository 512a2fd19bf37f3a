"""Matrices in 8-bit floats with scales, as numbers: code x scale, in float32 until they are loaded.

A tensor X of codes (float8_e4m3fn) has a scale that is multiplied: X_scale_inv with
`quant_method` "fp8", X_scale with compressed-tensors. There is one scale for the tensor, for
each row, or for each block of rows and columns. Scales of inputs are not needed: inputs stay in
full precision.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxllm.convert.tables import Field, FieldTable, read_fields, refuse, unknown_fields
from jaxllm.errors import CheckpointError
from jaxllm.weights.lazy import LazyTensor

FP8 = "fp8"  # a `quant_method`
CODES = "float8_e4m3fn"
_SCALE_DTYPES = ("float32", "bfloat16", "float16", "float8_e8m0fnu")
_INPUT_SCALES = ("activation_scale", "input_scale")
_BLOCK = "weight_block_size"
_TABLE = FieldTable(
    fields=(Field(_BLOCK, "block", None, tuple[int, int]),),
    allowed_values={"fmt": ("e4m3",), "expert_dtype": ("fp8",)},
    ignored_fields=frozenset(
        {
            "activation_scheme",
            "dequantize",
            "ignored_layers",  # the tensors show it, also for the next two
            "modules_to_convert",
            "modules_to_not_convert",
            "quant_method",
            "scale_fmt",
        }
    ),
)


@dataclasses.dataclass(frozen=True)
class Fp8Scheme:
    """How the tensors are scaled.

    Attributes:
        suffix: What follows the name of the codes in that of their scale.
        block: The rows and columns that share a scale; None: no scale is for blocks.
        by_rows: Whether a scale may also be for a row, or for the tensor if there are blocks.
    """

    suffix: str
    block: tuple[int, int] | None
    by_rows: bool = False


def read_fp8_scheme(data: Mapping[str, Any], where: str) -> Fp8Scheme:
    """Return how the tensors are scaled, from a `quantization_config` with `quant_method` "fp8".

    Raises:
        ConfigError: With every option that is not supported.
    """
    data = {_BLOCK: [128, 128], **data}  # transformers' default; null: a scale for each tensor
    fields, complaints = read_fields(_TABLE, data)
    complaints += [f"{name} is not supported" for name in unknown_fields(_TABLE, data)]
    block = fields["block"]
    if not complaints and block is not None and min(block) < 1:
        complaints.append(f"{_BLOCK} must be positive, got {list(block)}")
    refuse(where, complaints)
    return Fp8Scheme("_scale_inv", block)


def scale_fp8(
    tensors: Mapping[str, LazyTensor], scheme: Fp8Scheme | None, where: str
) -> dict[str, LazyTensor]:
    """Replace codes and their scales by their products; scales of inputs are dropped.

    Raises:
        CheckpointError: With every tensor that lacks its scale, scale that lacks its tensor, and
            scale of another shape or dtype.
    """
    codes = [name for name, tensor in tensors.items() if tensor.dtype.name == CODES]
    complaints = []
    if scheme is None:
        complaints += [
            f"{name} is {CODES}, but config.json has no quantization_config that scales it"
            for name in codes
        ]
        _refuse(complaints, where)
        return dict(tensors)
    result = dict(tensors)
    for name in codes:
        scale = result.pop(f"{name}{scheme.suffix}", None)
        stem = name.removesuffix("weight")
        for unused in _INPUT_SCALES:
            result.pop(f"{stem}{unused}" if stem != name else f"{name}_{unused}", None)
        if scale is None:
            complaints.append(f"{name} is {CODES}, but {name}{scheme.suffix} is missing")
            continue
        grid, complaint = _scale_grid(scheme, tensors[name], scale)
        if complaint:
            complaints.append(f"{name}{scheme.suffix} {complaint}")
        else:
            result[name] = _multiply(tensors[name], scale, grid)
    complaints += [
        f"{name} has no tensor of {CODES} that it scales"
        for name in result
        if name.endswith(scheme.suffix)
    ]
    if not codes and not complaints:
        complaints.append(f"no tensor is {CODES}, but config.json has a quantization_config")
    _refuse(complaints, where)
    return result


def _refuse(complaints: list[str], where: str) -> None:
    if complaints:
        raise CheckpointError(f"{where}: {'; '.join(complaints[:50])}")


def _scale_grid(
    scheme: Fp8Scheme, codes: LazyTensor, scale: LazyTensor
) -> tuple[tuple[int, int], str]:
    """Return the rows and columns that share a scale, and a complaint or ""."""
    if codes.ndim < 2:
        return (1, 1), f"scales a tensor of shape {codes.shape}, expected matrices"
    *stack, rows, columns = codes.shape
    shapes: dict[tuple[int, ...], tuple[int, int]] = {}
    if scheme.block is None or scheme.by_rows:
        shapes |= dict.fromkeys([(), (1,), (1, 1)], (rows, columns))
    if scheme.by_rows:
        shapes |= dict.fromkeys([(*stack, rows), (*stack, rows, 1)], (1, columns))
    if scheme.block is not None:
        height, width = scheme.block
        shapes[(*stack, -(-rows // height), -(-columns // width))] = scheme.block
    if scale.shape not in shapes:
        return (1, 1), f"has shape {scale.shape}, expected {' or '.join(map(str, shapes))}"
    if scale.dtype.name not in _SCALE_DTYPES:
        return (1, 1), f"is {scale.dtype.name}, expected {' or '.join(_SCALE_DTYPES)}"
    return shapes[scale.shape], ""


def _multiply(codes: LazyTensor, scale: LazyTensor, grid: tuple[int, int]) -> LazyTensor:
    """Return the products, float32. grid: The rows and columns that share a scale."""
    *stack, rows, columns = codes.shape
    height, width = grid
    each = -(-rows // height)  # rows of scales of a matrix

    def multiply(part: np.ndarray, first: int) -> np.ndarray:
        scale_RC = scale.read().astype(np.float32).reshape(-1, -(-columns // width))
        scale_RC = np.broadcast_to(scale_RC, (math.prod(stack) * each, scale_RC.shape[1]))
        number = first // columns + np.arange(part.size // columns)
        scale_nC = scale_RC[number // rows * each + number % rows // height]
        scale_nI = np.repeat(scale_nC, width, axis=1)[:, :columns]
        return part.astype(np.float32) * scale_nI.reshape(part.shape)

    return codes.map_blocks(np.dtype(np.float32), multiply)
