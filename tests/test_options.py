"""Generation options: one table that agrees with the types, the docstring and all checks."""

import dataclasses
import re
import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm.errors import CapacityError, SamplingError, TokenError
from jaxllm.generation.option_table import HINTS
from jaxllm.generation.options import OPTIONS, GenerateOptions, check_options, check_values
from jaxllm.generation.sampling.options import PROCESSORS, make_sampler
from jaxllm.generation.sampling.penalties import RepetitionPenalty
from jaxllm.runtime.docstrings import split_docstring
from tests.tiny_models import save_random


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("plain")
    save_random(path, "llama", eos_token_id=None, num_hidden_layers=1)
    return path


@pytest.fixture(scope="module")
def lm(plain: Path) -> jaxllm.LM:
    return jaxllm.load(plain)


def test_options_table_agrees_with_itself() -> None:
    """Every option is described, its default is valid, and a processor has it if it samples."""
    assert list(split_docstring(GenerateOptions)[1]) == list(OPTIONS)
    documented = set(re.findall(r"[a-z_]+", jaxllm.LM.generate.__doc__ or ""))
    assert set(OPTIONS) <= documented and not set(HINTS) & set(OPTIONS)
    for name, option in OPTIONS.items():
        given = {} if option.default in (None, ()) else {name: option.default}
        assert option.meaning and check_values(given) == given
    sampling = {name for name, option in OPTIONS.items() if option.decoders == "samplers"}
    assert sampling == {*PROCESSORS, "do_sample", "sampler", "logits_processor"}


WRONG: dict[str, list[Any]] = {
    "adapter": [5, {}, [5], True],
    "assistant_model": ["x", 5],
    "bad_words_ids": [[[]], [1, 2], [[1], [-1]]],
    "batch_invariant": [1, "yes"],
    "begin_suppress_tokens": [[True]],
    "cache": ["x", {}],
    "chunk": [0, 2.5, "x", True],
    "do_sample": [1, "true"],
    "dry_allowed_length": [0],
    "dry_base": [0.9],
    "dry_multiplier": [-1],
    "dry_penalty_last_n": [-2],
    "early_stopping": [1, "x", []],
    "edits": [5, "x", [1], {1: {}}, {"embed": 2}],
    "eos_token_id": ["12", 2.5, -1, [1.5], True, {}, 2**70],
    "epsilon_cutoff": [1.0],
    "eta_cutoff": [-0.1],
    "forced_bos_token_id": [-2],
    "forced_eos_token_id": ["12", 1.5],
    "frequency_penalty": ["often"],
    "guidance_scale": ["x", float("nan"), [], True],
    "length_penalty": ["x", float("inf")],
    "logit_bias": ["x", {"a": 1}, {1: "x"}, {1: 101}, {"one": 1}, [1, 2]],
    "logits_processor": [5, [5], "x", {}],
    "max_matching_ngram_size": [0, 1.5],
    "max_new_tokens": [0, -1, 2.5, "5", 2**40, True, [1.5]],
    "min_length": [-1],
    "min_new_tokens": [0.5],
    "min_p": [1.05, -0.1, [[0.1]]],
    "mirostat_eta": [[0.1, -0.1]],
    "mirostat_tau": [-1],
    "negative_prompt": [5, {}],
    "no_repeat_ngram_size": [-1, 1.5],
    "num_assistant_tokens": [0, "x"],
    "num_beams": [0, 2.5, "2"],
    "num_return_sequences": [0, -3, "x", 1.0],
    "overflow": [5, [], "shift", {}],
    "pad_token_id": ["x", 1.5],
    "penalty_alpha": ["x", -1, 2, []],
    "presence_penalty": [float("inf")],
    "prompt_lookup_num_tokens": [0, "x"],
    "repetition_penalty": ["1.5", 0, True],
    "sampler": ["x", 5],
    "seed": [1.5, -1, 2**64, "x", True, [1.5]],
    "sequence_bias": [{(): 1.0}, {(1,): float("inf")}, 3],
    "stop_strings": [5, "", [5], [""], {}],
    "stopping_criteria": [5, ["x"]],
    "suppress_tokens": ["12", "abc", [0.5], [1.5], {"a": 1}],
    "temperature": ["0.5", "hot", -1, 1e39, float("nan"), True, {}, [[1.0]], 10**400],
    "top_k": [1.5, -1, "x", 10**400],
    "top_logprobs": [-1, 1.5, "x"],
    "top_n_sigma": [-1],
    "top_p": [1.1, [0.5, -0.5]],
    "typical_p": [0.0, 1.1],
    "xtc_probability": [1.1],
    "xtc_threshold": [-0.1],
}


@pytest.mark.parametrize("name", sorted(WRONG))
def test_invalid_option_values_are_refused_by_name(name: str, lm: jaxllm.LM) -> None:
    """check_options, generate and stream refuse invalid values in one line with the name."""
    for value in WRONG[name]:
        for refused in (
            lambda: check_options({name: value}),  # noqa: B023
            lambda: lm.generate([5], **{name: value}),  # noqa: B023
            lambda: lm.stream([5], **{name: value}),  # noqa: B023
        ):
            with pytest.raises((SamplingError, TokenError)) as error:
                refused()
            assert name in str(error.value) or "prompt" in str(error.value)
            assert "\n" not in str(error.value)


def test_check_options_reports_all_invalid_values_together() -> None:
    with pytest.raises(SamplingError, match=r"top_p must be .*; max_new_tokens must be"):
        check_options({"top_p": 3, "max_new_tokens": "x", "chunk": 5})


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("temprature", "did you mean temperature"),
        ("max_new_token", "did you mean max_new_tokens"),
        ("stop", "use stop_strings"),
        ("max_tokens", "use max_new_tokens"),
        ("max_length", "use max_new_tokens, the length without the prompt"),
        ("n", "use num_return_sequences"),
        ("prefix_allowed_tokens_fn", "logits_processor"),
        ("xyzzy", "help(jaxllm.LM.generate)"),
    ],
)
def test_unknown_option_error_suggests_nearest_name(name: str, answer: str) -> None:
    with pytest.raises(SamplingError, match=re.escape(f"no option {name}")) as error:
        check_options({name: 1})
    assert answer in str(error.value)
    assert len(str(error.value)) < 200


def test_incompatible_options_are_refused() -> None:
    """Options of different decoding modes raise an error that names both; options at their default
    value are accepted.
    """
    for options, match in [
        ({"num_beams": 2, "guidance_scale": 2.0}, "beam search and guidance cannot"),
        ({"length_penalty": 2.0}, "generation does not take length_penalty, which requires beam"),
        ({"negative_prompt": "x"}, "does not take negative_prompt, which requires guidance"),
        ({"penalty_alpha": 0.5, "temperature": 1.0}, "search does not take temperature"),
        ({"num_beams": 2, "top_logprobs": 3}, "beam search does not take top_logprobs"),
        ({"sampler": jaxllm.GREEDY, "top_k": 3}, "sampler or top_k, not both"),
    ]:
        with pytest.raises(SamplingError, match=match):
            check_options(options)
    assert check_options({"length_penalty": 1.0, "top_k": None}) == {"length_penalty": 1.0}
    with pytest.raises(SamplingError, match="a request to serve does not take num_beams"):
        check_options({"num_beams": 2}, "serve")
    with pytest.raises(SamplingError, match=r"to serve does not take length_penalty$"):
        check_options({"length_penalty": 2.0}, "serve")
    with pytest.raises(SamplingError, match="stream does not support beam"):
        check_options({"num_beams": 2}, "stream")


def test_oversized_requests_are_refused_before_allocation(lm: jaxllm.LM) -> None:
    """Row counts, beams and capacities that exceed memory raise CapacityError, from the call or
    from generation_config.json.
    """
    for options in (
        {"num_return_sequences": 10**9},
        {"num_beams": 10**9},
        {"max_new_tokens": 2**30, "overflow": "slide", "num_return_sequences": 10**4},
    ):
        with pytest.raises(CapacityError, match="needs"):
            lm.generate([5], **options)
    broken = dataclasses.replace(lm, generation={"num_return_sequences": 10**9})
    with pytest.raises(CapacityError, match="needs"):
        broken.generate([5])
    for sizes in ({"rows": 2**40}, {"rows": 2.5}, {"rows": 0}, {"capacity": 2**30, "rows": 2**20}):
        with pytest.raises(CapacityError):
            next(lm.serve([{"prompt": [5]}], **sizes))


def test_generation_config_is_validated_like_call_options(lm: jaxllm.LM) -> None:
    """Invalid values in generation_config.json raise an error unless the call overrides them;
    unused and unknown fields are ignored.
    """
    wrong = dataclasses.replace(lm, generation={"eos_token_id": "12", "top_p": "x"})
    with pytest.raises(SamplingError, match=r"generation_config.json: eos_token_id must be"):
        wrong.generate([5])
    assert wrong.generate([5], eos_token_id=[], top_p=1.0, max_new_tokens=1).tokens
    fine = {"pad_token_id": 0, "length_penalty": 2.0, "seed": 3, "no_such": 1, "max_length": 20}
    beams = dataclasses.replace(lm, generation={"num_beams": 2})
    assert beams.generate([5], max_new_tokens=2, length_penalty=2.0).score is not None
    greedy = lm.generate([5], max_new_tokens=4).tokens
    assert dataclasses.replace(lm, generation=fine).generate([5], max_new_tokens=4).tokens == greedy
    assert lm.generate([5], max_new_tokens=4, pad_token_id=0).tokens == greedy


def test_generate_accepts_id_sequences_and_arrays(lm: jaxllm.LM) -> None:
    """Lists, tuples, ranges and NumPy or JAX arrays of ids give equal tokens; anything else raises
    TokenError.
    """
    ids, options = [5, 6, 7], {"max_new_tokens": 3}
    single = lm.generate(ids, **options)
    for same in (np.array(ids), jnp.array(ids), tuple(ids), [np.int64(5), *ids[1:]], range(5, 8)):
        assert lm.generate(same, **options).tokens == single.tokens
    for several in (np.array([ids, ids]), jnp.array([ids, ids]), [jnp.array(ids), ids]):
        assert [c.tokens for c in lm.generate(several, **options)] == [single.tokens] * 2
    assert lm.generate([]) == []
    for wrong in ([10**30], [2**31 + 5], [-(2**40)], np.zeros((1, 1, 1), int), jnp.array(5)):
        with pytest.raises(TokenError):
            lm.generate(wrong)
    for several in ([], [[1], [2]]):
        with pytest.raises(TokenError, match="one prompt"):
            lm.stream(several)
    with pytest.raises(TokenError, match=r"the prompt: token id .* \(token 1\)"):
        lm.embed([[5, 2**40]])


def test_random_seed_is_reported_and_reproducible(lm: jaxllm.LM) -> None:
    """seed='random' draws a new seed per call; the reported seed gives the same tokens."""
    options: Any = {"temperature": 1.0, "max_new_tokens": 8}
    one, two = (lm.generate([5], seed="random", **options) for _ in range(2))
    assert one.seed != two.seed
    assert lm.generate([5], seed=one.seed, **options).tokens == one.tokens
    assert [p.token for p in lm.stream([5], seed=two.seed, **options)] == two.tokens
    assert next(lm.stream([5], seed=two.seed, **options)).seed == two.seed
    pair = lm.generate([[5], [5]], seed=["random", 3], **options)
    assert pair[1].seed == 3
    assert lm.generate([5], seed=np.int64(3), **options).tokens == pair[1].tokens
    assert lm.generate([5], **options).seed == 0


def only_even(scores_BV: Any, context: Any) -> Any:
    return jnp.where(jnp.arange(scores_BV.shape[1]) % 2 == 0, scores_BV, -jnp.inf)


def test_custom_processors_and_samplers_are_applied(lm: jaxllm.LM) -> None:
    """Custom logits processors and samplers apply in generate, stream and serve; library ones equal
    the matching options.
    """
    options: Any = {"max_new_tokens": 8, "logits_processor": [only_even]}
    even = lm.generate([5], **options)
    assert not any(token % 2 for token in even.tokens)
    assert even.tokens != lm.generate([5], max_new_tokens=8).tokens
    assert [p.token for p in lm.stream([5], **options)] == even.tokens
    [(_, served)] = lm.serve([{"prompt": [5], **options}], rows=1, capacity=32)
    assert served.tokens == even.tokens
    sampled = lm.generate([5], temperature=1.0, top_k=20, seed=3, **options)
    assert not any(token % 2 for token in sampled.tokens)
    ours = lm.generate(
        [5], max_new_tokens=8, logits_processor=[RepetitionPenalty(jnp.float32(3.0))]
    )
    assert ours.tokens == lm.generate([5], max_new_tokens=8, repetition_penalty=3.0).tokens
    sampler = make_sampler(temperature=0.7, top_k=9)
    assert (
        lm.generate([5], max_new_tokens=8, sampler=sampler, seed=2).tokens
        == lm.generate([5], max_new_tokens=8, temperature=0.7, top_k=9, seed=2).tokens
    )
    with pytest.raises(SamplingError, match=r"must return float scores \(1, 131\)"):
        lm.generate([5], logits_processor=[lambda scores, context: scores[0]])


def test_custom_stopping_criterion_ends_generation(lm: jaxllm.LM) -> None:
    """A criterion on the token ids stops generate, batched generate, serve, prompt lookup and
    stream at the same token.
    """
    free = lm.generate([5], max_new_tokens=8)
    cut: Any = {"max_new_tokens": 8, "stopping_criteria": lambda text, ids: len(ids) == 3}
    for found in (
        lm.generate([5], **cut),
        lm.generate([[7, 8], [5]], **cut)[1],
        next(iter(lm.serve([{"prompt": [5], **cut}], rows=1, capacity=32)))[1],
        lm.generate([5], prompt_lookup_num_tokens=2, **cut),
    ):
        assert found.tokens == free.tokens[:3]
        assert found.finish_reason == "stop"
    assert [p.token for p in lm.stream([5], **cut)] == free.tokens[:3]


def test_serve_takes_top_logprobs(lm: jaxllm.LM) -> None:
    """A request's completion has the likeliest tokens of generate; more than 20 are refused."""
    options: Any = {"max_new_tokens": 5, "top_logprobs": 3}
    requests = [{"prompt": [5], **options}, {"prompt": [5], "top_logprobs": 21}, {"prompt": [7]}]
    found = dict(lm.serve([{"max_new_tokens": 5, **r} for r in requests], rows=3, capacity=32))
    expected = lm.generate([5], **options).top_logprobs
    assert [[i for i, _ in top] for top in found[0].top_logprobs] == [
        [i for i, _ in top] for top in expected
    ]
    np.testing.assert_allclose(found[0].top_logprobs, expected, atol=1e-4)
    assert "top_logprobs must be a whole number from 0 to 20, got 21" in str(found[1])
    assert found[2].top_logprobs is None


def test_custom_stopping_criterion_receives_decoded_text() -> None:
    """The criterion receives the growing text and stops at the fourth space; log_probs equals
    log-softmax of forward.
    """
    demo = jaxllm.load("demo:llama", dtype="float32")
    seen: list[str] = []

    def three_words(text: str, ids: list[int]) -> bool:
        seen.append(text)
        return text.count(" ") > 3

    found = demo.generate("Once upon a time", max_new_tokens=30, stopping_criteria=three_words)
    assert found.text.count(" ") == 4
    assert seen[-1].startswith(seen[-2])
    scored = demo.log_probs("Once upon a time")
    ids = demo.encode("Once upon a time")
    assert scored.shape == (len(ids) - 1,)
    logits = jaxllm.forward(demo.model, demo.params, None, [ids]).logits[0]
    expected = jnp.take_along_axis(
        logits[:-1] - jnp.log(jnp.exp(logits[:-1]).sum(axis=1, keepdims=True)),
        jnp.array(ids[1:])[:, None],
        axis=1,
    )[:, 0]
    np.testing.assert_allclose(scored, expected, atol=1e-4)


def test_lm_save_round_trips_changed_params(lm: jaxllm.LM, tmp_path: Path) -> None:
    """A saved demo generates the same text, and a changed norm weight is saved with it."""
    demo = jaxllm.load("demo:gpt2")
    demo.save(tmp_path / "gpt2")
    again = jaxllm.load(tmp_path / "gpt2")
    assert again.generate("One day", max_new_tokens=5) == demo.generate("One day", max_new_tokens=5)
    norm = {"weight": lm.params["norm"]["weight"] * 2}
    trained = dataclasses.replace(lm, params={**lm.params, "norm": norm})
    trained.save(tmp_path / "trained")
    loaded = jaxllm.load(tmp_path / "trained")
    np.testing.assert_array_equal(loaded.params["norm"]["weight"], norm["weight"])
    assert loaded.init_cache().capacity == lm.config.context_length
    assert loaded.init_cache(2, 8).batch == 2


def test_serve_keeps_requests_with_equal_ids_separate(lm: jaxllm.LM) -> None:
    """Requests with repeated or unhashable ids each get the tokens of a single run, and invalid
    requests get an error.
    """
    requests: list[Any] = [
        {"prompt": [5], "id": 1},
        {"prompt": [6, 7]},
        {"prompt": [8], "id": 1},
        {"prompt": [9], "id": [1]},
        {"prompt": [9], "id": {"a": 1}},
        "no mapping",
        {"prompt": [5], "stop_strings": 5},
    ]
    found = list(lm.serve([{"max_new_tokens": 4, **r} if isinstance(r, dict) else r
                           for r in requests], rows=4, capacity=32))  # fmt: skip
    results = [(name, getattr(answer, "tokens", None)) for name, answer in found]
    for name, prompt in ((1, [5]), (2, [6, 7]), (1, [8]), ([1], [9]), ({"a": 1}, [9])):
        assert (name, lm.generate(prompt, max_new_tokens=4).tokens) in results
    assert {str(name) for name, tokens in results if tokens is None} == {"5", "6"}
    assert len(results) == 7


def test_serve_cancels_requests(lm: jaxllm.LM) -> None:
    """Cancelled requests return the tokens generated so far, and other requests are unaffected."""
    cancelled, never = threading.Event(), threading.Event()
    cancelled.set()
    counts = iter(range(99))
    requests = [
        {"prompt": [5], "id": "whole", "max_new_tokens": 20, "is_cancelled": never.is_set},
        {
            "prompt": [6],
            "id": "some",
            "max_new_tokens": 90,
            "is_cancelled": lambda: next(counts) > 2,
        },
        {"prompt": [7], "id": "none", "max_new_tokens": 90, "is_cancelled": cancelled.is_set},
        {"prompt": [8], "id": "next", "max_new_tokens": 5},
    ]
    found = dict(lm.serve(requests, rows=2, capacity=96))
    assert found["none"].finish_reason == found["some"].finish_reason == "cancelled"
    assert found["none"].tokens == []
    some = found["some"].tokens
    assert 0 < len(some) < 90
    assert lm.generate([6], max_new_tokens=len(some)).tokens == some
    for name, prompt, new in (("whole", [5], 20), ("next", [8], 5)):
        assert found[name].tokens == lm.generate(prompt, max_new_tokens=new).tokens
    [(_, error)] = lm.serve([{"prompt": [5], "is_cancelled": True}], rows=1, capacity=32)
    assert "cancelled must be a function" in str(error)


def test_serve_reports_invalid_request_immediately(lm: jaxllm.LM) -> None:
    """An invalid request is answered before the next request is read."""
    consumed = []

    def arriving() -> Any:
        for request in ({"prompt": [5], "top_p": 7}, {"prompt": [5], "max_new_tokens": 2}):
            consumed.append(request)
            yield request

    answers = lm.serve(arriving(), rows=1, capacity=32)
    assert "top_p must be" in str(next(answers)[1])
    assert len(consumed) == 1
