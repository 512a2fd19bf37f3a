"""Properties after thousands of steps, from several threads and after an interruption."""

import gc
import threading
from typing import Any

import jax
import numpy as np
import pytest

import jaxllm
from tests.tiny_models import random_model, tokens


@pytest.fixture(scope="module")
def lm() -> Any:
    return random_model("llama", max_position_embeddings=4096)


@pytest.mark.more
def test_decode_2000_steps_compiles_and_leaks_nothing(lm: Any, compiled: list[str]) -> None:
    """After 50 steps, 2000 more, donated or not, compile no program and add no live array."""
    model, params = lm
    cache = jaxllm.init_cache(model.config, 1, 2100)
    for step in range(2050):
        token_B = np.array([step % 131])
        # Every second cache is donated, which frees its buffers, even if still referenced.
        _, cache = jaxllm.decode_step(model, params, cache, token_B, donate=step % 2 == 0)
        if step == 49:
            gc.collect()
            live, before = len(jax.live_arrays()), len(compiled)
    gc.collect()
    assert len(jax.live_arrays()) == live
    assert compiled[before:] == []
    assert cache.length_B.tolist() == [2050]


def test_weights_are_arguments_not_constants(lm: Any) -> None:
    """With parameters as arguments, forward captures no weight as a constant; a closure does."""
    model, params = lm
    ids = np.zeros((1, 1), np.int32)
    largest = max(leaf.size for leaf in jax.tree.leaves(params))

    def captured(step: Any, *arguments: Any) -> bool:
        program = jax.jit(step).lower(*arguments).as_text()
        constants = [c for c in program.splitlines() if "stablehlo.constant dense" in c]
        return any(len(c) >= largest for c in constants)

    assert not captured(lambda params, ids: jaxllm.forward(model, params, None, ids), params, ids)
    # Negative control: the check detects weights that are constants.
    assert captured(lambda ids: jaxllm.forward(model, params, None, ids), ids)


def test_decode_in_eight_threads_equals_serial(lm: Any) -> None:
    """Eight threads that share parameters and a cache generate the tokens of a serial run."""
    model, params = lm
    cache = jaxllm.init_cache(model.config, 1, 64)
    _, cache = jaxllm.prefill(model, params, cache, tokens(1, 9))

    def work(seed: int) -> list[int]:
        logits, mine = jaxllm.decode_step(model, params, cache, np.array([seed]))
        out = []
        for _ in range(12):
            token_B = logits.argmax(axis=1)
            out.append(int(token_B[0]))
            logits, mine = jaxllm.decode_step(model, params, mine, token_B)
        return out

    serial = [work(seed) for seed in range(8)]
    parallel: dict[int, list[int]] = {}
    threads = [
        threading.Thread(target=lambda s=s: parallel.update({s: work(s)}))  # type: ignore[misc]
        for s in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [parallel[s] for s in range(8)] == serial


def test_closed_stream_leaves_model_usable(lm: Any) -> None:
    """Generating after a stream was closed early gives the tokens from before."""
    model, params = lm
    expected = jaxllm.generate(model, params, tokens(1, 5), max_new_tokens=6).token_BT.tolist()
    stream = jaxllm.stream(model, params, tokens(1, 5), max_new_tokens=6)
    next(stream)
    next(stream)
    stream.close()
    again = jaxllm.generate(model, params, tokens(1, 5), max_new_tokens=6)
    assert again.token_BT.tolist() == expected
