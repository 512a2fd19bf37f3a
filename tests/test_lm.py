"""LM: options, prompts, batches, defaults, downloads and errors."""

import ast
import dataclasses
import importlib
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import transformers

import jaxllm
from jaxllm.cache import drop_range, fork
from jaxllm.cache.prefix_reuse import reuse_prefix
from jaxllm.convert.registry import open_checkpoint
from jaxllm.errors import (
    CacheMismatchError,
    CapacityError,
    CheckpointError,
    NonFiniteError,
    SamplingError,
    TemplateError,
    TokenError,
)
from jaxllm.generation.option_table import OPTIONS
from jaxllm.generation.options.resolve import UNSUPPORTED, resolve_options
from tests.conftest import Run, succeed
from tests.tiny_models import BOTH, in_both, save_random, tokens


@pytest.fixture(scope="module", params=BOTH)
def demo(request: pytest.FixtureRequest, shallow: Any) -> jaxllm.LM:
    return jaxllm.load(shallow(request.param), dtype="float32")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random checkpoint without a tokenizer."""
    path: Path = tmp_path_factory.mktemp("plain")
    save_random(path, "llama")
    return path


@in_both("demo")
def test_stream_equals_generate(demo: jaxllm.LM) -> None:
    """A stream's chunks add up to the completion: tokens, log-probs and finish reason too."""
    options: Any = {"max_new_tokens": 20, "temperature": 0.9, "seed": 5}
    whole = demo.generate("Once upon a time", **options)
    pieces = list(demo.stream("Once upon a time", **options))
    assert "".join(p.text for p in pieces) == whole.text
    assert [p.token for p in pieces] == whole.tokens
    np.testing.assert_allclose([p.logprob for p in pieces], whole.logprobs, atol=1e-4)
    assert [p.finish_reason for p in pieces] == [None] * 19 + [whole.finish_reason]
    assert pieces[-1].tokens_per_second > 0


def test_cached_prompt_prefix_is_reused(demo: jaxllm.LM) -> None:
    """For any shared prefix, generation equals a fresh run, and only the rest is run."""
    first = demo.generate("Once upon a time", max_new_tokens=12)
    assert first.cache.tokens() == demo.encode("Once upon a time") + first.tokens[:-1]
    for prompt in (f"Once upon a time{first.text} and", "Once upon a day", "Once", "One day"):
        again = demo.generate(prompt, max_new_tokens=12, cache=first.cache)
        assert again.tokens == demo.generate(prompt, max_new_tokens=12).tokens
        pieces = list(demo.stream(prompt, max_new_tokens=12, cache=first.cache))
        assert [p.token for p in pieces] == again.tokens
        assert pieces[-1].cache.tokens() == demo.encode(prompt) + again.tokens[:-1]
    ids = demo.encode("Once upon a time") + first.tokens
    cache, rest = reuse_prefix(first.cache, ids, 5)
    assert rest == first.tokens[-1:]
    np.testing.assert_array_equal(cache.position_BS, first.cache.position_BS)
    assert reuse_prefix(first.cache, ids[:3], 5)[1] == ids[2:3]
    larger, rest = reuse_prefix(first.cache, [*ids, *[5] * 150], 5)  # exceeds the cache capacity
    assert len(rest) == 151
    assert larger.capacity >= len(ids) + 150 + 4


def test_cache_with_gaps_or_multiple_rows_is_refused(demo: jaxllm.LM) -> None:
    cache = demo.generate("Once upon a time", max_new_tokens=3).cache
    with pytest.raises(CacheMismatchError, match="has gaps"):
        demo.generate("Once upon", cache=drop_range(cache, 1, 2))
    with pytest.raises(CacheMismatchError, match="one prompt"):
        demo.generate(["Once", "One"], cache=cache)
    with pytest.raises(CacheMismatchError, match="one row, got 2"):
        demo.generate("Once", cache=fork(cache, 2, capacity=2))


def test_stop_string_is_excluded_from_text(demo: jaxllm.LM) -> None:
    """A stop string ends the text before itself, also across tokens, in generate and stream."""
    prompts = ["Once upon a time", "One day"]
    free = demo.generate(prompts, max_new_tokens=30)
    assert free[0].text is not None
    stop = free[0].text[9:14]  # likely crosses token boundaries
    ended = demo.generate(prompts, max_new_tokens=30, stop_strings=[stop, "no such text"])
    for whole, cut in zip(free, ended, strict=True):
        assert whole.text is not None
        assert cut.text is not None
        assert cut.text == whole.text.split(stop)[0]
        assert cut.tokens == whole.tokens[: len(cut.tokens)]
        assert cut.finish_reason == ("stop" if stop in whole.text else whole.finish_reason)
    pieces = list(demo.stream("Once upon a time", max_new_tokens=30, stop_strings=stop))
    assert "".join(p.text for p in pieces) == ended[0].text
    assert [p.token for p in pieces] == ended[0].tokens
    assert pieces[-1].finish_reason == "stop"
    assert len(ended[0].tokens) < 30


def test_num_return_sequences_and_top_logprobs(demo: jaxllm.LM) -> None:
    """Several sequences equal repeated prompts, differ from each other, and the top log-probs begin
    with the greedy token.
    """
    options: Any = {"temperature": 1.0, "seed": 5, "max_new_tokens": 8, "top_logprobs": 3}
    several = demo.generate(["Once", "One day"], num_return_sequences=2, **options)
    flat = demo.generate(["Once", "Once", "One day", "One day"], **options)
    assert [c.tokens for pair in several for c in pair] == [c.tokens for c in flat]
    assert len({tuple(c.tokens) for c in flat}) == 4
    pair = demo.generate("Once", num_return_sequences=2, **options)
    assert [c.tokens for c in pair] == [c.tokens for c in flat[:2]]
    greedy = demo.generate("Once", max_new_tokens=4, top_logprobs=3)
    assert [top[0][0] for top in greedy.top_logprobs] == greedy.tokens
    np.testing.assert_allclose([t[0][1] for t in greedy.top_logprobs], greedy.logprobs, rtol=1e-6)
    streamed = [p.top_logprobs for p in demo.stream("Once", max_new_tokens=4, top_logprobs=3)]
    assert [[i for i, _ in top] for top in streamed] == [
        [i for i, _ in top] for top in greedy.top_logprobs
    ]


def test_beam_search_scores_and_no_repeat_ngram(demo: jaxllm.LM) -> None:
    """Beams are sorted by score and equal in a batch; unsupported options are refused;
    no_repeat_ngram_size holds for greedy text.
    """
    best, second = demo.generate(
        "Once upon a time", num_beams=4, num_return_sequences=2, max_new_tokens=12
    )
    assert best.score >= second.score
    assert best.text != second.text
    one, two = demo.generate(["Once upon a time", "One day"], num_beams=4, max_new_tokens=12)
    assert one.tokens == best.tokens
    assert two.finish_reason in ("length", "eos")
    with pytest.raises(SamplingError, match="beam search does not take cache"):
        demo.generate("One", num_beams=2, cache=demo.generate("One", max_new_tokens=1).cache)
    with pytest.raises(SamplingError, match="stream does not support beam"):
        next(demo.stream("One", num_beams=2))
    text = demo.generate("Once", max_new_tokens=40, no_repeat_ngram_size=2)
    ids = demo.encode("Once") + text.tokens
    pairs = list(itertools.pairwise(ids))
    assert len(set(pairs)) == len(pairs)


def test_speculative_guided_and_contrastive_options(demo: jaxllm.LM) -> None:
    """Draft models, prompt lookup, alpha 0 and weak guidance give the greedy tokens; bad
    combinations are refused.
    """
    prompt = "Once upon a time"
    plain = demo.generate(prompt, max_new_tokens=16)
    for options in ({"assistant_model": demo}, {"prompt_lookup_num_tokens": 3}):
        found = demo.generate(prompt, max_new_tokens=16, **options)
        assert found.tokens == plain.tokens
        assert found.text == plain.text
        assert found.draft_stats is not None
    assert demo.generate(prompt, max_new_tokens=16, penalty_alpha=0.0).tokens == plain.tokens
    guided = demo.generate(prompt, max_new_tokens=16, guidance_scale=1.0001, negative_prompt="One")
    assert guided.tokens == plain.tokens  # almost no guidance
    stop = plain.text[8:12]
    cut = demo.generate(prompt, max_new_tokens=16, prompt_lookup_num_tokens=3, stop_strings=stop)
    assert cut.text == plain.text.split(stop)[0]
    assert cut.finish_reason == "stop"
    with pytest.raises(SamplingError, match="beam search and guidance cannot be combined"):
        demo.generate(prompt, num_beams=2, guidance_scale=2.0)
    with pytest.raises(SamplingError, match="contrastive search does not take overflow"):
        demo.generate(prompt, penalty_alpha=0.5, overflow="slide")
    with pytest.raises(SamplingError, match="not both"):
        demo.generate(prompt, assistant_model=demo, prompt_lookup_num_tokens=3)


def test_overflow_option_exceeds_context(plain: Path) -> None:
    """overflow slide and sinks generate beyond the context; the default refuses and an unknown
    policy is an error.
    """
    lm = jaxllm.load(plain)
    assert len(lm.generate([1] * 90, max_new_tokens=150, overflow="slide").tokens) == 150
    assert len(lm.generate([1] * 90, max_new_tokens=20, overflow="sinks").tokens) == 20
    with pytest.raises(CapacityError, match="overflow='slide'"):
        lm.generate([1] * 90, max_new_tokens=20)
    with pytest.raises(SamplingError, match="overflow must be one of refuse, slide, sinks"):
        lm.generate([1] * 90, overflow="shift")


def test_batch_invariant_rows_have_same_bits(plain: Path) -> None:
    """With batch_invariant or seeds per row, a row has the same bits in any batch and position."""
    lm = jaxllm.load(plain)
    prompts = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
    options: Any = {"temperature": 1.0, "batch_invariant": True, "max_new_tokens": 6}
    one = lm.generate(prompts, seed=[1, 2, 3], **options)
    two = lm.generate([prompts[2], *prompts[:2], [1] * 40], seed=[3, 1, 2, 4], **options)
    single = lm.generate(prompts[1], seed=[2], temperature=1.0, max_new_tokens=6)
    for a, b in zip(one, [two[1], two[2], two[0]], strict=True):
        assert (a.tokens, a.logprobs) == (b.tokens, b.logprobs)  # bit for bit
    assert (single.tokens, single.logprobs) == (one[1].tokens, one[1].logprobs)
    together = lm.generate(prompts, seed=[1, 2, 3], temperature=1.0, max_new_tokens=[6, 4, 5])
    assert [c.tokens for c in together] == [
        c.tokens[:n] for c, n in zip(one, [6, 4, 5], strict=True)
    ]
    with pytest.raises(SamplingError, match="seed must be"):
        lm.generate(prompts, seed=[1, 2], temperature=1.0)
    with pytest.raises(SamplingError, match="requires num_return_sequences=1"):
        lm.generate(prompts, num_return_sequences=2, batch_invariant=True)
    with pytest.raises(SamplingError, match="requires the same max_new_tokens"):
        lm.generate(prompts, num_beams=2, max_new_tokens=[3, 4, 5])


def test_completion_text_continues_prompt(demo: jaxllm.LM) -> None:
    """The text keeps its leading space: prompt + text decodes all the tokens."""
    assert demo.tokenizer is not None
    prompt = "Once upon"
    completion = demo.generate(prompt, max_new_tokens=6)
    ids = demo.tokenizer.encode(prompt) + completion.tokens
    assert prompt + completion.text == demo.tokenizer.decode(ids)


def test_token_id_prompts_are_accepted(plain: Path) -> None:
    """Token ids work without a tokenizer, text does not, and an empty prompt is the bos token."""
    lm = jaxllm.load(plain)
    one = lm.generate([5, 6, 7], max_new_tokens=4)
    assert one.text is None
    assert one.prompt_tokens == 3
    two = lm.generate([[5, 6, 7], [8]], max_new_tokens=4)
    assert two[0].tokens == one.tokens
    with pytest.raises(TokenError, match="no tokenizer"):
        lm.generate("text")
    assert lm.generate("", max_new_tokens=1).prompt_tokens == 1  # the bos token


def with_settings(source: Path, target: Path, settings: dict[str, Any]) -> Path:
    """Copy a checkpoint and give it generation settings."""
    shutil.copytree(source, target)
    (target / "generation_config.json").write_text(json.dumps(settings))
    return target


def test_generation_config_gives_defaults(plain: Path, tmp_path: Path) -> None:
    """generation_config.json gives the defaults, and options of the call override them."""
    settings = {"do_sample": True, "temperature": 5.0, "eos_token_id": [], "max_new_tokens": 7}
    lm = jaxllm.load(with_settings(plain, tmp_path / "m", settings))
    greedy = jaxllm.load(plain).generate([5], max_new_tokens=7, eos_token_id=[]).tokens
    sampled = lm.generate([5]).tokens
    assert len(sampled) == 7
    assert sampled != greedy
    assert lm.generate([5], do_sample=False).tokens == greedy
    assert lm.generate([5], temperature=0).tokens == greedy
    eos = greedy[2]
    ended = lm.generate([5], do_sample=False, eos_token_id=eos)
    assert ended.tokens == greedy[: greedy.index(eos) + 1]
    assert ended.finish_reason == "eos"


# Fields of transformers' GenerationConfig that do not change a text.
NO_EFFECT = {
    "use_mtp", "use_cache", "cache_implementation", "cache_config", "max_cache_len",
    "remove_invalid_values", "output_attentions", "output_hidden_states", "output_scores",
    "output_logits", "return_dict_in_generate", "bos_token_id", "decoder_start_token_id",
    "is_assistant", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "assistant_early_exit", "assistant_lookbehind", "target_lookbehind",
    "assistant_ensemble_weight", "speculation_type", "compile_config", "disable_compile",
    "continuous_batching_config", "low_memory", "prefill_chunk_size", "transformers_version",
}  # fmt: skip


def test_every_field_of_generation_config_is_known() -> None:
    """Each field of transformers' GenerationConfig is an option, warned of, or without effect."""
    options = {name for name, option in OPTIONS.items() if option.from_file}
    known = options | UNSUPPORTED.keys() | NO_EFFECT | {"max_length"}
    fields = vars(transformers.GenerationConfig())
    assert [name for name in fields if name not in known and name[0] != "_"] == []


@pytest.mark.parametrize(
    ("settings", "options", "count"),
    [
        ({"max_length": 30}, {}, 27),  # it counts the prompt
        ({"max_length": 30, "max_new_tokens": 8}, {}, 8),
        ({"max_length": 30}, {"max_new_tokens": 40}, 40),
        ({"max_length": 2}, {}, 1),
        ({"max_length": 4096}, {}, 94),
        ({"max_new_tokens": 2048}, {}, 94),  # nobody asked for more than the context
        ({}, {}, 94),
        ({"max_new_tokens": 2048}, {"overflow": "slide"}, 2048),
    ],
)
def test_default_length_of_checkpoints_fits_the_context(
    plain: Path, settings: dict[str, Any], options: dict[str, Any], count: int
) -> None:
    """Without max_new_tokens in the call, max_new_tokens or max_length of generation_config.json
    decides, as far as the context of 97 tokens has room.
    """
    config = open_checkpoint(plain).config
    assert resolve_options(config, settings, [[1, 2, 3]], options).max_new_tokens == count


def test_special_tokens_in_prompts_are_parsed_on_request(demo_names: None, run: Run) -> None:
    """`encode` with parse_special gives transformers' ids; `jaxllm generate` parses by default."""
    lm, text = jaxllm.load("demo:llama"), "<|eos|>Once upon"
    theirs = transformers.AutoTokenizer.from_pretrained(lm.path)
    assert lm.encode(text, parse_special=True) == theirs.encode(text)
    assert lm.encode(text) != theirs.encode(text)
    for flags, parse in ((), True), (("--no-special-tokens",), False):
        out, _ = succeed(run, "generate", "demo:llama", text, "-n", 4, "--json", *flags)
        expected = lm.generate(lm.encode(text, parse_special=parse), max_new_tokens=4)
        assert json.loads(out)["tokens"] == expected.tokens


def test_unsupported_generation_config_fields_warn(plain: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="num_beam_groups is not supported"):
        jaxllm.load(with_settings(plain, tmp_path / "m", {"num_beam_groups": 2}))


def test_int8_inputs_option_rounds_inputs(demo_names: None, run: Run) -> None:
    """`load` and --int8-inputs change logits alike, a little, and warn without integers."""
    exact = jaxllm.load("demo:llama", quantize="int8")
    rounded = jaxllm.load("demo:llama", quantize="int8", int8_inputs=True)
    a, b = (lm.generate("Once", max_new_tokens=4).logprobs for lm in (exact, rounded))
    assert a != b
    assert a == pytest.approx(b, abs=0.1)
    flags = ("-n", 4, "--quantize", "int8", "--int8-inputs", "--json")
    out, _ = succeed(run, "generate", "demo:llama", "Once", *flags)
    assert json.loads(out)["logprobs"] == [round(x, 6) for x in b]
    with pytest.warns(UserWarning, match="no weight is of integers"):
        jaxllm.load("demo:llama", int8_inputs=True)


def test_unsupported_requests_are_refused_by_name(plain: Path) -> None:
    lm = jaxllm.load(plain)
    for error, match, prompt, options in [
        (CapacityError, "context of 97", tokens(1, 90)[0].tolist(), {"max_new_tokens": 8}),
        (CapacityError, "context of 97", tokens(1, 97)[0].tolist(), {}),
        (TokenError, "token id 131", [131], {}),
        (TokenError, "text or token ids", [1.5], {}),
    ]:
        with pytest.raises(error, match=match):
            lm.generate(prompt, **options)
    with pytest.raises(TokenError, match="no tokenizer"):
        lm.chat_prompt([{"role": "user", "content": "hi"}])
    assert len(lm.generate(tokens(1, 90)[0].tolist()).tokens) <= 7  # by default, as many as fit


def test_nan_logits_raise_with_row_and_step(plain: Path) -> None:
    lm = jaxllm.load(plain)
    weight = lm.params["embed_tokens"]["weight"].at[130].set(jnp.nan)
    broken = dataclasses.replace(lm, params={**lm.params, "embed_tokens": {"weight": weight}})
    with pytest.raises(NonFiniteError, match="row 1, after 0 new tokens"):
        broken.generate([[5], [130]], max_new_tokens=3)


def test_chat_prompt_without_template_is_refused(demo: jaxllm.LM, data: Any) -> None:
    lm = jaxllm.load(data("stories260K"))
    with pytest.raises(TemplateError, match="no chat template"):
        lm.chat_prompt([{"role": "user", "content": "hi"}])


def test_repr_is_one_line(demo: jaxllm.LM) -> None:
    assert "\n" not in repr(demo)
    assert "M parameters" in repr(demo)


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, ...]]:
    """The repositories and patterns that are asked of the hub, whose snapshots are `tmp_path`."""
    import huggingface_hub

    requests = []

    def hub(repo: str, allow_patterns: list[str]) -> str:
        requests.append((repo, *allow_patterns))
        if repo == "owner/offline":
            raise OSError("no network in tests")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    return requests


def test_load_downloads_only_with_hf_prefix(downloads: list[tuple[str, ...]]) -> None:
    with pytest.raises(CheckpointError, match="not a directory"):
        jaxllm.load("owner/offline")
    assert downloads == []
    with pytest.raises(CheckpointError, match="no network in tests"):
        jaxllm.load("hf:owner/offline")
    assert [repo for repo, *_ in downloads] == ["owner/offline"]


def test_flax_files_are_downloaded_as_fallback(
    downloads: list[tuple[str, ...]], tmp_path: Path
) -> None:
    """Flax weights are downloaded only if the repository has no other weights."""
    with pytest.raises(CheckpointError, match=r"config\.json"):
        jaxllm.load("hf:owner/name")
    assert downloads[1:] == [("owner/name", "flax_model*.msgpack")]
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        jaxllm.load("hf:owner/name")
    assert len(downloads) == 3


def test_gguf_file_is_downloaded_with_its_parts(downloads: list[tuple[str, ...]]) -> None:
    """One GGUF file of a repository is downloaded, with all parts if it is split."""
    for name in ("m.Q4_0.gguf", "Q8_0/m-00001-of-00002.gguf"):
        with pytest.raises(CheckpointError, match=name):
            jaxllm.load(f"hf:owner/name/{name}")
    assert downloads == [("owner/name", "m.Q4_0.gguf"), ("owner/name", "Q8_0/m-*-of-00002.gguf")]
    with pytest.raises(CheckpointError, match="does not name a repository"):
        jaxllm.load("hf:owner/name/file.bin")


def test_public_names_match_stub() -> None:
    """Every name of __all__ exists and is the object that the type stub names."""
    stub = ast.parse(Path(jaxllm.__file__).with_suffix(".pyi").read_text())
    found = [
        (alias.name, getattr(importlib.import_module(f"jaxllm.{node.module}"), alias.name))
        for node in stub.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    ]
    assert sorted([*dict(found), "errors"]) == sorted(jaxllm.__all__)
    assert set(jaxllm.__all__) <= set(dir(jaxllm))
    for name, value in found:
        assert getattr(jaxllm, name) is value
    assert jaxllm.errors.JaxllmError
    with pytest.raises(AttributeError, match="nonsense"):
        _ = jaxllm.nonsense
