"""Export of integer weights in other programs' formats: GPTQ and compressed-tensors.

Nothing is rounded: integers, scales and zero points are those of the leaf. Token tables and the
head are written as floats, which these programs expect there. `quantize` and `build_model` read
both formats back.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxllm.checkpoints.native import Checkpoint
from jaxllm.convert.fused_layouts import FusedLayout
from jaxllm.convert.gptq_packing import pack_gptq
from jaxllm.convert.tables import HEAD, Architecture
from jaxllm.errors import ConfigError
from jaxllm.weights.formats import parse_format
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.types import bitpack
from jaxllm.weights.types.int_weight import IntFormat
from jaxllm.weights.types.permuted import PermutedFormat

GPTQ, COMPRESSED = "gptq", "compressed-tensors"
METHODS = (GPTQ, COMPRESSED)
_WIDTHS = {GPTQ: (2, 3, 4, 8), COMPRESSED: (4, 8)}
_REMEDY = "Drop --keep-quantized to write floats"
Tensors = dict[str, LazyTensor]


@dataclasses.dataclass(frozen=True)
class QuantizedExport:
    """Quantized matrices in the format of a file.

    Attributes:
        paths: The parameters that stay quantized.
        tensors: Their tensors, by their names in the file.
        settings: The `quantization_config`.
    """

    paths: frozenset[str]
    tensors: Tensors
    settings: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _IntMatrix:
    """A matrix as unsigned integers.

    Attributes:
        codes: uint8 `[O, I]`.
        zeros, scales: `[O, G]`.
        order: Column j here is column order[j] of the file; None: the same order.
    """

    int_format: IntFormat
    shape: tuple[int, int]
    codes: LazyTensor
    zeros: LazyTensor
    scales: LazyTensor
    order: np.ndarray | None

    @property
    def group_index(self) -> np.ndarray:
        """The group of each of the file's columns, int32 `[I]`."""
        group_I = np.arange(self.shape[1], dtype=np.int32) // self.int_format.group_size(
            self.shape[1]
        )
        if self.order is None:
            return group_I
        index = np.empty_like(group_I)
        index[self.order] = group_I
        return index


def export_integers(
    checkpoint: Checkpoint,
    method: str,
    table: Architecture,
    linears: Mapping[str, tuple[int, int]],
) -> QuantizedExport:
    """Return the integer matrices of a checkpoint in the format of a method.

    Args:
        checkpoint: The quantized checkpoint.
        method: A name of `METHODS`.
        table: The table of the architecture, for the file's layouts and names.
        linears: The shapes `[O, I]` of all linear weights.

    Raises:
        ConfigError: With every matrix that the format cannot hold.
    """
    if method not in METHODS:
        raise ConfigError(
            f"--keep-quantized {method!r:.40} is not a format: expected {' or '.join(METHODS)}"
        )
    tables = {HEAD, *(path for path in checkpoint.formats if path not in linears)}
    stacks = [p for p in tables & {*checkpoint.formats} if ".experts." in p]
    complaints = [f"{path}: quantized experts are not supported" for path in stacks]
    matrices: dict[str, _IntMatrix] = {}
    for path in (path for path in checkpoint.formats if path not in tables):
        kind = parse_format(checkpoint.formats[path])
        inner = kind.inner if isinstance(kind, PermutedFormat) else kind
        if not (isinstance(inner, IntFormat) and inner.is_plain and inner.bits in _WIDTHS[method]):
            complaints.append(f"{path} is {kind.name}, which {method} does not support")
        else:
            matrices[path] = _read_matrix(checkpoint, path, inner, linears[path], inner is not kind)
    if not checkpoint.formats or not (matrices or complaints):
        raise ConfigError(
            "--keep-quantized requires integer weights, but no linear of this model has any."
            " Quantize it first: jaxllm quantize MODEL OUT --format int4-g64"
        )
    joined = {} if complaints else _fuse_matrices(matrices, checkpoint.config, table, complaints)
    write = _export_gptq if method == GPTQ else _export_compressed_tensors
    tensors: Tensors = {}
    settings: dict[str, Any] = {}
    if not complaints:
        plain = _float_linears(linears, matrices, checkpoint.config, table)
        tensors, settings = write(joined, table, plain, complaints)
    if complaints:
        raise ConfigError(
            f"--keep-quantized {method}: {'; '.join(complaints[:20])}. {_REMEDY}, or use"
            f" {COMPRESSED if method == GPTQ else GPTQ}"
        )
    return QuantizedExport(frozenset(matrices), tensors, settings)


def _read_matrix(
    checkpoint: Checkpoint, path: str, kind: IntFormat, shape: tuple[int, int], ordered: bool
) -> _IntMatrix:
    stem = f"{path}.weight" if ordered else path
    pieces = checkpoint.tensors
    order = pieces[f"{path}.order"].read() if ordered else None
    columns = shape[1]
    count = -(-columns // kind.group_size(columns))
    middle = 2 ** (kind.bits - 1)

    def codes() -> np.ndarray:
        data: Any = pieces[f"{stem}.data"].read()
        numbers: np.ndarray = np.asarray(bitpack.unpack_codes(data, kind.bits))[:, :columns]
        if numbers.dtype == np.int8:  # to unsigned: 0 becomes 128
            return numbers.view(np.uint8) ^ np.uint8(128)
        return numbers

    def trim_groups(name: str) -> LazyTensor:
        tensor = pieces[f"{stem}.{name}"]
        size = (shape[0], count)
        return LazyTensor(tensor.dtype, size, lambda: tensor.read()[:, :count], tensor.release)

    zeros = trim_groups("zero") if kind.zero_point else _constant_tensor((shape[0], count), middle)
    codes_tensor = LazyTensor(np.dtype(np.uint8), shape, codes, pieces[f"{stem}.data"].release)
    return _IntMatrix(kind, shape, codes_tensor, zeros, trim_groups("scale"), order)


def _constant_tensor(shape: tuple[int, int], value: int) -> LazyTensor:
    return LazyTensor(np.dtype(np.uint8), shape, lambda: np.full(shape, value, np.uint8))


def _fuse_matrices(
    matrices: Mapping[str, _IntMatrix], config: Any, table: Architecture, complaints: list[str]
) -> dict[str, _IntMatrix]:
    """Fuse the matrices that the file stores as one."""
    fused = dict(matrices)
    for layout in (layout for layout in table.layouts if isinstance(layout, FusedLayout)):
        ends = [f"{name}.weight" for name in layout.parts]
        layers = [p.removesuffix(end) for p in matrices for end in ends if p.endswith(f".{end}")]
        for layer in dict.fromkeys(layers):
            paths = [f"{layer}{end}" for end in ends]
            parts = [fused.pop(path, None) for path in paths]
            one = parts[0]
            if one is None or not all(part is not None and _can_fuse(one, part) for part in parts):
                complaints.append(f"{', '.join(paths)} must have one format and order to be fused")
                continue
            fused_path = f"{layer}{layout.fused}.weight"
            codes, zeros, scales = (
                layout.write({path: getattr(matrices[path], field) for path in paths}, config)
                for field in ("codes", "zeros", "scales")
            )
            rows = sum(matrices[path].shape[0] for path in paths)
            fused[fused_path] = dataclasses.replace(
                one,
                shape=(rows, one.shape[1]),
                codes=codes[fused_path],
                zeros=zeros[fused_path],
                scales=scales[fused_path],
            )
    return fused


def _can_fuse(one: _IntMatrix, other: _IntMatrix) -> bool:
    """Return whether two matrices can be fused: same format, same column order."""
    orders = one.order is other.order or (
        one.order is not None and other.order is not None and np.array_equal(one.order, other.order)
    )
    return one.int_format == other.int_format and orders


def _export_gptq(
    matrices: Mapping[str, _IntMatrix],
    table: Architecture,
    plain: list[str],
    complaints: list[str],
) -> tuple[Tensors, dict[str, Any]]:
    """Return the tensors and the settings for GPTQ, which has one format for all matrices."""
    kinds = Counter((x.int_format.bits, x.int_format.group) for x in matrices.values())
    (bits, group), _ = kinds.most_common(1)[0]
    # Version 1 stores zero points minus one, but readers add it back without a modulo.
    less = 0 if any((x.zeros.read() == 0).any() for x in matrices.values()) else 1
    tensors: Tensors = {}
    for path, x in matrices.items():
        (rows, columns), stem = x.shape, table.output_name(path).removesuffix(".weight")
        if (x.int_format.bits, x.int_format.group) != (bits, group):
            complaints.append(
                f"{path} is {x.int_format.name}, expected {bits} bits in groups of {group}"
            )
        elif rows * bits % 32 or columns * bits % 32:
            complaints.append(f"{path}: {x.shape} at {bits} bits does not fill whole int32 words")
        else:
            tensors |= {
                f"{stem}.{name}": piece for name, piece in _pack_gptq_matrix(x, less).items()
            }
    settings = {
        "bits": bits,
        "group_size": group or -1,
        "sym": not any(x.int_format.zero_point for x in matrices.values()),
        "desc_act": any(x.order is not None for x in matrices.values()),
        "checkpoint_format": "gptq" if less else "gptq_v2",
        "quant_method": GPTQ,
    }
    head = table.head.removesuffix(".weight")
    dynamic: dict[str, Any] = {f"-:{re.escape(name)}$": {} for name in plain if name != head}
    return tensors, {**settings, **({"dynamic": dynamic} if dynamic else {})}


def _pack_gptq_matrix(x: _IntMatrix, zero_offset: int) -> Tensors:
    (rows, columns), bits = x.shape, x.int_format.bits
    groups = x.zeros.shape[1]

    def qweight() -> np.ndarray:
        codes = x.codes.read()
        if x.order is not None:
            codes = np.take(codes, np.argsort(x.order), axis=1)
        return np.ascontiguousarray(pack_gptq(codes, bits).T)

    def qzeros() -> np.ndarray:
        stored = (x.zeros.read().T - np.uint8(zero_offset)) & np.uint8(2**bits - 1)
        return pack_gptq(stored, bits)

    words = np.dtype(np.int32)
    return {
        "qweight": LazyTensor(words, (columns * bits // 32, rows), qweight),
        "qzeros": LazyTensor(words, (groups, rows * bits // 32), qzeros),
        "scales": x.scales.transpose(),
        "g_idx": LazyTensor.from_array(x.group_index),
    }


def _export_compressed_tensors(
    matrices: Mapping[str, _IntMatrix],
    table: Architecture,
    plain: list[str],
    complaints: list[str],
) -> tuple[Tensors, dict[str, Any]]:
    """Return the tensors and the settings for compressed-tensors, one config group per format."""
    groups: dict[IntFormat, list[str]] = {}
    tensors: Tensors = {}
    for path, x in matrices.items():
        columns, stem = x.shape[1], table.output_name(path).removesuffix(".weight")
        if x.order is not None:
            complaints.append(f"{path}: reordered columns (act_order) are not supported")
        elif x.int_format.group and columns % x.int_format.group:
            complaints.append(
                f"{path}: {columns} columns are not whole groups of {x.int_format.group}"
            )
        else:
            kind = dataclasses.replace(x.int_format, scale_dtype="float32")
            groups.setdefault(kind, []).append(stem)
            pieces = _pack_matrix(x)
            tensors |= {f"{stem}.weight_{name}": piece for name, piece in pieces.items()}
    settings = {
        "quant_method": COMPRESSED,
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{i}": {
                "targets": ["Linear"] if len(groups) == 1 else stems,
                "weights": {
                    "num_bits": kind.bits,
                    "type": "int",
                    "symmetric": not kind.zero_point,
                    "strategy": "group" if kind.group else "channel",
                    "group_size": kind.group,
                    "dynamic": False,
                },
                "input_activations": None,
                "output_activations": None,
            }
            for i, (kind, stems) in enumerate(groups.items())
        },
        "ignore": plain,
    }
    return tensors, settings


def _pack_matrix(x: _IntMatrix) -> Tensors:
    (rows, columns), bits = x.shape, x.int_format.bits
    words = np.dtype(np.int32)

    def pack_words(numbers: np.ndarray) -> np.ndarray:
        """Pack along the last axis, padded to whole words."""
        return pack_gptq(np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % (32 // bits)))), bits)

    size = (rows, -(-columns * bits // 32))
    pieces = {
        "packed": LazyTensor(words, size, lambda: pack_words(x.codes.read())),
        "scale": x.scales,
        "shape": LazyTensor.from_array(np.array(x.shape, np.int64)),
    }
    if x.int_format.zero_point:
        size = (-(-rows * bits // 32), x.zeros.shape[1])
        zeros = LazyTensor(
            words, size, lambda: np.ascontiguousarray(pack_words(x.zeros.read().T).T)
        )
        pieces["zero_point"] = zeros
    return pieces


def _float_linears(
    linears: Mapping[str, tuple[int, int]],
    matrices: Iterable[str],
    config: Any,
    table: Architecture,
) -> list[str]:
    """Return the file's names of linears that are written as floats."""
    exported = set(matrices)
    tensors = {
        path: LazyTensor.from_array(np.empty((shape[0], 0)))
        for path, shape in linears.items()
        if path not in exported
    }
    for layout in reversed(table.layouts):
        tensors = layout.write(tensors, config)
    return [table.output_name(path).removesuffix(".weight") for path in tensors]
