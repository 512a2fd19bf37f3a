"""Resolved generation options: the call's, else the checkpoint's, else the table's defaults."""

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.cache.kv import cache_nbytes
from jaxllm.config.model import ModelConfig
from jaxllm.errors import CapacityError, SamplingError
from jaxllm.files import check_memory
from jaxllm.generation.completion import GenerationConfig
from jaxllm.generation.loops.overflow import OverflowPolicy
from jaxllm.generation.option_table import OPTIONS, Call
from jaxllm.generation.options.check import check_values, is_taken, select_decoder
from jaxllm.generation.sampling.constraints import MissingIds
from jaxllm.generation.sampling.grammar_mask import grammar_mask
from jaxllm.generation.sampling.options import ALWAYS_ON, PROCESSORS, make_sampler
from jaxllm.generation.sampling.sampler import GREEDY, Processor, Sampler
from jaxllm.grammar.grammar import KINDS, Matcher, start_matcher
from jaxllm.grammar.vocabulary import make_vocabulary
from jaxllm.models.inputs import check_longrope_limit, check_predicts_tokens
from jaxllm.ops.padding import bucket_size
from jaxllm.runtime import multihost
from jaxllm.runtime.validation import check_int
from jaxllm.text.tokenizer import Tokenizer

DEFAULT_NEW_TOKENS = 256

# Fields of generation_config.json that would change the tokens, and their neutral values.
UNSUPPORTED: dict[str, Any] = {
    "constraints": None,
    "diversity_penalty": 0.0,
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "exponential_decay_length_penalty": None,
    "force_words_ids": None,
    "max_time": None,
    "num_beam_groups": 1,
    "renormalize_logits": False,
    "token_healing": False,
    "top_h": None,
    "watermarking_config": None,
}


def resolve_options(
    config: ModelConfig,
    generation: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    options: Mapping[str, Any],
    kind: Call = "generate",
    cache_dtype: str | None = None,
    tokenizer: Tokenizer | None = None,
) -> GenerationConfig:
    """Return the settings of a call: its options, else generation_config.json, else the defaults.

    kind: the kind of call. cache_dtype: dtype of keys and values, to estimate the cache's memory.
    tokenizer: required by grammars.

    Raises SamplingError for an unknown or invalid option, CapacityError if prompt and new tokens
    exceed the context without an overflow policy, or if they exceed the machine's memory;
    ConfigError for a model with a score head.
    """
    check_predicts_tokens(config)
    options = check_values(options)
    defaults = check_values(
        {
            name: generation[name]
            for name, option in OPTIONS.items()
            if option.from_file and name not in options and name in generation
        },
        "generation_config.json: ",
    )
    decoder_type = select_decoder(options, kind, defaults)
    merged = {name: option.default for name, option in OPTIONS.items()} | defaults | options
    decoder = decoder_type(**{f.name: merged[f.name] for f in dataclasses.fields(decoder_type)})
    if not is_taken("num_return_sequences", decoder_type, kind):
        merged["num_return_sequences"] = 1
    n, eos = merged["num_return_sequences"], merged["eos_token_id"]
    new = _token_budget(config, prompts, options, generation, merged["overflow"])
    longest = max(map(len, prompts)) + (max(new) if isinstance(new, list) else new)
    rows = len(prompts) * decoder.rows_per_prompt(n)
    _check_memory(config, rows, longest, merged, cache_dtype)
    matcher = _start_grammar(config, options, eos, tokenizer)
    masks: list[Processor] = []
    if matcher is not None:
        masks = [grammar_mask(matcher.grammar, matcher.vocabulary, by_text=kind == "serve")]
    sampler = _build_sampler(config, generation, options, defaults | options, eos, new, masks)
    # Draws no id without a token, except those that end the text. All decoders and `serve` draw
    # with this sampler, so this is the one place. The mask is the first processor: no bias brings
    # an id back, and truncation counts tokens only. Log-probabilities are those of all rows.
    if missing := tokenizer and tokenizer.missing_ids(config.vocab_size, tuple(eos)):
        sampler = sampler.replace(processors=(MissingIds(missing), *sampler.processors))
    shared = {f.name for f in dataclasses.fields(GenerationConfig)} & OPTIONS.keys()
    return GenerationConfig(
        **{name: merged[name] for name in shared}
        | {
            "max_new_tokens": [x for x in new for _ in range(n)] if isinstance(new, list) else new,
            "sampler": sampler,
            "seed": _resolve_seeds(merged["seed"]),
        },
        decoder=decoder,
        matcher=matcher,
        eos_token_ids=eos,
    )


def _token_budget(
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    options: Mapping[str, Any],
    generation: Mapping[str, Any],
    overflow: OverflowPolicy | None,
) -> int | list[int]:
    """Return the number of new tokens, or one for each prompt if the call gives a list.

    The checkpoint's `max_new_tokens`, else its `max_length`, which counts the prompt, is a default:
    the context limits it.
    """
    max_new_tokens = options.get("max_new_tokens")
    usual, length = (
        None
        if (given := generation.get(name)) is None
        else check_int(f"generation_config.json: {name}", given, 1)
        for name in ("max_new_tokens", "max_length")
    )
    requested = (
        max_new_tokens if isinstance(max_new_tokens, list) else [max_new_tokens] * len(prompts)
    )
    if len(requested) != len(prompts):
        raise SamplingError(
            "max_new_tokens must be a whole number from 1 up, or one for each of"
            f" {len(prompts)} prompts, got {max_new_tokens!r:.60}"
        )
    new = []
    for prompt, n in zip(prompts, requested, strict=True):
        room = config.context_length - len(prompt)
        if n is None:
            n = usual or (max(length - len(prompt), 1) if length else DEFAULT_NEW_TOKENS)
            n = n if overflow else min(n, room)
            if config.original_context is not None and len(prompt) <= config.original_context:
                n = min(n, config.original_context - len(prompt) + 1)  # the last token is never run
        if overflow is None and room < max(n, 1):
            raise CapacityError(
                f"a prompt of {len(prompt)} tokens and {max(n, 1)} new ones exceed the model's"
                f" context of {config.context_length}. Shorten the prompt, reduce max_new_tokens,"
                " or choose an overflow policy (overflow='slide'; --overflow slide)"
            )
        check_longrope_limit(len(prompt), len(prompt) + n - 1, config)
        new.append(n)
    return new if isinstance(max_new_tokens, list) else min(new)


def _check_memory(
    config: ModelConfig,
    rows: int,
    longest: int,
    options: Mapping[str, Any],
    cache_dtype: str | None,
) -> None:
    """Raise CapacityError if the cache and the tokens of `rows` texts exceed the memory."""
    capacity = bucket_size(longest)
    if options["overflow"] is not None:
        capacity = min(capacity, config.default_cache_size)
    per_place = 8 + 8 * options["top_logprobs"]  # bytes of token id and log-probability
    text = rows * (bucket_size(longest) * per_place + 4 * config.vocab_size)
    check_memory(
        cache_nbytes(config, rows, capacity, cache_dtype) + text,
        f"{rows:,} texts of up to {longest:,} tokens, with {options['top_logprobs']:,} top_logprobs"
        " per step",
    )


def _start_grammar(
    config: ModelConfig,
    options: Mapping[str, Any],
    eos_token_ids: tuple[int, ...],
    tokenizer: Tokenizer | None,
) -> Matcher | None:
    """Return the matcher of an empty text, if a grammar is given.

    Raises SamplingError for two grammars, GrammarError for one that does not compile.
    """
    given = [name for name in (*KINDS, "grammar") if name in options]
    if len(given) > 1:
        raise SamplingError(f"give one grammar: {' and '.join(given)} cannot be combined")
    if not given:
        return None
    vocabulary = make_vocabulary(tokenizer, config.vocab_size, eos_token_ids)
    return start_matcher(options[given[0]], vocabulary)


def _resolve_seeds(value: Any) -> int | list[int]:
    """Return the seeds, with a 63-bit number drawn for each "random"."""
    if isinstance(value, list):
        return [_draw_seed() if seed == "random" else seed for seed in value]
    return _draw_seed() if value == "random" else int(value)


def _draw_seed() -> int:
    """Draw a seed that is the same in all processes."""
    return int(multihost.broadcast_from_zero(lambda: str(secrets.randbits(63))))


def uses_sampling(options: Mapping[str, Any], generation: Mapping[str, Any]) -> bool:
    """Return whether to sample: do_sample, else a given temperature, else the checkpoint's."""
    if (do_sample := options.get("do_sample")) is not None:
        return bool(do_sample)
    return "temperature" in options or bool(generation.get("do_sample"))


def _build_sampler(
    config: ModelConfig,
    generation: Mapping[str, Any],
    options: Mapping[str, Any],
    merged: Mapping[str, Any],
    eos_token_ids: tuple[int, ...],
    max_new_tokens: int | list[int],
    masks: list[Processor],
) -> Sampler:
    """Return a greedy sampler unless sampling is requested. Penalties, bans and forced tokens apply
    to both.

    options: the call's; merged: these over the checkpoint's. masks: those of a grammar. They come
    after what depends on the text and before what truncates; in a custom sampler first.
    """
    if "sampler" in options:
        sampler: Sampler = options["sampler"]
        return sampler.replace(processors=(*masks, *sampler.processors))
    do_sample = uses_sampling(options, generation)
    given = {
        name: value
        for name, value in merged.items()
        if name in PROCESSORS and (do_sample or name not in ALWAYS_ON)
    }
    added = (*merged.get("logits_processor", ()), *masks)
    if not do_sample and not given and not added:
        return GREEDY
    sampler = make_sampler(
        **given,
        logits_processor=added,
        vocab_size=config.vocab_size,
        eos_token_ids=eos_token_ids,
        max_new_tokens=max_new_tokens,
    )
    return sampler.replace(greedy=not do_sample)
