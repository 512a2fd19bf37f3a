"""Resolved generation options: the call's, else the checkpoint's, else the table's defaults."""

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.cache.kv import KVCache, cache_nbytes
from jaxllm.config.model import ModelConfig
from jaxllm.errors import CapacityError, SamplingError
from jaxllm.files import check_memory
from jaxllm.generation.loops.overflow import OverflowPolicy
from jaxllm.generation.options import (
    OPTIONS,
    PLAIN,
    Kind,
    StoppingCriterion,
    check_combination,
    check_values,
    select_mode,
)
from jaxllm.generation.sampling.options import ALWAYS_ON, PROCESSORS, make_sampler
from jaxllm.generation.sampling.sampler import GREEDY, Sampler
from jaxllm.models.inputs import check_longrope_limit
from jaxllm.ops.padding import bucket_size
from jaxllm.runtime import multihost

DEFAULT_NEW_TOKENS = 256

# Fields of generation_config.json that would change the tokens, and their neutral values.
UNSUPPORTED: dict[str, Any] = {
    "diversity_penalty": 0.0,
    "num_beam_groups": 1,
    "constraints": None,
    "force_words_ids": None,
}


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """Options of one call of `LM.generate` or `LM.stream`; most fields have the options' names.

    mode: the decoding mode; own: the options that it takes and plain generation does not.
    max_new_tokens: a number, or one per sequence. seed: likewise; "random" is replaced by the
    number drawn for it. adapter: a name, or one per prompt; None means the default adapter.
    """

    mode: str
    max_new_tokens: int | list[int]
    sampler: Sampler
    seed: int | list[int]
    eos_token_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    stopping_criteria: tuple[StoppingCriterion, ...]
    top_logprobs: int
    overflow: OverflowPolicy | None
    num_return_sequences: int
    chunk: int
    cache: KVCache | None
    batch_invariant: bool
    adapter: str | list[str | None] | None
    mode_options: Mapping[str, Any]

    @property
    def checks_every_token(self) -> bool:
        """Return whether Python must decide after each token whether to continue."""
        return bool(self.stop_strings or self.stopping_criteria)


def resolve_options(
    config: ModelConfig,
    generation: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    options: Mapping[str, Any],
    kind: Kind = "generate",
    cache_dtype: str | None = None,
) -> GenerationConfig:
    """Return the settings of a call: its options, else generation_config.json, else the defaults.

    kind: the kind of call. cache_dtype: dtype of keys and values, to estimate the cache's memory.

    Raises SamplingError for an unknown or invalid option, CapacityError if prompt and new tokens
    exceed the context without an overflow policy, or if they exceed the machine's memory.
    """
    chosen = check_values(options)
    defaults = {
        name: generation[name]
        for name, option in OPTIONS.items()
        if option.from_file and name not in chosen and name in generation
    }
    given = {**check_values(defaults, "generation_config.json: "), **chosen}
    way = select_mode(given, kind)
    check_combination(chosen, way)  # the file's other options are for other modes
    new = _token_budget(config, prompts, given.get("max_new_tokens"), given.get("overflow"))
    eos = given.get("eos_token_id", ())
    fields = {field.name for field in dataclasses.fields(GenerationConfig)} & OPTIONS.keys()
    asked = {name: given.get(name, OPTIONS[name].default) for name in fields}
    own = _mode_options(way, given)
    n = asked["num_return_sequences"] if way in OPTIONS["num_return_sequences"].modes else 1
    longest = max(map(len, prompts)) + (max(new) if isinstance(new, list) else new)
    texts = max(n, own.get("num_beams", 1))
    _check_memory(config, len(prompts) * texts, longest, asked, cache_dtype)
    return GenerationConfig(
        **asked
        | {
            "mode": way,
            "max_new_tokens": [n_new for n_new in new for _ in range(n)]
            if isinstance(new, list)
            else new,
            "num_return_sequences": n,
            "sampler": _build_sampler(config, generation, chosen, given, eos, new),
            "seed": _resolve_seeds(asked["seed"]),
            "stopping_criteria": asked["stopping_criteria"] or (),
        },
        eos_token_ids=eos,
        mode_options=own,
    )


def _mode_options(mode: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that this mode takes and plain generation does not. For modes that do not
    sample they include active processor options, which such a decoder applies itself."""
    taken = {name: option for name, option in OPTIONS.items() if mode in option.modes}
    own = {n: options.get(n, o.default) for n, o in taken.items() if PLAIN not in o.modes}
    if mode not in OPTIONS["do_sample"].modes:
        own |= {name: options[name] for name in taken if name in PROCESSORS and options.get(name)}
    return own


def _token_budget(
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: Any,
    overflow: OverflowPolicy | None,
) -> int | list[int]:
    each = max_new_tokens if isinstance(max_new_tokens, list) else [max_new_tokens] * len(prompts)
    if len(each) != len(prompts):
        raise SamplingError(
            "max_new_tokens must be a whole number from 1 up, or one for each of"
            f" {len(prompts)} prompts, got {max_new_tokens!r:.60}"
        )
    new = []
    for prompt, n in zip(prompts, each, strict=True):
        room = config.context_length - len(prompt)
        if n is None:
            n = DEFAULT_NEW_TOKENS if overflow else min(DEFAULT_NEW_TOKENS, room)
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
    config: ModelConfig, rows: int, longest: int, asked: Mapping[str, Any], cache_dtype: str | None
) -> None:
    """Raise CapacityError if the cache and the tokens of `rows` texts exceed the memory."""
    capacity = bucket_size(longest)
    if asked["overflow"] is not None:
        capacity = min(capacity, config.default_cache_size)
    per_place = 8 + 8 * asked["top_logprobs"]  # bytes of token id and log-probability
    text = rows * (bucket_size(longest) * per_place + 4 * config.vocab_size)
    check_memory(
        cache_nbytes(config, rows, capacity, cache_dtype) + text,
        f"{rows:,} texts of up to {longest:,} tokens, with {asked['top_logprobs']:,} top_logprobs"
        " per step",
    )


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
    given: Mapping[str, Any],
    eos_token_ids: tuple[int, ...],
    max_new_tokens: int | list[int],
) -> Sampler:
    """Return a greedy sampler unless sampling is requested. Penalties, bans and forced tokens apply
    to both.
    """
    if "sampler" in options:
        sampler: Sampler = options["sampler"]
        return sampler
    do_sample = uses_sampling(options, generation)
    chosen = {k: given[k] for k in (*PROCESSORS, "logits_processor") if k in given}
    if not do_sample:
        chosen = {k: v for k, v in chosen.items() if k not in ALWAYS_ON}
        if not chosen:
            return GREEDY
    sampler = make_sampler(
        **chosen,
        vocab_size=config.vocab_size,
        eos_token_ids=eos_token_ids,
        max_new_tokens=max_new_tokens,
    )
    return sampler.replace(greedy=not do_sample)
