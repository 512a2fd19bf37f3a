"""A short soak test: `make soak` is the long one."""

import gc
from pathlib import Path

import pytest

import jaxllm
from scripts.tools import soak
from tests.tiny_models import save_random


def test_serving_and_generation_do_not_leak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak, "MAX_PROMPT", 8)  # one bucket of lengths: less to compile
    monkeypatch.setattr(soak, "MAX_NEW", 8)
    save_random(tmp_path, "llama", num_hidden_layers=1, eos_token_id=None)
    lm = jaxllm.load(tmp_path)
    gc.freeze()  # each mark collects garbage, here only what is new
    monitor = soak.Monitor(30)
    reasons = soak.serve(lm, 30, 0, monitor)
    assert {"refused", "cancelled", "length", "stop"} <= set(reasons)
    assert monitor.marks[-1].arrays <= monitor.marks[-2].arrays
    monitor = soak.Monitor(30)
    soak.generate(lm, 30, 0, monitor)
    assert monitor.marks[-1].programs == monitor.marks[0].programs
    assert monitor.marks[-1].arrays == monitor.marks[0].arrays
