"""Weight replicas across processes: which parts are checksummed, and how differences are found."""

from pathlib import Path

import numpy as np
import pytest

from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.replica_check import (
    check_replicas,
    checksum_tensors,
    describe_differences,
    divide_tensors,
    identify_copy,
)
from jaxllm.weights.safetensors import BLOCK_BYTES

HERE, THERE = ["one machine", [[1, 2, 3, 4]]], ["another", [[1, 2, 3, 4]]]


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
    assert describe_differences([(HERE, one), (THERE, two)]) == (
        "the weights w in process 1 differ from those in process 0"
    )
    assert describe_differences([(HERE, one), (THERE, dict(one))]) == ""


def test_processes_on_one_machine_checksum_disjoint_parts() -> None:
    """Two processes on one machine checksum disjoint parts, one on another all; a difference names
    its weights and process.
    """
    sizes = {"a": 40, "b": 30, "c": 20, "d": 10, "e": 1}
    weights = tensors(**{name: np.arange(n, dtype=np.float32) for name, n in sizes.items()})
    parts = divide_tensors(weights, 2)
    assert sorted(parts[0] + parts[1]) == sorted(sizes)
    assert [sum(sizes[name] for name in part) for part in parts] == [51, 50]
    first, second = (checksum_tensors({name: weights[name] for name in part}) for part in parts)
    all_sums = checksum_tensors(weights)
    assert describe_differences([(HERE, first), (HERE, second), (THERE, all_sums)]) == ""
    for name in sizes:
        wrong = {**all_sums, name: all_sums[name] ^ 1}
        message = describe_differences([(HERE, first), (HERE, second), (THERE, wrong)])
        assert message == f"the weights {name} in process 2 differ from those in process 0"
    every = {name: x ^ 1 for name, x in all_sums.items()}
    assert "a, b, c and 2 more in process 2" in describe_differences(
        [(HERE, first), (HERE, second), (THERE, every)]
    )


def test_processes_on_unknown_machines_compare_full_copies() -> None:
    """If the machine is unknown, every process counts as holding its own copy."""
    sums = {"w": 1}
    assert describe_differences([([], sums), ([], sums)]) == ""
    assert "process 1" in describe_differences([([], sums), ([], {"w": 2})])


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
