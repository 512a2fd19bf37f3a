"""Matrices quantized by compressed-tensors, as leaves with the same integers, scales, zero points.

For a linear `[O, I]`, "pack-quantized" stores numbers from 0 to 2^bits - 1, as `weight_packed`
int32 `[O, I bits / 32]` and `weight_zero_point` `[O bits / 32, G]`. "int-quantized" stores them
minus 128, as `weight` int8 and `weight_zero_point` int8 `[O, G]`. Both have `weight_scale`
`[O, G]`, or one number per tensor. Activations of W8A8 checkpoints are not quantized here.
"float-quantized" stores 8-bit floats, which `fp8` reads.
"""

import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np

from jaxllm.convert.fp8 import Fp8Scheme
from jaxllm.convert.gptq_packing import unpack_gptq
from jaxllm.convert.int_pieces import SCALE_DTYPES, make_pieces
from jaxllm.errors import ConfigError
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.types.base import round_up
from jaxllm.weights.types.int_weight import GROUP_SIZES, IntFormat

COMPRESSED_TENSORS = "compressed-tensors"
FLOAT_FORMAT = "float-quantized"
PACKED_FORMATS, INT_FORMATS = ("pack-quantized",), ("int-quantized", "naive-quantized")
SUFFIXES = ("weight_packed", "weight_scale", "weight_zero_point")


@dataclasses.dataclass(frozen=True)
class CompressedScheme:
    """Storage of a checkpoint's matrices. widths: the bit widths of its config groups."""

    is_packed: bool
    bit_widths: frozenset[int]


def read_compressed_scheme(data: Mapping[str, Any], where: str) -> CompressedScheme | Fp8Scheme:
    """Return how the weights are stored, from compressed-tensors' `quantization_config`.

    Raises:
        ConfigError: With every option that is not supported.
    """
    complaints = []
    form, groups = data.get("format"), data.get("config_groups")
    known_formats = (*PACKED_FORMATS, *INT_FORMATS, FLOAT_FORMAT)
    if form not in known_formats:
        known = ", ".join(known_formats)
        complaints.append(f"format {form!r:.40} is not supported (known: {known})")
    for name in ("kv_cache_scheme", "sparsity_config", "transform_config", "moe_sparsity_config"):
        if data.get(name) not in (None, {}):
            complaints.append(f"{name} is not supported (got {data[name]!r:.60})")
    if not isinstance(groups, Mapping) or not groups:
        complaints.append(f"config_groups must be an object of groups, got {groups!r:.60}")
        groups = {}
    widths, blocks = set(), list[tuple[int, int]]()
    for name, group in groups.items():
        bits, block, wrong = _read_group(group, form == FLOAT_FORMAT)
        widths.add(bits)
        blocks += [block] if block is not None else []
        complaints += [f"config_groups.{name}: {text}" for text in wrong]
    if complaints:
        raise ConfigError(f"{where}: {'; '.join(complaints)}")
    if form == FLOAT_FORMAT:
        return Fp8Scheme("_scale", max(blocks, default=None), by_rows=True)
    return CompressedScheme(form in PACKED_FORMATS, frozenset(widths))


def _read_group(group: Any, is_float: bool) -> tuple[int, tuple[int, int] | None, list[str]]:
    """Return a config group's bit width, the blocks that share a scale, and complaints."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        return 0, None, [f"weights must be an object, got {weights!r:.60}"]
    block = weights.get("block_structure") if is_float else None
    is_block = isinstance(block, list) and [type(n) is int and n > 0 for n in block] == [True] * 2
    wanted: dict[str, tuple[Any, ...]] = {
        "num_bits": (8,) if is_float else (4, 8),
        "type": ("float",) if is_float else ("int",),
        "strategy": ("block" if is_float else "group", "channel", "tensor", None),
        "dynamic": (False, None),
        "actorder": (None, False, "static", "weight"),
        "block_structure": (None, *([block] if is_block else ())),
    }
    wrong = [
        f"weights.{name} {weights.get(name)!r:.40} is not supported (known:"
        f" {', '.join(str(v) for v in values if v is not None)})"
        for name, values in wanted.items()
        if not any(weights.get(name) is v or weights.get(name) == v for v in values)
    ]
    inputs = group.get("input_activations")
    is_dynamic = isinstance(inputs, Mapping) and inputs.get("dynamic") is True
    if not is_float and inputs is not None and not is_dynamic:
        wrong.append("static input_activations are not supported")
    if group.get("output_activations") is not None:
        wrong.append("output_activations are not supported")
    bits = weights.get("num_bits")
    shared = (block[0], block[1]) if block is not None and is_block else None
    return (bits if type(bits) is int else 0), shared, wrong


def import_compressed_tensors(
    scheme: CompressedScheme,
    tensors: MutableMapping[str, LazyTensor],
    linears: Mapping[str, tuple[int, int]],
    complaints: list[str],
) -> dict[str, str]:
    """Replace the quantized pieces by those of our leaves; return the leaves' formats, by path.

    Args:
        scheme: How the matrices are stored.
        tensors: By our paths; quantized ones end in one of `SUFFIXES`.
        linears: The shapes `[O, I]` of all weights that can be quantized.
        complaints: Complaints are appended.
    """
    formats = {}
    for path, shape in linears.items():
        stem = path.removesuffix(".weight")
        stored = {p: t for p in SUFFIXES if (t := tensors.pop(f"{stem}.{p}", None)) is not None}
        if not scheme.is_packed and path in tensors and tensors[path].dtype == np.int8:
            stored["weight_packed"] = tensors.pop(path)
        if not stored:
            continue
        wrong, kind = _choose_format(scheme, stem, shape, stored)
        complaints += wrong
        if kind is None or path in tensors:
            if kind is not None:
                complaints.append(f"{path} and {stem}.weight_packed are both stored")
            tensors[path] = LazyTensor(np.dtype(np.float32), shape, lambda: np.empty(0))
            continue
        formats[path] = kind.name
        for name, tensor in _make_pieces(scheme, kind, shape, stored).items():
            tensors[f"{path}{name}"] = tensor
    if not formats and not complaints:
        complaints.append("no tensor is quantized, but config.json has a quantization_config")
    return formats


def _choose_format(
    scheme: CompressedScheme, stem: str, shape: tuple[int, int], stored: Mapping[str, LazyTensor]
) -> tuple[list[str], IntFormat | None]:
    """Return complaints about a matrix's tensors, and its format if there are none."""
    rows, columns = shape
    missing = [f"{stem}.{p} is missing" for p in SUFFIXES[:2] if p not in stored]
    if missing:
        return missing, None
    codes, scale, zero = (stored.get(piece) for piece in SUFFIXES)
    assert codes is not None
    assert scale is not None
    by_shape: dict[tuple[int, ...], int]
    by_shape = {(rows, round_up(columns * bits, 32) // 32): bits for bits in scheme.bit_widths}
    bits = by_shape.get(codes.shape, 0) if scheme.is_packed else 8 * (codes.shape == shape)
    wanted = "int32" if scheme.is_packed else "int8"
    if not bits or codes.dtype.name != wanted:
        return [
            f"{stem}.{SUFFIXES[0]} is {codes.dtype.name} {codes.shape}, expected {wanted} for"
            f" {shape}"
        ], None
    groups = scale.shape[1] if scale.ndim == 2 else 1
    size = columns // groups if groups else 0
    wrong = []
    if scale.shape not in ((rows, groups), (1,), (), (1, 1)) or size * groups != columns:
        wrong.append(f"{stem}.weight_scale has shape {scale.shape}, which does not divide {shape}")
    if scale.dtype.name not in SCALE_DTYPES:
        wrong.append(
            f"{stem}.weight_scale is {scale.dtype.name}, expected {' or '.join(SCALE_DTYPES)}"
        )
    sizes = [group for group in reversed(GROUP_SIZES) if size % group == 0]
    if groups > 1 and not sizes:
        wrong.append(f"{stem}: the group size is {size}, expected a multiple of {GROUP_SIZES}")
    expected_shape = (round_up(rows * bits, 32) // 32, groups) if scheme.is_packed else scale.shape
    if zero is not None and zero.shape != expected_shape:
        wrong.append(f"{stem}.weight_zero_point has shape {zero.shape}, expected {expected_shape}")
    if wrong:
        return wrong, None
    group = None if groups == 1 and bits == 8 else sizes[0] if groups > 1 else GROUP_SIZES[-1]
    half = scale.dtype == np.float16
    return [], IntFormat(bits, group, zero is not None, "float16" if half else "float32")


def _make_pieces(
    scheme: CompressedScheme,
    kind: IntFormat,
    shape: tuple[int, int],
    tensors: Mapping[str, LazyTensor],
) -> dict[str, LazyTensor]:
    """Return the pieces of the leaf, computed when they are read."""
    rows, columns = shape
    middle = np.uint8(2 ** (kind.bits - 1))

    def read_rows(piece: str) -> np.ndarray:
        """Read a number for each row and group, or one for all."""
        stored = tensors[piece].read()
        return stored.reshape(-1, stored.shape[-1] if stored.ndim > 1 else 1)

    def read_zeros() -> np.ndarray:
        if not scheme.is_packed:
            return read_rows("weight_zero_point").view(np.uint8) ^ middle
        stored = tensors["weight_zero_point"].read()
        return unpack_gptq(np.ascontiguousarray(stored.T), kind.bits)[:, :rows].T

    def read_codes() -> np.ndarray:
        stored = tensors["weight_packed"].read()
        if scheme.is_packed:
            return unpack_gptq(stored, kind.bits)[:, :columns]
        return stored.view(np.uint8) ^ middle

    scale = tensors["weight_scale"]
    group = columns // (scale.shape[1] if scale.ndim == 2 else 1)
    return make_pieces(
        kind, shape, group, read_codes, lambda: read_rows("weight_scale"), read_zeros
    )
