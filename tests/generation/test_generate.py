"""Generation: the compiled loop, streaming and decode steps give equal results."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm.errors import SamplingError
from jaxllm.generation.loops.finish import Finish
from jaxllm.generation.sampling.options import make_sampler
from jaxllm.generation.sampling.sampler import Context, Processor, Sampler
from tests.tiny_models import BOTH, in_both, random_model, tokens


@pytest.fixture(scope="module", params=BOTH)
def lm(request: pytest.FixtureRequest) -> Any:
    return random_model(request.param)


@in_both("lm", sampled=[False, True])
def test_generate_equals_decode_steps(lm: Any, sampled: bool) -> None:
    """Tokens and log-probabilities equal decode_step calls, of which each draws with its position's
    key, and the cache holds all but the last token.
    """
    model, params = lm
    prompt = tokens(2, 7)
    cache = jaxllm.init_cache(model.config, 2, 30)
    logits, cache = jaxllm.prefill(model, params, cache, prompt)
    expected, logprobs = [], []
    for length in range(7, 19):
        token_B = jnp.argmax(logits, axis=1)
        if sampled:
            key_B = jax.vmap(jax.random.fold_in, (0, None))(jaxllm.row_keys(3, 2), length)
            token_B = jax.vmap(jax.random.categorical)(key_B, logits)
        expected.append(token_B)
        rows = jnp.arange(2)
        logprobs.append(jax.nn.log_softmax(logits)[rows, token_B])
        logits, cache = jaxllm.decode_step(model, params, cache, token_B, donate=True)
    sampler = Sampler() if sampled else jaxllm.GREEDY
    result = jaxllm.generate(model, params, prompt, max_new_tokens=12, sampler=sampler, seed=3)
    assert result.token_BT.tolist() == np.stack(expected, 1).tolist()
    np.testing.assert_allclose(result.logprob_BT, np.stack(logprobs, 1), atol=1e-4)
    assert result.finish_B.tolist() == [Finish.LENGTH] * 2
    assert result.cache.length_B.tolist() == [7 + 11] * 2  # all but the last token of each row


@pytest.mark.parametrize("seed", [0, 2**40])
def test_stream_equals_generate(lm: Any, seed: int) -> None:
    """stream yields generate's sampled tokens step by step, with unequal prompts and budgets."""
    model, params = lm
    options: Any = {
        "max_new_tokens": [9, 4],
        "lengths_B": np.array([3, 7]),
        "sampler": make_sampler(temperature=0.9, top_k=50),
        "seed": seed,
    }
    whole = jaxllm.generate(model, params, tokens(2, 7), **options)
    steps = list(jaxllm.stream(model, params, tokens(2, 7), **options))
    assert np.concatenate([s.token_BT for s in steps], 1).tolist() == whole.token_BT.tolist()
    assert steps[-1].finish_B.tolist() == whole.finish_B.tolist()
    assert whole.length_B.tolist() == [9, 4]
    assert (np.asarray(whole.token_BT)[1, 4:] == -1).all()


@in_both("lm")
def test_batched_prompts_equal_single_row_generation(lm: Any) -> None:
    """Prompts of unequal length in a batch get the tokens of separate runs with the same keys."""
    model, params = lm
    lengths = [2, 9, 5]
    prompts = tokens(3, 9)
    sampler = make_sampler(temperature=0.8)
    keys = jaxllm.row_keys(11, 3)
    batched = jaxllm.generate(
        model, params, prompts, lengths_B=np.array(lengths), max_new_tokens=10, sampler=sampler,
        seed=keys,
    )  # fmt: skip
    for row, length in enumerate(lengths):
        single = jaxllm.generate(
            model, params, prompts[row : row + 1, :length], max_new_tokens=10, sampler=sampler,
            seed=keys[row : row + 1],
        )  # fmt: skip
        assert single.token_BT[0].tolist() == batched.token_BT[row].tolist()


def test_row_stops_at_eos(lm: Any) -> None:
    """After EOS a row holds only -1, and its cache does not grow."""
    model, params = lm
    free = jaxllm.generate(model, params, tokens(2, 5), max_new_tokens=16)
    eos = int(free.token_BT[0, 3])
    ended = jaxllm.generate(
        model, params, tokens(2, 5), max_new_tokens=16, eos_token_ids=[999, eos]
    )
    row = free.token_BT[0].tolist()
    cut = row.index(eos) + 1
    assert ended.token_BT[0].tolist() == row[:cut] + [-1] * (16 - cut)
    assert ended.finish_B[0] == Finish.EOS
    assert ended.length_B[0] == cut
    assert ended.cache.length_B[0] == 5 + cut - 1


def test_continuing_returned_cache_equals_one_run(lm: Any) -> None:
    model, params = lm
    prompt = tokens(2, 5)
    long = jaxllm.generate(model, params, prompt, max_new_tokens=20)
    cache = jaxllm.init_cache(model.config, 2, 40)
    first = jaxllm.generate(model, params, prompt, max_new_tokens=8, cache=cache)
    last_B1 = first.token_BT[:, -1:]
    rest = jaxllm.generate(model, params, last_B1, max_new_tokens=12, cache=first.cache)
    assert np.append(first.token_BT, rest.token_BT, 1).tolist() == long.token_BT.tolist()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_nan_row_does_not_affect_batch(family: str) -> None:
    """A row with NaN logits ends as NON_FINITE without tokens, and the other row is unchanged."""
    model, params = random_model(family, tie_word_embeddings=False)  # else every row has NaN
    table = "embed_tokens" if "embed_tokens" in params else "wte"
    weight = params[table]["weight"].at[130].set(jnp.nan)
    broken = {**params, table: {"weight": weight}}
    prompt = np.array([[1, 2, 3], [1, 130, 3]])
    result = jaxllm.generate(model, broken, prompt, max_new_tokens=6)
    assert result.finish_B.tolist() == [Finish.LENGTH, Finish.NON_FINITE]
    assert result.length_B.tolist() == [6, 0]
    good = jaxllm.generate(model, params, prompt, max_new_tokens=6)
    assert result.token_BT[0].tolist() == good.token_BT[0].tolist()


def test_generate_does_not_recompile_for_new_values(lm: Any, compiled: list[str]) -> None:
    """Other contents, samplers, seeds, budgets, EOS sets and prompt lengths compile nothing."""
    # No other test compiles this model.
    model, params = random_model(lm[0].config.model_type, max_position_embeddings=89)
    counts = [len(compiled)]
    for seed, temperature in enumerate([0.0, 0.5, 1.0, 2.0]):
        jaxllm.generate(
            model,
            params,
            tokens(2, 5 + seed, seed=seed),
            lengths_B=np.array([1 + seed, 3]),
            max_new_tokens=[4 + seed, 9],
            sampler=make_sampler(temperature=temperature, top_k=3 * seed, top_p=1 / (1 + seed)),
            seed=seed,
            eos_token_ids=list(range(seed)),
        )
        counts.append(len(compiled))
    assert counts[1] > counts[0]
    assert compiled[counts[1] :] == []


def test_prompt_lengths_compile_at_most_12_programs(compiled: list[str]) -> None:
    """Prompts are padded to buckets: 200 lengths compile at most 12 programs after the first."""
    model, params = random_model("llama", max_position_embeddings=512, num_hidden_layers=1)
    before = len(compiled)
    jaxllm.generate(model, params, tokens(1, 3), max_new_tokens=20)
    first = len(compiled)
    assert first > before
    for length in range(1, 201):
        jaxllm.generate(model, params, tokens(1, length), max_new_tokens=1 + length % 20)
    # Prompts of 8, 16 ... 256 tokens, the loop at two capacities, and the caches' constructors.
    assert len(compiled) - first <= 12, compiled[first:]


class BanSeen(Processor):
    """Bans every token of the text so far: a processor that reads the context."""

    def __call__(self, scores_BV: jax.Array, context: Context) -> jax.Array:
        rows = jnp.arange(scores_BV.shape[0])[:, None]
        at = jnp.where(context.token_BL >= 0, context.token_BL, scores_BV.shape[1])
        return scores_BV.at[rows, at].set(-jnp.inf, mode="drop")


class Countdown(Processor):
    """Allows one token, then the one below it, and so on: a stateful processor."""

    next_B: Any

    def __call__(self, scores_BV: jax.Array, context: Context) -> jax.Array:
        allowed = jnp.arange(scores_BV.shape[1])[None] == self.next_B[:, None]
        return jnp.where(allowed, scores_BV, -jnp.inf)

    def begin(self, rows: int) -> "Countdown":
        return self.replace(next_B=jnp.broadcast_to(self.next_B, (rows,)))

    def observe(self, scores_BV: jax.Array, token_B: jax.Array) -> "Countdown":
        return self.replace(next_B=token_B - 1)


@pytest.mark.parametrize("cached", [False, True])
def test_processors_read_token_ids_per_row(lm: Any, cached: bool) -> None:
    """A processor reads each row's own tokens, including those already in the cache."""
    model, params = lm
    prompts, lengths = tokens(2, 6), np.array([6, 4])
    sampler, cache = Sampler((BanSeen(),), greedy=True), None
    if cached:  # cached tokens are part of the text
        cache = jaxllm.init_cache(model.config, 2, 40)
        _, cache = jaxllm.prefill(model, params, cache, prompts[:, :2])
    result = jaxllm.generate(
        model, params, prompts[:, 2 * cached :], lengths_B=lengths - 2 * cached,
        max_new_tokens=20, sampler=sampler, cache=cache,
    )  # fmt: skip
    for row, length in enumerate(lengths):
        text = prompts[row, :length].tolist()
        for token in result.token_BT[row].tolist():
            logits = (
                jaxllm.forward(model, params, None, [text]).logits[0, -1] if len(text) < 8 else None
            )
            assert token not in text
            if logits is not None:
                best = np.asarray(logits).copy()
                best[text] = -np.inf
                assert token == int(best.argmax())
            text.append(token)


def test_sampler_state_carries_across_steps(lm: Any) -> None:
    """A stateful processor is updated at each step, and the caller's sampler is unchanged."""
    model, params = lm
    sampler = Sampler((Countdown(jnp.array(50)),), greedy=True)
    result = jaxllm.generate(model, params, tokens(2, 3), max_new_tokens=5, sampler=sampler)
    assert result.token_BT.tolist() == [[50, 49, 48, 47, 46]] * 2
    again = jaxllm.generate(model, params, tokens(2, 3), max_new_tokens=5, sampler=sampler)
    assert again.token_BT.tolist() == result.token_BT.tolist()  # the caller's sampler is unchanged


def test_top_logprobs_equal_full_forward(lm: Any) -> None:
    """Each step's likeliest tokens and log-probabilities are those of the unprocessed logits;
    unused steps hold -1.
    """
    model, params = lm
    prompt = tokens(2, 5)
    result = jaxllm.generate(
        model, params, prompt, max_new_tokens=[6, 3], top_logprobs=4, sampler=make_sampler(top_k=9)
    )
    assert result.top_token_BTN.shape == (2, 6, 4)
    for row, length in enumerate([6, 3]):
        text = np.append(prompt[row], result.token_BT[row, :length])[None]
        logits = jaxllm.forward(model, params, None, text).logits[0, 4:-1]
        expected = np.asarray(jax.nn.log_softmax(logits, axis=-1))
        best = np.argsort(-expected, axis=1)[:, :4]
        assert result.top_token_BTN[row, :length].tolist() == best.tolist()
        np.testing.assert_allclose(
            result.top_logprob_BTN[row, :length],
            np.take_along_axis(expected, best, 1),
            atol=1e-4,
        )
    assert (np.asarray(result.top_token_BTN)[1, 3:] == -1).all()
    with pytest.raises(SamplingError, match="top_logprobs"):
        jaxllm.generate(model, params, prompt, max_new_tokens=1, top_logprobs=-1)


def test_until_callback_stops_rows(lm: Any) -> None:
    """A row ends with STOP if the callback returns True for it, and the other row is unchanged."""
    model, params = lm
    free = jaxllm.generate(model, params, tokens(2, 5), max_new_tokens=9)
    seen: list[list[int]] = []

    def until(token_B: np.ndarray) -> np.ndarray:
        seen.append(token_B.tolist())
        return np.array([len(seen) == 4, False])

    ended = jaxllm.generate(model, params, tokens(2, 5), max_new_tokens=9, until=until)
    row = free.token_BT[0].tolist()
    assert ended.token_BT[0].tolist() == row[:4] + [-1] * 5
    assert ended.token_BT[1].tolist() == free.token_BT[1].tolist()
    assert ended.finish_B.tolist() == [Finish.STOP, Finish.LENGTH]
    assert ended.cache.length_B.tolist() == [5 + 3, 5 + 8]
    assert [a for a, _ in seen] == row[:4] + [-1] * 5


def test_generate_names_unknown_options() -> None:
    with pytest.raises(SamplingError, match="no option eos_token_id: did you mean eos_token_ids"):
        jaxllm.generate(*random_model("llama"), [[1]], max_new_tokens=1, eos_token_id=[])
