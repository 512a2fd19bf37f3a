"""A student that is part of its teacher."""

import numpy as np
import pytest

import jaxllm
from jaxllm.errors import ConfigError
from jaxllm.research.distill import student
from jaxllm.research.distill.student import StudentSize
from tests.compress.models import tiny


def test_select_even_layers_matches_distilbert() -> None:
    """The six of twelve layers that DistilBERT's script extract.py selects."""
    assert student.select_even_layers(12, 6) == [0, 2, 4, 7, 9, 11]
    assert student.select_even_layers(6, 3) == [0, 2, 5]
    with pytest.raises(ConfigError, match="must keep 1 to 6 layers, got 7"):
        student.select_even_layers(6, 7)


def test_cut_student_keeps_teacher_weights() -> None:
    """A cut student has the requested size and the weights of the teacher's layers, and runs."""
    teacher = tiny("llama", num_hidden_layers=3)
    made = student.cut_student(
        teacher, StudentSize(layers=2, heads=1, channels=50, importance="magnitude")
    )
    c = made.config
    assert (c.num_hidden_layers, c.num_key_value_heads, c.intermediate_size) == (2, 1, 50)
    assert (c.num_attention_heads, c.head_dim) == (4, 6)
    for ours, theirs in ((0, 0), (1, 2)):
        np.testing.assert_array_equal(
            made.params[f"layers.{ours}"]["input_layernorm"]["weight"],
            teacher.params[f"layers.{theirs}"]["input_layernorm"]["weight"],
        )
    assert np.isfinite(jaxllm.forward(made.model, made.params, None, [[1, 2]]).logits).all()
    with pytest.raises(ConfigError, match="parts needs a text"):
        student.cut_student(teacher, StudentSize(channels=50))
    with pytest.raises(ConfigError, match="heads to keep must be 1 to 2: got 3"):
        student.cut_student(teacher, StudentSize(heads=3, importance="magnitude"))
