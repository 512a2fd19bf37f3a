"""Bans, biases and forced tokens: published vectors, transformers' processors, edge cases."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from transformers.generation import logits_process as theirs

from jaxllm.errors import SamplingError
from jaxllm.generation.sampling.options import make_sampler
from jaxllm.generation.sampling.sampler import Context, Processor
from tests.generation.processors import apply, apply_theirs, logits, make_context

INF = float("inf")


def build(**options: Any) -> Processor:
    """Return the one processor that these options add to the default sampler."""
    always = {type(p) for p in make_sampler().processors}
    (processor,) = (p for p in make_sampler(**options).processors if type(p) not in always)
    return processor


def banned(processor: Processor, vocab: int, context: Context) -> list[list[int]]:
    scores = apply(processor, np.zeros((context.length_B.shape[0], vocab)), context)
    return [np.flatnonzero(np.isneginf(row)).tolist() for row in scores]


# Vectors of transformers, tests/generation/test_logits_process.py.


def test_bad_words_equal_transformers_vectors() -> None:
    """Bans equal the vectors of test_no_bad_words_dist_processor."""
    words = [[1], [4], [1, 0], [0, 1, 2], [1, 3, 1, 3]]
    processor = build(bad_words_ids=words, eos_token_ids=[4])
    context = make_context([[0, 1, 3, 1], [0, 1, 0, 1]])
    assert banned(processor, 5, context) == [[0, 1, 3], [0, 1, 2]]
    assert banned(build(bad_words_ids=[[4]], eos_token_ids=[4]), 5, context) == [[], []]


def test_sequence_bias_equals_transformers_vectors() -> None:
    """Scores equal the vectors of test_bias_dist_processor, with biases as dict and as list."""
    bias = {(1,): 100.0, (4,): 100.0, (1, 0): -100.0, (0, 1, 2): -100.0, (1, 3, 1, 3): -100.0}
    bias[(1, 3, 1, 3, 1, 3)] = -100.0
    context = make_context([[0, 1, 3, 1], [0, 1, 0, 1]])
    for given_as in (bias, [[list(ids), value] for ids, value in bias.items()]):
        after = apply(build(sequence_bias=given_as), np.zeros((2, 5)), context)
        assert after.tolist() == [
            [-100.0, 100.0, 0.0, -100.0, 100.0],
            [-100.0, 100.0, -100.0, 0.0, 100.0],
        ]


@pytest.mark.parametrize("end", [[0], [0, 18]])
def test_minimum_lengths_equal_transformers_vectors(end: list[int]) -> None:
    """EOS bans equal the vectors of test_min_length_dist_processor and
    test_new_min_length_dist_processor.
    """
    shortest = build(min_length=10, eos_token_ids=end)
    assert banned(shortest, 20, make_context([[1] * 5, [1] * 15])) == [end, []]
    new = build(min_new_tokens=3, eos_token_ids=end)
    rows = make_context([[1] * n for n in (5, 6, 7, 8, 15)], prompts=[5] * 5)
    assert banned(new, 20, rows) == [end, end, end, [], []]


def test_forced_tokens_equal_transformers_vectors() -> None:
    """Scores equal the vectors of test_forced_bos_token_logits_processor and
    test_forced_eos_token_logits_processor.
    """
    forced, free = [0.0] + [-INF] * 19, [0.05] * 20
    scores = np.full((2, 20), 0.05, np.float32)
    first = apply(
        build(forced_bos_token_id=0), scores, make_context([[7], [7] * 4], prompts=[1, 1])
    )
    np.testing.assert_array_equal(first, np.array([forced, free], np.float32))
    last = build(forced_eos_token_id=0, max_new_tokens=5)  # max_length 5, no prompt
    after = apply(last, scores, make_context([[7] * 4, [7] * 3]))
    np.testing.assert_array_equal(after, np.array([forced, free], np.float32))


@settings(max_examples=40)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=16), min_size=3, max_size=3),
    st.integers(1, 5),
)
def test_no_repeat_ngram_equals_transformers_per_row(rows: list[list[int]], size: int) -> None:
    """In rows of unequal length, bans equal NoRepeatNGramLogitsProcessor on each row."""
    x = logits(3, 5)
    ours = apply(build(no_repeat_ngram_size=size), x, make_context(rows, [1, 1, 1], slots=16))
    expected = apply_theirs(theirs.NoRepeatNGramLogitsProcessor(size), x, rows)
    np.testing.assert_array_equal(ours, expected)


@settings(max_examples=30)
@given(st.integers(0, 10**6))
def test_bad_words_and_biases_equal_transformers_per_row(seed: int) -> None:
    """In rows of unequal length, scores equal transformers' processors on each row."""
    rng, x = np.random.default_rng(seed), logits(3, 7, seed)
    rows = [rng.integers(0, 4, n).tolist() for n in (1, 5, 16)]
    words = [rng.integers(0, 4, n).tolist() for n in (1, 2, 2, 3, 4)]
    bias = {tuple(word): float(rng.normal()) for word in words}
    context = make_context(rows, slots=16)
    ours = apply(build(bad_words_ids=words), x, context)
    biased = apply(build(sequence_bias=bias), x, context)
    expected = apply_theirs(theirs.NoBadWordsLogitsProcessor(words), x, rows)
    np.testing.assert_array_equal(ours, expected)
    expected = apply_theirs(theirs.SequenceBiasLogitsProcessor(bias), x, rows)
    np.testing.assert_allclose(biased, expected, rtol=1e-5, atol=1e-6)


def test_suppressed_tokens_equal_transformers() -> None:
    """suppress_tokens and begin_suppress_tokens equal transformers' processors."""
    x, rows = logits(2, 9), [[1, 2, 3], [1, 2, 3, 4]]
    ours = apply(build(suppress_tokens=[3, 8]), x, make_context(rows))
    expected = apply_theirs(theirs.SuppressTokensLogitsProcessor([3, 8]), x, rows)
    np.testing.assert_array_equal(ours, expected)
    ours = apply(build(begin_suppress_tokens=[3, 8]), x, make_context(rows, prompts=[3, 3]))
    expected = apply_theirs(theirs.SuppressTokensAtBeginLogitsProcessor([3, 8], 3), x, rows)
    np.testing.assert_array_equal(ours, expected)


def test_begin_suppress_follows_forced_first_token() -> None:
    """After a forced first token, begin_suppress_tokens applies to the second, as GenerationMixin
    sets begin_index.
    """
    sampler = make_sampler(begin_suppress_tokens=[3], forced_bos_token_id=[5, -1, 5])
    processor = sampler.processors[0]
    rows = [[1], [1], [1, 2]]
    assert banned(processor, 7, make_context(rows, prompts=[1, 1, 2])) == [[], [3], [3]]
    longer = [[*row, 5] for row in rows]
    assert banned(processor, 7, make_context(longer, prompts=[1, 1, 2])) == [[3], [], []]


def test_logit_bias_adds_to_scores() -> None:
    """As in OpenAI's API, a bias is added to the score of its token id, which may be a string."""
    x = logits(2, 7)
    after = apply(build(logit_bias={2: 1.5, "4": -100}), x, make_context([[1], [2]]))
    np.testing.assert_allclose(after - x, [[0, 0, 1.5, 0, -100, 0, 0]] * 2, atol=1e-5)


def test_ban_of_every_token_is_ignored() -> None:
    """A constraint that would ban all tokens of a row is not applied."""
    context = make_context([[0, 1, 2], [0, 1, 1]])
    assert banned(build(no_repeat_ngram_size=1), 3, context) == [[], [0, 1]]
    assert banned(build(suppress_tokens=[0, 1, 2]), 3, context) == [[], []]
    assert banned(build(min_length=9, eos_token_ids=[0, 1, 2]), 3, context) == [[], []]
    assert banned(build(bad_words_ids=[[0], [1], [2]]), 3, context) == [[], []]


def test_forced_token_overrides_ban() -> None:
    sampler = make_sampler(
        forced_eos_token_id=2,
        max_new_tokens=4,
        suppress_tokens=[2],
        min_new_tokens=9,
        eos_token_ids=[2],
    )
    x = logits(1, 5)
    for processor in sampler.processors:
        x = apply(processor, x, make_context([[1, 1, 1]]))
    assert x.tolist() == [[-INF, -INF, 0.0, -INF, -INF]]


@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": {7: 1.0}},
        {"sequence_bias": {(1, 9): 1.0}},
        {"bad_words_ids": [[7]]},
        {"suppress_tokens": [7]},
        {"forced_bos_token_id": 7},
        {"forced_eos_token_id": 7, "max_new_tokens": 4},
        {"forced_eos_token_id": 1},  # without a number of new tokens
        {"eos_token_ids": [7]},
        {"dry_sequence_breakers": [[7]]},
        {"top_z": 1},
    ],
)
def test_make_sampler_refuses_tokens_outside_vocabulary(options: dict[str, Any]) -> None:
    """Token ids outside the vocabulary raise a SamplingError that names the option, as unknown
    options do; tests/test_options.py has the other invalid values.
    """
    with pytest.raises(SamplingError, match=next(iter(options)).removesuffix("s")):
        make_sampler(vocab_size=7, **options)
