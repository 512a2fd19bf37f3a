"""Tiny random models whose dimensions divide over eight devices, with and without a mesh."""

from typing import Any

import numpy as np

import jaxllm
from jaxllm.sharding import ShardedModel, make_sharded_model
from jaxllm.sharding.mesh_spec import parse_mesh
from jaxllm.weights.paths import Params
from jaxllm.weights.precision import Precision, cast
from tests.tiny_models import KINDS, LATENTS, RECURRENT, random_model

# Mistral is the llama model; these run on one device: recurrent layers, latents, sizes by layer.
ON_ONE_DEVICE = (*RECURRENT, *LATENTS, "gemma4_text")
FAMILIES = tuple(kind for kind in KINDS if kind not in ("mistral", *ON_ONE_DEVICE))
CHANGES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_inner": 56},
    "gpt_neox": {"num_attention_heads": 8, "hidden_size": 48},
}
WIDE: dict[str, dict[str, Any]] = {  # every shard holds whole quantization groups
    "gpt2": {"n_embd": 256, "n_inner": 256},
    "llama": {"head_dim": 32, "intermediate_size": 256, "hidden_size": 64},
}


def make_model(
    family: str, precision: Precision | None = None, **changes: Any
) -> tuple[Any, Params]:
    """Return a single-device model with every parameter random, cast to a precision."""
    precision = precision or Precision()
    changes = {**CHANGES.get(family, {}), **changes}
    model, params = random_model(family, precision=precision, **changes)
    return model, cast(params, precision)


def shard_model(
    model: Any, params: Params, mesh: str, **options: Any
) -> tuple[ShardedModel, Params]:
    """Return the model and its parameters on a mesh; options go to `make_sharded_model`."""
    over = make_sharded_model(model.config, model.precision, parse_mesh(mesh), **options)
    return over, over.shard(params)


def load_weights(trained: dict[str, Any]) -> dict[str, Any]:
    """Load the lazily gathered weights of a train state."""
    return {name: x.read() for name, x in trained.items()}


def largest_difference(a: Any, b: Any) -> float:
    """Return the largest difference of two arrays, relative to max(1, largest value of b)."""
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    assert a.shape == b.shape
    return float(np.abs(a - b).max() / max(1.0, float(np.abs(b).max())))


def check_trace(ours: jaxllm.Output, theirs: jaxllm.Output, close: float) -> None:
    """Check logits and the hidden states of all layers."""
    assert ours.hidden_states is not None and theirs.hidden_states is not None
    assert largest_difference(ours.logits, theirs.logits) < close
    for mine, other in zip(ours.hidden_states, theirs.hidden_states, strict=True):
        assert largest_difference(mine, other) < close
