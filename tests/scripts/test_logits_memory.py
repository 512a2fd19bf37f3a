"""Logits that stay divided over the vocabulary take less in a training step."""

import logits_memory
from on_devices import said_on


def test_divided_logits_take_less() -> None:
    given = "demo:llama", "tensor=2", 4, 64
    size, whole, divided = said_on("tensor=2", logits_memory.CHILD, *given)
    assert whole - divided > 4 * 64 * size * 4 / 2  # half of the logits, float32, at least
