"""A sliding window is the last w keys, including the token's own, with a cache or without."""

from pathlib import Path

import numpy as np
import pytest

import jaxllm
from jaxllm.cache import compact, drop_range
from tests.cache.caches import close, filled, fresh, peek
from tests.tiny_models import Twin, assert_close, load_twin, random_model, save_random, tokens

WINDOW, LENGTH = 6, 23


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    directory: Path = tmp_path_factory.mktemp("mistral")
    save_random(directory, "mistral", sliding_window=WINDOW)
    return load_twin(directory)


@pytest.mark.parametrize("chunk", [1, 2, WINDOW, WINDOW + 3, LENGTH])
def test_chunks_around_window_size_equal_mistral(mistral: Twin, chunk: int) -> None:
    """Chunks shorter and longer than the sliding window give transformers' Mistral logits."""
    model, params, ids = mistral.model, mistral.params, tokens(2, LENGTH)
    theirs = mistral.logits(ids)
    cache = jaxllm.init_cache(model.config, 2, LENGTH)
    for start in range(0, 2 * chunk, chunk):
        part = ids[:, start : start + chunk]
        if part.size:
            out = jaxllm.forward(model, params, cache, part)
            assert_close(out.logits, theirs[:, start : start + chunk])
            cache = jaxllm.commit(cache, out.delta)
    empty = jaxllm.init_cache(model.config, 2, LENGTH)
    logits, cache = jaxllm.prefill(model, params, empty, ids[:, :-1], chunk=chunk)
    assert_close(logits, theirs[:, -2])
    logits, _ = jaxllm.decode_step(model, params, cache, ids[:, -1])
    assert_close(logits, theirs[:, -1])


def test_window_spans_exactly_w_keys() -> None:
    """With one layer, a token outside the window changes no bit; the oldest one inside does."""
    model, params = random_model("mistral", sliding_window=WINDOW, num_hidden_layers=1)
    ids = tokens(1, LENGTH).copy()
    before = np.asarray(jaxllm.forward(model, params, None, ids).logits[0, -1])
    for back, same in ((WINDOW, True), (WINDOW - 1, False)):
        changed = ids.copy()
        changed[0, LENGTH - 1 - back] ^= 1
        after = np.asarray(jaxllm.forward(model, params, None, changed).logits[0, -1])
        assert np.array_equal(before, after) == same


def test_window_counts_positions_not_slots() -> None:
    """A layer of Gemma sees 5 positions: a culled text equals a fresh run without recomputation,
    compacted or not.
    """
    lm, ids = random_model("gemma2", num_hidden_layers=1), tokens(1, 13)
    assert lm[0].config.window(0) == 5
    cache = filled(lm, ids)
    for begin, end in ((1, 5), (9, 12)):  # outside the window, and within it
        kept = [i for i in range(13) if not begin <= i < end]
        culled = drop_range(cache, begin, end)
        expected = fresh(lm, ids[0, kept], [*kept, 13])
        close(peek(lm, culled)[0], expected)
        close(peek(lm, compact(culled))[0], expected)
