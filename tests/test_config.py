"""Model configurations are hashable values, and every field has an effect."""

import dataclasses
from typing import Any, get_args

import jax
import numpy as np
import pytest

import jaxllm
from jaxllm import models
from jaxllm.config.model import ROPE_FIELDS, HiddenAct, ScoreHead
from jaxllm.convert.decoders import DIVISOR_FIELDS
from jaxllm.errors import ConfigError
from jaxllm.ops import ACTIVATIONS
from jaxllm.research.long_attention.settings import LongAttention
from jaxllm.weights.paths import flatten
from tests.tiny_models import random_model, tokens

CHANGES: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 137,
        "hidden_size": 48,
        "intermediate_size": 57,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "hidden_act": "gelu",
        "norm_eps": 0.5,
        "tie_word_embeddings": True,
        "rope": jaxllm.Rope(rope_type="default", rope_theta=77.0),
        "attention_bias": True,
        "mlp_bias": True,
        "sliding_window": 3,
        "attention": LongAttention(kind="dilated", segment_lengths=(2, 4), dilated_ratios=(1, 2)),
        "score": ScoreHead(labels=("a", "b")),
    },
    "gpt2": {
        "vocab_size": 137,
        "intermediate_size": 57,
        "num_hidden_layers": 3,
        "max_position_embeddings": 98,
        "hidden_act": "gelu",
        "norm_eps": 0.5,
        "tie_word_embeddings": False,
        "scale_attn_weights": False,
        "scale_attn_by_inverse_layer_idx": True,
        "score": ScoreHead(labels=("a", "b")),
    },
}
# Fields that only have an effect together with another field.
TOGETHER = {
    "llama": {"max_position_embeddings"},  # dynamic rope, context_length: tested below
    "gpt2": {"hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"},
}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_every_config_field_changes_shape_or_output(family: str) -> None:
    model, params = random_model(family)
    ids = tokens(1, 12)
    before = jaxllm.forward(model, params, None, ids).logits
    fields = {f.name for f in dataclasses.fields(model.config)}
    assert fields == set(CHANGES[family]) | TOGETHER[family]
    for name, value in CHANGES[family].items():
        changed = models.build(dataclasses.replace(model.config, **{name: value}))
        if _shapes(changed) == _shapes(model):
            after = jaxllm.forward(changed, params, None, ids).logits
            assert not np.allclose(before, after, atol=1e-4), name


def _shapes(model: Any) -> dict[str, Any]:
    return {path: leaf.shape for path, leaf in flatten(models.param_shapes(model))}


def test_dynamic_scaling_extends_context_length() -> None:
    config = random_model("llama")[0].config
    assert config.context_length == 97
    for kind, expected in (("dynamic", 194), ("linear", 97)):
        rope = jaxllm.Rope(rope_type=kind, rope_theta=1e4, factor=2.0)
        assert dataclasses.replace(config, rope=rope).context_length == expected


def test_every_activation_has_function() -> None:
    assert set(ACTIVATIONS) == set(get_args(HiddenAct))


@pytest.mark.parametrize("kind", ROPE_FIELDS)
def test_rope_fields_are_required_and_exclusive(kind: str) -> None:
    """Each rotary type requires exactly its own fields."""
    required, _ = ROPE_FIELDS[kind]
    values: dict[str, Any] = {
        name: (4.0 + i,) if name in DIVISOR_FIELDS else 4 + i for i, name in enumerate(required)
    }
    jaxllm.Rope(rope_type=kind, rope_theta=1e4, **values)
    for name in required:
        with pytest.raises(ConfigError, match=f"{name} is missing"):
            jaxllm.Rope(rope_type=kind, rope_theta=1e4, **{**values, name: None})
    if kind != "yarn":
        with pytest.raises(ConfigError, match="beta_fast is not used"):
            jaxllm.Rope(rope_type=kind, rope_theta=1e4, beta_fast=3, **values)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({**YARN, "rope_theta": 1e4, "beta_fast": 5e-324}, "beta_fast"),
        ({**YARN, "rope_theta": 1.0}, "rope_theta must not be 1"),
        ({**LLAMA3, "rope_theta": 1e4}, "must differ"),
    ],
)
def test_rope_refuses_division_by_zero(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        jaxllm.Rope(**settings)


def test_dynamic_scaling_needs_two_rotated_pairs() -> None:
    config = random_model("llama")[0].config
    rope = jaxllm.Rope(rope_type="dynamic", rope_theta=1e4, factor=2.0)
    with pytest.raises(ConfigError, match="more than 2 rotated dimensions"):
        dataclasses.replace(config, rope=rope, head_dim=2)


def test_equal_models_are_equal_static_arguments() -> None:
    """Equal configurations give equal, hashable models, which jit accepts as static arguments."""
    one, _ = random_model("llama")
    other, _ = random_model("llama")
    assert one == other
    assert hash(one) == hash(other)
    assert jax.jit(lambda m: 1, static_argnums=0)(one) == 1
