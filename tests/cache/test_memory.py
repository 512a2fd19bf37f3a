"""Caches with a memory: a model that counts its tokens, through every operation."""

import dataclasses
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm.cache import (
    branch,
    compact,
    drop_range,
    fork,
    heavy_hitters,
    keep,
    load_cache,
    merge_rows,
    rewind,
    save_cache,
    select,
    sinks_and_window,
)
from jaxllm.errors import CacheMismatchError, CheckpointError, ConfigError
from jaxllm.generation.recompute import recompute
from jaxllm.models.decoder import Decoder
from jaxllm.models.layers import Trace
from jaxllm.models.llama import LlamaConfig
from jaxllm.research.llama_batch.sequences import read_positions
from jaxllm.weights.precision import Precision
from tests.cache.caches import close
from tests.tiny_models import random_model, tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class CountingConfig(LlamaConfig):
    def state_shape(self, layer: int) -> Any:
        return {"seen": jax.ShapeDtypeStruct((self.vocab_size,), jnp.float32)} if layer else None


class Counting(Decoder):
    """Add to each token's logit its count in the text so far, the current token included."""

    @nn.compact
    def __call__(self, token_BT: Any, position_BT: Any, *args: Any, **options: Any) -> Trace:
        before = options.pop("state", ())
        trace = super().__call__(token_BT, position_BT, *args, **options)
        real_BT1 = (position_BT >= 0)[..., None].astype(jnp.float32)
        one_BTV = jax.nn.one_hot(token_BT, self.config.vocab_size) * real_BT1
        seen_BTV = jnp.cumsum(one_BTV, axis=1)
        if before:
            seen_BTV += before[1]["seen"][:, None]
        column_B = args[2] if len(args) > 2 else None
        shown = (
            seen_BTV if column_B is None else seen_BTV[jnp.arange(len(column_B)), column_B][:, None]
        )
        *rest, last = trace.layers
        attention = last.attention._replace(state={"seen": seen_BTV[:, -1]})
        last = last._replace(attention=attention)
        return trace.replace(layers=(*rest, last), logits=trace.logits + shown)


@pytest.fixture(scope="module")
def lm() -> Any:
    model, params = random_model("llama")
    config = CountingConfig(
        **{f.name: getattr(model.config, f.name) for f in dataclasses.fields(model.config)}
    )
    return Counting(config=config, precision=Precision()), params


def seen(cache: jaxllm.KVCache) -> np.ndarray:
    assert cache.state[0] is None
    return np.asarray(cache.state[1]["seen"])


def counted(ids: Any) -> np.ndarray:
    return np.stack([np.bincount(row, minlength=131) for row in np.asarray(ids)])


def test_memory_in_chunks_and_steps_equals_forward(lm: Any) -> None:
    """Logits of a model with a memory are equal in one run, chunks, steps and generation."""
    ids = tokens(2, 9)
    whole = jaxllm.forward(*lm, None, ids).logits
    cache = jaxllm.init_cache(lm[0], 2, 16)
    assert not seen(cache).any()
    logits, cache = jaxllm.prefill(*lm, cache, ids[:, :7], chunk=3)
    close(logits, whole[:, 6])
    for column in (7, 8):
        logits, cache = jaxllm.decode_step(*lm, cache, ids[:, column])
        close(logits, whole[:, column])
    assert (seen(cache) == counted(ids)).all()
    result = jaxllm.generate(*lm, ids, max_new_tokens=4)
    text = np.concatenate([ids, result.token_BT[:, :3]], axis=1)
    close(jaxllm.forward(*lm, None, text).logits[:, -1].argmax(-1), result.token_BT[:, 3])
    assert (seen(result.cache) == counted(text)).all()


def test_padding_does_not_change_memory(lm: Any) -> None:
    ids, lengths = tokens(2, 9), np.array([9, 4])
    _, cache = jaxllm.prefill(*lm, jaxllm.init_cache(lm[0], 2, 16), ids, lengths_B=lengths)
    assert (seen(cache)[1] == counted(ids[1:, :4])[0]).all()


def test_memory_follows_batch_operations_and_files(lm: Any, tmp_path: Path) -> None:
    """Selecting, forking and merging rows keep their memories, files restore them, and a model
    without memory rejects the cache.
    """
    ids = tokens(2, 6)
    _, cache = jaxllm.prefill(*lm, jaxllm.init_cache(lm[0], 2, 16), ids)
    assert (seen(select(cache, [1, 0, 1])) == counted(ids[[1, 0, 1]])).all()
    forks = fork(branch(cache, 1), 3, capacity=2)
    assert (seen(forks) == counted(ids[[1, 1, 1]])).all()
    _, forks = jaxllm.decode_step(*lm, forks, np.array([1, 2, 3]))
    assert seen(forks).sum(axis=1).tolist() == [7, 7, 7]
    assert (seen(cache) == counted(ids)).all()
    merged = merge_rows([branch(cache, 1), branch(cache, 0)])
    assert (seen(merged) == counted(ids[::-1])).all()
    save_cache(tmp_path / "c", cache, *lm)
    again = load_cache(tmp_path / "c", *lm)
    assert again == cache
    assert again != again.replace(state=jax.tree.map(lambda x: x + 1, again.state))
    plain, params = random_model("llama")
    with pytest.raises(CacheMismatchError, match="state"):
        delta = jaxllm.forward(plain, params, None, ids).delta
        jaxllm.commit(cache, delta)


def test_file_without_memory_is_refused(lm: Any, tmp_path: Path) -> None:
    """A model with a memory refuses a cache file without one."""
    plain, params = random_model("llama")
    cache = jaxllm.init_cache(plain, 1, 4)
    save_cache(tmp_path / "c", cache, plain, params)
    with pytest.raises((CheckpointError, CacheMismatchError)):
        load_cache(tmp_path / "c", *lm)


def test_operations_that_rewrite_history_refuse_memory(lm: Any) -> None:
    """Operations that remove or recompute tokens raise an error for a cache with a memory, and so
    do beam search and speculation.
    """
    ids = tokens(1, 6)
    _, cache = jaxllm.prefill(*lm, jaxllm.init_cache(lm[0], 1, 16), ids)
    with pytest.raises(CacheMismatchError, match=r"rewind: .* state"):
        rewind(cache, 1)
    with pytest.raises(CacheMismatchError, match=r"sequences: .* state"):
        read_positions(cache)
    mass_BS = np.ones((1, cache.slots), np.float32)
    for name, operation in {
        "keep": lambda: keep(cache, cache.position_BS != 2),
        "drop_range": lambda: drop_range(cache, 1, 3),
        "sinks_and_window": lambda: sinks_and_window(cache, sinks=1, window=2),
        "heavy_hitters": lambda: heavy_hitters(cache, mass_BS, heavy=1, recent=2),
        "recompute": lambda: recompute(*lm, cache, 1, 3),
    }.items():
        with pytest.raises(CacheMismatchError, match=rf"{name}: .* state"):
            operation()
    assert (seen(compact(cache)) == counted(ids)).all()
    with pytest.raises(ConfigError, match="keep a state"):
        jaxllm.beam_search(*lm, ids, num_beams=2, max_new_tokens=3)
    with pytest.raises((ConfigError, CacheMismatchError), match="it cannot forget"):
        jaxllm.speculative_generate(*lm, ids, draft=jaxllm.PromptLookup(), max_new_tokens=3)
