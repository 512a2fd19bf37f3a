"""Speculative decoding: the text of plain decoding, or the distribution of plain sampling."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jaxllm
from jaxllm.errors import CapacityError, ConfigError, SamplingError
from jaxllm.generation.loops import speculative
from jaxllm.generation.loops.draft import (
    PromptLookup,
    check_draft_vocabulary,
    look_up_draft,
    residual,
)
from jaxllm.generation.loops.draft_pace import DraftPace
from jaxllm.generation.loops.finish import Finish, mask_draft
from jaxllm.generation.loops.speculative import SpeculativeResult, speculative_generate
from jaxllm.generation.sampling.sampler import (
    Context,
    Processor,
    Sampler,
    apply_processors,
    row_keys,
)
from jaxllm.generation.sampling.truncation import Temperature, TopK
from jaxllm.weights.paths import map_leaves
from jaxllm.weights.precision import Precision, cast
from tests.tiny_models import random_model, tokens

TARGET = random_model("llama")


def adversarial_draft() -> Any:
    """Return a draft that always proposes the target's least likely token."""
    model, params = TARGET
    return model, {**params, "lm_head": {"weight": -params["lm_head"]["weight"]}}


def bfloat16_copy() -> Any:
    """Return the target in bfloat16."""
    precision = Precision.uniform("bfloat16")
    return random_model("llama", precision=precision)[0], cast(TARGET[1], precision)


DRAFTS: dict[str, Callable[[], Any]] = {
    "itself": lambda: TARGET,
    "a random one": lambda: random_model("llama", seed=5),
    "an adversary": adversarial_draft,
    "itself in bfloat16": bfloat16_copy,
    "another family": lambda: random_model("gpt2", seed=5),
    "prompt lookup": lambda: PromptLookup(ngram=3),
}


def assert_equals_generate(lm: Any, prompts: Any, draft: Any, **options: Any) -> SpeculativeResult:
    plain = jaxllm.generate(*lm, prompts, top_logprobs=3, **options)
    result = speculative_generate(*lm, prompts, draft=draft, top_logprobs=3, **options)
    assert result.token_BT.tolist() == plain.token_BT.tolist()
    assert result.finish_B.tolist() == plain.finish_B.tolist()
    assert result.length_B.tolist() == plain.length_B.tolist()
    np.testing.assert_allclose(result.logprob_BT, plain.logprob_BT, atol=1e-4)
    np.testing.assert_allclose(result.top_logprob_BTN, plain.top_logprob_BTN, atol=1e-4)
    return result


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full) if name == "itself in bfloat16" else name
        for name in DRAFTS
    ],
)
def test_speculative_greedy_equals_plain_greedy(name: str) -> None:
    """With any draft, tokens, lengths and finish reasons equal plain greedy decoding, and the
    counts of rounds and accepted tokens are right.
    """
    # Unequal prompts, one repetitive; budgets that end within a run of accepted tokens.
    prompts = tokens(3, 9).copy()
    prompts[2] = [5, 6, 7, 8, 5, 6, 7, 8, 5]
    options: Any = {"lengths_B": np.array([2, 7, 9]), "max_new_tokens": [17, 9, 24]}
    draft = DRAFTS[name]()
    result = assert_equals_generate(TARGET, prompts, draft, **options)
    proposed, accepted = np.asarray(result.proposed_B), np.asarray(result.accepted_B)
    assert result.length_B.tolist() == (1 + result.accepted_B + result.rounds_B).tolist()
    if name == "itself":
        assert accepted.tolist() == proposed.tolist()
        assert result.rounds_B.tolist() == [4, 2, 5]  # five tokens per round after the first token
    if name == "an adversary":
        assert accepted.tolist() == [0, 0, 0]
        assert result.rounds_B.tolist() == [16, 8, 23]
    if name == "itself in bfloat16":
        assert accepted.sum() > proposed.sum() / 2
    # EOS within a run of accepted tokens.
    plain = np.asarray(result.token_BT)
    eos = [int(plain[0, 3]), int(plain[2, 6])]
    ended = assert_equals_generate(TARGET, prompts, draft, eos_token_ids=eos, **options)
    assert ended.finish_B.tolist().count(Finish.EOS) >= 2
    if name == "itself":
        assert ended.accepted_B.tolist() == ended.proposed_B.tolist()
    assert ended.cache.length_B[0] == 2 + ended.length_B[0] - 1


@pytest.mark.parametrize(
    ("accepted", "cost", "least"),
    [
        pytest.param(0.1, 2.5, 0.94, id="prose, which lookup makes slower"),
        pytest.param(0.0, 6.0, 0.85, id="a pass of six rows costs six"),
        pytest.param(1.5, 2.5, 0.94, id="as fast as plain decoding"),
        pytest.param(4.5, 2.5, 2.0, id="code, most of it copied"),
    ],
)
def test_draft_that_does_not_pay_rests(accepted: float, cost: float, least: float) -> None:
    """1,000 tokens take about as long as the faster way; a pass with a draft is `cost` passes."""
    now = 0.0
    pace = DraftPace(clock=lambda: now)
    written, drafting = 0.0, 0
    while written < 1000:
        drafts, rounds, began = pace.drafts, pace.left, pace.clock()
        now += rounds * (cost if drafts else 1.0)
        pace.record(rounds, rounds * (1 + accepted if drafts else 1.0), pace.clock() - began)
        written += rounds * (1 + accepted if drafts else 1.0)
        drafting += rounds * drafts
    assert written / now > least
    if 1 + accepted < cost:
        assert drafting < 40


def test_resting_draft_catches_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that rests and is tried again changes no token, and reads what it has missed."""

    class Turns:
        """Four rounds without the draft, then one with it, and so on."""

        drafts, left, clock = False, 4, staticmethod(lambda: 0.0)

        def record(self, rounds: int, tokens: float, seconds: float) -> None:
            assert tokens > 0
            self.drafts, self.left = not self.drafts, 4 if self.drafts else 1

    monkeypatch.setattr(speculative, "DraftPace", Turns)
    options: Any = {"lengths_B": np.array([2, 7, 9]), "max_new_tokens": [17, 9, 24]}
    result = assert_equals_generate(TARGET, tokens(3, 9), TARGET, **options)
    assert result.accepted_B.tolist() == result.proposed_B.tolist()  # so its cache is right
    # 1 token after the prompt, then 4 alone, 5 with a draft (the model itself), 4 alone, ...
    assert result.rounds_B.tolist() == [10, 5, 15]


@pytest.mark.parametrize(
    ("draft", "kinds"),
    [("itself", [0, 1]), ("an adversary", [1]), ("another family", [0]), ("prompt lookup", [1])],
)
def test_sampled_text_equals_plain_sampling(draft: str, kinds: list[int]) -> None:
    """With any draft, sampled tokens, lengths and finish reasons are those of plain sampling with
    the same seed, and a processor's state too.
    """
    samplers = (
        Sampler((Temperature(jnp.float32(0.8)), TopK(jnp.float32(20)))),
        Sampler((SeenPenalty(jnp.float32(1.0)), OddTokenTemperature(jnp.float32(0.7)))),
    )
    for sampler in map(samplers.__getitem__, kinds):
        options: Any = {"max_new_tokens": [17, 9, 24], "sampler": sampler, "seed": 3}
        result = assert_equals_generate(TARGET, tokens(3, 9), DRAFTS[draft](), **options)
        eos = [int(result.token_BT[0, 3])]
        assert_equals_generate(TARGET, tokens(3, 9), DRAFTS[draft](), eos_token_ids=eos, **options)
        if draft == "itself":
            assert result.accepted_B.tolist() == result.proposed_B.tolist()


def test_prompt_lookup_is_accepted_on_repetitive_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a text that repeats a cycle, over 30 of 80 tokens are accepted from prompt lookup."""
    # It drafts, whatever is faster here.
    monkeypatch.setattr(DraftPace, "_choices", lambda self: iter([(True, 1 << 20)]))
    model, params = TARGET

    def no_attention(path: str, x: jax.Array) -> jax.Array:
        return 0 * x if "o_proj" in path else x  # each token depends only on the last: a cycle

    params = map_leaves(no_attention, params)
    result = assert_equals_generate(
        (model, params), tokens(3, 9), PromptLookup(), max_new_tokens=80
    )
    assert int(result.accepted_B.min()) > 30
    assert int(result.rounds_B.max()) < 50


def test_returned_cache_continues_as_one_run() -> None:
    """The returned cache lacks the last token, and continuing from it equals one long run."""
    model, params = TARGET
    long = jaxllm.generate(model, params, tokens(3, 9), max_new_tokens=20)
    draft = random_model("llama", seed=5)
    first = speculative_generate(model, params, tokens(3, 9), draft=draft, max_new_tokens=8)
    assert first.cache.tokens(1) == [*tokens(3, 9)[1], *first.token_BT[1, :-1].tolist()]
    last_B1 = first.token_BT[:, -1:]
    rest = jaxllm.generate(model, params, last_B1, max_new_tokens=12, cache=first.cache)
    assert np.append(first.token_BT, rest.token_BT, 1).tolist() == long.token_BT.tolist()


def test_nan_rows_and_nan_drafts_are_isolated() -> None:
    """NaN in the target ends only its row, and NaN in the draft only loses proposals: all tokens
    equal plain decoding.
    """
    model, params = TARGET

    def with_nan(token: int) -> Any:
        weight = params["embed_tokens"]["weight"].at[token].set(jnp.nan)
        return {**params, "embed_tokens": {"weight": weight}}

    prompts = np.array([[1, 2, 3], [1, 130, 3], [1, 2, 3]])
    broken = with_nan(130)
    result = assert_equals_generate((model, broken), prompts, (model, broken), max_new_tokens=6)
    assert result.finish_B.tolist() == [Finish.LENGTH, Finish.NON_FINITE, Finish.LENGTH]
    # Only the draft is broken: it proposes nothing.
    nothing = jax.tree.map(lambda x: x * jnp.nan, params)
    result = assert_equals_generate(TARGET, prompts, (model, nothing), max_new_tokens=6)
    assert result.proposed_B.tolist() == [0, 0, 0]
    # The draft proposes a token with a NaN embedding that the target would not choose.
    zeros = {**params, "lm_head": {"weight": 0 * params["lm_head"]["weight"]}}
    result = assert_equals_generate((model, with_nan(0)), prompts, (model, zeros), max_new_tokens=6)
    assert (np.asarray(result.token_BT) > 0).all()
    assert result.finish_B.tolist() == [Finish.LENGTH] * 3
    # The target chooses a token with a NaN embedding: the row ends after that token.
    chosen = int(jaxllm.generate(model, params, prompts, max_new_tokens=6).token_BT[0, 2])
    result = assert_equals_generate((model, with_nan(chosen)), prompts, TARGET, max_new_tokens=6)
    assert result.finish_B[0] == Finish.NON_FINITE


# The joint distribution of several tokens. With a vocabulary of 4, each of 256 texts is frequent.

VOCAB, NEW, ROWS = 4, 4, 10_000
SMALL: Any = {
    "vocab_size": VOCAB, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2,
}  # fmt: skip
SMALL_GPT2: Any = {"vocab_size": VOCAB, "n_embd": 8, "n_inner": 8, "n_layer": 1, "n_head": 2}


class SeenPenalty(Processor):
    """Lowers the scores of tokens in the text: a processor that reads the context."""

    by: Any

    def __call__(self, scores_BV: jax.Array, context: Context) -> jax.Array:
        ids = jnp.arange(scores_BV.shape[1])
        seen_BV = (context.token_BL[:, :, None] == ids[None, None]).any(axis=1)
        return jnp.where(seen_BV, scores_BV - self.by, scores_BV)


class OddTokenTemperature(Processor):
    """A temperature per row that doubles with each odd token: a stateful processor."""

    heat_B: Any

    def begin(self, rows: int) -> "OddTokenTemperature":
        return self.replace(heat_B=jnp.broadcast_to(self.heat_B, (rows,)))

    def __call__(self, scores_BV: jax.Array, context: Context) -> jax.Array:
        return scores_BV / jnp.reshape(self.heat_B, (-1, 1))

    def observe(self, scores_BV: jax.Array, token_B: jax.Array) -> "OddTokenTemperature":
        return self.replace(heat_B=self.heat_B * (1.0 + (token_B % 2).astype(jnp.float32)))


SAMPLERS = {
    "temperature, top-k": Sampler((Temperature(1.5), TopK(3))),
    "context, memory": Sampler((SeenPenalty(1.0), OddTokenTemperature(jnp.float32(1.0)))),
}
PROMPT = (0, 1, 3, 0, 1)
PROCESS = jax.jit(apply_processors)


def joint_probs(
    lm: Any, sampler: Sampler, new: int, prompt: tuple[int, ...] = PROMPT
) -> np.ndarray:
    """Return the probability of each text of `new` tokens after the prompt, by one forward."""
    paths_BT = np.indices((VOCAB,) * (new - 1), np.int32).reshape(new - 1, VOCAB ** (new - 1)).T
    B, P = len(paths_BT), len(prompt)
    text_BT = np.append(np.tile(np.array(prompt, np.int32), (B, 1)), paths_BT, axis=1)
    logits_BTV = jaxllm.forward(*lm, None, text_BT).logits[:, P - 1 :]
    p_B, sampler = np.ones(B), sampler.begin(B)
    for i in range(new):
        seen_BT = np.where(np.arange(text_BT.shape[1])[None] < P + i, text_BT, -1)
        prompt_B, length_B = (jnp.full((B,), n, jnp.int32) for n in (P, P + i))
        context = Context(jnp.asarray(seen_BT), prompt_B, length_B, row_keys(0, B))
        scores_BV = PROCESS(logits_BTV[:, i], sampler, context)
        p_BV = np.asarray(jax.nn.softmax(scores_BV, axis=1), np.float64)
        p_BV /= p_BV.sum(axis=1, keepdims=True)
        if i == new - 1:
            break
        p_B *= p_BV[np.arange(B), paths_BT[:, i]]
        sampler = sampler.observe(scores_BV, jnp.asarray(paths_BT[:, i]))
    return (p_B[:, None] * p_BV).ravel()


def draw(lm: Any, draft: Any, sampler: Sampler, **options: Any) -> SpeculativeResult:
    options = {"max_new_tokens": NEW, "num_draft_tokens": 2, "seed": 1, **options}
    options.setdefault("acceptance", "distribution")
    prompts = np.tile(np.array(PROMPT, np.int32), (ROWS, 1))
    return speculative_generate(*lm, prompts, draft=draft, sampler=sampler, **options)


def p_value(result: SpeculativeResult, p_X: np.ndarray) -> float:
    """Return the chi-square p-value of the texts, pooling those expected under five times."""
    index_B = np.asarray(result.token_BT) @ VOCAB ** np.arange(NEW)[::-1]
    seen_X = np.bincount(index_B, minlength=p_X.size)
    assert (seen_X[p_X == 0] == 0).all()
    rare = p_X * ROWS < 5
    expected = np.append(p_X[~rare], p_X[rare].sum()) * ROWS
    seen = np.append(seen_X[~rare], seen_X[rare].sum())
    some = expected > 0
    return float(stats.chisquare(seen[some], expected[some]).pvalue)


@pytest.fixture(scope="module")
def pair() -> Any:
    """Return a target, and a draft of another family that disagrees with it."""
    target = random_model("llama", seed=4, spread=0.4, **SMALL)
    return target, random_model("gpt2", seed=5, spread=0.4, **SMALL_GPT2)


@pytest.mark.parametrize(
    ("name", "lookup"),
    [
        ("temperature, top-k", True),
        ("context, memory", False),
        pytest.param("temperature, top-k", False, marks=pytest.mark.full),
    ],
)
def test_sampled_texts_follow_target_distribution(pair: Any, name: str, lookup: bool) -> None:
    """Whole texts pass a chi-square test against the target's exact joint distribution, with a
    draft of another family and with prompt lookup.
    """
    target, draft = pair
    p_X = joint_probs(target, SAMPLERS[name], NEW)
    result = draw(target, PromptLookup(ngram=2) if lookup else draft, SAMPLERS[name])
    assert 0.05 < float(result.accepted_B.sum() / result.proposed_B.sum()) < 0.95
    assert p_value(result, p_X) > 1e-3


def overlaps(target: Any, draft: Any, sampler: Sampler) -> tuple[np.ndarray, np.ndarray]:
    """Return the probability of each first token, and sum min(p, q) of the second after it."""
    first_X = joint_probs(target, sampler, 1)
    texts = [(*PROMPT, token) for token in range(VOCAB)]
    p, q = (
        np.stack([joint_probs(lm, sampler, 1, text) for text in texts]) for lm in (target, draft)
    )
    return first_X, np.minimum(p, q).sum(axis=1)


def test_acceptance_rate_equals_distribution_overlap(pair: Any) -> None:
    """The first drafted token is accepted with probability sum min(p, q) (Leviathan, eq. 3)."""
    target, draft = pair
    sampler = SAMPLERS["temperature, top-k"]
    first_X, overlap_X = overlaps(target, draft, sampler)
    overlap = float((first_X * overlap_X).sum())
    result = draw(target, draft, sampler, max_new_tokens=3)
    assert (np.asarray(result.proposed_B) == 1).all()
    bound = 5 * (overlap * (1 - overlap) / ROWS) ** 0.5
    assert abs(float(result.accepted_B.mean()) - overlap) < bound


def test_acceptance_by_text_is_near_the_overlap(pair: Any) -> None:
    """If the text must be the same, the first drafted token is accepted with a probability between
    (1 - d) / (1 + d) and 1 - d on average, of distributions at total variation d (Daliri et al.
    2024, theorem 1).
    """
    target, draft = pair
    sampler = SAMPLERS["temperature, top-k"]
    first_X, overlap_X = overlaps(target, draft, sampler)
    most, least = (float((first_X * x).sum()) for x in (overlap_X, overlap_X / (2 - overlap_X)))
    result = draw(target, draft, sampler, max_new_tokens=3, acceptance="text")
    assert (np.asarray(result.proposed_B) == 1).all()
    bound = 5 * (most * (1 - most) / ROWS) ** 0.5
    assert least - bound < float(result.accepted_B.mean()) < most + bound


def test_residual_equals_values_by_hand() -> None:
    """residual(p, q) is max(p - q, 0), normalized; it is p if that is zero everywhere."""
    p, q = jnp.array([[0.5, 0.25, 0.25]]), jnp.array([[0.25, 0.75, 0.0]])
    np.testing.assert_allclose(residual(p, q), [[0.5, 0.0, 0.5]])
    np.testing.assert_allclose(residual(p, p), p)
    np.testing.assert_allclose(residual(p, 0 * p), p)


def test_draft_ends_at_limit_missing_token_or_end() -> None:
    """`mask_draft` keeps the room's tokens, none after a missing one, and an end itself."""
    draft_BK = jnp.array([[7, 8, 9], [7, 8, 9], [7, -1, 9], [7, 8, 9]])
    ends_BK = jnp.zeros((4, 3), bool).at[3, 0].set(True)
    masked = mask_draft(draft_BK, jnp.array([3, 1, 3, 3]), ends_BK)
    assert masked.tolist() == [[7, 8, 9], [7, -1, -1], [7, -1, -1], [7, -1, -1]]


def test_row_draws_are_independent_of_batch() -> None:
    keys, length_B, prompts = row_keys(7, 3), np.array([4, 9, 6]), tokens(3, 9)
    together = small_call(prompts, lengths_B=length_B, seed=keys)
    changed = np.where(np.arange(3)[:, None] == 2, 5, prompts[::-1])
    other = small_call(changed, lengths_B=length_B[::-1], seed=keys[::-1])
    assert other.token_BT[:2].tolist() == together.token_BT[2:0:-1].tolist()
    assert other.token_BT[2].tolist() != together.token_BT[0].tolist()


def test_speculative_does_not_recompile_for_new_values(
    compiled: list[str],
) -> None:
    """Other contents, samplers, seeds, budgets, EOS sets and prompt lengths compile nothing."""
    small_call(tokens(3, 9))
    before = len(compiled)
    for seed, temperature in enumerate([0.0, 0.5, 2.0]):
        small_call(
            tokens(3, 9 + seed, seed=seed),
            lengths_B=np.array([1 + seed, 3, 9]),
            max_new_tokens=[4 + seed, 9, 1],
            sampler=Sampler((Temperature(jnp.float32(temperature)), TopK(jnp.float32(3 * seed)))),
            seed=seed,
            eos_token_ids=list(range(seed)),
        )
    assert compiled[before:] == []


def small_call(prompts: np.ndarray, **options: Any) -> SpeculativeResult:
    options = {
        "sampler": Sampler((Temperature(jnp.float32(0.9)), TopK(jnp.float32(20)))),
        "max_new_tokens": 10,
        **options,
    }
    return speculative_generate(*TARGET, prompts, draft=random_model("llama", seed=5), **options)


@pytest.mark.parametrize("ngram", [1, 2, 4])
def test_look_up_draft_equals_search_by_hand(ngram: int) -> None:
    """Drafts equal a plain-Python search for the last occurrence of the longest matching n-gram."""
    rng = np.random.default_rng(ngram)
    length_B = rng.integers(2, 14, 200)
    token_BL = np.where(np.arange(16)[None] < length_B[:, None], rng.integers(0, 3, (200, 16)), -1)
    prompt_B, text_BL = (jnp.asarray(x, jnp.int32) for x in (length_B, token_BL))
    text = Context(text_BL, prompt_B, prompt_B, row_keys(0, 200))
    found = np.asarray(jax.jit(look_up_draft, static_argnums=(1, 2))(text, ngram, 5))
    for row, n in enumerate(length_B):
        assert found[row].tolist() == lookup_by_hand(token_BL[row, :n].tolist(), ngram, 5)


def lookup_by_hand(text: list[int], ngram: int, width: int) -> list[int]:
    for n in range(min(ngram, len(text) - 1), 0, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == text[-n:]:
                longer = list(text)
                while len(longer) < len(text) + width:  # the continuation may overlap itself
                    longer.append(longer[start + n + len(longer) - len(text)])
                return longer[len(text) :]
    return [-1] * width


def test_speculative_refuses_invalid_arguments() -> None:
    """Bad vocabularies, sizes and budgets, drafts without enough positions and drafts with dynamic
    RoPE raise errors.
    """
    model, params = TARGET

    def call(prompt: int = 3, **options: Any) -> SpeculativeResult:
        options = {"draft": TARGET, "max_new_tokens": 4, **options}
        return speculative_generate(model, params, tokens(3, prompt), **options)

    lms = [SimpleNamespace(model=SimpleNamespace(config=SimpleNamespace(vocab_size=n)),
                           tokenizer=None) for n in (131, 97)]  # fmt: skip
    with pytest.raises(SamplingError, match="vocabulary has 97 tokens, expected 131"):
        check_draft_vocabulary(*lms)
    with pytest.raises(SamplingError, match="num_draft_tokens must be a whole number from 1 to"):
        call(num_draft_tokens=0)
    with pytest.raises(SamplingError, match="max_new_tokens"):
        call(max_new_tokens=0)
    with pytest.raises(SamplingError, match="ngram"):
        PromptLookup(ngram=0)
    with pytest.raises(CapacityError, match="97 positions of the draft"):
        call(prompt=90, max_new_tokens=9, draft=random_model("gpt2"))
    call(prompt=90, max_new_tokens=8, draft=random_model("gpt2"))  # the last is not run
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    dynamic = random_model("llama", rope_parameters=scaling)
    with pytest.raises(ConfigError, match="draft uses dynamic RoPE"):
        call(prompt=90, max_new_tokens=9, draft=dynamic)
