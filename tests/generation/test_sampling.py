"""Samplers against brute force, transformers' warpers and their exact distributions."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy import stats
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import jaxllm
from jaxllm.errors import NonFiniteError, SamplingError
from jaxllm.generation.sampling.options import PROCESSORS, make_sampler
from jaxllm.generation.sampling.sampler import (
    GREEDY,
    Context,
    Sampler,
    apply_processors as process_in,
    row_keys,
    sample,
    sample_next,
)
from jaxllm.generation.sampling.truncation import TopK, TopP

TOP_K, TOP_P = jax.jit(TopK.__call__), jax.jit(TopP.__call__)
PROCESS = jax.jit(process_in)

# For each option, a neutral value and one that changes the scores of TEXT.
SETTINGS: dict[str, tuple[Any, Any]] = {
    "logit_bias": (None, {5: 2.0}),
    "sequence_bias": ({(9, 9): 2.0}, {(3, 4): 2.0}),  # TEXT has no 9
    "repetition_penalty": (1.0, 1.3),
    "presence_penalty": (0, 0.7),
    "frequency_penalty": (0, 0.4),
    "dry_multiplier": (0, 0.8),
    "dry_base": (1.75, 2.5),
    "dry_allowed_length": (2, 1),
    "dry_penalty_last_n": (-1, 7),
    "dry_sequence_breakers": (None, [2]),
    "no_repeat_ngram_size": (0, 2),
    "bad_words_ids": ([[9, 9]], [[3, 4], [8]]),
    "suppress_tokens": (None, [6, 7]),
    "begin_suppress_tokens": (None, [10]),
    "min_length": (0, 12),
    "min_new_tokens": (0, 9),
    "forced_bos_token_id": (-1, 2),
    "forced_eos_token_id": (None, 11),
    "temperature": (1.0, 0.7),
    "top_n_sigma": (0, 1.5),
    "top_k": (0, 40),
    "top_p": (1.0, 0.8),
    "min_p": (0, 0.05),
    "typical_p": (1.0, 0.9),
    "epsilon_cutoff": (0, 0.003),
    "eta_cutoff": (0, 0.01),
    "xtc_probability": (0, 1.0),
    "xtc_threshold": (0.1, 0.05),
    "mirostat_tau": (0, 2.0),
    "mirostat_eta": (0.1, 0.3),
}
REQUIRES = {  # options that have an effect only with another one
    "dry_base": {"dry_multiplier": 1.0},
    "dry_allowed_length": {"dry_multiplier": 1.0},
    "dry_penalty_last_n": {"dry_multiplier": 1.0},
    "dry_sequence_breakers": {"dry_multiplier": 1.0},
    "xtc_threshold": {"xtc_probability": 1.0},
    "mirostat_eta": {"mirostat_tau": 2.0},
}
FIXED: dict[str, Any] = {"vocab_size": 131, "eos_token_ids": [11], "max_new_tokens": 8}
PROMPT, TEXT = 3, [1, 2, 3, 1, 2, 3, 4, 1, 2, 3]


@jax.jit
def STEP(
    logits_BV: jax.Array, sampler: Sampler, context: Context
) -> tuple[jax.Array, jax.Array, Sampler]:
    """Return the scores, the tokens drawn and the next sampler."""
    scores_BV = process_in(logits_BV, sampler, context)
    token_B, _ = sample_next(scores_BV, Sampler(), context)
    return scores_BV, token_B, sampler.observe(scores_BV, token_B)


def make_context(rows: int, prompt: int = PROMPT, text: Sequence[int] = TEXT) -> Context:
    """Return a context of rows with the same text."""
    token_L = np.full(16, -1, np.int32)
    token_L[: len(text)] = text
    return Context(
        jnp.asarray(np.tile(token_L, (rows, 1))),
        jnp.full(rows, prompt, jnp.int32),
        jnp.full(rows, len(text), jnp.int32),
        row_keys(1, rows),
    )


def process(logits_BV: jax.Array, sampler: Sampler) -> jax.Array:
    """Return the processed scores for an empty text."""
    return PROCESS(logits_BV, sampler, Context.empty(jax.random.key(0), logits_BV.shape[0]))


def logits(rows: int, vocab: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(rows, vocab)) * 3).astype(np.float32)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 7, 131, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
def test_the_chain_equals_transformers_warpers(
    temperature: float, top_k: int, top_p: float
) -> None:
    x = logits(4, 131)
    theirs = TemperatureLogitsWarper(temperature)(None, torch.tensor(x))
    if top_k:
        theirs = TopKLogitsWarper(top_k)(None, theirs)
    if top_p < 1:
        theirs = TopPLogitsWarper(top_p)(None, theirs)
    ours = process(jnp.asarray(x), make_sampler(temperature=temperature, top_k=top_k, top_p=top_p))
    np.testing.assert_allclose(np.asarray(ours), theirs.numpy(), rtol=1e-6)


def test_top_k_keeps_all_ties_and_top_p_zero_keeps_one() -> None:
    x = jnp.array([[1.0, 3.0, 2.0, 2.0, 0.0], [-0.0, 0.0, -1.0, -2.0, -3.0]])
    kept = np.isfinite(np.asarray(TopK(2)(x)))
    assert kept.tolist() == [[False, True, True, True, False], [True, True, False, False, False]]
    assert np.isfinite(np.asarray(TopP(0.0)(x[:1]))).tolist() == [[False, True] + [False] * 3]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(-50, 50, width=32, allow_subnormal=False), min_size=6, max_size=6),
    st.integers(1, 8),
    st.floats(0.01, 0.99),
)
def test_top_k_and_top_p_equal_brute_force(values: list[float], k: int, p: float) -> None:
    x = np.array(values, np.float32)
    kept_k = np.isfinite(np.asarray(TOP_K(TopK(k), jnp.asarray(x)[None])))[0]
    assert kept_k.tolist() == [bool((x > v).sum() < k) for v in x]
    mass = np.exp(x.astype(np.float64) - x.max())
    mass /= mass.sum()
    above = np.array([mass[x > v].sum() for v in x])
    kept_p = np.isfinite(np.asarray(TOP_P(TopP(p), jnp.asarray(x)[None])))[0]
    certain = np.abs(above - p) > 1e-5  # not within float32 rounding of p
    assert (kept_p == (above < p))[certain].all()


def test_each_row_has_its_own_settings() -> None:
    x = jnp.asarray(logits(3, 131))
    mixed = process(x, make_sampler(temperature=[0.5, 1.0, 0.0], top_k=[3, 0, 9]))
    for row, (temperature, top_k) in enumerate([(0.5, 3), (1.0, 0), (0.0, 9)]):
        single = process(x[row : row + 1], make_sampler(temperature=temperature, top_k=top_k))
        np.testing.assert_array_equal(np.asarray(mixed[row]), np.asarray(single[0]))


def test_temperature_zero_is_greedy_and_ties_go_to_the_first() -> None:
    x = jnp.array([[1.0, 5.0, 5.0], [0.0, 0.0, 0.0]])
    cold = make_sampler(temperature=0.0)
    for seed in range(20):
        assert sample(jax.random.key(seed), x, cold).tolist() == [1, 0]
    assert sample(jax.random.key(0), x, GREEDY).tolist() == [1, 0]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_draws_follow_the_softmax(dtype: jnp.dtype) -> None:
    """Chi-square; bf16 logits too, whose noise would have few levels if drawn in bf16."""
    x = jnp.asarray([0.0, 1.0, -1.0, 2.0, 0.5, -3.0], dtype)
    draws = 20000
    tokens = sample(
        jax.random.key(3), jnp.broadcast_to(x, (draws, 6)), make_sampler(temperature=1.3)
    )
    expected = np.asarray(jax.nn.softmax(x.astype(jnp.float32) / 1.3), np.float64)
    counts = np.bincount(np.asarray(tokens), minlength=6)
    assert stats.chisquare(counts, expected / expected.sum() * draws).pvalue > 1e-3


def test_a_row_draws_the_same_whatever_shares_its_batch() -> None:
    x = jnp.asarray(logits(5, 131))
    keys = row_keys(7, 5)
    batched = sample(keys, x, make_sampler(temperature=1.0))
    for row in range(5):
        single = sample(keys[row : row + 1], x[row : row + 1], make_sampler(temperature=1.0))
        assert int(single[0]) == int(batched[row])


def test_each_row_has_a_key_of_its_own() -> None:
    few, many = (jax.random.key_data(row_keys(7, n)).tolist() for n in (3, 64))
    assert many[:3] == few
    assert len({tuple(key) for key in many}) == 64


def test_all_64_bits_of_a_seed_count() -> None:
    seeds = [0, 1, 2**32, 2**32 + 1, 2**63, 2**64 - 1]
    data = {jax.random.key_data(row_keys(seed, 1)).tobytes() for seed in seeds}
    assert len(data) == len(seeds)
    expected = jax.random.fold_in(jax.random.key(5), 0)  # seeds of up to 32 bits: JAX's own key
    assert (jax.random.key_data(row_keys(5, 1)[0]) == jax.random.key_data(expected)).all()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": "hot"},
        {"top_k": -1},
        {"top_k": 1.5},
        {"top_p": 1.1},
        {"top_p": [0.5, -0.5]},
        {"top_k": 10**400},
        {"temperature": 1e39},
        {"top_z": 1},
        {"min_p": 1.05},
        {"min_p": -0.1},
        {"typical_p": 0.0},
        {"typical_p": 1.1},
        {"epsilon_cutoff": 1.0},
        {"eta_cutoff": -0.1},
        {"top_n_sigma": -1},
        {"repetition_penalty": 0.0},
        {"presence_penalty": float("inf")},
        {"frequency_penalty": "often"},
        {"dry_multiplier": -1},
        {"dry_base": 0.9},
        {"dry_allowed_length": 0},
        {"dry_penalty_last_n": -2},
        {"xtc_probability": 1.1},
        {"xtc_threshold": -0.1},
        {"mirostat_tau": -1},
        {"mirostat_eta": [0.1, -0.1]},
        {"min_p": [[0.1]]},
    ],
)
def test_impossible_settings_are_refused_by_name(options: dict[str, object]) -> None:
    with pytest.raises(SamplingError, match=next(iter(options))):
        make_sampler(**options)


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, True])
def test_impossible_seeds_are_refused(seed: object) -> None:
    with pytest.raises(SamplingError, match="seed"):
        row_keys(seed, 1)  # type: ignore[arg-type]


def test_new_values_do_not_recompile() -> None:
    traces = 0

    @jax.jit
    def draw(key: jax.Array, x: jax.Array, sampler: jaxllm.Sampler) -> jax.Array:
        nonlocal traces
        traces += 1
        return sample(key, x, sampler)

    for temperature, top_k, top_p in [(0.0, 0, 1.0), (0.7, 40, 0.9), (1.5, 10**6, 0.0)]:
        sampler = make_sampler(temperature=temperature, top_k=top_k, top_p=top_p)
        draw(jax.random.key(0), jnp.asarray(logits(2, 131)), sampler)
    assert traces == 1


def test_every_option_is_tried() -> None:
    assert list(SETTINGS) == list(PROCESSORS)


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "mirostat_eta"])
def test_off_leaves_a_row_bit_for_bit_beside_a_row_that_is_on(name: str) -> None:
    """Rows with the same text and all processors; in every second one option is on."""
    off, on = SETTINGS[name]
    context = make_context(4)
    if name == "begin_suppress_tokens":
        context = make_context(4, prompt=len(TEXT))
    if name == "forced_bos_token_id":
        context = make_context(4, prompt=1, text=[1])
    x = np.repeat(logits(1, 131), 4, axis=0)
    x[:, 20:24] = [0.0, -0.0, -np.inf, 2e-38]
    rows = {each: [value] * 4 for each, (value, _) in SETTINGS.items()}
    rows |= {each: [value] * 4 for each, value in REQUIRES.get(name, {}).items()}
    rows |= {name: [off, [on] if name == "forced_eos_token_id" else on] * 2}
    fixed = FIXED | {"max_new_tokens": [8] * 4}
    scores = np.asarray(STEP(x, make_sampler(**fixed, **rows).begin(4), context)[0])
    if name not in REQUIRES:
        assert scores[0].tobytes() == scores[2].tobytes() == x[0].tobytes()
    assert not np.array_equal(scores[0], scores[1])
    assert scores[1].tobytes() == scores[3].tobytes() or name == "xtc_probability"


def test_a_batch_of_rows_with_all_settings_different_equals_each_row_alone() -> None:
    """All processors, each row its own values; three steps, for what mirostat remembers."""
    rows = 4
    each: dict[str, list[Any]] = {}
    for i, (name, (off, on)) in enumerate(SETTINGS.items()):
        each[name] = [off, on, off, on] if i % 2 else [on, on, off, off]
    each |= {"temperature": [1.0, 0.7, 0.0, 1.4], "top_k": [0, 50, 30, 90]}
    each |= {"top_p": [1.0, 0.95, 0.5, 0.8], "mirostat_tau": [0, 2.0, 3.0, 4.0]}
    each |= {"forced_eos_token_id": [None, [11], None, [12]]}
    budgets = [8, 9, 10, 11]
    fixed: dict[str, Any] = {"vocab_size": 131, "eos_token_ids": [11]}
    batched = make_sampler(**fixed, max_new_tokens=budgets, **each).begin(rows)
    single = [
        make_sampler(
            **fixed,
            max_new_tokens=budgets[row : row + 1],
            **{name: values[row : row + 1] for name, values in each.items()},
        ).begin(1)
        for row in range(rows)
    ]
    context = make_context(rows)
    for i in range(3):
        x = logits(rows, 131, seed=i)
        scores, drawn, batched = STEP(x, batched, context)
        for row in range(rows):
            one = slice(row, row + 1)
            row_context = jax.tree.map(lambda leaf, one=one: leaf[one], context)
            row_scores, row_drawn, single[row] = STEP(x[one], single[row], row_context)
            assert np.asarray(row_scores[0]).tobytes() == np.asarray(scores[row]).tobytes()
            assert int(row_drawn[0]) == int(drawn[row])
        context = context.replace(
            token_BL=context.token_BL.at[:, len(TEXT) + i].set(drawn),
            length_B=context.length_B + 1,
            key_B=row_keys(i, rows),
        )


def test_a_sweep_of_all_values_compiles_once() -> None:
    traces = 0

    @jax.jit
    def draw(x: jax.Array, sampler: Sampler, context: Context) -> jax.Array:
        nonlocal traces
        traces += 1
        return sample_next(x, sampler, context)[0]

    x, context = jnp.asarray(logits(2, 131)), make_context(2)
    empty: dict[str, Any] = {
        name: {} if name == "logit_bias" else []
        for name, (off, _) in SETTINGS.items()
        if off is None
    }
    first = {name: off for name, (off, _) in SETTINGS.items()} | empty
    second = {name: on for name, (_, on) in SETTINGS.items()}
    swept = [first, second]
    for name in SETTINGS:  # one at a time
        swept.append(first | {name: second[name]})
    for options in swept:
        draw(x, make_sampler(**FIXED, **options).begin(2), context)
    assert traces == 1


def test_the_chain_works_under_vmap_and_in_a_loop() -> None:
    """The loop's carry keeps its shapes once the sampler has begun."""
    names = ["repetition_penalty", "dry_multiplier", "bad_words_ids", "min_p", "xtc_probability"]
    sampler = make_sampler(**{name: SETTINGS[name][1] for name in [*names, "mirostat_tau"]})
    quick = (p for p in sampler.processors if not isinstance(p, TopK | TopP))
    sampler = sampler.replace(processors=tuple(quick))
    x, contexts = jnp.asarray(logits(3, 131)), make_context(3)

    def run_row(x_V: jax.Array, context: Context) -> tuple[jax.Array, jax.Array]:
        def body(state: tuple[jax.Array, Sampler]) -> tuple[jax.Array, Sampler]:
            _, after = sample_next(x_V[None], state[1], context)
            return state[0] + 1, after

        _, after = jax.lax.while_loop(lambda s: s[0] < 3, body, (0, sampler.begin(1)))
        return process_in(x_V[None], after, context)[0], after.processors[-1].mu  # type: ignore[attr-defined]

    one_each = jax.tree.map(lambda leaf: leaf[:, None], contexts)
    scores, mu = jax.jit(jax.vmap(run_row))(x, one_each)
    assert np.isfinite(np.asarray(scores)).any(axis=1).all()
    step = sampler.begin(3)
    for _ in range(3):
        _, _, step = STEP(x, step, contexts)
    expected = STEP(x, step, contexts)[0]
    np.testing.assert_allclose(np.asarray(scores), np.asarray(expected), rtol=1e-6)
    np.testing.assert_allclose(np.asarray(mu)[:, 0], np.asarray(step.processors[-1].mu), rtol=1e-6)


def test_a_list_that_grows_compiles_when_it_outgrows_a_power_of_two() -> None:
    shapes = {
        tuple(leaf.shape for leaf in jax.tree.leaves(make_sampler(suppress_tokens=range(n))))
        for n in range(33)
    }
    assert len(shapes) == 3  # up to 8, 16, 32


def test_processors_of_two_classes_never_have_the_same_structure() -> None:
    """JAX would take them for one program's arguments: it compares a dataclass's static data."""
    every = make_sampler(**FIXED, **{name: on for name, (_, on) in SETTINGS.items()}).processors
    structures = [jax.tree.structure(jax.tree.map(lambda _: 0, p)) for p in every]
    assert all(a != b for i, a in enumerate(structures) for b in structures[:i])


def test_the_order_is_that_of_the_table_whatever_order_was_given() -> None:
    names = list(SETTINGS)
    forward = make_sampler(**FIXED, **{name: SETTINGS[name][1] for name in names})
    backward = make_sampler(**FIXED, **{name: SETTINGS[name][1] for name in reversed(names)})
    assert [type(p).__name__ for p in forward.processors] == [
        *(
            "LogitBias",
            "SequenceBias",
            "RepetitionPenalty",
            "FrequencyPenalty",
            "DryPenalty",
            "NoRepeatNGram",
        ),
        *(
            "BadWords",
            "SuppressTokens",
            "BeginSuppressTokens",
            "MinLength",
            "ForcedBos",
            "ForcedEos",
        ),
        *(
            "Temperature",
            "TopNSigma",
            "TopK",
            "TopP",
            "MinP",
            "TypicalP",
            "EpsilonCutoff",
            "EtaCutoff",
        ),
        *("XTC", "Mirostat"),
    ]
    assert jax.tree.structure(forward) == jax.tree.structure(backward)


def test_a_row_that_nothing_can_be_drawn_from_is_refused() -> None:
    good_V = np.zeros(9, np.float32)
    masked_V = np.where(np.arange(9) == 4, np.float32(0), -np.inf).astype(np.float32)
    key = jax.random.key(0)
    assert int(jaxllm.sample(key, jnp.array([good_V, masked_V]), jaxllm.Sampler())[1]) == 4
    for wrong in (np.nan, np.inf, -np.inf):
        bad_V = good_V.copy()
        bad_V[3 if wrong != -np.inf else slice(None)] = wrong
        for sampler in (jaxllm.GREEDY, jaxllm.Sampler()):
            with pytest.raises(NonFiniteError, match="row 1"):
                jaxllm.sample(key, jnp.array([good_V, bad_V]), sampler)
            jitted = jax.jit(jaxllm.sample)(key, jnp.array([good_V, bad_V]), sampler)
            assert jitted.shape == (2,)  # jitted code cannot raise
