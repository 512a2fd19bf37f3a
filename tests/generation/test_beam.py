"""Beam search against transformers, and against brute force where that is feasible."""

import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

import jaxllm
from jaxllm.errors import CacheMismatchError, CapacityError, SamplingError, TokenError
from jaxllm.generation.loops.beam import BeamResult, beam_search
from jaxllm.generation.loops.finish import Finish
from jaxllm.generation.sampling.penalties import RepetitionPenalty
from jaxllm.generation.sampling.sampler import Context, Processor, Sampler
from tests.tiny_models import BOTH, VOCAB, in_both, load_twin, random_model, save_random, tokens

BEAMS = 4
EOS_SETS = [[], [7], list(range(3, VOCAB, 9))]
MODES = [False, True, "never"]
PENALTIES = [-1.0, 0.0, 0.5, 1.0, 2.0]


@pytest.fixture(scope="module", params=BOTH)
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp(request.param)
    save_random(directory, request.param, spread=0.2, num_hidden_layers=2)
    return _without_defaults(load_twin(directory))


@pytest.fixture(scope="module")
def lm() -> Any:
    return random_model("llama", spread=0.2)


def _without_defaults(twin: Any) -> Any:
    twin.torch_model.generation_config = transformers.GenerationConfig()
    return twin


def random_prompts(
    lengths: list[int], vocab: int = VOCAB, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Return random prompts of these lengths, padded on the right, and the lengths."""
    rng = np.random.default_rng(seed)
    return rng.integers(3, vocab, (len(lengths), max(lengths))), np.array(lengths)


def reference(
    model: Any, prompts: np.ndarray, lengths: np.ndarray, new: int, **options: Any
) -> tuple[list[list[list[int]]], np.ndarray]:
    """Return transformers' sequences, without prompts and padding, and their scores."""
    B, T = prompts.shape
    ids, mask = np.zeros((B, T), np.int64), np.zeros((B, T), np.int64)
    for b, n in enumerate(lengths):  # transformers needs left padding
        ids[b, T - n :], mask[b, T - n :] = prompts[b, :n], 1
    eos = options.pop("eos_token_ids", [])
    out = model.generate(
        torch.tensor(ids),
        attention_mask=torch.tensor(mask),
        do_sample=False,
        max_new_tokens=new,
        eos_token_id=list(eos) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    found = []
    for row in out.sequences[:, T:].tolist():
        ends = [i for i, token in enumerate(row) if token in eos]
        found.append(row[: ends[0] + 1] if ends else row)
    n = options["num_return_sequences"]
    return [found[b * n : (b + 1) * n] for b in range(B)], out.sequences_scores.reshape(
        B, n
    ).numpy()


def sequences(result: BeamResult) -> list[list[list[int]]]:
    """Return the tokens without padding."""
    return [[[t for t in row if t >= 0] for row in prompt] for prompt in result.token_BNT.tolist()]


def assert_equals_transformers(
    twin: Any,
    prompts: np.ndarray,
    lengths: np.ndarray,
    new: int,
    ours: tuple[Processor, ...] = (),
    theirs: tuple[transformers.LogitsProcessor, ...] = (),
    **options: Any,
) -> BeamResult:
    """Assert that sequences, scores, lengths and finish reasons equal transformers'."""
    processors = transformers.LogitsProcessorList(theirs)
    found, scores = reference(
        twin.torch_model, prompts, lengths, new, logits_processor=processors, **options
    )
    result = beam_search(
        twin.model, twin.params, prompts, lengths_B=lengths, max_new_tokens=new,
        sampler=Sampler(ours), **options,
    )  # fmt: skip
    assert sequences(result) == found
    np.testing.assert_allclose(result.score_BN, scores, atol=1e-4, rtol=1e-5)
    assert result.length_BN.tolist() == [[len(row) for row in prompt] for prompt in found]
    eos = options["eos_token_ids"]
    ends = [[Finish.EOS if row[-1] in eos else Finish.LENGTH for row in p] for p in found]
    assert result.finish_BN.tolist() == ends
    assert result.token_BNT.shape[-1] == new
    return result


@in_both("twin", early_stopping=MODES)
def test_beam_search_equals_transformers(twin: Any, early_stopping: Any) -> None:
    """Sequences, scores, lengths and finish reasons equal transformers' for all length penalties,
    EOS sets and early-stopping modes.
    """
    prompts, lengths = random_prompts([5, 9, 2])
    free = beam_search(
        twin.model, twin.params, prompts, lengths_B=lengths, num_beams=BEAMS, max_new_tokens=12,
        num_return_sequences=BEAMS, early_stopping=early_stopping,
    )  # fmt: skip
    common = np.argsort(-np.bincount(np.asarray(free.token_BNT).ravel())).tolist()
    eos_sets = [[], common[1:2], common[3:24:3]]
    ended = []
    combinations = itertools.product(PENALTIES, eos_sets, [3, 12])
    for i, (penalty, eos, new) in enumerate(combinations):
        result = assert_equals_transformers(
            twin, prompts, lengths, new, num_beams=BEAMS, num_return_sequences=1 + i % BEAMS,
            length_penalty=penalty, early_stopping=early_stopping, eos_token_ids=eos,
        )  # fmt: skip
        ended += np.asarray(result.finish_BN).ravel().tolist()
    assert set(ended) == {Finish.EOS, Finish.LENGTH}


class CountPenalty(Processor):
    """Lowers a token's score each time it was chosen, counted in its own state."""

    taken_BV: Any

    def __call__(self, scores_BV: jax.Array, context: Context) -> jax.Array:
        return scores_BV - 1.5 * self.taken_BV

    def observe(self, scores_BV: jax.Array, token_B: jax.Array) -> "CountPenalty":
        return self.replace(
            taken_BV=self.taken_BV.at[jnp.arange(token_B.shape[0]), token_B].add(1.0)
        )


class TorchCountPenalty(transformers.LogitsProcessor):
    def __init__(self, prompt: int) -> None:
        self.prompt = prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        new = input_ids[:, self.prompt :]
        return scores - 1.5 * torch.zeros_like(scores).scatter_add_(
            1, new, torch.ones_like(new, dtype=scores.dtype)
        )


class TableScores(Processor):
    """Replaces scores with a table indexed by the number of new tokens and the newest token."""

    table_TVV: Any

    def __call__(self, scores_BV: jax.Array, context: Context) -> jax.Array:
        newest_B = context.token_BL[jnp.arange(scores_BV.shape[0]), context.length_B - 1]
        return self.table_TVV[context.length_B - context.prompt_B, newest_B]


class TorchTableScores(transformers.LogitsProcessor):
    def __init__(self, table: np.ndarray, prompt: int) -> None:
        self.table, self.prompt = torch.tensor(table), prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self.table[input_ids.shape[1] - self.prompt, input_ids[:, -1]]


def test_early_stopping_equals_transformers(tmp_path: Path) -> None:
    """Scores come from a table of sharp distributions, for which the three modes differ."""
    # Sharp distributions: unlike random models, sequences end early, with high or low scores.
    vocab, new = 13, 14
    save_random(tmp_path, "llama", num_hidden_layers=1, vocab_size=vocab)
    twin = _without_defaults(load_twin(tmp_path))
    prompts, lengths = random_prompts([3, 6], vocab)
    # With these seeds the three modes differ, and "never" depends on the penalty's sign.
    for seed, penalty in itertools.product([43, 71, 119], PENALTIES):
        rng = np.random.default_rng(seed)
        eos = rng.choice(vocab, 1 + seed % 4, replace=False).tolist()
        logits = rng.normal(size=(new, vocab, vocab)) * 3
        logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        table = logits.astype(np.float32)
        found = []
        for early_stopping in MODES:
            result = assert_equals_transformers(
                twin, prompts, lengths, new, (TableScores(jnp.asarray(table)),),
                (TorchTableScores(table, 6),), num_beams=3, num_return_sequences=3,
                length_penalty=penalty, early_stopping=early_stopping, eos_token_ids=eos,
            )  # fmt: skip
            found.append(sequences(result))
        if penalty == 1.0:
            assert found[0] != found[1] != found[2] != found[0]


def test_processors_track_state_per_beam(twin: Any) -> None:
    """A processor acts on log-probabilities, and its state follows its beam, as in transformers."""
    prompts, lengths = random_prompts([5, 9, 2], seed=1)
    options: Any = {"num_beams": BEAMS, "num_return_sequences": BEAMS, "eos_token_ids": [7, 9]}
    plain = beam_search(
        twin.model, twin.params, prompts, lengths_B=lengths, max_new_tokens=10, **options
    )
    ours = CountPenalty(jnp.zeros((3, twin.config.vocab_size), jnp.float32))
    result = assert_equals_transformers(
        twin, prompts, lengths, 10, (ours,), (TorchCountPenalty(9),), **options
    )
    assert sequences(result) != sequences(plain)


@pytest.mark.parametrize("early_stopping", MODES)
def test_single_beam_equals_greedy(lm: Any, early_stopping: Any) -> None:
    """One beam gives greedy tokens and finish reasons, scored by the mean log-probability."""
    model, params = lm
    prompts, _ = random_prompts([6, 6], seed=3)
    for eos in EOS_SETS:
        greedy = jaxllm.generate(model, params, prompts, max_new_tokens=16, eos_token_ids=eos)
        result = beam_search(
            model, params, prompts, num_beams=1, max_new_tokens=16, eos_token_ids=eos,
            early_stopping=early_stopping,
        )  # fmt: skip
        assert result.token_BNT[:, 0].tolist() == greedy.token_BT.tolist()
        assert result.finish_BN[:, 0].tolist() == greedy.finish_B.tolist()
        mean_B = np.asarray(greedy.logprob_BT).sum(axis=1) / np.asarray(greedy.length_B)
        np.testing.assert_allclose(result.score_BN[:, 0], mean_B, atol=1e-5)


@pytest.mark.parametrize("batch", [1, 2])
def test_beam_search_continues_cache_without_modifying_it(lm: Any, batch: int) -> None:
    """A search from a prefilled cache equals one from the prompt, and leaves the cache alone."""
    model, params = lm
    prompts, _ = random_prompts([9] * batch, seed=4)
    sampler = Sampler((RepetitionPenalty(2.0),))
    options: Any = {"num_beams": BEAMS, "num_return_sequences": 2, "max_new_tokens": 6}
    whole = beam_search(model, params, prompts, sampler=sampler, **options)
    cache = jaxllm.init_cache(model.config, batch, 128)
    _, cache = jaxllm.prefill(model, params, cache, prompts[:, :5])
    before = jax.device_get(cache)
    result = beam_search(model, params, prompts[:, 5:], sampler=sampler, cache=cache, **options)
    assert result.token_BNT.tolist() == whole.token_BNT.tolist()
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(cache))


def test_missing_continuations_are_empty_with_minus_infinity() -> None:
    """With fewer continuations than beams, other results are empty, RUNNING and score -inf."""
    model, params = random_model("llama", vocab_size=5, num_hidden_layers=1)
    result = beam_search(
        model, params, np.array([[1, 2]]), num_beams=8, num_return_sequences=8, max_new_tokens=1
    )
    assert sorted(sequences(result)[0]) == [[], [], [], [0], [1], [2], [3], [4]]
    assert result.finish_BN.tolist() == [[Finish.LENGTH] * 5 + [Finish.RUNNING] * 3]
    assert result.length_BN.tolist() == [[1] * 5 + [0] * 3]
    assert np.isneginf(np.asarray(result.score_BN)[0, 5:]).all()


def test_nan_row_does_not_affect_batch() -> None:
    """A row with NaN logits ends as NON_FINITE without tokens, and the other row is unchanged."""
    model, params = random_model("llama", tie_word_embeddings=False)
    weight = params["embed_tokens"]["weight"].at[130].set(jnp.nan)
    broken = {**params, "embed_tokens": {"weight": weight}}
    prompts = np.array([[1, 2, 3], [1, 130, 3]])
    options: Any = {"num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 6}
    result = beam_search(model, broken, prompts, **options)
    assert result.finish_BN.tolist() == [[Finish.LENGTH] * 2, [Finish.NON_FINITE] * 2]
    assert result.length_BN.tolist() == [[6, 6], [0, 0]]
    good = beam_search(model, params, prompts, **options)
    assert sequences(result)[0] == sequences(good)[0]


def test_options_and_lengths_do_not_recompile(compiled: list[str]) -> None:
    """After one search, other option values and prompt lengths compile nothing."""
    model, params = random_model("llama", max_position_embeddings=89)  # only compiled here
    before = len(compiled)
    beam_search(model, params, tokens(1, 5), num_beams=BEAMS, max_new_tokens=4)
    first = len(compiled)
    assert first > before
    for i in range(4):
        beam_search(
            model,
            params,
            tokens(1, 5 + i, seed=i),
            num_beams=BEAMS,
            num_return_sequences=1 + i,
            max_new_tokens=4 + 5 * i,
            length_penalty=0.5 * i,
            early_stopping=[*MODES, True][i],
            eos_token_ids=list(range(i)),
            lengths_B=np.array([4 + i]),
        )
    assert compiled[first:] == []


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"num_beams": 0}, "num_beams"),
        ({"num_beams": 2.0}, "num_beams"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"num_return_sequences": 0}, "num_return_sequences"),
        ({"num_return_sequences": 5}, "num_return_sequences is 5"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"length_penalty": -99.0}, "length_penalty"),
        ({"early_stopping": "always"}, "early_stopping"),
        ({"early_stopping": 1}, "early_stopping"),
    ],
)
def test_beam_search_refuses_bad_options(lm: Any, options: Any, name: str) -> None:
    with pytest.raises(SamplingError, match=name):
        beam_search(*lm, tokens(1, 3), **{"num_beams": 4, "max_new_tokens": 4, **options})


def test_beam_search_refuses_oversized_inputs() -> None:
    """Prompts beyond the context or the cache, a wrong number of cache rows and prompts without a
    batch axis raise errors.
    """
    model, params = random_model("gpt2")
    options: Any = {"num_beams": 2}
    with pytest.raises(CapacityError, match="97 positions"):
        beam_search(model, params, tokens(1, 90), max_new_tokens=9, **options)
    beam_search(model, params, tokens(1, 90), max_new_tokens=8, **options)  # the last is not run
    cache = jaxllm.init_cache(model.config, 1, 4)
    with pytest.raises(CapacityError, match="do not fit"):
        beam_search(model, params, tokens(1, 5), max_new_tokens=4, cache=cache, **options)
    with pytest.raises(CacheMismatchError, match="rows"):
        beam_search(model, params, tokens(2, 3), max_new_tokens=4, cache=cache, **options)
    with pytest.raises(TokenError, match="shape"):
        beam_search(model, params, [1, 2, 3], max_new_tokens=4, **options)
