"""Samplers from the sampling options of `option_table`."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from jaxllm.errors import SamplingError, suggest_name
from jaxllm.generation.option_table import ALIASES, OPTIONS
from jaxllm.generation.sampling import constraints, penalties, truncation
from jaxllm.generation.sampling.parsers import OptionProcessor, Values
from jaxllm.generation.sampling.sampler import FunctionProcessor, Processor, Sampler
from jaxllm.generation.sampling.truncation import Temperature, TopK, TopP

_FOUND: dict[str, type[OptionProcessor]] = {
    name: kind
    for module in (constraints, penalties, truncation)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, OptionProcessor)
    for name in kind.names
}
# In order of application: first the processors that depend on the text, of which those that force
# tokens come last; then those of the distribution. As in llama.cpp, top_n_sigma sees the vocabulary
# before truncation, XTC and mirostat after it.
PROCESSORS = {name: _FOUND[name] for name in OPTIONS if name in _FOUND}
# Those of every sampler that draws, so that setting them does not recompile.
ALWAYS_ON: dict[str, type[OptionProcessor]] = {
    "temperature": Temperature,
    "top_k": TopK,
    "top_p": TopP,
}


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
        options: Names from `PROCESSORS`, with values as in `Values`.

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
    if unknown := sorted(options.keys() - PROCESSORS):
        named = [f"unknown sampling option {name}{_suggest_name(name)}" for name in unknown]
        raise SamplingError("; ".join(named))
    given = {**options, "max_new_tokens": max_new_tokens, "eos_token_id": eos_token_ids}
    values = Values(given, vocab_size)
    values("eos_token_id")  # checks them
    on = {PROCESSORS[name] for name in (*ALWAYS_ON, *options)}
    chain = [kind.from_options(values) for kind in dict.fromkeys(PROCESSORS.values()) if kind in on]
    added = [p if isinstance(p, Processor) else FunctionProcessor(p) for p in logits_processor]
    text = sum(type(p).__module__ != truncation.__name__ for p in chain)
    return Sampler((*chain[:text], *added, *chain[text:]))


@cache
def neutral_processors() -> tuple[tuple[Processor, ...], tuple[Processor, ...]]:
    """Return all processors, in order, with values that change nothing: those that depend on the
    text, and those of the distribution.
    """
    off = {name: () if (x := OPTIONS[name]).default is None else x.default for name in PROCESSORS}
    off |= {name: x.off for name, x in OPTIONS.items() if x.off is not None}
    values = Values({**off, "max_new_tokens": 1, "eos_token_id": ()})
    made = [kind.from_options(values) for kind in dict.fromkeys(PROCESSORS.values())]
    text = sum(type(p).__module__ != truncation.__name__ for p in made)
    return tuple(made[:text]), tuple(made[text:])


def check_sampling_option(name: str, value: Any) -> Any:
    """Return a value. Raises SamplingError if it is invalid for every vocabulary and text."""
    Values({name: value})(name)
    return value


def _suggest_name(name: str) -> str:
    """Return a suggestion for an unknown option name."""
    if (known := ALIASES.get(name)) in PROCESSORS:
        return f": use {known}"
    return suggest_name(name, PROCESSORS)
