"""The cache of latent attention: one key head of latents, and all that is done with caches."""

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
    find_slots,
    fork,
    merge_rows,
    patch,
    rewind,
    select,
)
from jaxllm.cache.files import load_cache, save_cache
from jaxllm.cache.kv import cache_nbytes
from jaxllm.generation.batching.requests import Request
from jaxllm.generation.batching.scheduler import serve
from jaxllm.generation.loops.draft import PromptLookup
from jaxllm.models import param_shapes
from tests.tiny_models import assert_close, random_model, tokens

TEXT = tokens(1, 24)


@pytest.fixture(scope="module")
def lm() -> Any:
    return random_model("deepseek_v3")


def run(lm: Any, text_BT: Any, capacity: int = 40, **options: Any) -> Any:
    _, cache = jaxllm.prefill(*lm, jaxllm.init_cache(lm[0], 1, capacity, **options), text_BT)
    return cache


def logits(lm: Any, cache: Any, token: int = 5) -> np.ndarray:
    found, _ = jaxllm.decode_step(*lm, cache, [token] * cache.batch)
    return np.asarray(found)


def test_cache_holds_latents_alone(lm: Any) -> None:
    """A token has the numbers of its latent and its rotated dimensions, in one head."""
    config = lm[0].config
    cache = jaxllm.init_cache(lm[0], 2, 32)
    assert {x.shape for x in cache.tail.k} == {(2, 32, 1, 14 + 4)}
    assert {x.shape for x in cache.tail.v} == {(2, 32, 0, 14 + 4)}
    assert cache.nbytes - cache_nbytes(config, 2, 32) == 12  # cursor and next positions
    of_keys = 2 * 32 * config.num_hidden_layers * 18 * 4
    assert cache_nbytes(config, 2, 32) - of_keys == 2 * 32 * 9
    assert param_shapes(lm[0])["layers.0"]["self_attn"]["k_b_proj"]["weight"].shape == (8, 14, 6)


def test_operations_give_the_logits_of_a_plain_run(lm: Any, tmp_path: Path) -> None:
    """After each operation the next token has the logits of a text that was run alone."""
    whole = run(lm, TEXT)
    want = logits(lm, whole)
    save_cache(tmp_path / "cache", whole, *lm)
    other = run(lm, tokens(1, 9, seed=3))
    longer = run(lm, np.concatenate([TEXT, [[7, 8, 9]]], axis=1))
    _, parts = jaxllm.prefill(*lm, run(lm, TEXT[:, :11]), TEXT[:, 11:])
    for name, cache in {
        "chunks": parts,
        "rewind": rewind(longer, 3),
        "file": load_cache(tmp_path / "cache", *lm),
        "merge": branch(merge_rows([other, whole]), 1),
        "select": branch(select(fork(whole, 2, capacity=8), [1, 1]), 0),
        "compact": compact(whole, capacity=40),
    }.items():
        np.testing.assert_allclose(logits(lm, cache), want, atol=2e-4, err_msg=name)
    twins = fork(whole, 2, capacity=8)
    both, _ = jaxllm.decode_step(*lm, twins, [5, 6])
    assert_close(np.asarray(both)[:1], want)
    assert_close(np.asarray(both)[1:], logits(lm, whole, 6))


def test_edits_equal_runs_that_see_the_same_tokens(lm: Any) -> None:
    """A dropped end is as one that never was, and patched tokens as ones that were there."""
    whole, at = run(lm, TEXT), np.append(np.arange(20), 24)[None]
    text = np.append(TEXT[:, :20], [[5]], axis=1)
    out = jaxllm.forward(*lm, None, text, positions_BT=at.astype(np.int32)).logits
    assert_close(logits(lm, drop_range(whole, 20, 24)), np.asarray(out)[:, -1])
    changed = TEXT.copy()
    changed[:, 20:] = tokens(1, 4, seed=9)
    again = run(lm, changed)
    slot_BT = find_slots(again, [list(range(20, 24))])
    delta = jaxllm.forward(*lm, rewind(whole, 4), TEXT[:, 20:]).delta
    assert_close(logits(lm, patch(again, slot_BT, delta)), logits(lm, whole))


def test_int8_latents_are_near_floats() -> None:
    """Numbers of 8 bits with a scale for each token change logits little."""
    lm = random_model("minicpm3")  # without experts, which a small error may exchange
    exact, rounded = (logits(lm, run(lm, TEXT, dtype=d)) for d in ("float32", "int8"))
    assert 0 < np.sqrt(np.mean((rounded - exact) ** 2)) < 0.2 * exact.std()


def test_generation_serving_drafts_and_prefixes_agree(lm: Any) -> None:
    """`generate`, `serve` with a prefix cache, and n-gram drafts write the same texts."""
    prompt = np.concatenate([TEXT, TEXT], axis=1)
    options: Any = {"max_new_tokens": 12}
    want = np.asarray(jaxllm.generate(*lm, prompt, **options).token_BT)
    drafted = jaxllm.speculative_generate(*lm, prompt, draft=PromptLookup(), **options)
    np.testing.assert_array_equal(drafted.token_BT, want)
    cache = jaxllm.PrefixCache(1 << 24, chunk=16)
    for cached in (0, 32):
        requests = [Request(id=0, prompt=prompt[0], max_new_tokens=12)]
        events = list(serve(*lm, requests, rows=2, capacity=96, prefix_cache=cache))
        assert all(event.error is None for event in events)
        assert [event.token for event in events] == want[0].tolist()
        assert events[-1].cached_tokens >= cached
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(lm[1]))
