"""The long-context demo models, trained by train_long.py: how far back each recalls."""

from pathlib import Path
from typing import Any

import jaxllm
from jaxllm.research.needle.grid import recall

DEMO = Path(jaxllm.__file__).parent / "demo"
TRIES = 24
CHANCE = 1 / 9  # among the names in the text


def recall_shares(kind: str, *lengths: int, **settings: Any) -> list[float]:
    """Return the share of right answers about the first fact, for each text length."""
    lm = jaxllm.load(f"demo:long-{kind}", dtype="float32")
    options = {"style": "meetings", "depths": (0.0,), "tries": TRIES, **settings}
    cells = recall(lm.model, lm.params, lm.encode, lengths=lengths, **options)
    return [cell.share for cell in cells]


def test_demo_files_are_small() -> None:
    """The two long-context demo models take less than 1 MB together."""
    files = [path for path in DEMO.glob("long-*/*") if path.is_file()]
    assert {path.parent.name for path in files} == {"long-dense", "long-infini"}
    assert sum(path.stat().st_size for path in files) < 1e6


def test_infini_recalls_facts_eight_segments_back() -> None:
    """With a cache of two segments, the Infini-attention model answers about a fact eight segments
    back, far above chance.
    """
    (share,) = recall_shares("infini", 512, policies=("segments",), slots=128)
    assert share > 0.75 > 5 * CHANCE


def test_dense_model_recalls_only_without_window() -> None:
    """The dense model recalls the first fact of 448 tokens with a full cache, and not with a window
    policy in 128 slots.
    """
    (full,) = recall_shares("dense", 448)
    (window,) = recall_shares("dense", 448, policies=("window",), slots=128)
    assert full > 0.75
    assert window < 0.4
