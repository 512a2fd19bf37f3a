"""Background scans for non-finite weights: equal results, and only for the loaded file."""

import itertools
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import jaxllm
from jaxllm.errors import CheckpointError
from jaxllm.weights import prefetch_scan
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.safetensors import first_non_finite, open_tensors, write_tensors

FORMATS = (np.float32, np.float16, np.float64, ml_dtypes.bfloat16)


@pytest.mark.parametrize("dtype", FORMATS)
def test_first_non_finite_finds_first_index(dtype: type) -> None:
    """The first inf or NaN is found in every dtype and block size; extreme finite
    values are none.
    """
    largest = ml_dtypes.finfo(dtype).max
    clean = np.random.default_rng(0).standard_normal(77).astype(dtype)
    clean[:4] = largest, -largest, dtype(0), -dtype(0)
    for block in (7, 1 << 17):
        assert first_non_finite(clean, block) is None
        for bad, at in itertools.product((np.inf, -np.inf, np.nan, -np.nan), (0, 6, 7, 76)):
            damaged = clean.copy()
            damaged[at:] = bad
            assert first_non_finite(damaged.reshape(7, 11), block) == at


def write(file: Path, **bad: int) -> dict[str, LazyTensor]:
    """Write adjacent tensors of several dtypes, with NaN at the given index of some."""
    random = np.random.default_rng(0)
    shapes = {"a": (4, 32), "b": (64,), "c": (3,), "d": (5,), "e": (32,), "f": (2, 16)}
    tensors = {}
    for name, shape in shapes.items():
        dtype = np.float32 if name == "e" else ml_dtypes.bfloat16
        array = random.standard_normal(shape).astype(dtype)
        if name in bad:
            array.reshape(-1)[bad[name]] = np.nan
        tensors[name] = LazyTensor.from_array(array)
    write_tensors(file, {**tensors, "whole": LazyTensor.from_array(np.arange(8))})
    return open_tensors(file, mapped=True)


@pytest.mark.parametrize("bad", [{}, {"a": 77}, {"b": 0, "d": 4}, {"e": 31, "f": 3}])
@pytest.mark.parametrize("run", [1, 1 << 28])
def test_scan_reports_first_non_finite_per_tensor(
    tmp_path: Path, bad: dict[str, int], run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each float tensor gets the index of its own first non-finite value, integer tensors are
    skipped, and a scan is not repeated.
    """
    monkeypatch.setattr(prefetch_scan, "RUN_BYTES", run)
    found = prefetch_scan.start_scan(write(tmp_path / "x.safetensors", **bad))
    assert found["whole"].scan_result is None
    indices = {n: t.scan_result() for n, t in found.items() if t.scan_result is not None}
    assert indices == dict.fromkeys("abcdef") | bad
    assert prefetch_scan.start_scan(found) == found, "no second scan"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    jaxllm.load("demo:llama").save(tmp_path / "model")
    return tmp_path / "model"


def test_begun_scan_is_used_once_by_loading(model: Path) -> None:
    prefetch_scan.begin_scan(str(model))
    file = model / "model.safetensors"
    assert all(
        t.scan_result is not None and t.scan_result() is None
        for t in prefetch_scan.open_scanned(file).values()
    )
    again = prefetch_scan.open_scanned(file)
    assert all(t.scan_result is None for t in again.values()), "a scan is used once"


def test_changed_file_is_scanned_again(model: Path) -> None:
    file = model / "model.safetensors"
    prefetch_scan.begin_scan(str(model))
    prefetch_scan._SCANS[file].result()
    content = bytearray(file.read_bytes())
    content[-2:] = b"\xff\xff"  # NaN in bfloat16, and the end of a NaN in float32
    content[-4:-2] = b"\xff\xff"
    file.unlink()
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="holds nan at index"):
        jaxllm.load(model)


def test_begin_scan_ignores_invalid_and_foreign_sources(tmp_path: Path, model: Path) -> None:
    """A damaged file raises its error only at loading; demo and hub names and missing paths start
    no scan.
    """
    (model / "model.safetensors").write_bytes(b"no such thing")
    prefetch_scan.begin_scan(str(model))
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        jaxllm.load(model)
    for other in ("demo:llama", "hf:owner/name", "", "\0", str(tmp_path / "none")):
        prefetch_scan.begin_scan(other)
    assert not prefetch_scan._SCANS
