"""Caches with NumPy arrays, as `jax.device_get` and pickle return them."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxllm
from jaxllm.cache import (
    branch,
    compact,
    drop_range,
    fork,
    load_cache,
    merge_rows,
    rewind,
    save_cache,
    select,
    shift,
)
from tests.tiny_models import random_model, tokens


@pytest.fixture(scope="module")
def lm() -> Any:
    return random_model("llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def cache(lm: Any) -> jaxllm.KVCache:
    return jaxllm.prefill(*lm, jaxllm.init_cache(lm[0], 2, 16), tokens(2, 6)).cache


def via_pickle(cache: jaxllm.KVCache) -> Any:
    return pickle.loads(pickle.dumps(jax.device_get(cache)))


EDITS: dict[str, Callable[[jaxllm.KVCache], Any]] = {
    "rewind": lambda c: rewind(c, 2),
    "compact": lambda c: compact(drop_range(c, 1, 3)),
    "shift": lambda c: shift(c, 2, start=3),
    "fork": lambda c: fork(branch(c, 1), 2, capacity=8),
    "merge_rows": lambda c: merge_rows([c, select(c, [1])]),
}


@pytest.mark.parametrize("to_host", [jax.device_get, via_pickle])
def test_steps_accept_host_arrays(lm: Any, cache: jaxllm.KVCache, to_host: Any) -> None:
    """Forward, prefill and steps have the same bits from a host cache (device_get, pickle)."""
    host, ids = to_host(cache), tokens(2, 3, seed=1)
    assert host == cache
    assert repr(host) == repr(cache)
    steps: tuple[Callable[[Any], Any], ...] = (
        lambda c: jaxllm.forward(*lm, c, ids).logits,
        lambda c: jaxllm.prefill(*lm, c, ids).logits,
        lambda c: jaxllm.decode_step(*lm, c, ids[:, 0]).logits,
        lambda c: jaxllm.decode_step(*lm, c, ids[:, 0], donate=True).logits,
    )
    for step in steps:
        np.testing.assert_array_equal(step(to_host(cache)), step(jax.device_put(host)))


@pytest.mark.parametrize("name", EDITS)
def test_cache_edits_accept_host_arrays(cache: jaxllm.KVCache, name: str) -> None:
    assert EDITS[name](jax.device_get(cache)) == EDITS[name](cache)


def test_save_cache_accepts_host_arrays(lm: Any, cache: jaxllm.KVCache, tmp_path: Path) -> None:
    save_cache(tmp_path / "c", jax.device_get(cache), *lm)
    assert load_cache(tmp_path / "c", *lm) == cache
