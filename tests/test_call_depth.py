"""How far it is from `LM.generate` to the first product."""

import traceback
from pathlib import Path
from typing import Any

import pytest

import jaxllm
from jaxllm.ops import native
from jaxllm.weights.precision import Precision, cast
from tests.tiny_models import random_model

MOST = 15  # own functions between them


@pytest.mark.skipif(not native.is_enabled(), reason="no native kernels")
def test_few_functions_between_generate_and_the_first_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a plain bfloat16 Llama, from the prompt's first product up."""
    bfloat16 = Precision.uniform("bfloat16")
    model, params = random_model("llama", precision=bfloat16, hidden_size=48, num_hidden_layers=1)
    lm = jaxllm.LM(model.config, model, cast(params, bfloat16), None, {}, Path())
    stacks = list[list[str]]()

    def linear(*args: Any, **options: Any) -> Any:
        root = str(Path(jaxllm.__file__).parent)
        own = [f for f in traceback.extract_stack()[:-1] if f.filename.startswith(root)]
        stacks.append([f"{f.filename.removeprefix(root)} {f.name}" for f in own])
        return multiply(*args, **options)

    multiply = native.linear
    monkeypatch.setattr(native, "linear", linear)
    lm.generate([1, 2, 3], max_new_tokens=1)
    first, *between = stacks[0]
    print("\n".join(stacks[0]))
    assert first.endswith("lm.py generate")
    assert len(between) <= MOST
