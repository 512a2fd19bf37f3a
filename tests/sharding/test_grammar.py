"""Grammars on a mesh: the texts of one device."""

from typing import Any

import pytest

import jaxllm

pytestmark = pytest.mark.devices


def test_masked_texts_equal_single_device(shallow: Any) -> None:
    """By an automaton and by text, greedy and drawn, two rows."""
    mesh = "data=2,stage=2,tensor=2"
    one, many = (jaxllm.load(shallow("llama"), dtype="float32", mesh=m) for m in (None, mesh))
    prompts = ["Once upon a time", "The cat"]
    for options in (
        {"regex": "[a-z]{2,5}( [a-z]{2,5})*"},
        {"json_schema": {"enum": ["red", "green", 12]}, "temperature": 1.0, "seed": 2},
    ):
        found = [lm.generate(prompts, max_new_tokens=12, **options) for lm in (one, many)]
        assert [c.tokens for c in found[0]] == [c.tokens for c in found[1]]
        assert any(c.grammar_complete for c in found[1]) or "regex" in options
