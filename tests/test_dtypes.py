"""Dtype arguments: types of any library, aliases, and unsupported values."""

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import jaxllm
from jaxllm.errors import ConfigError
from jaxllm.runtime.validation import check_dtype
from tests.tiny_models import random_model

SAME = {
    "float32": [np.float32, np.dtype("float32"), np.dtype(">f4"), jnp.float32, torch.float32,
                "fp32", "f32", "float"],
    "bfloat16": [ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16), jnp.bfloat16, torch.bfloat16,
                 "bf16"],
    "float16": [np.float16, jnp.zeros(1, jnp.float16).dtype, torch.float16, "half", "fp16", "f16"],
}  # fmt: skip
UNSUPPORTED = [
    True, False, 3, float, list, np.float64, torch.float64, jnp.int8, np.float32(1), "float8",
    np.zeros(2, np.float32), b"bf16", [], object(),
]  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_check_dtype_accepts_types_of_any_library(name: str) -> None:
    assert {check_dtype("dtype", x) for x in SAME[name]} == {name}


@pytest.mark.parametrize("x", UNSUPPORTED, ids=lambda x: str(x).split(" at ")[0])
def test_check_dtype_refuses_unsupported_values(x: Any) -> None:
    with pytest.raises(ConfigError, match="dtype must be one of float32, bfloat16, float16 "):
        check_dtype("dtype", x)


def test_load_applies_dtype() -> None:
    """Weights, activations and cache have the requested dtype, given as a type of any library."""
    lm = jaxllm.load("demo:llama", dtype=jnp.bfloat16)
    weight = lm.params["layers.0"]["mlp"]["down_proj"]["weight"]
    assert (weight.dtype, lm.init_cache(1, 8).dtype) == (jnp.bfloat16, "bfloat16")
    assert lm.model.precision == jaxllm.Precision.uniform("bfloat16")


CALLS = {
    "load": lambda x: jaxllm.load("demo:llama", dtype=x),
    "verify": lambda x: jaxllm.verify("demo:llama", dtype=x),
    "verify's reference": lambda x: jaxllm.verify("demo:llama", reference_dtype=x),
    "weights": lambda x: jaxllm.Precision(weights=x),
    "activations": lambda x: jaxllm.Precision(activations=x),
    "cache": lambda x: jaxllm.Precision(cache=x),
    "quantize": lambda x: jaxllm.Precision(quantize=x),
    "uniform": lambda x: jaxllm.Precision.uniform(x),
    "in_dtype": lambda x: jaxllm.Precision().with_dtype(x),
    "an override's weights": lambda x: jaxllm.Override(weights=x),
    "an override's output": lambda x: jaxllm.Override(output=x),
    "init_cache": lambda x: jaxllm.init_cache(random_model("llama")[0].config, 1, 8, dtype=x),
}


@pytest.mark.parametrize("x", [3, False, np.float64, "float8"], ids=repr)
@pytest.mark.parametrize("name", CALLS)
def test_unsupported_dtypes_are_refused(name: str, x: Any) -> None:
    with pytest.raises(ConfigError, match=r"one of float32|quantization rules|must be a string"):
        CALLS[name](x)


def test_precision_stores_canonical_names() -> None:
    written = jaxllm.Precision(
        weights=jnp.bfloat16,  # type: ignore[arg-type]
        activations="fp32",
        cache=np.int8,  # type: ignore[arg-type]
        quantize=((".*mlp.*", "bf16"),),
        overrides=(("norm", jaxllm.Override(weights="half", output=torch.float32)),),  # type: ignore[arg-type]
    )
    assert written == jaxllm.Precision(
        weights="bfloat16",
        activations="float32",
        cache="int8",
        quantize=((".*mlp.*", "bf16"),),
        overrides=(("norm", jaxllm.Override(weights="float16", output="float32")),),
    )
    assert written.param_format("layers.0.mlp.up_proj.weight", (256, 256)) == "bfloat16"
