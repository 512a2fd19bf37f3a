"""Penalties: published vectors, transformers' processors row by row, and DRY by brute force."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from transformers.generation import logits_process as theirs

from jaxllm.generation.sampling.options import make_sampler
from jaxllm.generation.sampling.penalties import DryPenalty, FrequencyPenalty, RepetitionPenalty
from tests.generation.processors import apply, apply_theirs, logits, make_context

NO_BREAKERS = np.full(1, -1, np.int32)


def softmax(scores: np.ndarray) -> np.ndarray:
    mass = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return mass / mass.sum(axis=-1, keepdims=True)


def dry_by_hand(
    tokens: Sequence[int],
    vocab: int,
    multiplier: float,
    base: float,
    allowed: int,
    last_n: int,
    breakers: set[int],
) -> np.ndarray:
    """Return DRY's penalty for each token, in plain Python."""
    tokens = list(tokens) if last_n < 0 else list(tokens)[max(len(tokens) - last_n, 0) :]
    penalty = np.zeros(vocab)
    for token in set(tokens) - breakers:
        longest = 0
        for end in (i for i, t in enumerate(tokens) if t == token):
            n = 0
            while n < end and tokens[end - 1 - n] == tokens[-1 - n] not in breakers:
                n += 1
            longest = max(longest, n)
        if longest >= allowed:
            penalty[token] = multiplier * base ** (longest - allowed)
    return penalty


@pytest.mark.parametrize(
    ("tokens", "after", "multiplier", "allowed", "last_n", "breaker"),
    [
        ([0, 1], [0.25] * 4, 1.0, 2, 4, -1),
        ([0, 1, 2, 0, 1], [0.296923, 0.296923, 0.109232, 0.296923], 1.0, 2, 5, -1),
        ([0, 1, 3, 4, 0, 1], [0.2] * 5, 1.0, 2, 6, 3),
        ([0, 1, 2, 0, 1], [0.241818, 0.241818, 0.032727, 0.241818, 0.241818], 2.0, 2, 5, -1),
        ([0, 1, 2, 3, 4, 0, 1], [0.2] * 5, 1.0, 4, 7, -1),
    ],
)
def test_dry_equals_llama_cpp_vectors(
    tokens: list[int],
    after: list[float],
    multiplier: float,
    allowed: int,
    last_n: int,
    breaker: int,
) -> None:
    """Probabilities equal the vectors of test_dry, tests/test-sampling.cpp, with base 1.1."""
    scores = np.full((1, len(after)), np.log(1 / len(after)), np.float32)
    processor = DryPenalty(multiplier, 1.1, allowed, last_n, np.array([breaker], np.int32))
    np.testing.assert_allclose(
        softmax(apply(processor, scores, make_context([tokens]))), [after], atol=1e-5
    )


@pytest.mark.parametrize("penalty", [0.4, 1.0, 1.3, 3.0])
def test_repetition_penalty_equals_transformers_per_row(penalty: float) -> None:
    """In rows of unequal length, scores equal transformers' processor on each row."""
    rng, x = np.random.default_rng(1), logits(4, 31)
    rows = [rng.integers(0, 31, n).tolist() for n in (1, 7, 24, 16)]
    ours = apply(RepetitionPenalty(penalty), x, make_context(rows, [1, 3, 10, 16]))
    expected = apply_theirs(theirs.RepetitionPenaltyLogitsProcessor(penalty), x, rows)
    np.testing.assert_allclose(ours, expected, rtol=1e-6)


def test_presence_and_frequency_count_only_sampled_tokens() -> None:
    """OpenAI's formula, score - count * frequency - (count > 0) * presence, counts sampled tokens
    and not the prompt.
    """
    x = logits(2, 5)
    context = make_context([[3, 3, 1, 1, 0], [4, 4, 4, 2]], prompts=[2, 4])
    ours = apply(FrequencyPenalty(jnp.array([0.5, 2.0]), jnp.array([0.25, 2.0])), x, context)
    np.testing.assert_allclose(ours[0] - x[0], [-0.75, -1.0, 0, 0, 0], atol=1e-6)
    np.testing.assert_array_equal(ours[1], x[1])  # no token is sampled yet


def test_penalties_count_real_tokens_not_empty_slots() -> None:
    """Slots beyond a row's length are empty whatever they hold; token 0 is like any other."""
    x = np.ones((1, 4), np.float32)
    garbage = make_context([[2, 0, 0, 3, 3]]).replace(length_B=jnp.array([3], jnp.int32))
    for context in (make_context([[2, 0, 0]]), garbage):
        assert apply(RepetitionPenalty(2.0), x, context).tolist() == [[0.5, 1, 0.5, 1]]
        assert apply(FrequencyPenalty(0.0, 0.25), x, context).tolist() == [[0.5, 1, 0.75, 1]]
    assert apply(RepetitionPenalty(2.0), x, make_context([[]])).tolist() == x.tolist()
    dry = DryPenalty(1.0, 2.0, 1, -1, NO_BREAKERS)
    assert apply(dry, x, make_context([[]])).tolist() == x.tolist()


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 3), max_size=24),
    st.sampled_from([0.0, 0.8, 2.5]),
    st.sampled_from([1.0, 1.3, 1.75]),
    st.integers(1, 4),
    st.sampled_from([-1, 0, 1, 5, 13, 100]),
    st.sampled_from([(-1, -1), (3, -1), (0, 2)]),
)
def test_dry_equals_brute_force(
    tokens: list[int],
    multiplier: float,
    base: float,
    allowed: int,
    last_n: int,
    breakers: tuple[int, int],
) -> None:
    """Penalties equal a plain-Python search for the longest repeated suffix."""
    x = logits(1, 5)
    processor = DryPenalty(multiplier, base, allowed, last_n, np.array(breakers, np.int32))
    ours = apply(processor, x, make_context([tokens]))
    expected = x[0] - dry_by_hand(tokens, 5, multiplier, base, allowed, last_n, set(breakers))
    np.testing.assert_allclose(ours[0], expected, rtol=1e-4)


def test_dry_settings_and_breakers_apply_per_row() -> None:
    tokens = [1, 2, 3, 1, 2, 3, 1, 2]
    breakers = np.array([[-1, -1], [2, -1], [3, 1], [-1, -1]], np.int32)
    each = [(0.5, 1.75, 2, -1), (0.5, 2.0, 1, -1), (1.0, 1.5, 1, -1), (1.0, 1.5, 1, 4)]
    columns = [jnp.array(values, jnp.float32) for values in zip(*each, strict=True)]
    x = logits(4, 5)
    ours = apply(DryPenalty(*columns, breakers), x, make_context([tokens] * 4))
    for row, (multiplier, base, allowed, last_n) in enumerate(each):
        stops = set(breakers[row].tolist())
        gone = dry_by_hand(tokens, 5, multiplier, base, allowed, last_n, stops)
        np.testing.assert_allclose(ours[row], x[row] - gone, rtol=1e-5)


def test_dry_penalty_stays_finite_for_long_repetition() -> None:
    x = logits(1, 5)
    ours = apply(DryPenalty(5.0, 4.0, 2, -1, NO_BREAKERS), x, make_context([[1] * 500], slots=512))
    assert np.isfinite(ours).all() and ours[0, 1] < -1e29
    assert (ours[0] == x[0]).tolist() == [True, False, True, True, True]


def test_dry_sequence_breakers_are_token_ids() -> None:
    """make_sampler takes breakers as token ids, and the penalty equals brute force with them."""
    sampler = make_sampler(dry_multiplier=1.0, dry_sequence_breakers=[3, 2], vocab_size=5)
    (processor,) = (p for p in sampler.processors if isinstance(p, DryPenalty))
    tokens = [0, 1, 1, 2, 0, 1, 3, 0, 1]
    expected = dry_by_hand(tokens, 5, 1.0, 1.75, 2, -1, {2, 3})
    assert expected.any()
    x = logits(1, 5)
    np.testing.assert_allclose(
        apply(processor, x, make_context([tokens]))[0], x[0] - expected, rtol=1e-5
    )
