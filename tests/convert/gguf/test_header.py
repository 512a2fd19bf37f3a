"""GGUF headers: the `gguf` package's files are read, malformed ones are refused by name."""

import struct
import time
import tracemalloc
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy as np
import pytest

from jaxllm.convert.gguf.header import is_gguf, read_header
from jaxllm.errors import CheckpointError
from tests.convert.gguf.gguf_files import finish

TEXTS = ["", "a", "\u2581the", "\U0001f999", "<|im_start|>"]


def write(path: Path, alignment: int | None = None) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    writer.add_uint32("llama.block_count", 7)
    writer.add_float32("llama.rope.freq_base", 1e6)
    writer.add_bool("yes", True)
    writer.add_array("texts", TEXTS)
    writer.add_array("scores", [0.5, -1.5])
    writer.add_array("types", [1, 2, 3])
    writer.add_int64("far", -(1 << 40))
    writer.add_tensor("matrix", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("half", np.ones((2, 3, 5), np.float16))
    writer.add_tensor(
        "blocks", np.zeros((3, 68), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0
    )
    finish(writer)
    return path


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("good") / "good.gguf")


@pytest.mark.parametrize(
    "other", ["", "\0", "\0" * 9, "a\0\0\0\0\0\0\0b", "x" * 255, "x" * 256, "\u2581" * 90, "\x01\0"]
)  # fmt: skip
def test_string_arrays_of_any_lengths_are_read(tmp_path: Path, other: str) -> None:
    """Strings with nulls, empty, short and long ones, at any place of an array."""
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    some = [*TEXTS[1:], "x" * 20]
    cases = [some, [other], [other, *TEXTS], [*some, other, *some], [other] * 3]
    for number, case in enumerate(cases):
        writer.add_array(f"texts{number}", case)
    finish(writer)
    settings = read_header(tmp_path / "a.gguf").settings
    assert [settings[f"texts{number}"] for number in range(len(cases))] == cases


@pytest.mark.parametrize("alignment", [None, 64])
def test_header_equals_gguf_package(tmp_path: Path, alignment: int | None) -> None:
    """Settings, shapes, types and offsets equal those that the package wrote, for any alignment."""
    path = write(tmp_path / "a.gguf", alignment)
    assert is_gguf(path)
    header = read_header(path)
    settings: Any = header.settings
    assert settings["general.architecture"] == "llama" and settings["texts"] == TEXTS
    assert settings["llama.block_count"] == 7 and settings["yes"] is True
    assert settings["llama.rope.freq_base"] == 1e6 and settings["far"] == -(1 << 40)
    assert list(settings["scores"]) == [0.5, -1.5] and list(settings["types"]) == [1, 2, 3]
    shapes = {name: (entry.block.name, entry.shape) for name, entry in header.tensor_infos.items()}
    assert shapes == {
        "matrix": ("F32", (3, 4)), "half": ("F16", (2, 3, 5)), "blocks": ("Q8_0", (3, 64)),
    }  # fmt: skip
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name, entry in header.tensor_infos.items():
        assert entry.offset == theirs[name].data_offset and entry.nbytes == theirs[name].n_bytes


def value(kind: int, packed: bytes) -> bytes:
    return struct.pack("<I", kind) + packed


def text(some: str | bytes) -> bytes:
    raw = some if isinstance(some, bytes) else some.encode()
    return struct.pack("<Q", len(raw)) + raw


def tensor(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return (
        text(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims)
        + struct.pack("<IQ", kind, offset)
    )  # fmt: skip


def head(
    *, magic: bytes = b"GGUF", version: int = 3, keys: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (), counts: tuple[int, int] | None = None, data: int = 64,
) -> bytes:  # fmt: skip
    n, k = counts or (len(tensors), len(keys))
    raw = magic + struct.pack("<IQQ", version, n, k) + b"".join(keys) + b"".join(tensors)
    return raw + bytes(-len(raw) % 32) + bytes(data)


HUGE = (1 << 64) - 1
A, STRING, ARRAY = tensor("a", [4]), 8, 9
MALFORMED = {
    "an empty file": (b"", "cannot read"),
    "no GGUF": (head(magic=b"GGML"), "does not begin with GGUF"),
    "only a magic number": (b"GGUF\3\0", "cut off"),
    "version 1": (head(version=1), "version 1 is not supported"),
    "big endian": (head(version=3 << 24), "big endian"),
    "more tensors than there can be": (head(counts=(HUGE, 0)), "tensors, expected at most"),
    "more keys": (head(counts=(0, HUGE)), "keys, expected at most"),
    "more keys than are there": (head(counts=(0, 9), data=0), "cut off"),
    "a long key": (head(keys=(struct.pack("<Q", 1 << 40),)), "bytes of key 0"),
    "a long text": (head(keys=(text("k") + value(STRING, struct.pack("<Q", 1 << 20)),)), "'k'"),
    "no UTF-8": (head(keys=(text("k") + value(STRING, text(b"\xff")),)), "'k' is not UTF-8"),
    "an unknown type": (head(keys=(text("k") + value(13, b""),)), "'k' has the unknown type 13"),
    "neither true nor false": (head(keys=(text("k") + value(7, b"\2"),)), "expected a boolean"),
    "a key twice": (head(keys=(text("k") + value(0, b"\1"),) * 2), "'k' occurs twice"),
    "nested arrays": (
        head(keys=(text("k") + value(ARRAY, struct.pack("<IQ", ARRAY, 1)),)),
        "'k' is an array of arrays",
    ),
    "a long array": (
        head(keys=(text("k") + value(ARRAY, struct.pack("<IQ", 5, 1 << 26)),)),
        "'k' takes 268,435,456 bytes",
    ),
    "an endless array": (
        head(keys=(text("k") + value(ARRAY, struct.pack("<IQ", 0, HUGE)),)), "items of 'k'",
    ),
    "many texts": (
        head(keys=(text("k") + value(ARRAY, struct.pack("<IQ", STRING, 1 << 22)),)), "strings",
    ),
    "a text of an array that is too long": (
        head(keys=(text("k") + value(ARRAY, struct.pack("<IQQ", STRING, 1, HUGE)),)), "string 0",
    ),
    "an alignment of 0": (
        head(keys=(text("general.alignment") + value(4, struct.pack("<I", 0)),)), "power of 2",
    ),
    "a tensor twice": (head(tensors=(A, A)), "'a' occurs twice"),
    "no dimensions": (head(tensors=(tensor("a", []),)), "0 dimensions"),
    "five dimensions": (head(tensors=(tensor("a", [1] * 5),)), "5 dimensions"),
    "an empty dimension": (head(tensors=(tensor("a", [4, 0]),)), "has shape"),
    "more numbers than bytes": (head(tensors=(tensor("a", [HUGE, HUGE]),)), "has shape"),
    "a product that overflows": (head(tensors=(tensor("a", [128] * 4),)), "cut off"),
    "an unsupported type": (head(tensors=(tensor("a", [256], 41),)), "Q1_0"),
    "an undefined type": (head(tensors=(tensor("a", [256], 99),)), "type 99"),
    "half a block": (head(tensors=(tensor("a", [48], 8),)), "block size 32"),
    "a misaligned offset": (head(tensors=(tensor("a", [4], 0, 4),)), "not a multiple of the"),
    "overlapping tensors": (head(tensors=(A, tensor("b", [4]))), "'b' at offset 0 overlaps 'a'"),
    "past the end": (head(tensors=(tensor("a", [4], 0, 1 << 32),)), "cut off"),
    "an offset that wraps": (head(tensors=(tensor("a", [4], 0, HUGE - 31),)), "cut off"),
    "a truncated tensor": (head(tensors=(tensor("a", [32]),)), "ends at byte"),
}  # fmt: skip


@pytest.mark.parametrize("defect", MALFORMED)
def test_malformed_header_is_refused(tmp_path: Path, defect: str) -> None:
    """A malformed header raises a one-line error that names the file and the problem."""
    raw, message = MALFORMED[defect]
    path = tmp_path / "malformed.gguf"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path)
    assert "\n" not in str(caught.value) and "malformed.gguf" in str(caught.value)


def test_header_size_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxllm.convert.gguf.header.MAX_HEADER", 100)
    path = tmp_path / "long.gguf"
    path.write_bytes(head(keys=(text("k") + value(STRING, text("x" * 80)),)))
    with pytest.raises(CheckpointError, match="at most 100 bytes of a header"):
        read_header(path)


def mutated(raw: bytes, rng: Random) -> bytes:
    """Return a randomly changed header: bytes, counts, lengths, deletions and repetitions."""
    changed = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(changed))
        match rng.randrange(6):
            case 0:
                changed[at] = rng.randrange(256)
            case 1:
                some = rng.choice((0, 1, 255, 1 << 16, 1 << 31, 1 << 32, 1 << 63, HUGE))
                changed[at : at + 8] = struct.pack("<Q", some)
            case 2:
                changed[at : at + 4] = struct.pack("<I", rng.choice((0, 8, 9, 13, 1 << 31)))
            case 3:
                del changed[at : at + rng.choice((1, 4, 8, 64))]
            case 4:
                changed[at:at] = changed[at : at + rng.choice((1, 8, 64))]
            case _:
                del changed[at:]
        changed = changed or bytearray(b"G")
    return bytes(changed)


@pytest.mark.parametrize("cases", [300, pytest.param(10_000, marks=pytest.mark.full)])
def test_mutated_headers_parse_or_fail_within_bounds(
    good: Path, tmp_path: Path, cases: int
) -> None:
    """A randomly changed header is read or refused, with bounded memory, time and
    message length.
    """
    raw, header = good.read_bytes(), read_header(good)
    first = min(entry.offset for entry in header.tensor_infos.values())
    path, rng, refused, longest = tmp_path / "changed.gguf", Random(17), 0, 0.0
    tracemalloc.start()
    for _ in range(cases):
        path.write_bytes(mutated(raw[:first], rng) + raw[first:])
        begun = time.process_time()
        try:
            read_header(path)
        except CheckpointError as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) < 1000
        longest = max(longest, time.process_time() - begun)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert refused > cases / 2
    assert peak < 16 << 20 and longest < 2, (peak, longest)
