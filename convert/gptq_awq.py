"""Matrices quantized by GPTQ and AWQ, as leaves with the same integers, scales and zero points.

Nothing is rounded, and integers are read only when the leaf is. Group sizes that our formats lack
become groups of 32, 64 or 128 columns with repeated scales.

GPTQ (AutoGPTQ, GPTQModel, optimum), for a linear `[O, I]`: `qweight` int32 `[I bits / 32, O]`,
`qzeros` int32 `[G, O bits / 32]`, `scales` `[G, O]`, `g_idx` int32 `[I]`, the group of each column.
Version 1 of the format stores zero points minus one, modulo 2^bits. GPT-2's Conv1D is packed like
the equivalent linear, so nothing is transposed.
AWQ (AutoAWQ, version "gemm"): `qweight` int32 `[I, O / 8]`, `qzeros` `[G, O / 8]`, `scales`.
"""

import dataclasses
import re
from collections.abc import Container, Iterable, Mapping, MutableMapping

import numpy as np

from jaxllm.convert import compressed_tensors
from jaxllm.convert.gptq_packing import unpack_awq, unpack_gptq
from jaxllm.convert.int_pieces import SCALE_DTYPES, make_pieces
from jaxllm.convert.quantization_config import Scheme
from jaxllm.weights.formats import Format
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.types.int_weight import GROUP_SIZES, IntFormat
from jaxllm.weights.types.permuted import PermutedFormat

SUFFIXES = ("qweight", "qzeros", "scales", "g_idx")


def list_tensor_names(linears: Iterable[str]) -> set[str]:
    """Return the possible tensor names of quantized linears, by the paths of their weights."""
    stems = [path.removesuffix(".weight") for path in linears]
    return {
        f"{stem}.{piece}"
        for stem in stems
        for piece in (*SUFFIXES, *compressed_tensors.SUFFIXES, "bias")
    }


def import_gptq_awq(
    scheme: Scheme,
    tensors: MutableMapping[str, LazyTensor],
    linears: Mapping[str, tuple[int, int]],
    paths: Container[str],
    complaints: list[str],
) -> dict[str, str]:
    """Replace the pieces of GPTQ or AWQ by those of our leaves, in `tensors`.

    Args:
        tensors: By our paths; quantized ones end in one of `SUFFIXES`.
        linears: The shapes `[O, I]` of all weights that can be quantized.
        paths: The paths of all parameters. A zero bias that is not among them is removed, since
            AutoGPTQ wrote one for every linear.
        complaints: Complaints are appended.

    Returns:
        The formats of the leaves, by path.
    """
    formats = {}
    stems = [path.removesuffix(".weight") for path in linears]
    for stem in stems:
        stored = {p: t for p in SUFFIXES if (t := tensors.get(f"{stem}.{p}")) is not None}
        if not stored:
            continue
        bias = f"{stem}.bias"
        if bias in tensors and bias not in paths and not tensors[bias].read().any():
            del tensors[bias]
        path, used = f"{stem}.weight", SUFFIXES if scheme.method == "gptq" else SUFFIXES[:3]
        for piece in used:
            tensors.pop(f"{stem}.{piece}", None)
        if path in tensors:
            complaints.append(f"{path} and {stem}.{next(iter(stored))} are both stored")
        matrix = _Matrix(scheme, stem, linears[path], stored)
        wrong = matrix.find_complaints()
        format, order = (None, None) if wrong else matrix.choose_format(wrong)
        complaints += wrong
        if format is None:  # a placeholder, so that it is not reported missing too
            tensors[path] = LazyTensor(np.dtype(np.float32), linears[path], lambda: np.empty(0))
            continue
        tensors.pop(path, None)
        formats[path] = format.name
        for name, tensor in matrix.make_pieces(format, order).items():
            tensors[f"{path}{name}"] = tensor
    if not formats and not complaints:
        complaints.append("no tensor is quantized, but config.json has a quantization_config")
    return formats


def make_rules(
    formats: Mapping[str, str], paths: Iterable[str]
) -> tuple[tuple[str, str | None], ...]:
    """Return quantization rules that give each path its format, one for all layers if they agree.

    paths: The paths of all parameters, quantized or not.
    """
    named: dict[str, set[str | None]] = {}
    patterns = {path: re.sub(r"(?<=\\\.)\d+(?=\\\.)", r"\\d+", re.escape(path)) for path in paths}
    for path, pattern in patterns.items():
        named.setdefault(pattern, set()).add(formats.get(path))
    rows: dict[str, str | None] = {}
    for path, name in formats.items():
        pattern = patterns[path]
        rows[pattern if len(named[pattern]) == 1 else re.escape(path)] = name
    return tuple(rows.items())


@dataclasses.dataclass(frozen=True)
class _Matrix:
    """A quantized linear of a checkpoint. tensors: its tensors, by the names in `SUFFIXES`."""

    scheme: Scheme
    stem: str
    shape: tuple[int, int]
    tensors: Mapping[str, LazyTensor]

    def find_complaints(self) -> list[str]:
        """Return complaints about the shapes and dtypes of its tensors."""
        (rows, columns), bits = self.shape, self.scheme.bits
        groups, awq = (
            -(-columns // (self.scheme.group_size or columns)),
            self.scheme.method == "awq",
        )
        if rows * bits % 32 or columns * bits % (1 if awq else 32):
            return [f"{self.stem}: {self.shape} at {bits} bits does not fill whole int32 words"]
        packed = (columns, rows // 8) if awq else (columns * bits // 32, rows)
        wanted: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
            "qweight": (packed, ("int32",)),
            "qzeros": ((groups, rows * bits // 32), ("int32",)),
            "scales": ((groups, rows), SCALE_DTYPES),
        }
        needs_groups = self.scheme.act_order and groups > 1
        if not awq and (needs_groups or "g_idx" in self.tensors):
            wanted["g_idx"] = ((columns,), ("int32", "int64"))
        complaints = []
        for piece, (shape, dtypes) in wanted.items():
            path, tensor = f"{self.stem}.{piece}", self.tensors.get(piece)
            if tensor is None:
                complaints.append(f"{path} is missing")
            elif tensor.shape != shape:
                complaints.append(
                    f"{path} has shape {tensor.shape}, expected {shape} for {bits} bits in groups"
                    f" of {self.scheme.group_size or columns}"
                )
            elif tensor.dtype.name not in dtypes:
                complaints.append(f"{path} is {tensor.dtype.name}, expected {' or '.join(dtypes)}")
        if self._group_size() == 0:
            complaints.append(
                f"{self.stem}: the group size is not supported: got {self.scheme.group_size},"
                " expected"
                f" a multiple of {', '.join(map(str, GROUP_SIZES))}"
            )
        return complaints

    def choose_format(self, complaints: list[str]) -> tuple[Format | None, np.ndarray | None]:
        """Return its format, and the column order if it differs from the checkpoint's.

        Complaints about zero points and groups are appended.
        """
        zeros, order = self.read_zeros(), self.read_order(complaints)
        middle = 2 ** (self.scheme.bits - 1)
        if self.scheme.symmetric and (zeros != middle).any():
            complaints.append(
                f"{self.stem}.qzeros are not all {middle}, which symmetric integers (sym) require"
            )
        if complaints:
            return None, None
        zero_point = bool((zeros != middle).any())
        half = self.tensors["scales"].dtype == np.float16
        kind = IntFormat(
            self.scheme.bits, self._group_size(), zero_point, "float16" if half else "float32"
        )
        return (kind if order is None else PermutedFormat(kind)), order

    def make_pieces(self, format: Format, order: np.ndarray | None) -> dict[str, LazyTensor]:
        """Return the pieces of the leaf, computed when they are read."""
        kind = format.inner if isinstance(format, PermutedFormat) else format
        assert isinstance(kind, IntFormat)
        columns = self.shape[1]

        def read_codes() -> np.ndarray:
            words = self.tensors["qweight"].read()
            awq = self.scheme.method == "awq"
            codes = unpack_awq(words).T if awq else unpack_gptq(words.T, self.scheme.bits)
            # np.take is ten times as fast as indexing.
            return codes if order is None else np.take(codes, order, axis=1)

        made = make_pieces(
            kind,
            self.shape,
            min(self.scheme.group_size or columns, columns),
            read_codes,
            lambda: self.tensors["scales"].read().T,
            self.read_zeros,
        )
        if order is None:
            return made
        pieces = {f".weight{name}": tensor for name, tensor in made.items()}
        return {".order": LazyTensor.from_array(order.astype(np.int32)), **pieces}

    def read_zeros(self) -> np.ndarray:
        """Return the zero points, uint8 `[O, G]`."""
        words, bits = self.tensors["qzeros"].read(), self.scheme.bits
        if self.scheme.method == "awq":
            return unpack_awq(words).T
        stored = unpack_gptq(words, bits).T
        # Some writers of symmetric integers declare version 1 but store version 2.
        if self.scheme.symmetric and (stored == 2 ** (bits - 1)).all():
            return stored
        return (stored + np.uint8(self.scheme.zero_offset)) & np.uint8(2**bits - 1)

    def read_order(self, complaints: list[str]) -> np.ndarray | None:
        """Return the stored column for each of ours if groups must be sorted, else None."""
        tensor, columns = self.tensors.get("g_idx"), self.shape[1]
        if tensor is None:
            return None
        size = self.scheme.group_size or columns
        index, ramp = tensor.read(), np.arange(columns) // size
        if np.array_equal(index, ramp):
            return None
        path, groups = f"{self.stem}.g_idx", ramp[-1] + 1
        if index.min() < 0 or index.max() >= groups:
            complaints.append(
                f"{path} names groups {index.min()} to {index.max()}, but there are {groups}"
            )
        elif not self.scheme.act_order:
            complaints.append(f"{path} is not in order, but desc_act is false")
        elif not np.array_equal(np.sort(index), ramp):
            complaints.append(f"{path} does not give each group {size} columns")
        return np.argsort(index, kind="stable")

    def _group_size(self) -> int | None:
        """Return the leaf's group size; None: a whole row; 0: none is possible."""
        group = self.scheme.group_size
        for size in reversed(GROUP_SIZES):
            if group is not None and group % size == 0:
                return size
        if group is not None and group < self.shape[1]:
            return 0
        return None if self.scheme.bits == 8 else GROUP_SIZES[-1]
