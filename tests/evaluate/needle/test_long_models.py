"""The models of train_long.py in jaxllm/demo: how far back each remembers."""

from pathlib import Path
from typing import Any

import jaxllm
from jaxllm.evaluate.needle.grid import recall

DEMO = Path(jaxllm.__file__).parent / "demo"
TRIES = 24
GUESSING = 1 / 9  # among all who were met


def shares(kind: str, *lengths: int, **settings: Any) -> list[float]:
    """Right answers about a fact of a text's begin, by the text's length."""
    lm = jaxllm.load(f"demo:long-{kind}", dtype="float32")
    asked = {"style": "meetings", "depths": (0.0,), "tries": TRIES, **settings}
    cells = recall(lm.model, lm.params, lm.encode, lengths=lengths, **asked)
    return [cell.share for cell in cells]


def test_they_are_small() -> None:
    files = [path for path in DEMO.glob("long-*/*") if path.is_file()]
    assert {path.parent.name for path in files} == {"long-dense", "long-infini"}
    assert sum(path.stat().st_size for path in files) < 1e6


def test_the_memory_knows_what_is_eight_segments_back() -> None:
    """From a cache of two segments: far above a guess among all who were met."""
    (share,) = shares("infini", 512, policies=("segments",), slots=128)
    assert share > 0.75 > 5 * GUESSING


def test_the_dense_one_knows_it_and_its_window_does_not() -> None:
    (full,) = shares("dense", 448)
    (window,) = shares("dense", 448, policies=("window",), slots=128)
    assert full > 0.75
    assert window < 0.4
