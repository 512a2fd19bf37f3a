"""Attention mass against transformers' attention matrices and brute force."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jaxllm
from jaxllm.cache import fork, heavy_hitters, rewind, sinks_and_window, slot_order
from jaxllm.cache.operations import close_gaps, compact
from jaxllm.errors import CacheMismatchError, CapacityError
from tests.cache.caches import close, filled, fresh, lm_of
from tests.tiny_models import Twin, load_twin, random_model, save_random, tokens

SLOWER = [pytest.param(family, marks=pytest.mark.full) for family in ("llama", "gpt2")]


@pytest.fixture(scope="module", params=["mistral", *SLOWER])
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twin:
    directory = tmp_path_factory.mktemp("mass")
    window = {"sliding_window": 5} if request.param == "mistral" else {}
    save_random(directory, request.param, **window)
    return load_twin(directory)


def attentions(twin: Twin, ids: np.ndarray) -> np.ndarray:
    """Return transformers' eager attention, `[layers, B, N, T, S]`."""
    with torch.no_grad():
        out = twin.torch_model(torch.tensor(ids), output_attentions=True)
    return np.stack([a.numpy() for a in out.attentions])


def test_attention_mass_sums_transformers_attention_matrices(twin: Twin) -> None:
    """Mass equals the sums of transformers' attention matrices: one run, chunks, single steps."""
    model, params, ids = twin.model, twin.params, tokens(2, 11)
    full = attentions(twin, ids)
    by_layer = full.sum(axis=(2, 3))
    out = jaxllm.forward(model, params, None, ids, attention_mass="layers")
    close(out.attention_mass, by_layer)
    out = jaxllm.forward(model, params, None, ids, attention_mass=True)
    close(out.attention_mass, by_layer.sum(axis=0))
    # By rows of the matrix: cached and new keys, in chunks and single tokens.
    cache = jaxllm.init_cache(model.config, 2, 14)
    out = jaxllm.prefill(model, params, cache, ids[:, :7], chunk=3, attention_mass=True)
    cache, mass = out.cache, out.attention_mass
    close(mass[:, :7], full[:, :, :, :7, :7].sum(axis=(0, 2, 3)))
    assert not np.asarray(mass[:, 7:]).any()
    out = jaxllm.forward(model, params, cache, ids[:, 7:9], attention_mass=True)
    close(out.attention_mass[:, :7], full[:, :, :, 7:9, :7].sum(axis=(0, 2, 3)))
    close(out.attention_mass[:, 14:], full[:, :, :, 7:9, 7:9].sum(axis=(0, 2, 3)))
    out = jaxllm.decode_step(model, params, cache, ids[:, 7], attention_mass="layers")
    close(out.attention_mass[:, :, :8], full[:, :, :, 7, :8].sum(axis=2))


def test_generation_accumulates_stream_attention_mass(twin: Twin) -> None:
    """Generation returns the mass of its stream steps and full matrices, with the same tokens."""
    model, params = twin.model, twin.params
    prompt, lengths = tokens(2, 6), np.array([6, 4])
    options: dict[str, Any] = {"max_new_tokens": 7, "lengths_B": lengths}
    result = jaxllm.generate(model, params, prompt, attention_mass=True, **options)
    plain = jaxllm.generate(model, params, prompt, **options)
    assert plain.attention_mass is None
    np.testing.assert_array_equal(result.token_BT, plain.token_BT)
    steps = [
        s.attention_mass
        for s in jaxllm.stream(model, params, prompt, attention_mass=True, **options)
    ]
    close(result.attention_mass, np.sum(steps, axis=0))
    for row, length in enumerate(lengths):
        text = np.append(prompt[row, :length], result.token_BT[row, :-1])
        order = np.asarray(slot_order(result.cache))[row, : text.size]
        full = attentions(twin, text[None]).sum(axis=(0, 2, 3))[0]
        close(np.asarray(result.attention_mass)[row, order], full)


def test_branches_have_separate_mass_over_shared_prefix() -> None:
    """Each branch has its own attention mass, also over the prefix that branches share."""
    lm = random_model("llama")
    forks = fork(filled(lm, tokens(1, 9)), 2, capacity=4)
    out = jaxllm.forward(*lm, forks, [[5], [60]], attention_mass=True)
    assert out.attention_mass.shape == (2, 24 + 4 + 1)
    for row, token in enumerate((5, 60)):
        text = np.append(tokens(1, 9), [[token]], axis=1)
        before = jaxllm.forward(*lm, None, text[:, :-1], attention_mass=True)
        single = jaxllm.forward(*lm, None, text, attention_mass=True).attention_mass[0]
        theirs = np.asarray(single) - np.pad(before.attention_mass[0], (0, 1))
        close(np.asarray(out.attention_mass)[row, [*range(9), 28]], theirs, atol=1e-4)


def test_mass_sums_to_one_per_query_and_head() -> None:
    """Over many blocks the mass of each query and head sums to 1; empty slots receive none."""
    model, params = lm = random_model("gpt2", n_positions=800)
    cache = filled(lm, tokens(1, 600), capacity=800)
    layers, heads = model.config.num_hidden_layers, model.config.num_attention_heads
    out = jaxllm.forward(model, params, rewind(cache, 40), [[3, 4]], attention_mass="layers")
    mass = np.asarray(out.attention_mass)
    assert mass.shape == (layers, 1, 802)
    np.testing.assert_allclose(mass.sum(axis=-1), 2 * heads, rtol=1e-5)
    assert not mass[:, :, 560:800].any()  # empty slots receive nothing
    assert (mass[:, :, :560] > 0).all()


def test_disabled_mass_adds_no_matmuls() -> None:
    """Without attention_mass, the compiled step has exactly the matmuls of the plain model."""
    model, params = lm = random_model("llama")
    cache = filled(lm, tokens(1, 9), capacity=600)
    ids = at = jnp.full((1, 1), 9, jnp.int32)

    def plain(params: Any, segments: Any, ids: jax.Array, at: jax.Array) -> Any:
        trace = model.apply({"params": params}, ids, at, at.max(axis=1) + 1, segments)
        return trace.logits, trace.k, trace.v

    def count(lowered: Any) -> int:
        return lowered.as_text().count("stablehlo.dot_general")

    def lowered(mass: bool) -> Any:
        def step(params: Any, cache: Any, ids: jax.Array, at: jax.Array) -> Any:
            return jaxllm.forward(model, params, cache, ids, positions_BT=at, attention_mass=mass)

        return jax.jit(step).lower(params, cache, ids, at)

    without = count(jax.jit(plain).lower(params, cache.segments, ids, at))
    assert count(lowered(False)) == without < count(lowered(True))


def test_heavy_hitters_equal_sorting_by_mass() -> None:
    """The tokens with the largest mass and the recent ones stay; wrong shapes and sizes raise."""
    model, params = random_model("llama")
    cache = jaxllm.init_cache(model.config, 2, 24)
    out = jaxllm.prefill(model, params, cache, tokens(2, 12), attention_mass=True)
    cache, mass = out.cache, out.attention_mass
    kept = heavy_hitters(cache, mass, heavy=4, recent=3)
    for row in range(2):
        old = np.asarray(mass)[row, :9]
        expected = [*sorted(np.argsort(-old)[:4].tolist()), 9, 10, 11]
        positions = np.asarray(kept.position_BS)[row]
        assert sorted(positions[positions >= 0].tolist()) == expected
    assert heavy_hitters(cache, mass, heavy=99, recent=3).length_B.tolist() == [12, 12]
    with pytest.raises(CacheMismatchError, match="attention mass has"):
        heavy_hitters(cache, mass[:, :5], heavy=1, recent=1)
    with pytest.raises(CapacityError, match="heavy must be a whole number from 0 "):
        heavy_hitters(cache, mass, heavy=-1, recent=1)


@pytest.mark.parametrize("renumber", [False, True])
def test_sinks_and_window_decode_endlessly(renumber: bool) -> None:
    """With one layer, each step equals a run of sinks and window (StreamingLLM) in 10 slots."""
    lm = lm_of(("llama", "float32"), num_hidden_layers=1)
    text = tokens(1, 40)[0]
    cache = filled(lm, text[None, :6], capacity=10)
    for step in range(6, 40):
        if int(cache.cursor) == cache.capacity:
            cache = compact(sinks_and_window(cache, sinks=2, window=5), capacity=10)
            cache = close_gaps(cache) if renumber else cache
        logits, cache = jaxllm.decode_step(*lm, cache, text[step : step + 1])
    left = cache.tokens()
    assert left[:2] == text[:2].tolist()
    assert left[2:] == text[42 - len(left) :].tolist()
    at = np.sort(np.asarray(cache.position_BS)[0])[-len(left) :]
    assert int(at[-1]) == (int(cache.next_position_B[0]) - 1 if renumber else 39)
    assert (np.diff(at) == 1).all() == renumber
    close(logits[0], fresh(lm, left[:-1], positions=at, token=left[-1]))
    with pytest.raises(CapacityError, match="window must be a whole number from 1 "):
        sinks_and_window(cache, sinks=1, window=0)


def test_eviction_policies_count_positions() -> None:
    """sinks_and_window and heavy_hitters keep exactly the requested positions."""
    cache = filled(random_model("llama"), tokens(2, 9))
    mass_BS = jnp.pad(jnp.arange(9.0)[None], ((0, 1), (0, cache.slots - 9)))  # row 1 has none

    def left(cache: jaxllm.KVCache) -> list[list[int]]:
        return [sorted(p for p in row if p >= 0) for row in np.asarray(cache.position_BS).tolist()]

    assert left(sinks_and_window(cache, sinks=2, window=3)) == [[0, 1, 6, 7, 8]] * 2
    assert left(sinks_and_window(cache, sinks=0, window=1)) == [[8]] * 2
    assert left(heavy_hitters(cache, mass_BS, heavy=2, recent=3))[0] == [4, 5, 6, 7, 8]
    assert left(heavy_hitters(cache, mass_BS, heavy=0, recent=2)) == [[7, 8]] * 2
