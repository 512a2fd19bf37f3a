"""LongRoPE's two factor lists, between which a cached text cannot switch; dynamic NTK."""

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import jaxllm
from jaxllm.errors import CapacityError
from jaxllm.generation.batching.requests import Request
from jaxllm.generation.batching.scheduler import serve
from jaxllm.generation.loops.contrastive import contrastive_search
from jaxllm.generation.loops.guidance import generate_with_guidance
from jaxllm.models import build
from tests.tiny_models import Twin, assert_close, load_twin, random_model, save_random, tokens

ORIGINAL_CONTEXT = 40  # the twin's original_max_position_embeddings


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    directory = tmp_path_factory.mktemp("phi3")
    save_random(directory, "phi3", num_hidden_layers=1)
    return load_twin(directory)


@pytest.mark.parametrize(("prompt", "new"), [(32, 9), (45, 9)])
def test_greedy_equals_transformers_around_original_context(
    twin: Twin, prompt: int, new: int
) -> None:
    """Texts that end at the original context and texts that begin beyond it equal transformers."""
    ids = tokens(1, prompt)
    with torch.no_grad():
        theirs = twin.torch_model.generate(
            torch.tensor(ids),
            attention_mask=torch.ones(ids.shape, dtype=torch.long),
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
        )
    ours = jaxllm.generate(twin.model, twin.params, ids, max_new_tokens=new)
    assert ours.token_BT[0].tolist() == theirs[0, prompt:].tolist()


def test_chunked_long_prompt_uses_long_factors(twin: Twin) -> None:
    """A prompt beyond the original context, prefilled in chunks, equals transformers without a
    cache.
    """
    ids = tokens(1, 45)
    cache = jaxllm.init_cache(twin.config, 1, 48)
    logits, _ = jaxllm.prefill(twin.model, twin.params, cache, ids, chunk=16)
    assert_close(logits, twin.logits(ids)[:, -1])


def _from_cache(twin: Twin) -> None:
    cache = jaxllm.init_cache(twin.config, 1, 64)
    cache = jaxllm.prefill(twin.model, twin.params, cache, tokens(1, 30)).cache
    jaxllm.generate(twin.model, twin.params, tokens(1, 12), max_new_tokens=2, cache=cache)


PROMPT = tokens(1, 36)
CROSSING: dict[str, Callable[[Twin], object]] = {
    "generate": lambda t: jaxllm.generate(t.model, t.params, PROMPT, max_new_tokens=6),
    "one of two rows": lambda t: jaxllm.generate(
        t.model, t.params, tokens(2, 45), lengths_B=np.array([45, 36]), max_new_tokens=6
    ),
    "from a cache": _from_cache,
    "beams": lambda t: jaxllm.beam_search(t.model, t.params, PROMPT, num_beams=2, max_new_tokens=6),
    "speculation": lambda t: jaxllm.speculative_generate(
        t.model, t.params, PROMPT, draft=(t.model, t.params), max_new_tokens=6
    ),
    "guidance": lambda t: generate_with_guidance(
        t.model, t.params, PROMPT[0].tolist(), guidance_scale=2.0, max_new_tokens=6
    ),
    "contrastive": lambda t: contrastive_search(
        t.model, t.params, PROMPT[0].tolist(), penalty_alpha=0.5, top_k=2, max_new_tokens=6
    ),
    "LM": lambda t: jaxllm.load(t.directory).generate(PROMPT, max_new_tokens=6),
}


@pytest.mark.parametrize("way", CROSSING)
def test_decoding_refuses_to_cross_original_context(twin: Twin, way: str) -> None:
    """Every way of decoding raises CapacityError before the text crosses the original context."""
    with pytest.raises(CapacityError, match=r"cannot grow to 4\d.*long_factor in config\.json"):
        CROSSING[way](twin)


@pytest.mark.full
def test_drafts_beyond_original_context_are_harmless(twin: Twin) -> None:
    """Drafted tokens beyond the limit do not switch to the long factors: tokens equal plain greedy
    decoding.
    """
    ids = tokens(1, 32)
    plain = jaxllm.generate(twin.model, twin.params, ids, max_new_tokens=9)
    drafted = jaxllm.speculative_generate(
        twin.model, twin.params, ids, draft=(twin.model, twin.params), max_new_tokens=9
    )
    assert drafted.token_BT.tolist() == plain.token_BT.tolist()


@pytest.mark.full
def test_serve_refuses_only_crossing_request(twin: Twin) -> None:
    prompts = {"crossing": 36, "short": 20}
    requests = [
        Request(id=n, prompt=tokens(1, size)[0], max_new_tokens=6) for n, size in prompts.items()
    ]
    events = list(serve(twin.model, twin.params, requests, rows=2, capacity=64))
    (refusal,) = (event for event in events if event.id == "crossing")
    assert "cannot grow to 41" in str(refusal.error)
    assert sum(event.token is not None for event in events if event.id == "short") == 6


def test_generation_stops_at_original_context_by_default(twin: Twin) -> None:
    lm = jaxllm.load(twin.directory)
    assert (
        len(lm.generate(PROMPT[0].tolist(), eos_token_id=None).tokens) == ORIGINAL_CONTEXT - 36 + 1
    )


def test_original_context_requires_two_factor_lists(twin: Twin) -> None:
    """The limit exists only if short and long factors differ."""
    rope = twin.config.rope
    assert twin.config.original_context == ORIGINAL_CONTEXT
    assert dataclasses.replace(rope, short_factor=rope.long_factor).original_context is None
    assert jaxllm.Rope(rope_type="default", rope_theta=1e4).original_context is None


@pytest.mark.full
def test_equal_factor_lists_remove_limit(twin: Twin) -> None:
    """The error message suggests equal lists: then generation past the limit equals a forward pass
    without a cache.
    """
    rope = twin.config.rope
    rope = dataclasses.replace(rope, short_factor=rope.long_factor)
    config = dataclasses.replace(twin.config, rope=rope)
    model: Any = build(config)
    ids = jaxllm.generate(model, twin.params, PROMPT, max_new_tokens=6).token_BT
    text = np.concatenate([PROMPT, np.asarray(ids)], axis=1)[:, :-1]
    # Before and after the original context, a forward pass without a cache agrees.
    whole = np.asarray(jaxllm.forward(model, twin.params, None, text).logits)
    assert ids[0].tolist() == whole[0, 35:].argmax(-1).tolist()


def test_factors_are_chosen_per_row(twin: Twin) -> None:
    """A long and a short row in one batch equal transformers on each row."""
    ids, lengths = tokens(2, 45), np.array([45, 20])
    cache = jaxllm.init_cache(twin.config, 2, 48)
    logits, _ = jaxllm.prefill(twin.model, twin.params, cache, ids, lengths_B=lengths, chunk=16)
    for row, size in enumerate(lengths):
        assert_close(logits[row], twin.logits(ids[row : row + 1, :size])[0, -1])


STEPS: dict[str, Callable[[Twin, jaxllm.KVCache], object]] = {
    "prefill": lambda t, c: jaxllm.prefill(t.model, t.params, c, tokens(1, 12)),
    "forward": lambda t, c: jaxllm.forward(t.model, t.params, c, tokens(1, 12)),
    "decode_step": lambda t, c: jaxllm.decode_step(
        t.model, t.params, jaxllm.prefill(t.model, t.params, c, tokens(1, 10)).cache, [5]
    ),
}


@pytest.mark.parametrize("step", STEPS)
def test_cached_steps_refuse_to_cross_original_context(twin: Twin, step: str) -> None:
    """Each step raises CapacityError if it would cross the limit, and runs if the cached text is
    already beyond it.
    """
    cache = jaxllm.init_cache(twin.config, 1, 64)
    _, short = jaxllm.prefill(twin.model, twin.params, cache, tokens(1, 30))
    with pytest.raises(CapacityError, match=r"cannot grow to 4\d"):
        STEPS[step](twin, short)
    _, long = jaxllm.prefill(twin.model, twin.params, cache, tokens(1, 45))
    STEPS[step](twin, long)


DYNAMIC: dict[str, Any] = {
    "rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 500.0},
    "max_position_embeddings": 16, "num_hidden_layers": 1,
}  # fmt: skip


def test_dynamic_ntk_warns_if_angles_mix() -> None:
    """As in transformers, cached keys retain their old angles; a warning appears only if a cached
    text grows past the context.
    """
    model, params = random_model("llama", **DYNAMIC)
    message = r"the model's rotary angles change with every token beyond 16 \(dynamic NTK\)"
    with pytest.warns(UserWarning, match=message):
        jaxllm.generate(model, params, tokens(1, 12), max_new_tokens=9)
    jaxllm.generate(model, params, tokens(1, 12), max_new_tokens=5)  # no warning yet
    cache = jaxllm.init_cache(model, 1, 64)
    _, cache = jaxllm.prefill(model, params, cache, tokens(1, 30))  # one pass has one set of angles
    with pytest.warns(UserWarning, match=message):
        jaxllm.forward(model, params, cache, [[5]])


def test_dynamic_ntk_warns_once_per_text() -> None:
    """Each way of running warns exactly once, counting a cache and its prompt as one text."""
    lm = random_model("llama", **DYNAMIC)
    front = jaxllm.LM(lm[0].config, *lm, None, {}, Path("random"))
    ids = tokens(1, 12)[0].tolist()
    _, held = jaxllm.prefill(*lm, jaxllm.init_cache(lm[0], 1, 32), [ids])
    ways: dict[str, Callable[[], object]] = {
        "generate": lambda: front.generate(ids, max_new_tokens=9),
        "stream": lambda: list(front.stream(ids, max_new_tokens=9)),
        "serve": lambda: list(front.serve([{"prompt": ids, "max_new_tokens": 9}], capacity=32)),
        "beams": lambda: front.generate(ids, max_new_tokens=9, num_beams=2),
        "on from a cache": lambda: jaxllm.generate(*lm, [ids[:2]], cache=held, max_new_tokens=9),
        "prompt beyond": lambda: jaxllm.generate(*lm, [ids], cache=held, max_new_tokens=2),
    }
    for name, run in ways.items():
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            run()
        matching = [w for w in found if "dynamic NTK" in str(w.message)]
        assert len(matching) == 1, name
