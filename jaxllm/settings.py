"""What a user asks for, in Hugging Face's spelling, checked and with the checkpoint's defaults."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxllm.cache.kv import KVCache
from jaxllm.config import ModelConfig
from jaxllm.decode.options import PROCESSORS, make_sampler
from jaxllm.decode.overflow import OVERFLOWS, Overflow
from jaxllm.decode.sampling import GREEDY, Sampler
from jaxllm.errors import CapacityError, SamplingError

DEFAULT_NEW_TOKENS = 256

# generation_config.json's fields that change which tokens come out, and the value without effect.
UNSUPPORTED: dict[str, Any] = {
    "diversity_penalty": 0.0,
    "num_beam_groups": 1,
    "constraints": None,
    "force_words_ids": None,
}
# Options that are whole numbers, and the least that they may be.
_WHOLE = {
    "chunk": 1,
    "max_matching_ngram_size": 1,
    "num_assistant_tokens": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "prompt_lookup_num_tokens": 1,
    "top_logprobs": 0,
}
# Options that are the caller's alone: a checkpoint's file does not set them.
_CALLERS = ("assistant_model", "batch_invariant", "cache", "chunk", "negative_prompt", "overflow")
# Options whose value is a list for one row already: these are for all prompts.
LISTS = (
    "bad_words_ids",
    "begin_suppress_tokens",
    "dry_sequence_breakers",
    "forced_eos_token_id",
    "logit_bias",
    "sequence_bias",
    "suppress_tokens",
)
# The table's names that generation_config.json may hold too.
_SAMPLING = tuple(PROCESSORS)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What `LM.generate` and `LM.stream` were asked for; the field names are the options'.

    contrasted: contrastive search's top_k. negative_prompt: as token ids.
    """

    max_new_tokens: int | list[int]
    sampler: Sampler
    seed: int | Sequence[int] = 0
    eos_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    top_logprobs: int = 0
    overflow: Overflow | None = None
    num_return_sequences: int = 1
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    assistant_model: Any = None
    num_assistant_tokens: int = 4
    prompt_lookup_num_tokens: int | None = None
    max_matching_ngram_size: int = 3
    penalty_alpha: float | None = None
    contrasted: int = 4
    guidance_scale: float | None = None
    negative_prompt: Sequence[int] | None = None
    chunk: int = 256
    cache: KVCache | None = None
    batch_invariant: bool = False


def read_settings(
    config: ModelConfig,
    generation: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    options: Mapping[str, Any],
) -> Settings:
    """The settings of a call: its options, else generation_config.json, else the defaults.

    Raises SamplingError for an unknown or impossible option, CapacityError when prompt and new
    tokens exceed the context and no overflow policy is named.
    """
    plain = {field.name for field in dataclasses.fields(Settings)}
    plain -= {"sampler", "eos_token_ids", "contrasted"}
    known = plain | {"do_sample", "eos_token_id", *PROCESSORS}
    if unknown := sorted(set(options) - known):
        raise SamplingError(f"no option {', '.join(unknown)} (known: {', '.join(sorted(known))})")
    defaults = {k: v for k, v in generation.items() if k not in _CALLERS}
    given = {**defaults, **{k: v for k, v in options.items() if v is not None}}
    chosen = {k: given[k] for k in plain & set(given) if given[k] is not None}
    overflow = chosen.get("overflow")
    if isinstance(overflow, str):
        if overflow not in OVERFLOWS:
            raise SamplingError(f"overflow must be one of {', '.join(OVERFLOWS)}, got {overflow!r}")
        overflow = OVERFLOWS[overflow]
    eos = given.get("eos_token_id")
    eos_ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    stop = chosen.get("stop_strings", ())
    new = _budget(config, prompts, given.get("max_new_tokens"), overflow)
    chosen |= {
        "max_new_tokens": new,
        "sampler": _sampler(config, generation, options, given, eos_ids, new),
        "eos_token_ids": eos_ids,
        "overflow": overflow,
        "stop_strings": (stop,) if isinstance(stop, str) else tuple(stop),
        "contrasted": given.get("top_k") or 4,
    }
    for name, least in _WHOLE.items():
        if not _is_whole(chosen.get(name, least)) or chosen.get(name, least) < least:
            raise SamplingError(
                f"{name} must be a whole number from {least} up, got {chosen[name]!r}"
            )
    if chosen.get("guidance_scale") == 1:  # transformers' value for none
        del chosen["guidance_scale"]
    if chosen.get("batch_invariant") and chosen.get("num_return_sequences", 1) > 1:
        raise SamplingError("batch_invariant takes one sequence a prompt: list the prompt twice")
    if isinstance(new, list):
        chosen["max_new_tokens"] = [
            n for n in new for _ in range(chosen.get("num_return_sequences", 1))
        ]
    return Settings(**chosen)


def row_options(options: Mapping[str, Any], row: int, rows: int) -> dict[str, Any]:
    """The options of one prompt among several: its own number where there is one for each."""
    numbers = {"seed", "max_new_tokens", *PROCESSORS} - set(LISTS)

    def own(name: str, value: Any) -> Any:
        per_row = name in numbers and isinstance(value, Sequence | np.ndarray)
        return value[row] if per_row and len(value) == rows else value

    return {name: own(name, value) for name, value in options.items()}


def _budget(
    config: ModelConfig, prompts: Sequence[Sequence[int]], asked: Any, overflow: Overflow | None
) -> int | list[int]:
    each = list(asked) if isinstance(asked, Sequence | np.ndarray) else [asked] * len(prompts)
    wrong = [n for n in each if n is not None and (not _is_whole(n) or n < 1)]
    if wrong or len(each) != len(prompts):
        raise SamplingError(
            "max_new_tokens must be a whole number from 1 up, or one for each of"
            f" {len(prompts)} prompts, got {asked!r:.60}"
        )
    new = []
    for prompt, n in zip(prompts, each, strict=True):
        room = config.context_length - len(prompt)
        if n is None:
            n = DEFAULT_NEW_TOKENS if overflow else min(DEFAULT_NEW_TOKENS, room)
        if overflow is None and room < max(n, 1):
            raise CapacityError(
                f"a prompt of {len(prompt)} tokens and {max(n, 1)} new ones exceed the model's"
                f" context of {config.context_length}. Shorten the prompt or max_new_tokens, or"
                " let the text overflow (overflow='slide')"
            )
        new.append(int(n))
    return new if isinstance(asked, Sequence | np.ndarray) else min(new)


def _sampler(
    config: ModelConfig,
    generation: Mapping[str, Any],
    options: Mapping[str, Any],
    given: Mapping[str, Any],
    eos_token_ids: tuple[int, ...],
    max_new_tokens: int | list[int],
) -> Sampler:
    """Greedy unless asked to sample; penalties, bans and forced tokens apply to both."""
    do_sample = options.get("do_sample")
    if do_sample is None:
        asked = options.get("temperature") is not None
        do_sample = asked or bool(generation.get("do_sample"))
    chosen = {k: given[k] for k in _SAMPLING if given.get(k) is not None}
    if not do_sample:
        chosen = {k: v for k, v in chosen.items() if not PROCESSORS[k].always}
        if not chosen:
            return GREEDY
    sampler = make_sampler(
        **chosen,
        vocab_size=config.vocab_size,
        eos_token_ids=eos_token_ids,
        max_new_tokens=max_new_tokens,
    )
    return sampler.replace(greedy=not do_sample)


def _is_whole(x: Any) -> bool:
    return isinstance(x, int | np.integer) and not isinstance(x, bool)
