"""Steering vectors of a server: requests name them, each with its own strength and layers.

A request's vectors are added up before it runs, and have all layers of all vectors, with zeros
where it steers nothing. So all steered requests run the same program.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxllm.config.model import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.inside.steering import Directions, combine_directions, read_directions, steering_edits

Vectors = Mapping[str, Directions]


def read_vectors(files: Mapping[str, str], config: ModelConfig) -> Vectors:
    """Return the vectors of files, by name. Raises CheckpointError for one of another model."""
    return {name: read_directions(file, config) for name, file in files.items()}


def read_steering(steering: Sequence[Mapping[str, Any]], vectors: Vectors) -> dict[str, Any]:
    """Return the edits that a request's `steering` describes.

    steering: Objects with the fields of `openai_requests.Steering`. Raises ConfigError for a vector
    or a layer that is not there.
    """
    layers = {layer: x for vector in vectors.values() for layer, x in vector.items()}
    parts: list[tuple[Directions, float]] = [
        ({layer: np.zeros_like(x) for layer, x in layers.items()}, 1.0)
    ]
    for item in steering:
        if (name := item["vector"]) not in vectors:
            known = ", ".join(vectors) or "none (--steer)"
            raise ConfigError(f"steering: unknown vector {name!r:.60}. The server has {known:.200}")
        parts.append((_pick_layers(vectors[name], item["layers"], name), item["scale"]))
    return {"edits": steering_edits(combine_directions(parts))}


def _pick_layers(vector: Directions, layers: list[int] | None, name: str) -> Directions:
    if layers is None:
        return vector
    if not vector.keys() >= set(layers):
        raise ConfigError(
            f"steering: layers of {name:.60} must be a list of {min(vector)} to {max(vector)},"
            f" got {layers!r:.60}"
        )
    return {layer: vector[layer] for layer in layers}
