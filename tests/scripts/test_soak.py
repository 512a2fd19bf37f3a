"""A short soak test; `make soak` runs the long one."""

from pathlib import Path

import pytest

import jaxllm
from scripts.tools import soak
from tests.tiny_models import save_random


def test_serving_and_generation_do_not_leak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a short soak, serving and generation create no more arrays, and generation no more
    programs.
    """
    monkeypatch.setattr(soak, "LONGEST", 8)  # a single length bucket, to compile less
    monkeypatch.setattr(soak, "NEW", 8)
    save_random(tmp_path, "llama", num_hidden_layers=1, eos_token_id=None)
    lm = jaxllm.load(tmp_path)
    watch = soak.Watch(30)
    ends = soak.serve(lm, 30, 0, watch)
    assert {"refused", "cancelled", "length", "stop"} <= set(ends)
    assert watch.marks[-1].arrays <= watch.marks[-2].arrays
    watch = soak.Watch(30)
    soak.generate(lm, 30, 0, watch)
    assert watch.marks[-1].programs == watch.marks[0].programs
    assert watch.marks[-1].arrays == watch.marks[0].arrays
