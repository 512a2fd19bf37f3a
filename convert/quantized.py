"""Matrices that GPTQ and AWQ have quantized: their integers, scales and zero points as our leaves.

Nothing is rounded, and of the integers nothing is read before the leaf is. Groups that no format of
ours has are groups of 32, 64 or 128 columns whose scales repeat.

GPTQ (AutoGPTQ, GPTQModel, optimum), of a linear `[O, I]`: `qweight` int32 `[I bits / 32, O]`,
`qzeros` int32 `[G, O bits / 32]`, `scales` `[G, O]`, `g_idx` int32 `[I]`, the group of each column.
The first version of the format stores zero points less one, modulo 2^bits. A Conv1D of GPT-2 is
packed as the linear that it stands for, so nothing is transposed.
AWQ (AutoAWQ, version "gemm"): `qweight` int32 `[I, O / 8]`, `qzeros` `[G, O / 8]`, `scales`.
"""

import dataclasses
import re
from collections.abc import Container, Iterable, Mapping, MutableMapping

import numpy as np

from jaxllm.weights.formats import Format
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.leaves import digits
from jaxllm.weights.leaves.integers import GROUPS, Integer
from jaxllm.weights.leaves.leaf import up
from jaxllm.weights.leaves.ordered import OrderedFormat

from . import compressed
from .codes import unpacked, unpacked_awq
from .scheme import Scheme

PIECES = ("qweight", "qzeros", "scales", "g_idx")
_SCALES = ("float16", "bfloat16", "float32")


def their_names(linears: Iterable[str]) -> set[str]:
    """What a quantized linear's tensors may be called. linears: the paths of the weights."""
    stems = [path.removesuffix(".weight") for path in linears]
    return {f"{stem}.{piece}" for stem in stems for piece in (*PIECES, *compressed.PIECES, "bias")}


def take_quantized(
    scheme: Scheme,
    tensors: MutableMapping[str, LazyTensor],
    linears: Mapping[str, tuple[int, int]],
    paths: Container[str],
    complaints: list[str],
) -> dict[str, str]:
    """Put the pieces of leaves in place of GPTQ's or AWQ's; the formats of the leaves, by path.

    tensors: by our paths, theirs ending in one of `PIECES`. linears: the shapes `[O, I]` of all
    weights that can be quantized. paths: of all parameters; a bias of zeros that is none of them,
    as AutoGPTQ wrote it for every linear, goes. complaints: what is wrong with theirs is added.
    """
    formats = {}
    stems = [path.removesuffix(".weight") for path in linears]
    for stem in stems:
        found = {p: t for p in PIECES if (t := tensors.get(f"{stem}.{p}")) is not None}
        if not found:
            continue
        bias = f"{stem}.bias"
        if bias in tensors and bias not in paths and not tensors[bias].read().any():
            del tensors[bias]
        path, used = f"{stem}.weight", PIECES if scheme.method == "gptq" else PIECES[:3]
        for piece in used:
            tensors.pop(f"{stem}.{piece}", None)
        if path in tensors:
            complaints.append(f"{path} is there beside {stem}.{next(iter(found))}")
        matrix = _Matrix(scheme, stem, linears[path], found)
        wrong = matrix.complaints()
        format, order = (None, None) if wrong else matrix.format(wrong)
        complaints += wrong
        if format is None:  # in its place, that nobody misses it too
            tensors[path] = LazyTensor(np.dtype(np.float32), linears[path], lambda: np.empty(0))
            continue
        tensors.pop(path, None)
        formats[path] = format.name
        for name, tensor in matrix.pieces(format, order).items():
            tensors[f"{path}{name}"] = tensor
    if not formats and not complaints:
        complaints.append(
            "no tensor is quantized, though config.json says so (quantization_config)"
        )
    return formats


def rules(formats: Mapping[str, str], paths: Iterable[str]) -> tuple[tuple[str, str | None], ...]:
    """Quantization rules that give each path its format, layers together where they agree.

    paths: of all parameters, those that are not quantized too.
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
    """A quantized linear of a checkpoint. found: its tensors, by what they are called."""

    scheme: Scheme
    stem: str
    shape: tuple[int, int]
    found: Mapping[str, LazyTensor]

    def complaints(self) -> list[str]:
        """What is wrong with the shapes and formats of its tensors."""
        (rows, columns), bits = self.shape, self.scheme.bits
        groups, awq = -(-columns // (self.scheme.group or columns)), self.scheme.method == "awq"
        if rows * bits % 32 or columns * bits % (1 if awq else 32):
            return [f"{self.stem}: {self.shape} of {bits} bits does not fill whole int32 words"]
        packed = (columns, rows // 8) if awq else (columns * bits // 32, rows)
        wanted: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
            "qweight": (packed, ("int32",)),
            "qzeros": ((groups, rows * bits // 32), ("int32",)),
            "scales": ((groups, rows), _SCALES),
        }
        needs_groups = self.scheme.act_order and groups > 1
        if not awq and (needs_groups or "g_idx" in self.found):
            wanted["g_idx"] = ((columns,), ("int32", "int64"))
        complaints = []
        for piece, (shape, dtypes) in wanted.items():
            path, tensor = f"{self.stem}.{piece}", self.found.get(piece)
            if tensor is None:
                complaints.append(f"{path} is missing")
            elif tensor.shape != shape:
                complaints.append(
                    f"{path} has shape {tensor.shape}, {bits} bits in groups of"
                    f" {self.scheme.group or columns} have {shape}"
                )
            elif tensor.dtype.name not in dtypes:
                complaints.append(f"{path} is {tensor.dtype.name}, not {' or '.join(dtypes)}")
        if self._group() == 0:
            complaints.append(
                f"{self.stem}: groups of {self.scheme.group} columns are not whole ones of"
                f" {', '.join(map(str, GROUPS))}"
            )
        return complaints

    def format(self, complaints: list[str]) -> tuple[Format | None, np.ndarray | None]:
        """Its format, and the order of its columns where that is not theirs.

        What its zero points and groups may not be is added to the complaints.
        """
        zeros, order = self.zeros(), self.order(complaints)
        middle = 2 ** (self.scheme.bits - 1)
        if self.scheme.symmetric and (zeros != middle).any():
            complaints.append(
                f"{self.stem}.qzeros are not all those of symmetric integers (sym), {middle}"
            )
        if complaints:
            return None, None
        zero_point = bool((zeros != middle).any())
        half = self.found["scales"].dtype == np.float16
        kind = Integer(
            self.scheme.bits, self._group(), zero_point, "float16" if half else "float32"
        )
        return (kind if order is None else OrderedFormat(kind)), order

    def pieces(self, format: Format, order: np.ndarray | None) -> dict[str, LazyTensor]:
        """The pieces of the leaf, made when they are read."""
        kind = format.inner if isinstance(format, OrderedFormat) else format
        assert isinstance(kind, Integer)
        expected = kind.expected(self.shape)

        def data() -> np.ndarray:
            codes = self.codes()
            if order is not None:
                codes = np.take(codes, order, axis=1)  # ten times as fast as an index
            rows, columns = self.shape
            if kind.code_dtype == np.int8:  # 128 is zero there
                codes = (codes ^ np.uint8(128)).view(np.int8)
            zeros = np.full((rows, up(columns, digits.CHUNK)), kind.middle, codes.dtype)
            if kind.zero_point:  # the code of zero, which what is added has
                zeros = np.repeat(zero(), kind.size(columns), axis=1)
            zeros[:, :columns] = codes
            packed: np.ndarray = digits.packed(zeros, kind.bits)
            return packed

        def scale() -> np.ndarray:
            return filled(self._spread(self.found["scales"].read().T, kind), ".scale")

        def zero() -> np.ndarray:
            return filled(self._spread(self.zeros(), kind), ".zero")

        def filled(some: np.ndarray, name: str) -> np.ndarray:
            """With the groups of the columns that are added."""
            shape, dtype = expected[name]
            whole = np.zeros([n or 0 for n in shape], dtype)
            whole[:, : some.shape[1]] = some
            return whole

        reads = {".data": data, ".scale": scale, ".zero": zero}
        made = {
            name: LazyTensor(np.dtype(dtype), tuple(n or 0 for n in shape), reads[name])
            for name, (shape, dtype) in expected.items()
        }
        if order is None:
            return made
        pieces = {f".weight{name}": tensor for name, tensor in made.items()}
        return {".order": LazyTensor.of(order.astype(np.int32)), **pieces}

    def codes(self) -> np.ndarray:
        """The integers, uint8 `[O, I]`."""
        words = self.found["qweight"].read()
        if self.scheme.method == "awq":
            return unpacked_awq(words).T
        return unpacked(words.T, self.scheme.bits)

    def zeros(self) -> np.ndarray:
        """The zero points, uint8 `[O, G]`."""
        words, bits = self.found["qzeros"].read(), self.scheme.bits
        if self.scheme.method == "awq":
            return unpacked_awq(words).T
        stored = unpacked(words, bits).T
        # Some writers of symmetric integers say the first version and store the second's.
        if self.scheme.symmetric and (stored == 2 ** (bits - 1)).all():
            return stored
        return (stored + np.uint8(self.scheme.less)) & np.uint8(2**bits - 1)

    def order(self, complaints: list[str]) -> np.ndarray | None:
        """Their column for each of ours, where groups are to lie together that do not yet."""
        tensor, columns = self.found.get("g_idx"), self.shape[1]
        if tensor is None:
            return None
        size = self.scheme.group or columns
        index, ramp = tensor.read(), np.arange(columns) // size
        if np.array_equal(index, ramp):
            return None
        path, groups = f"{self.stem}.g_idx", ramp[-1] + 1
        if index.min() < 0 or index.max() >= groups:
            complaints.append(
                f"{path} names groups {index.min()} to {index.max()}, of {groups} that there are"
            )
        elif not self.scheme.act_order:
            complaints.append(f"{path} is not in order, and config.json says desc_act false")
        elif not np.array_equal(np.sort(index), ramp):
            complaints.append(f"{path} does not give each group {size} columns")
        return np.argsort(index, kind="stable")

    def _group(self) -> int | None:
        """The columns that share a scale in the leaf; None: all of a row; 0: there is none."""
        group = self.scheme.group
        for size in reversed(GROUPS):
            if group is not None and group % size == 0:
                return size
        if group is not None and group < self.shape[1]:
            return 0
        return None if self.scheme.bits == 8 else GROUPS[-1]

    def _spread(self, x_OG: np.ndarray, kind: Integer) -> np.ndarray:
        """What each of their groups has, for each of ours that has columns."""
        columns = self.shape[1]
        size, theirs = kind.size(columns), min(self.scheme.group or columns, columns)
        return np.repeat(x_OG, -(-theirs // size), axis=1)[:, : -(-columns // size)]
