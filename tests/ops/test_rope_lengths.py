"""Angles of every rotary type equal transformers below and beyond the original context length."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from jaxllm import ops
from jaxllm.config.model import Rope

TRAINED, STRETCHED, HEAD = 40, 160, 16
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": TRAINED},
    "longrope": {
        "short_factor": tuple(1.0 + 0.1 * i for i in range(HEAD // 2)),
        "long_factor": tuple(1.5 + 0.7 * i for i in range(HEAD // 2)),
        "original_max_position_embeddings": TRAINED,
    },
}


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("length", [TRAINED - 1, TRAINED, TRAINED + 1, STRETCHED, STRETCHED + 9])
def test_rope_angles_equal_transformers_at_every_length(kind: str, length: int) -> None:
    """For every rotary type, angles equal transformers below, at and beyond the original context
    length.
    """
    # Dynamic scaling takes the original context from the config, other types from their own field.
    context = TRAINED if kind == "dynamic" else STRETCHED
    settings = {"rope_type": kind, "rope_theta": 500.0, **ROPES[kind]}
    parameters = {k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()}
    config = transformers.LlamaConfig(
        hidden_size=4 * HEAD, num_attention_heads=4, head_dim=HEAD,
        max_position_embeddings=context, rope_parameters=parameters,
    )  # fmt: skip
    position_BT = np.arange(length)[None]
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, length, 1), torch.tensor(position_BT))
    ours = ops.rope_angles(
        Rope(**settings), jnp.asarray(position_BT, jnp.int32), jnp.array([length]),
        head_dim=HEAD, max_position_embeddings=context,
    )  # fmt: skip
    for mine, theirs in zip(ours, (cos, sin), strict=True):
        # transformers repeats the angles in both halves; float32 rounding grows with the angle.
        np.testing.assert_allclose(mine, theirs[..., : HEAD // 2].numpy(), atol=2e-5 * length / 40)


def test_rope_angles_use_each_row_length() -> None:
    """With dynamic scaling, each row of a batch has the angles of its own length."""
    rope = Rope(rope_type="dynamic", rope_theta=500.0, factor=4.0)
    position_BT = jnp.tile(jnp.arange(50, dtype=jnp.int32)[None], (2, 1))
    options: dict[str, Any] = {"head_dim": HEAD, "max_position_embeddings": TRAINED}
    both, _ = ops.rope_angles(rope, position_BT, jnp.array([30, 50]), **options)
    for row, length in enumerate((30, 50)):
        single, _ = ops.rope_angles(rope, position_BT[:1], jnp.array([length]), **options)
        np.testing.assert_array_equal(both[row], single[0])
    assert np.abs(np.asarray(both[0] - both[1])).max() > 0.1
