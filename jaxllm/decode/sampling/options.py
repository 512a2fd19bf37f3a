"""Sampling options by the names that users know, and the sampler that they make.

The names and meanings are those of Hugging Face transformers, llama.cpp (`dry_*`, `xtc_*`,
`mirostat_*`, `top_n_sigma`) and OpenAI (`presence_penalty`, `frequency_penalty`, `logit_bias`).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jaxllm.decode.sampling import constraints, penalties, truncation
from jaxllm.decode.sampling.readers import (
    Facts,
    Reader,
    anything,
    begin_suppress,
    biases,
    forced_bos,
    forced_eos,
    min_length,
    number,
    share,
    token_id,
    tokens,
    whole_number,
    words,
)
from jaxllm.decode.sampling.sampler import Function, Processor, Sampler
from jaxllm.errors import SamplingError, nearest


class Option(NamedTuple):
    """How users set a processor, or a part of it.

    make: the processor's maker; options with the same maker are one processor. read: from the
    value, arguments of the maker; its ValueError or TypeError becomes an error that tells what the
    option must be, its `meaning`. help: what it does. default: the value where only other options
    of the processor are given. always: part of every sampler, so that setting it compiles nothing;
    the others join the chain when they are given. a_list: the value for one row is a list already.
    """

    make: Callable[..., Processor]
    read: Reader
    meaning: str
    help: str
    default: Any = None
    always: bool = False
    a_list: bool = False


def make_sampler(
    *,
    vocab_size: int | None = None,
    eos_token_ids: Sequence[int] = (),
    max_new_tokens: Any = None,
    logits_processor: Sequence[Any] = (),
    **options: Any,
) -> Sampler:
    """A sampler with the processors of these options, in the order of the table.

    options: names of `PROCESSORS`. A number may be a sequence with one number a row; a list of
    tokens, words or biases may be a list of such lists, one a row (None for an empty one). New
    values compile nothing; a new set of processors does, and a list that outgrows its power of
    two. vocab_size: refuse token ids from this one up. eos_token_ids: what minimum lengths
    forbid, and `bad_words_ids` cannot. max_new_tokens: when `forced_eos_token_id` acts.
    logits_processor: further processors, or functions as `Function` has them, after those that read
    the text and before temperature.

    Raises SamplingError for a name that is not in the table or a value out of its range.
    """
    if unknown := [
        f"no sampling option {x}{nearest(x, PROCESSORS)}" for x in options.keys() - PROCESSORS
    ]:
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
    text = [made.pop(make) for make in list(made) if make in _OF_TEXT]
    added = [p if isinstance(p, Processor) else Function(p) for p in logits_processor]
    return Sampler((*text, *added, *made.values()))


def check_sampling(name: str, value: Any) -> None:
    """Raise SamplingError for a value that no vocabulary and no text would allow."""
    _read(name, value, PROCESSORS[name], Facts(None, (), 1, -1))


def _read(name: str, value: Any, option: Option, facts: Facts) -> dict[str, jax.Array]:
    try:
        return option.read(value, facts)
    except (TypeError, ValueError, OverflowError) as error:
        raise SamplingError(
            f"{name} must be {option.meaning}; got {value!r:.80} ({error})"
        ) from None


_OFF_AT_0 = "a whole number, 0 is off"
_TOKENS = "a list of token ids, or one such list a row"
_SHARE = "a number from 0 (off) to below 1"

# In the order in which they are applied: the text's processors, where what must come has the last
# word; then the distribution's. top_n_sigma looks at the vocabulary before it is cut, as in
# llama.cpp, and so do XTC and mirostat at what is left.
PROCESSORS: dict[str, Option] = {
    "logit_bias": Option(
        constraints.LogitBias,
        biases(single=True),
        "a table from token ids to biases from -100 to 100, or one such table a row",
        "added to these tokens' scores, as OpenAI does",
        a_list=True,
    ),
    "sequence_bias": Option(
        constraints.SequenceBias,
        biases(single=False),
        "a table from sequences of token ids to finite biases, or one such table a row",
        "added to the scores of tokens that complete these sequences",
        a_list=True,
    ),
    "repetition_penalty": Option(
        penalties.Repetition,
        number("penalty", lambda x: x > 0),
        "a number above 0, 1 is off",
        "divides what the text has had already, prompt included (CTRL)",
    ),
    "presence_penalty": Option(
        penalties.Frequency,
        number("presence", anything),
        "a finite number, 0 is off",
        "taken once from what was generated already, as OpenAI does",
        0,
    ),
    "frequency_penalty": Option(
        penalties.Frequency,
        number("frequency", anything),
        "a finite number, 0 is off",
        "taken for each time that a token was generated, as OpenAI does",
        0,
    ),
    "dry_multiplier": Option(
        penalties.Dry,
        number("multiplier", lambda x: x >= 0),
        "a number from 0 (off) up",
        "DRY: of what would prolong a repetition",
        0,
    ),
    "dry_base": Option(
        penalties.Dry,
        number("base", lambda x: x >= 1),
        "a number from 1 up",
        "DRY: to the power of the repetition's length",
        1.75,
    ),
    "dry_allowed_length": Option(
        penalties.Dry,
        whole_number("allowed_length", 1),
        "a whole number from 1 up",
        "DRY: repetitions up to this length cost nothing",
        2,
    ),
    "dry_penalty_last_n": Option(
        penalties.Dry,
        whole_number("last_n", -1),
        "a whole number, -1 is all, 0 is off",
        "DRY: how many of the last tokens are looked at",
        -1,
    ),
    "dry_sequence_breakers": Option(
        penalties.Dry,
        tokens("breakers"),
        _TOKENS,
        "DRY: tokens that end what counts as repeated",
        (),
        a_list=True,
    ),
    "no_repeat_ngram_size": Option(
        constraints.NoRepeatNGram,
        whole_number("size", 0),
        _OFF_AT_0,
        "no sequence of so many tokens comes twice",
    ),
    "bad_words_ids": Option(
        constraints.BadWords,
        words,
        "a list of lists of token ids, or one such list a row",
        "sequences that are never completed",
        a_list=True,
    ),
    "suppress_tokens": Option(
        constraints.Suppress, tokens("token_N"), _TOKENS, "never drawn", a_list=True
    ),
    "begin_suppress_tokens": Option(
        constraints.BeginSuppress, begin_suppress, _TOKENS, "not drawn first", a_list=True
    ),
    "min_length": Option(
        constraints.MinLength,
        min_length("total"),
        _OFF_AT_0,
        "no end before the text has so many tokens, prompt included",
        0,
    ),
    "min_new_tokens": Option(
        constraints.MinLength, min_length("new"), _OFF_AT_0, "no end before so many new tokens", 0
    ),
    "forced_bos_token_id": Option(
        constraints.ForcedBos,
        forced_bos,
        "a token id, -1 is off, or one a row",
        "comes second, after a prompt of one token",
    ),
    "forced_eos_token_id": Option(
        constraints.ForcedEos,
        forced_eos,
        f"a token id, {_TOKENS}",
        "comes last, where max_new_tokens ends the text",
        a_list=True,
    ),
    "temperature": Option(
        truncation.Temperature,
        number("temperature", lambda x: x >= 0),
        "a number from 0 (greedy) up",
        "divides the scores; giving it asks to sample",
        1.0,
        always=True,
    ),
    "top_n_sigma": Option(
        truncation.TopNSigma,
        number("n", lambda x: x >= 0),
        "a number from 0 (off) up",
        "only tokens within so many standard deviations of the best score",
    ),
    "top_k": Option(
        truncation.TopK,
        whole_number("top_k", 0),
        _OFF_AT_0,
        "only the k best tokens; of contrastive search, its candidates",
        0,
        always=True,
    ),
    "top_p": Option(
        truncation.TopP,
        number("top_p", share),
        "a number from 0 to 1 (off)",
        "only the best tokens whose probabilities add up to p",
        1.0,
        always=True,
    ),
    "min_p": Option(
        truncation.MinP,
        number("min_p", share),
        "a number from 0 (off) to 1",
        "only tokens with this part of the best one's probability",
    ),
    "typical_p": Option(
        truncation.Typical,
        number("typical_p", lambda x: (x > 0) & (x <= 1)),
        "a number above 0, up to 1 (off)",
        "only the most typical tokens whose probabilities add up to p",
    ),
    "epsilon_cutoff": Option(
        truncation.Epsilon,
        number("epsilon", lambda x: (x >= 0) & (x < 1)),
        _SHARE,
        "only tokens at least so probable",
    ),
    "eta_cutoff": Option(
        truncation.Eta,
        number("epsilon", lambda x: (x >= 0) & (x < 1)),
        _SHARE,
        "as epsilon_cutoff, less strict where the entropy is high",
    ),
    "xtc_probability": Option(
        truncation.XTC,
        number("probability", share),
        "a number from 0 (off) to 1",
        "XTC: how often the best tokens are left out",
        0,
    ),
    "xtc_threshold": Option(
        truncation.XTC,
        number("threshold", share),
        "a number from 0 to 1",
        "XTC: of tokens at least so probable all but the last are left out",
        0.1,
    ),
    "mirostat_tau": Option(
        truncation.Mirostat.start,
        number("tau", lambda x: x >= 0),
        "a number of bits from 0 (off) up",
        "mirostat: the surprise that is aimed at",
        0,
    ),
    "mirostat_eta": Option(
        truncation.Mirostat.start,
        number("eta", lambda x: x >= 0),
        "a number from 0 up",
        "mirostat: how fast it adapts",
        0.1,
    ),
}
SHAPING = tuple(name for name, option in PROCESSORS.items() if option.always)
_NAMES = list(PROCESSORS)
_OF_TEXT = {PROCESSORS[name].make for name in _NAMES[: _NAMES.index("temperature")]}
