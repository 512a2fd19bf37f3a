"""A step with a donated cache updates it in place: no compiled copy has the size of the cache."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxllm
from jaxllm.ops import native
from jaxllm.steps import run_and_commit
from tests.tiny_models import random_model

CAPACITY = 1013  # a size that no other array has

pytestmark = pytest.mark.skipif(
    not native.is_enabled(), reason="without native kernels, XLA copies the cache it updates"
)


def copies(step: Any, cache: jaxllm.KVCache, *args: Any) -> list[str]:
    """Return the compiled step's copy instructions whose shape contains CAPACITY."""
    text = jax.jit(step, donate_argnums=0).lower(cache, *args).compile().as_text()
    return re.findall(rf"\S+ = \S*\b{CAPACITY}\b\S* copy\(.*", text)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("attention_mass", [False, True])
def test_donated_step_copies_no_cache_array(dtype: str, attention_mass: bool) -> None:
    """With a donated cache, the compiled step copies no array with one entry per slot."""
    model, params = random_model("llama", num_hidden_layers=2)
    cache = jaxllm.init_cache(model, 1, CAPACITY, dtype=dtype)

    def step(cache: jaxllm.KVCache, token: jax.Array) -> Any:
        at = cache.next_position_B[:, None]
        return run_and_commit(model, params, (), cache, token, at, attention_mass=attention_mass)

    assert copies(step, cache, jnp.zeros((1, 1), jnp.int32)) == []


def test_donated_loop_copies_no_cache_array() -> None:
    """The same holds for a while_loop of decode steps."""
    model, params = random_model("llama", num_hidden_layers=2)
    cache = jaxllm.init_cache(model, 1, CAPACITY)

    def loop(cache: jaxllm.KVCache) -> Any:
        def one(carry: Any) -> Any:
            cache, token_B1 = carry
            at = cache.next_position_B[:, None]
            logits, cache = run_and_commit(model, params, (), cache, token_B1, at)
            return cache, logits.argmax(axis=-1).astype(jnp.int32)

        start = cache, jnp.zeros((1, 1), jnp.int32)
        return jax.lax.while_loop(lambda c: (c[0].next_position_B < 9).all(), one, start)

    assert copies(loop, cache) == []
