"""Random adapters for tiny models."""

from typing import Any

import jax
import numpy as np

from jaxllm.adapters import LoraConfig, init_adapter
from jaxllm.adapters.attach import Adapter, LoraMatrices
from jaxllm.weights.paths import Params


def random_adapter(
    config: Any, params: Params, lora: LoraConfig, seed: int = 0, spread: float = 0.3
) -> Adapter:
    """Return an adapter without zero matrices, with magnitudes that differ from the row norms."""
    rng = np.random.default_rng(seed)

    def random_like(x: jax.Array) -> np.ndarray:
        return rng.normal(0, spread, x.shape).astype(x.dtype)

    initial = init_adapter(config, params, lora, jax.random.key(seed)).matrices
    return Adapter(
        lora,
        {
            module: jax.device_put(
                LoraMatrices(
                    random_like(a),
                    random_like(b),
                    None if m is None else m * (1 + np.abs(random_like(m))),
                )
            )
            for module, (a, b, m) in initial.items()
        },
    )
