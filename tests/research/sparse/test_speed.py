"""Warnings before a sparse format is stored that this processor decodes slowly."""

from pathlib import Path

import pytest

import jaxllm
from jaxllm.compress.pipeline import compress
from jaxllm.ops import native
from jaxllm.research.sparse import speed
from jaxllm.weights.formats import log_slow_formats
from tests.conftest import Run, succeed
from tests.tiny_models import save_random

pytestmark = pytest.mark.skipif(not native.is_enabled(), reason="no native library")
SLOW = "int8-bitmap decodes at 0.4x the speed of int8 on this processor"


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    ratios = {str(native.isa()): {"int8-bitmap": 0.401, "int8-2:4": 1.0}, "other": {"nf4": 0.5}}
    monkeypatch.setattr(speed, "DECODE_SPEED", ratios)


def test_only_slow_measured_formats_are_logged() -> None:
    """There is one line for each, and none for a fast, dense or unmeasured format."""
    lines: list[str] = []
    names = ("int8-2:4", None, "int8-bitmap", "int8-bitmap", "nf4", "bfloat16-2:4", "int8")
    log_slow_formats(names, lines.append)
    assert lines == [f"{SLOW} ({native.isa()}): see docs/benchmarks/compression.md"]
    with native.disable_kernels():
        log_slow_formats(names, lines.append)
    assert len(lines) == 1


def test_commands_and_store_step_warn(run: Run, tmp_path: Path) -> None:
    save_random(tmp_path / "hf", "llama", num_hidden_layers=1)
    command = ("quantize", tmp_path / "hf", tmp_path / "small", "--format", "int8-bitmap")
    assert SLOW in succeed(run, *command)[1]
    sizes = ("--prompts", "8", "--decode", "1", "--depths", "0", "--batches", "1", "-r", "1")
    step = ("--step", "quantize: rtn int8-bitmap")
    assert SLOW in succeed(run, "bench", tmp_path / "hf", *step, *sizes)[1]
    lines: list[str] = []
    compress(jaxllm.load(tmp_path / "hf"), ["store: int8-bitmap"], log=lines.append)
    assert SLOW in "".join(lines)
