"""Weight replicas across processes: which parts are checksummed, and how differences are found."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.runtime import multihost
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.replica_check import (
    check_replicas,
    checksum_tensors,
    describe_differences,
    identify_copy,
)
from jaxllm.weights.safetensors import BLOCK_BYTES


def tensors(**arrays: np.ndarray) -> dict[str, LazyTensor]:
    return {name: LazyTensor.from_array(array) for name, array in arrays.items()}


@pytest.mark.parametrize("at", [0, 700_001, BLOCK_BYTES // 4 + 5, -1])
def test_one_bit_difference_is_detected_anywhere(at: int) -> None:
    """Checksums detect one flipped bit at any offset of an array that is larger than one block."""
    array = np.random.default_rng(0).standard_normal((1100, 1031)).astype(np.float32)
    assert array.nbytes > BLOCK_BYTES  # more than one block
    other = array.copy()
    other.reshape(-1).view(np.uint32)[at] ^= 1
    one, two = (checksum_tensors(tensors(a=array[:5], w=x)) for x in (array, other))
    assert one["a"] == two["a"] and one["w"] != two["w"]
    assert describe_differences([one, two]) == (
        "the weights w in process 1 differ from those in process 0"
    )
    assert describe_differences([one, dict(one)]) == ""


def test_difference_names_weights_and_process() -> None:
    """A process that reads nothing, since another reads its copy, differs in nothing."""
    sums = dict.fromkeys("abcde", 1)
    assert describe_differences([sums, {}, sums]) == ""
    assert describe_differences([sums, {}, {**sums, "b": 2}]) == (
        "the weights b in process 2 differ from those in process 0"
    )
    assert "a, b, c and 2 more in process 1" in describe_differences([sums, dict.fromkeys(sums, 2)])


@pytest.mark.parametrize(
    ("copies", "number", "reads"),
    [
        (["one", "one"], 0, None),
        (["one", "one", "two", "two"], 0, True),
        (["one", "one", "two", "two"], 1, False),
        (["one", "one", "two", "two"], 2, True),
        (["", ""], 1, True),
    ],
)
def test_one_process_reads_each_copy(
    copies: list[str], number: int, reads: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One copy for all is not read; else its first process reads it. A copy that cannot be
    identified counts as one of its own.
    """
    gathered: list[Any] = []

    def gather(value: Any) -> list[Any]:
        gathered.append(value)
        return copies if len(gathered) == 1 else [value] * len(copies)

    monkeypatch.setattr(multihost, "is_multiprocess", lambda: True)
    monkeypatch.setattr(multihost, "process_index", lambda: number)
    monkeypatch.setattr(multihost, "all_gather_objects", gather)
    check_replicas(tensors(w=np.ones(3, np.float32)), Path("none"))
    assert [bool(sums) for sums in gathered[1:]] == ([] if reads is None else [reads])


def test_copy_identity_depends_on_checkpoint_file(tmp_path: Path) -> None:
    """A directory and its file have one identity, which changes if the file is replaced."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"1234")
    identity = identify_copy(tmp_path)
    assert identity == identify_copy(file) == identify_copy(tmp_path)
    (tmp_path / "other").mkdir()
    assert identity == identify_copy(tmp_path)
    file.unlink()
    file.write_bytes(b"12345")
    assert not identity or identity != identify_copy(tmp_path)


def test_check_replicas_reads_nothing_in_single_process() -> None:
    def never() -> np.ndarray:
        raise AssertionError

    check_replicas({"w": LazyTensor(np.dtype(np.float32), (1 << 20,), never)}, Path("nowhere"))
