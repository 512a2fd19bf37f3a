"""Random adapters for tiny models, weights with one adapter, and adapters loaded by PEFT."""

import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import peft
import transformers

from jaxllm.adapters import LoraConfig, choose_adapters, init_adapter, with_adapters
from jaxllm.adapters.attach import Adapter, LoraMatrices
from jaxllm.weights.paths import Params
from tests.tiny_models import Twin


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


def with_one(config: Any, params: Params, adapter: Adapter) -> Params:
    """Return the weights with the only loaded adapter chosen."""
    return choose_adapters(with_adapters(config, params, {"x": adapter}), np.zeros(1, np.int32))


def load_in_peft(twin: Twin, directory: Path) -> Any:
    """Return PEFT's model of a twin with the adapter of a directory."""
    base = transformers.AutoModelForCausalLM.from_pretrained(
        twin.directory, attn_implementation="eager"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(base, directory).eval()
