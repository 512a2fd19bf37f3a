"""Adapters whose every number is random, over tiny models."""

from typing import Any

import jax
import numpy as np

from jaxllm.adapters import LoraConfig, init_adapter
from jaxllm.adapters.attach import Adapter, LoraMatrices
from jaxllm.weights.paths import Params


def random_adapter(
    config: Any, params: Params, lora: LoraConfig, seed: int = 0, spread: float = 0.3
) -> Adapter:
    """An adapter of which no matrix is zero, and whose lengths are not those of the rows."""
    rng = np.random.default_rng(seed)

    def some(x: jax.Array) -> np.ndarray:
        return rng.normal(0, spread, x.shape).astype(x.dtype)

    made = init_adapter(config, params, lora, jax.random.key(seed)).matrices
    return Adapter(
        lora,
        {
            module: jax.device_put(
                LoraMatrices(some(a), some(b), None if m is None else m * (1 + np.abs(some(m))))
            )
            for module, (a, b, m) in made.items()
        },
    )
