"""A step that is given its cache to keep writes new slots into it, and copies nothing as large."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxllm
from jaxllm.ops import native
from jaxllm.steps import run_and_commit
from tests.twins import random_model

CAPACITY = 1013  # nothing else has as many numbers

pytestmark = pytest.mark.skipif(
    not native.is_enabled(), reason="XLA alone copies what it writes to"
)


def copies(step: Any, cache: jaxllm.KVCache, *args: Any) -> list[str]:
    """The instructions of the compiled step that copy an array with a number for each slot."""
    text = jax.jit(step, donate_argnums=0).lower(cache, *args).compile().as_text()
    return re.findall(rf"\S+ = \S*\b{CAPACITY}\b\S* copy\(.*", text)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("attention_mass", [False, True])
def test_a_step_copies_no_keys(dtype: str, attention_mass: bool) -> None:
    model, params = random_model("llama", num_hidden_layers=2)
    cache = jaxllm.init_cache(model, 1, CAPACITY, dtype=dtype)

    def step(cache: jaxllm.KVCache, token: jax.Array) -> Any:
        at = cache.next_position_B[:, None]
        return run_and_commit(model, params, (), cache, token, at, attention_mass=attention_mass)

    assert copies(step, cache, jnp.zeros((1, 1), jnp.int32)) == []


def test_neither_does_a_loop_of_steps() -> None:
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
