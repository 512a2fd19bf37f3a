"""Grammars in every decoder: masked draws, batches, beams, drafts, endings."""

import itertools
import json
import math
import random
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest

import jaxllm
from jaxllm.errors import GrammarError, SamplingError
from jaxllm.generation.loops.overflow import Slide
from jaxllm.generation.sampling.grammar_mask import TextMask, grammar_mask
from jaxllm.generation.sampling.sampler import Context, Sampler, sample_next
from jaxllm.grammar import Grammar, token_masks
from jaxllm.grammar.grammar import start_matcher
from jaxllm.grammar.vocabulary import Vocabulary, make_vocabulary
from jaxllm.ops import native
from tests.grammar.schemas import random_schema

PROMPT = "Once upon a time"
NAME = Grammar.regex("[A-Z][a-z]{1,6}( [A-Z][a-z]{1,6})?")
OBJECT = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2, 30]}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
DECODERS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 3},
    "truncated": {"temperature": 1.3, "top_k": 4, "top_p": 0.9, "seed": 5},
    "penalized": {"repetition_penalty": 1.3, "logit_bias": {300: 2.0}},
    "beams": {"num_beams": 3},
    "contrastive": {"penalty_alpha": 1.0},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "lookup, sampled": {"prompt_lookup_num_tokens": 3, "temperature": 1.0, "seed": 1},
    "guided": {"guidance_scale": 1.5},
}


@pytest.fixture(scope="module")
def lm(shallow: Any) -> jaxllm.LM:
    return jaxllm.load(shallow("llama"), dtype="float32")


@pytest.fixture(scope="module")
def words(lm: jaxllm.LM) -> Vocabulary:
    return make_vocabulary(lm.tokenizer, lm.config.vocab_size, [lm.tokenizer.eos_id])


@pytest.mark.parametrize("name", DECODERS)
def test_every_decoder_writes_texts_of_the_grammar(lm: jaxllm.LM, name: str) -> None:
    """An automaton and a JSON schema; a complete text ends with the end-of-text token."""
    options = DECODERS[name]
    found = lm.generate(PROMPT, regex=NAME.text, max_new_tokens=30, **options)
    assert found.grammar_complete and re.fullmatch(NAME.text, found.text)
    assert found.finish_reason == "eos" and found.tokens[-1] == lm.tokenizer.eos_id
    found = lm.generate(PROMPT, json_schema=OBJECT, max_new_tokens=120, **options)
    assert found.grammar_complete
    jsonschema.validate(json.loads(found.text), OBJECT)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "drawn"])
def test_draft_model_leaves_masked_text(lm: jaxllm.LM, shallow: Any, options: Any) -> None:
    """Greedy: the text without a draft. Drawn: a text of the grammar; drafts are masked too."""
    draft = jaxllm.load(shallow("llama"), dtype="float32", quantize="int8")
    both = {"regex": NAME.text, "max_new_tokens": 20, **options}
    plain = lm.generate(PROMPT, **both)
    drafted = lm.generate(PROMPT, assistant_model=draft, **both)
    assert drafted.grammar_complete and drafted.draft_stats[1] > 0
    assert options or drafted.tokens == plain.tokens


def test_masks_by_text_and_by_state_are_equal(lm: jaxllm.LM, words: Vocabulary) -> None:
    """The same bits, in one batch of sampled rows, with kernels and without."""
    prompts = [lm.encode(text) for text in ("Once upon", "The cat")]
    mask = grammar_mask(NAME, words), grammar_mask(NAME, words, by_text=True)
    assert not isinstance(mask[0], TextMask) and isinstance(mask[1], TextMask)

    def run(processor: Any) -> Any:
        return jaxllm.generate(
            lm.model,
            lm.params,
            np.array([p[:3] for p in prompts]),
            max_new_tokens=8,
            sampler=Sampler((processor,)),
            eos_token_ids=words.eos_ids,
            seed=4,
        ).token_BT

    found = [run(one) for one in mask]
    with native.disable_kernels():
        found.append(run(mask[1]))
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[1][0, :3], found[2][0, :3])


def test_grammars_with_equal_numbers_are_kept_apart(
    words: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the same grammar of two tokenizers with one name."""
    monkeypatch.setattr(token_masks.zlib, "crc32", lambda _: 77)
    again = jaxllm.load("demo:gpt2").tokenizer
    other = make_vocabulary(again, again.vocab_size, [again.eos_id])
    pairs = [(NAME, words), (Grammar.choice(["x"]), words), (NAME, other)]
    numbers = [token_masks.register(*pair) for pair in pairs]
    assert len(set(numbers)) == 3 and numbers == [token_masks.register(*pair) for pair in pairs]
    nothing = np.zeros((1, 1), np.int32)
    for number, (grammar, vocabulary) in zip(numbers, pairs, strict=True):
        where = np.full(1, number, np.int32), nothing[0], nothing[0], nothing
        found = token_masks.mask_tokens(*where, vocabulary.size)[0]
        expected = start_matcher(grammar, vocabulary).allowed()
        np.testing.assert_array_equal(found, expected)


def test_masked_draws_have_the_renormalized_law(words: Vocabulary) -> None:
    """Chi-square of 4,000 draws against the softmax over the allowed tokens; none is forbidden."""
    rng = np.random.default_rng(0)
    logits_V = rng.normal(size=words.size).astype(np.float32)
    mask = grammar_mask(Grammar.regex("[ab]+|the"), words)
    allowed = np.asarray(Grammar.regex("[ab]+|the").matcher(words.tokenizer).allowed())
    rows = 4000
    context = Context.empty(jax.random.key(1), rows)
    logits_BV = jnp.broadcast_to(logits_V, (rows, words.size))
    drawn = np.asarray(jax.jit(sample_next)(logits_BV, Sampler((mask,)), context)[0])
    p = np.where(allowed[: words.size], np.exp(logits_V), 0)
    p /= p.sum()
    count = np.bincount(drawn, minlength=words.size)
    assert not count[p == 0].any()
    here = p > 0
    chi = ((count[here] - rows * p[here]) ** 2 / (rows * p[here])).sum()
    degrees = int(here.sum()) - 1
    assert degrees >= 2 and chi < degrees + 5 * math.sqrt(2 * degrees)


@pytest.mark.parametrize("drafter", ["model", "lookup"])
def test_drafted_texts_have_the_masked_law(
    lm: jaxllm.LM, words: Vocabulary, shallow: Any, drafter: str
) -> None:
    """Chi-square of 1,000 drafted texts against the product of renormalized probabilities."""
    grammar, prompt, rows = Grammar.regex("[ab]{2}"), lm.encode(PROMPT), 1000
    law: dict[tuple[int, ...], float] = {}
    layer = [(start_matcher(grammar, words), 1.0)]
    while layer:
        following = []
        for matcher, p in layer:
            text = np.array([[*prompt, *matcher.tokens]])
            out = jaxllm.forward(lm.model, lm.params, jaxllm.init_cache(lm.model, 1, 64), text)
            scores_V = jnp.where(matcher.allowed(), out.logits[0, -1], -jnp.inf)
            share_V = np.asarray(jax.nn.softmax(scores_V))
            for token in matcher:
                if token in words.eos_ids:
                    law[(*matcher.tokens, token)] = p * float(share_V[token])
                else:
                    following.append((matcher.take(token), p * float(share_V[token])))
        layer = following
    assert math.isclose(sum(law.values()), 1, rel_tol=1e-4)
    other = jaxllm.load(shallow("llama"), dtype="float32", quantize="int4")
    draft: Any = (other.model, other.params) if drafter == "model" else jaxllm.PromptLookup()
    found = jaxllm.speculative_generate(
        lm.model,
        lm.params,
        np.array([prompt] * rows),
        draft=draft,
        num_draft_tokens=2,
        max_new_tokens=3,
        sampler=Sampler((grammar_mask(grammar, words),)),
        eos_token_ids=words.eos_ids,
        seed=1,
    )
    tokens = np.asarray(found.token_BT).tolist()
    count = Counter(tuple(t for t in row if t >= 0) for row in tokens)
    assert count.keys() <= law.keys()
    frequent = {text: p for text, p in law.items() if rows * p >= 5}
    chi = sum((count[text] - rows * p) ** 2 / (rows * p) for text, p in frequent.items())
    degrees = len(frequent)
    assert degrees >= 3 and chi < degrees + 5 * math.sqrt(2 * degrees)
    assert drafter == "lookup" or int(found.accepted_B.sum()) > 0


def test_state_goes_through_scan_vmap_and_branches(words: Vocabulary) -> None:
    """A loop of one's own: branches of a state are those of a matcher that took the same tokens."""
    grammar = Grammar.regex("(ab|ba){2}c?")
    mask = grammar_mask(grammar, words)
    first = grammar.matcher(words.tokenizer)
    token_T = first.take_all(words.encode(b"ab")).tokens
    state = mask.begin(1)
    for token in token_T:
        state = state.observe(jnp.zeros((1, words.size)), jnp.array([token]))
    branches = jax.vmap(lambda t: state.observe(jnp.zeros((1, words.size)), t[None]).state)(
        jnp.array([words.encode(b"a")[-1], words.encode(b"b")[-1]])
    )
    assert branches.shape[0] == 2 and branches[0, 0] != branches[1, 0]

    def step(mask: Any, _: Any) -> Any:
        scores = mask(jnp.zeros((1, words.size)), Context.empty(jax.random.key(0), 1))
        token_B = jnp.argmax(scores, axis=1).astype(jnp.int32)
        return mask.observe(scores, token_B), token_B[0]

    _, written = jax.lax.scan(step, mask.begin(1), None, length=8)
    tokens = written.tolist()
    end = next(i for i, token in enumerate(tokens) if token in words.eos_ids)
    assert first.take_all(tokens[: end + 1]).complete


def test_rows_of_a_batch_equal_each_alone(lm: jaxllm.LM) -> None:
    """Requests with and without grammars, each its own, and the errors of bad ones apart."""
    requests: list[dict[str, Any]] = [
        {"prompt": "Once", "regex": "[a-z ]{3,9}"},
        {"prompt": "The cat"},
        {"prompt": "One day", "json_schema": OBJECT, "temperature": 1.0, "seed": 5},
        {"prompt": "A", "choice": ["red", "green"], "temperature": 0.8, "seed": 6},
        {"prompt": "It", "lark": 'start: "(" start ")" | "x"', "temperature": 1.0, "seed": 7},
    ]
    bad = [{"prompt": "x", "regex": "("}, {"prompt": "x", "regex": "a", "choice": ["b"]}]
    limits = {"max_new_tokens": 24}
    alone = [lm.generate(**r, **limits) for r in requests]
    served = dict(lm.serve([{**r, **limits} for r in [*requests, *bad]], rows=3, capacity=64))
    for number, one in enumerate(alone):
        assert served[number].tokens == one.tokens, number
        assert served[number].grammar_complete == one.grammar_complete
    assert "missing )" in str(served[5]) and "one grammar" in str(served[6])


def test_beams_equal_brute_force(lm: jaxllm.LM, words: Vocabulary) -> None:
    """Over all spellings of all texts of a small grammar."""
    grammar, prompt = Grammar.regex("[ab]{1,3}"), lm.encode(PROMPT)
    start, eos = grammar.matcher(lm.tokenizer, vocab_size=words.size), lm.tokenizer.eos_id
    scored: dict[tuple[int, ...], float] = {}
    layer = [start]
    while layer:
        layer = [m.take(t) for m in layer for t in m if t != eos]
        for matcher in layer:
            if matcher.complete:
                tokens = (*matcher.tokens, eos)
                text = np.array([[*prompt, *tokens]])
                out = jaxllm.forward(lm.model, lm.params, jaxllm.init_cache(lm.model, 1, 64), text)
                law = np.asarray(jax.nn.log_softmax(out.logits[0]))
                at = range(len(prompt) - 1, len(prompt) + len(tokens) - 1)
                scored[tokens] = sum(float(law[i, t]) for i, t in zip(at, tokens, strict=True))
    best = sorted(scored.items(), key=lambda item: -item[1])[:3]
    found = lm.generate(
        PROMPT,
        grammar=grammar,
        num_beams=len(scored),
        num_return_sequences=3,
        length_penalty=0.0,
        max_new_tokens=6,
    )
    assert [tuple(c.tokens) for c in found] == [tokens for tokens, _ in best]
    np.testing.assert_allclose([c.score for c in found], [s for _, s in best], rtol=1e-4)


def test_budget_ends_a_text_that_is_not_complete(lm: jaxllm.LM) -> None:
    """The completion and the last piece of a stream say so."""
    found = lm.generate(PROMPT, json_schema=OBJECT, max_new_tokens=3)
    assert found.finish_reason == "length" and found.grammar_complete is False
    pieces = list(lm.stream(PROMPT, json_schema=OBJECT, max_new_tokens=3))
    assert [p.token for p in pieces] == found.tokens and pieces[-1].grammar_complete is False
    assert lm.generate(PROMPT, max_new_tokens=3).grammar_complete is None


@pytest.mark.parametrize("call", ["generate", "stream", "serve"])
def test_row_without_a_token_is_an_error(lm: jaxllm.LM, call: str) -> None:
    """Options that ban all that the grammar allows: the error names the place."""
    options: dict[str, Any] = {"choice": ["ab"], "min_new_tokens": 9, "max_new_tokens": 12}
    found: dict[int, Any] = {}
    if call == "serve":  # which raises nothing: the other request goes on
        other = {"prompt": "The", "max_new_tokens": 14}
        found = dict(lm.serve([{"prompt": PROMPT, **options}, other], rows=2, capacity=64))
        assert len(found[1].tokens) == 14
    with pytest.raises(GrammarError, match=r"no token was left after [12] new ones"):
        if call == "serve":
            raise found[0]
        list(lm.stream(PROMPT, **options)) if call == "stream" else lm.generate(PROMPT, **options)


def test_grammar_follows_the_text_through_overflow(lm: jaxllm.LM, words: Vocabulary) -> None:
    """Slots are dropped, the text of the grammar goes on."""
    cache = jaxllm.init_cache(lm.model, 1, 24)
    tokens = np.array([lm.encode(PROMPT)])
    for by_text in (False, True):
        mask = grammar_mask(Grammar.regex("([a-z]{3}-)+"), words, by_text=by_text)
        found = jaxllm.generate(
            lm.model,
            lm.params,
            tokens,
            cache=cache,
            overflow=Slide(),
            max_new_tokens=60,
            sampler=Sampler((mask,)),
            seed=2,
        )
        text = b"".join(words.bytes_V[t] for t in np.asarray(found.token_BT)[0].tolist())
        assert re.fullmatch(rb"([a-z]{3}-)*[a-z]{0,3}", text) and len(text) > 50


def test_logits_processor_comes_before_the_mask(lm: jaxllm.LM) -> None:
    """It sees all scores; truncation keeps the best of what is allowed."""
    seen: list[bool] = []

    def look(scores_BV: jax.Array, context: Context) -> jax.Array:
        jax.debug.callback(lambda x: seen.append(bool(np.isfinite(x).all())), scores_BV)
        return scores_BV

    found = lm.generate(
        PROMPT, choice=["zebra", "quick"], logits_processor=[look], temperature=2.0, top_k=1
    )
    jax.effects_barrier()
    assert found.text in ("zebra", "quick") and seen and all(seen)


@pytest.mark.parametrize("seed", range(12))
def test_answers_to_random_schemas_validate(lm: jaxllm.LM, seed: int) -> None:
    """Greedy and sampled; a text that the budget cut is not complete."""
    schema = random_schema(random.Random(seed))
    for options in ({}, {"temperature": 1.0, "seed": seed}):
        found = lm.generate(PROMPT, json_schema=schema, max_new_tokens=96, **options)
        if found.grammar_complete:
            jsonschema.validate(json.loads(found.text), schema)
        else:
            assert found.finish_reason == "length"


def test_second_grammar_compiles_nothing(lm: jaxllm.LM, compiled: list[str]) -> None:
    """Grammars of one kind share their programs; so do all of a served batch."""

    def run(pattern: str, schema: Any) -> None:
        lm.generate(PROMPT, regex=pattern, max_new_tokens=9)
        lm.generate(PROMPT, json_schema=schema, max_new_tokens=9)
        requests = [{"prompt": "a", "regex": pattern}, {"prompt": "b", "json_schema": schema}]
        list(lm.serve([{**r, "max_new_tokens": 9} for r in requests], rows=2, capacity=32))

    run("[a-c]{2}", {"type": "boolean"})
    before = Counter(compiled)
    run("x+y", {"enum": [12, 3]})
    assert Counter(compiled) == before


FORMS = {
    "json": {
        "json_schema": {
            **OBJECT,
            "properties": {"description": {"const": "fine"}, **OBJECT["properties"]},
            "required": ["description", "ok", "n"],
        }
    },
    "regex": {"regex": "(Mr|Mrs)\\. Longname Smith, aged [0-9]{2}, of London"},
}


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("greedy", "json"),
        ("sampled", "regex"),
        ("penalized", "json"),
        pytest.param("sampled", "json", marks=pytest.mark.full),
        pytest.param("penalized", "regex", marks=pytest.mark.full),
    ],
)
def test_fast_forward_leaves_the_result(lm: jaxllm.LM, name: str, form: str) -> None:
    """Tokens, log-probabilities, the likeliest tokens, the cache; also where a text stops within
    forced tokens, and with every budget.
    """
    options = {**FORMS[form], **DECODERS[name], "top_logprobs": 2, "max_new_tokens": 80}
    for more in ({}, {"stop_strings": ["rip", "ng"]}, {"max_new_tokens": 7}, {"max_new_tokens": 2}):
        slow, fast = (
            lm.generate(PROMPT, **{**options, **more}, fast_forward=on) for on in (False, True)
        )
        assert slow.tokens == fast.tokens and slow.text == fast.text
        assert slow.finish_reason == fast.finish_reason
        assert slow.cache.tokens() == fast.cache.tokens()
        np.testing.assert_allclose(slow.logprobs, fast.logprobs, rtol=1e-4, atol=1e-5)
        pieces = list(lm.stream(PROMPT, **{**options, **more}, fast_forward=True))
        assert [p.token for p in pieces] == slow.tokens
        assert pieces[-1].finish_reason == slow.finish_reason
        assert "".join(p.text for p in pieces) == slow.text
        assert pieces[-1].cache.tokens() == slow.cache.tokens()


def test_forced_tokens_run_in_one_pass(lm: jaxllm.LM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer passes than tokens."""
    from jaxllm.generation.loops import generate

    passes: list[int] = []

    def count(tokens: Any, state: Any, options: Any) -> Any:
        token_1K = forced_run(tokens, state, options)
        passes.append(1 if token_1K is None else 1 + token_1K.shape[1])
        return token_1K

    forced_run = generate._forced_run
    monkeypatch.setattr(generate, "_forced_run", count)
    found = lm.generate(PROMPT, **FORMS["json"], max_new_tokens=80, fast_forward=True)
    assert found.grammar_complete and sum(passes) == len(found.tokens) - 1
    assert len(passes) < len(found.tokens) - 5


def test_two_grammars_are_refused(lm: jaxllm.LM) -> None:
    """And so are a value of the wrong kind and a grammar without llguidance's support."""
    with pytest.raises(SamplingError, match="one grammar: regex and choice"):
        lm.generate(PROMPT, regex="a", choice=["b"])
    with pytest.raises(SamplingError, match=r"grammar must be a jaxllm\.Grammar"):
        lm.generate(PROMPT, grammar="a")
    for name, value in itertools.product(("regex", "lark", "gbnf"), (3, [], b"a")):
        with pytest.raises(SamplingError, match=name):
            lm.generate(PROMPT, **{name: value})
