"""Sampling options under their common names, and the samplers built from them.

The names and meanings are those of Hugging Face transformers, llama.cpp (`dry_*`, `xtc_*`,
`mirostat_*`, `top_n_sigma`) and OpenAI (`presence_penalty`, `frequency_penalty`, `logit_bias`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxllm.errors import SamplingError, suggest_name
from jaxllm.generation.sampling import constraints, penalties, truncation
from jaxllm.generation.sampling.aliases import ALIASES
from jaxllm.generation.sampling.parsers import ParseContext, SamplingOption, parse_token_id
from jaxllm.generation.sampling.sampler import FunctionProcessor, Processor, Sampler


def _suggest_name(name: str) -> str:
    """Return a suggestion for an unknown option name."""
    if (ours := ALIASES.get(name)) in PROCESSORS:
        return f": use {ours}"
    return suggest_name(name, PROCESSORS)


def make_sampler(
    *,
    vocab_size: int | None = None,
    eos_token_ids: Sequence[int] = (),
    max_new_tokens: Any = None,
    logits_processor: Sequence[Any] = (),
    **options: Any,
) -> Sampler:
    """Return a sampler with the processors of these options, in the order of `PROCESSORS`.

    New values do not recompile; a new set of processors does, and so does a list that grows past a
    power of two.

    Args:
        vocab_size: Reject token ids from this one up.
        eos_token_ids: Tokens that minimum lengths forbid; `bad_words_ids` cannot ban them.
        max_new_tokens: Required by `forced_eos_token_id`.
        logits_processor: More processors, or functions as in `FunctionProcessor`; they run after
            those that depend on the text and before temperature.
        options: Names from `PROCESSORS`. A number may be a sequence with one number per row; a list
            of tokens, words or biases may be a list of such lists, one per row (None for empty).

    Raises:
        SamplingError: For an unknown name or a value out of range.
    """
    if not isinstance(logits_processor, list | tuple) or not all(
        isinstance(p, Processor) or callable(p) for p in logits_processor
    ):
        raise SamplingError(
            "logits_processor must be a list of Processors and functions of (scores, Context), got"
            f" {logits_processor!r:.60}"
        )
    if unknown := [
        f"unknown sampling option {x}{_suggest_name(x)}" for x in options.keys() - PROCESSORS
    ]:
        raise SamplingError("; ".join(sorted(unknown)))
    facts = ParseContext(vocab_size, (), max_new_tokens, options.get("forced_bos_token_id", -1))
    try:
        facts = facts._replace(
            eos_token_ids=[parse_token_id(token, facts) for token in eos_token_ids]
        )
    except (TypeError, ValueError) as error:
        raise SamplingError(f"eos_token_ids: {error}") from None
    factories = {o.factory for name, o in PROCESSORS.items() if o.always_on or name in options}
    chain: dict[Callable[..., Processor], dict[str, jax.Array]] = {}
    for name, option in PROCESSORS.items():
        if option.factory in factories:
            value = options.get(name, option.default)
            chain.setdefault(option.factory, {}).update(_parse_option(name, value, option, facts))
    processors = {make: make(**fields) for make, fields in chain.items()}
    text = [processors.pop(make) for make in list(processors) if make in _TEXT_MAKERS]
    added = [p if isinstance(p, Processor) else FunctionProcessor(p) for p in logits_processor]
    return Sampler((*text, *added, *processors.values()))


def check_option_value(name: str, value: Any) -> Any:
    """Return a value; raise SamplingError if it is invalid for every vocabulary and text."""
    _parse_option(name, value, PROCESSORS[name], ParseContext(None, (), 1, -1))
    return value


def _parse_option(
    name: str, value: Any, option: SamplingOption, facts: ParseContext
) -> dict[str, jax.Array]:
    try:
        return option.parse(value, facts)
    except (TypeError, ValueError, OverflowError) as error:
        raise SamplingError(
            f"{name} must be {option.meaning}; got {value!r:.80} ({error})"
        ) from None


# In order of application: first the processors that depend on the text, of which those that force
# tokens come last; then those of the distribution.
_TEXT_OPTIONS = constraints.BIASES | penalties.OPTIONS | constraints.OPTIONS
PROCESSORS: dict[str, SamplingOption] = _TEXT_OPTIONS | truncation.OPTIONS
ALWAYS_ON = tuple(name for name, option in PROCESSORS.items() if option.always_on)
_TEXT_MAKERS = {option.factory for option in _TEXT_OPTIONS.values()}
