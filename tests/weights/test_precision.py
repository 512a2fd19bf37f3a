"""Precision: formats of weights, activations and caches, and their overrides."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm import Override, Precision
from jaxllm.errors import ConfigError
from jaxllm.weights.paths import flatten
from tests.tiny_models import random_model, tokens


def test_override_covers_module_and_its_children() -> None:
    """The first row that sets a field wins, a row applies to everything in its module, and layers.1
    does not match layers.10.
    """
    precision = Precision(
        weights="bfloat16",
        activations="bfloat16",
        overrides=(
            (r"layers\.0\.mlp\.down_proj", Override(activations="float16")),
            (r"layers\.0", Override(weights="float32", activations="float32")),
            (r".*norm", Override(weights="float32")),
        ),
    )
    # The first row does not set weights.
    assert precision.param_format("layers.0.mlp.down_proj.weight", (256, 256)) == "float32"
    assert precision.activation_dtype("layers.0.mlp.down_proj") == jnp.float16
    assert precision.activation_dtype("layers.0.self_attn.q_proj") == jnp.float32
    assert precision.param_format("layers.1.input_layernorm.weight", (256, 256)) == "float32"
    assert precision.param_format("layers.1.mlp.up_proj.weight", (256, 256)) == "bfloat16"
    assert precision.activation_dtype("layers.10") == jnp.bfloat16


def test_overrides_and_quantize_rules_match_identically() -> None:
    """Overrides and quantization rules both match a parameter path or a module path."""
    rows = [
        (r"layers\.1\.mlp\.up_proj\.weight", "float16"),
        (r".*mlp\.up_proj", "int8"),
        (r"layers\.0", "int4-g32"),
    ]
    overrides = tuple((regex, Override(weights=name)) for regex, name in rows)
    for precision in (Precision(overrides=overrides), Precision(quantize=tuple(rows))):
        for path, wanted in {
            "layers.1.mlp.up_proj.weight": "float16",
            "layers.0.mlp.up_proj.weight": "int8",
            "layers.0.mlp.down_proj.weight": "int4-g32",
            "layers.0.input_layernorm.weight": "int4-g32",
            "layers.10.mlp.down_proj.weight": "float32",
            "layers.1.mlp.down_proj.weight": "float32",
        }.items():
            assert precision.param_format(path, (256, 256)) == wanted, path


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_cast_and_forward_follow_overrides(family: str) -> None:
    block = "layers" if family == "llama" else "h"
    precision = Precision(
        weights="bfloat16",
        activations="bfloat16",
        cache="float16",
        overrides=((rf"{block}\.1", Override(weights="float32", activations="float32")),),
    )
    model, params = random_model(family, precision=precision)
    cast = jaxllm.cast(params, precision)
    for path, leaf in flatten(cast):
        assert leaf.dtype == (jnp.float32 if path.startswith(f"{block}.1.") else jnp.bfloat16)
    cache = jaxllm.init_cache(model.config, 1, 16, dtype=precision.cache)
    out = jaxllm.forward(model, cast, cache, tokens(1, 9), hidden_states=True)
    assert out.logits.dtype == jnp.float32
    assert {x.dtype for x in (*out.delta.k, *out.delta.v)} == {jnp.dtype("float16")}
    assert {x.dtype for x in out.hidden_states or ()} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_cache_is_independent_of_chunks(dtype: str) -> None:
    """New keys are rounded to the cache dtype before attention, so that chunking does not change
    the logits.
    """
    precision = Precision(cache=dtype)
    model, params = random_model("llama", precision=precision)
    ids = tokens(1, 20)
    results = []
    for chunk in (20, 3):
        cache = jaxllm.init_cache(model.config, 1, 20, dtype=dtype)
        results.append(jaxllm.prefill(model, params, cache, ids, chunk=chunk).logits)
    scale = float(jnp.abs(results[0]).max())
    np.testing.assert_allclose(results[0], results[1], atol=1e-5 * scale)


def test_precision_refuses_unknown_formats_and_invalid_patterns() -> None:
    with pytest.raises(ConfigError, match="weights must be one of"):
        Precision(weights="int3")
    with pytest.raises(ConfigError, match="activations must be one of"):
        Override(activations="double")
    with pytest.raises(ConfigError, match="not a valid regex"):
        Precision(overrides=(("(", Override()),))
    with pytest.raises(ConfigError, match="cache dtype"):
        jaxllm.init_cache(random_model("gpt2")[0].config, 1, 4, dtype="int3")
