"""Tiny models whose numbers divide over eight devices, and the same on a mesh."""

from typing import Any

import numpy as np

from jaxllm.sharding import ShardedModel, make_sharded_model
from jaxllm.sharding.mesh_spec import parse_mesh
from jaxllm.weights.lazy_gather import load_weight
from jaxllm.weights.paths import Params
from jaxllm.weights.precision import Precision, cast
from tests.twins import KINDS, random_model

FAMILIES = tuple(kind for kind in KINDS if kind != "mistral")  # which is llama
CHANGES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_inner": 56},
    "gpt_neox": {"num_attention_heads": 8, "hidden_size": 48},
}
WIDE: dict[str, dict[str, Any]] = {  # of which every share is of whole groups
    "gpt2": {"n_embd": 256, "n_inner": 256},
    "llama": {"head_dim": 32, "intermediate_size": 256, "hidden_size": 64},
}


def one(family: str, precision: Precision | None = None, **changes: Any) -> tuple[Any, Params]:
    """A model of one device, every parameter random, in the formats of a precision."""
    precision = precision or Precision()
    changes = {**CHANGES.get(family, {}), **changes}
    model, params = random_model(family, precision=precision, **changes)
    return model, cast(params, precision)


def spread(model: Any, params: Params, mesh: str, **options: Any) -> tuple[ShardedModel, Params]:
    """The same on a mesh. options: what `make_sharded_model` takes beside it."""
    over = make_sharded_model(model.config, model.precision, parse_mesh(mesh), **options)
    return over, over.shard(params)


def at_hand(trained: dict[str, Any]) -> dict[str, Any]:
    """What is trained, read."""
    return {name: load_weight(x) for name, x in trained.items()}


def largest_difference(a: Any, b: Any) -> float:
    """Between two arrays of one shape, against the largest number."""
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    assert a.shape == b.shape
    return float(np.abs(a - b).max() / max(1.0, float(np.abs(b).max())))
