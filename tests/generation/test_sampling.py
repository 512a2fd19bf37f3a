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
from jaxllm.errors import NonFiniteError
from jaxllm.generation.sampling.options import PROCESSORS, make_sampler, neutral_processors
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
from tests.generation.processors import logits

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


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 7, 131, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
def test_sampling_chain_equals_transformers_warpers(
    temperature: float, top_k: int, top_p: float
) -> None:
    """Temperature, top-k and top-p in sequence equal transformers' warpers."""
    x = logits(4, 131)
    theirs = TemperatureLogitsWarper(temperature)(None, torch.tensor(x))
    if top_k:
        theirs = TopKLogitsWarper(top_k)(None, theirs)
    if top_p < 1:
        theirs = TopPLogitsWarper(top_p)(None, theirs)
    ours = process(jnp.asarray(x), make_sampler(temperature=temperature, top_k=top_k, top_p=top_p))
    np.testing.assert_allclose(np.asarray(ours), theirs.numpy(), rtol=1e-6)


def test_top_k_keeps_ties_top_p_keeps_one() -> None:
    """top_k keeps all tokens tied with the k-th, and a top_p of 0 keeps one token."""
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


def test_temperature_zero_takes_first_maximum() -> None:
    """A temperature of 0 is greedy for every seed, and ties go to the lowest token id."""
    x = jnp.array([[1.0, 5.0, 5.0], [0.0, 0.0, 0.0]])
    cold = make_sampler(temperature=0.0)
    for seed in range(20):
        assert sample(jax.random.key(seed), x, cold).tolist() == [1, 0]
    assert sample(jax.random.key(0), x, GREEDY).tolist() == [1, 0]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_draws_follow_softmax(dtype: jnp.dtype) -> None:
    """Draws pass a chi-square test, also for bfloat16 logits, for which noise drawn in bfloat16
    would have few levels.
    """
    x = jnp.asarray([0.0, 1.0, -1.0, 2.0, 0.5, -3.0], dtype)
    draws = 20000
    tokens = sample(
        jax.random.key(3), jnp.broadcast_to(x, (draws, 6)), make_sampler(temperature=1.3)
    )
    expected = np.asarray(jax.nn.softmax(x.astype(jnp.float32) / 1.3), np.float64)
    counts = np.bincount(np.asarray(tokens), minlength=6)
    assert stats.chisquare(counts, expected / expected.sum() * draws).pvalue > 1e-3


def test_row_keys_are_unique_and_prefix_stable() -> None:
    """64 rows have 64 keys, and the first rows' keys do not depend on the number of rows."""
    few, many = (jax.random.key_data(row_keys(7, n)).tolist() for n in (3, 64))
    assert many[:3] == few
    assert len({tuple(key) for key in many}) == 64


def test_row_keys_use_all_64_seed_bits() -> None:
    """Seeds that differ in any bit give different keys; up to 32 bits, JAX's own keys."""
    seeds = [0, 1, 2**32, 2**32 + 1, 2**63, 2**64 - 1]
    data = {jax.random.key_data(row_keys(seed, 1)).tobytes() for seed in seeds}
    assert len(data) == len(seeds)
    expected = jax.random.fold_in(jax.random.key(5), 0)  # seeds of up to 32 bits: JAX's own key
    assert (jax.random.key_data(row_keys(5, 1)[0]) == jax.random.key_data(expected)).all()


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "mirostat_eta"])
def test_disabled_option_leaves_row_bits_unchanged(name: str) -> None:
    """Every second row enables one option; the other rows' scores keep their logits' bits."""
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


def test_mixed_row_settings_equal_single_row_runs() -> None:
    """With all processors and different values per row, scores and draws equal single-row runs, bit
    for bit, over three steps.
    """
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


def test_option_sweep_compiles_once() -> None:
    """Changing each option to its other value in turn reuses one trace."""
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


def test_sampling_chain_works_under_vmap_and_loop() -> None:
    """Under vmap and in a while_loop, the chain gives the scores and state of separate steps; the
    loop's carry has constant shapes.
    """
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


def test_list_options_are_padded_to_powers_of_two() -> None:
    """Lists of 0 to 32 tokens have three shapes (8, 16, 32): growing ones recompile rarely."""
    shapes = {
        tuple(leaf.shape for leaf in jax.tree.leaves(make_sampler(suppress_tokens=range(n))))
        for n in range(33)
    }
    assert len(shapes) == 3  # up to 8, 16, 32


def test_processor_classes_have_distinct_tree_structures() -> None:
    """JAX compares only a dataclass's static data: equal structures would share a program."""
    every = make_sampler(**FIXED, **{name: on for name, (_, on) in SETTINGS.items()}).processors
    structures = [jax.tree.structure(jax.tree.map(lambda _: 0, p)) for p in every]
    assert all(a != b for i, a in enumerate(structures) for b in structures[:i])


def test_processor_order_is_fixed() -> None:
    """Processors follow the table's order, whichever order the options have; SETTINGS has all."""
    assert [*SETTINGS] == [*PROCESSORS]
    names = list(SETTINGS)
    forward = make_sampler(**FIXED, **{name: SETTINGS[name][1] for name in names})
    backward = make_sampler(**FIXED, **{name: SETTINGS[name][1] for name in reversed(names)})
    assert [type(p).__name__ for p in forward.processors] == [
        "LogitBias", "SequenceBias", "RepetitionPenalty", "FrequencyPenalty", "DryPenalty",
        "NoRepeatNGram", "BadWords", "SuppressTokens", "BeginSuppressTokens", "MinLength",
        "ForcedBos", "ForcedEos", "Temperature", "TopNSigma", "TopK", "TopP", "MinP", "TypicalP",
        "EpsilonCutoff", "EtaCutoff", "XTC", "Mirostat",
    ]  # fmt: skip
    assert jax.tree.structure(forward) == jax.tree.structure(backward)


def test_sample_refuses_nonfinite_rows() -> None:
    """NaN, infinity or only -inf in a row raises NonFiniteError; in jit nothing can raise."""
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


def test_neutral_processors_change_no_bit() -> None:
    """Together they are one of each, and leave scores alone, those of removed tokens too."""
    before, after = neutral_processors()
    chain = (*before, *after)
    assert [type(p) for p in chain] == list(dict.fromkeys(PROCESSORS.values()))
    scores_BV = np.array(logits(3, 131))
    scores_BV[:, 7], scores_BV[:, 9] = -np.inf, -0.0
    text_BL = jnp.array([[5, 5, 3, 5, 3, 5, 2, -1]] * 3, jnp.int32)
    number_B = jnp.full(3, 7)
    context = Context(text_BL, number_B // 2, number_B, jax.random.split(jax.random.key(0), 3))
    found = PROCESS(scores_BV, Sampler(chain), context)
    np.testing.assert_array_equal(found, scores_BV)
