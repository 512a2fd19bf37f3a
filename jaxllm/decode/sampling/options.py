"""Sampling options under their common names, and the samplers built from them.

The names and meanings are those of Hugging Face transformers, llama.cpp (`dry_*`, `xtc_*`,
`mirostat_*`, `top_n_sigma`) and OpenAI (`presence_penalty`, `frequency_penalty`, `logit_bias`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxllm.decode.sampling import constraints, penalties, truncation
from jaxllm.decode.sampling.readers import Facts, SamplingOption, token_id
from jaxllm.decode.sampling.sampler import Function, Processor, Sampler
from jaxllm.decode.sampling.spellings import OURS
from jaxllm.errors import SamplingError, nearest


def _meant(name: str) -> str:
    """Return a suggestion for an unknown option name."""
    if (ours := OURS.get(name)) in PROCESSORS:
        return f": use {ours}"
    return nearest(name, PROCESSORS)


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
        logits_processor: More processors, or functions as in `Function`; they run after those that
            depend on the text and before temperature.
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
    if unknown := [f"unknown sampling option {x}{_meant(x)}" for x in options.keys() - PROCESSORS]:
        raise SamplingError("; ".join(sorted(unknown)))
    facts = Facts(vocab_size, (), max_new_tokens, options.get("forced_bos_token_id", -1))
    try:
        facts = facts._replace(end=[token_id(token, facts) for token in eos_token_ids])
    except (TypeError, ValueError) as error:
        raise SamplingError(f"eos_token_ids: {error}") from None
    wanted = {o.make for name, o in PROCESSORS.items() if o.always or name in options}
    chain: dict[Callable[..., Processor], dict[str, jax.Array]] = {}
    for name, option in PROCESSORS.items():
        if option.make in wanted:
            value = options.get(name, option.default)
            chain.setdefault(option.make, {}).update(_read(name, value, option, facts))
    made = {make: make(**fields) for make, fields in chain.items()}
    text = [made.pop(make) for make in list(made) if make in _TEXT_MAKERS]
    added = [p if isinstance(p, Processor) else Function(p) for p in logits_processor]
    return Sampler((*text, *added, *made.values()))


def check_sampling(name: str, value: Any) -> None:
    """Raise SamplingError for a value that is invalid for every vocabulary and text."""
    _read(name, value, PROCESSORS[name], Facts(None, (), 1, -1))


def _read(name: str, value: Any, option: SamplingOption, facts: Facts) -> dict[str, jax.Array]:
    try:
        return option.read(value, facts)
    except (TypeError, ValueError, OverflowError) as error:
        raise SamplingError(
            f"{name} must be {option.meaning}; got {value!r:.80} ({error})"
        ) from None


# In order of application: first the processors that depend on the text, of which those that force
# tokens come last; then those of the distribution.
_OF_THE_TEXT = constraints.BIASES | penalties.OPTIONS | constraints.OPTIONS
PROCESSORS: dict[str, SamplingOption] = _OF_THE_TEXT | truncation.OPTIONS
SHAPING = tuple(name for name, option in PROCESSORS.items() if option.always)
_TEXT_MAKERS = {option.make for option in _OF_THE_TEXT.values()}
