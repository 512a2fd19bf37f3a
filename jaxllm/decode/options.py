"""Sampling options by the names that users know, and the sampler that they make.

The names and meanings are those of Hugging Face transformers, llama.cpp (`dry_*`, `xtc_*`,
`mirostat_*`, `top_n_sigma`) and OpenAI (`presence_penalty`, `frequency_penalty`, `logit_bias`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.decode import constraints, penalties, truncation
from jaxllm.decode.sampling import Processor, Sampler
from jaxllm.errors import SamplingError
from jaxllm.shapes import power_of_two


class Facts(NamedTuple):
    """What the readers of some options need to know beside the option's own value."""

    vocab_size: int | None
    end: Sequence[int]
    max_new_tokens: Any
    forced_bos: Any


Reader = Callable[[Any, Facts], dict[str, jax.Array]]
Biased = tuple[Sequence[int], float]  # a sequence of tokens, and its bias


class Option(NamedTuple):
    """How users set a processor, or a part of it.

    make: the processor's maker; options with the same maker are one processor. read: from the
    value, arguments of the maker; its ValueError or TypeError becomes an error that tells what the
    option must be, its `meaning`. default: the value where only other options of the processor
    are given. always: part of every sampler, so that setting it compiles nothing; the others join
    the chain when they are given.
    """

    make: Callable[..., Processor]
    read: Reader
    meaning: str
    default: Any = None
    always: bool = False


def make_sampler(
    *,
    vocab_size: int | None = None,
    eos_token_ids: Sequence[int] = (),
    max_new_tokens: Any = None,
    **options: Any,
) -> Sampler:
    """A sampler with the processors of these options, in the order of the table.

    options: names of `PROCESSORS`. A number may be a sequence with one number a row; a list of
    tokens, words or biases may be a list of such lists, one a row (None for an empty one). New
    values compile nothing; a new set of processors does, and a list that outgrows its power of
    two. vocab_size: refuse token ids from this one up. eos_token_ids: what minimum lengths
    forbid, and `bad_words_ids` cannot. max_new_tokens: when `forced_eos_token_id` acts.

    Raises SamplingError for a name that is not in the table or a value out of its range.
    """
    if unknown := sorted(set(options) - set(PROCESSORS)):
        raise SamplingError(
            f"no sampling option {', '.join(unknown)} (known: {', '.join(PROCESSORS)})"
        )
    facts = Facts(vocab_size, (), max_new_tokens, options.get("forced_bos_token_id", -1))
    try:
        facts = facts._replace(end=[_id(token, facts) for token in eos_token_ids])
    except (TypeError, ValueError) as error:
        raise SamplingError(f"eos_token_ids: {error}") from None
    wanted = {o.make for name, o in PROCESSORS.items() if o.always or name in options}
    chain: dict[Callable[..., Processor], dict[str, jax.Array]] = {}
    for name, option in PROCESSORS.items():
        if option.make in wanted:
            value = options.get(name, option.default)
            chain.setdefault(option.make, {}).update(_read(name, value, option, facts))
    return Sampler(tuple(make(**fields) for make, fields in chain.items()))


def _read(name: str, value: Any, option: Option, facts: Facts) -> dict[str, jax.Array]:
    try:
        return option.read(value, facts)
    except (TypeError, ValueError, OverflowError) as error:
        raise SamplingError(
            f"{name} must be {option.meaning}; got {value!r:.80} ({error})"
        ) from None


def _number(field: str, allowed: Callable[[np.ndarray], Any]) -> Reader:
    """A reader of a number, or one a row, that must be finite and allowed."""

    def read(value: Any, facts: Facts) -> dict[str, jax.Array]:
        array = np.asarray(value, np.float64)
        if array.ndim > 1:
            raise ValueError("neither a number nor one a row")
        if not (np.abs(array) <= np.finfo(np.float32).max).all() or not np.all(allowed(array)):
            raise ValueError("out of range")
        return {field: jnp.asarray(array, jnp.float32)}

    return read


def _whole(field: str, least: int) -> Reader:
    return _number(field, lambda x: (x >= least) & (x == np.floor(x)))


def _tokens(field: str) -> Reader:
    """A reader of token ids; a single one is a list of one."""

    def read(value: Any, facts: Facts) -> dict[str, jax.Array]:
        value = [value] if isinstance(value, int) else value

        def entries(row: Any) -> list[Biased]:
            return [([_id(token, facts)], 0.0) for token in row]

        return {field: _pack(value, entries, _holds(value, list | tuple))[0][..., 0]}

    return read


def _words(value: Any, facts: Facts) -> dict[str, jax.Array]:
    def entries(row: Any) -> list[Biased]:
        words = [_sequence(word, facts) for word in row]
        # As in transformers, the end of text is no bad word.
        return [(word, 0.0) for word in words if not (len(word) == 1 and word[0] in facts.end)]

    rows = _holds(value, None) or any(_holds(row, list | tuple) for row in value)
    return {"token_NS": _pack(value, entries, rows)[0]}


def _biases(single: bool) -> Reader:
    """A reader of a table of biases, of single tokens (OpenAI) or of sequences (transformers)."""

    def read(value: Any, facts: Facts) -> dict[str, jax.Array]:
        def entries(row: Any) -> list[Biased]:
            pairs: Iterable[Any] = row.items() if isinstance(row, Mapping) else row
            return [
                (_sequence([_key(ids)] if single else ids, facts), _bias(bias, single))
                for ids, bias in pairs
            ]

        per_row = not isinstance(value, Mapping) and _holds(value, Mapping)
        token, bias = _pack(value, entries, per_row)
        return {"token_NS": token, "bias_N": bias}

    return read


def _min_length(field: str) -> Reader:
    def read(value: Any, facts: Facts) -> dict[str, jax.Array]:
        return _whole(field, 0)(value, facts) | _tokens("end_E")(facts.end, facts)

    return read


def _forced_bos(value: Any, facts: Facts) -> dict[str, jax.Array]:
    below = np.inf if facts.vocab_size is None else facts.vocab_size
    return _number("token", lambda x: (x >= -1) & (x == np.floor(x)) & (x < below))(value, facts)


def _forced_eos(value: Any, facts: Facts) -> dict[str, jax.Array]:
    if facts.max_new_tokens is None:
        raise ValueError("it needs max_new_tokens, to know which token is the last")
    return _tokens("token_E")(value, facts) | _whole("max_new_tokens", 1)(
        facts.max_new_tokens, facts
    )


def _begin_suppress(value: Any, facts: Facts) -> dict[str, jax.Array]:
    forced = _forced_bos(facts.forced_bos, facts)["token"]
    return _tokens("token_N")(value, facts) | {"forced_bos": forced}


def _id(token: Any, facts: Facts) -> int:
    if isinstance(token, bool) or not isinstance(token, int | np.integer):
        raise TypeError(f"a token id is a whole number, not {token!r:.40}")
    if token < 0 or token >= 1 << 31:
        raise ValueError(f"no token has the id {token}")
    if facts.vocab_size is not None and token >= facts.vocab_size:
        raise ValueError(f"token id {token} is not in the vocabulary of {facts.vocab_size}")
    return int(token)


def _key(token: Any) -> Any:
    """A token id; JSON, and so OpenAI, writes the keys of an object as text."""
    return int(token) if isinstance(token, str) and token.isdecimal() else token


def _sequence(ids: Any, facts: Facts) -> list[int]:
    if not isinstance(ids, Sequence) or not len(ids):
        raise ValueError(f"a sequence of tokens cannot be {ids!r:.40}")
    return [_id(token, facts) for token in ids]


def _bias(bias: Any, single: bool) -> float:
    limit = 100.0 if single else float(np.finfo(np.float32).max)
    if isinstance(bias, bool) or not isinstance(bias, int | float) or not abs(bias) <= limit:
        raise ValueError(f"no bias can be {bias!r:.40}")
    return float(bias)


def _holds(value: Any, kind: Any) -> bool:
    """Whether the value is a list of one thing a row: something in it is of that kind, or None."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return False
    return any(row is None or (kind is not None and isinstance(row, kind)) for row in value)


def _pack(
    value: Any, entries: Callable[[Any], list[Biased]], per_row: bool
) -> tuple[jax.Array, jax.Array]:
    """Sequences, their last tokens first and padded with -1, `[N, S]` or `[B, N, S]`; biases."""
    rows = [entries(row if row is not None else ()) for row in (value if per_row else [value])]
    N = max(8, power_of_two(max(map(len, rows))))
    S = power_of_two(max((len(ids) for row in rows for ids, _ in row), default=1))
    token_BNS = np.full((len(rows), N, S), -1, np.int32)
    bias_BN = np.zeros((len(rows), N), np.float32)
    for b, row in enumerate(rows):
        for n, (ids, bias) in enumerate(row):
            token_BNS[b, n, : len(ids)] = ids[::-1]
            bias_BN[b, n] = bias
    if per_row:
        return jnp.asarray(token_BNS), jnp.asarray(bias_BN)
    return jnp.asarray(token_BNS[0]), jnp.asarray(bias_BN[0])


def _share(x: np.ndarray) -> np.ndarray:
    return (x >= 0) & (x <= 1)


def _any(x: np.ndarray) -> bool:
    return True


_OFF_AT_0 = "a whole number, 0 is off"
_TOKENS = "a list of token ids, or one such list a row"

# In the order in which they are applied: the text's processors, where what must come has the last
# word; then the distribution's. top_n_sigma looks at the vocabulary before it is cut, as in
# llama.cpp, and so do XTC and mirostat at what is left.
PROCESSORS: dict[str, Option] = {
    "logit_bias": Option(
        constraints.LogitBias,
        _biases(single=True),
        "a table from token ids to biases from -100 to 100, or one such table a row",
    ),
    "sequence_bias": Option(
        constraints.SequenceBias,
        _biases(single=False),
        "a table from sequences of token ids to finite biases, or one such table a row",
    ),
    "repetition_penalty": Option(
        penalties.Repetition, _number("penalty", lambda x: x > 0), "a number above 0, 1 is off"
    ),
    "presence_penalty": Option(
        penalties.Frequency, _number("presence", _any), "a finite number, 0 is off", 0
    ),
    "frequency_penalty": Option(
        penalties.Frequency, _number("frequency", _any), "a finite number, 0 is off", 0
    ),
    "dry_multiplier": Option(
        penalties.Dry,
        _number("multiplier", lambda x: x >= 0),
        "a number from 0 (off) up",
        0,
    ),
    "dry_base": Option(
        penalties.Dry, _number("base", lambda x: x >= 1), "a number from 1 up", 1.75
    ),
    "dry_allowed_length": Option(
        penalties.Dry, _whole("allowed_length", 1), "a whole number from 1 up", 2
    ),
    "dry_penalty_last_n": Option(
        penalties.Dry, _whole("last_n", -1), "a whole number, -1 is all, 0 is off", -1
    ),
    "dry_sequence_breakers": Option(penalties.Dry, _tokens("breakers"), _TOKENS, ()),
    "no_repeat_ngram_size": Option(constraints.NoRepeatNGram, _whole("size", 0), _OFF_AT_0),
    "bad_words_ids": Option(
        constraints.BadWords, _words, "a list of lists of token ids, or one such list a row"
    ),
    "suppress_tokens": Option(constraints.Suppress, _tokens("token_N"), _TOKENS),
    "begin_suppress_tokens": Option(constraints.BeginSuppress, _begin_suppress, _TOKENS),
    "min_length": Option(constraints.MinLength, _min_length("total"), _OFF_AT_0, 0),
    "min_new_tokens": Option(constraints.MinLength, _min_length("new"), _OFF_AT_0, 0),
    "forced_bos_token_id": Option(
        constraints.ForcedBos, _forced_bos, "a token id, -1 is off, or one a row"
    ),
    "forced_eos_token_id": Option(constraints.ForcedEos, _forced_eos, f"a token id, {_TOKENS}"),
    "temperature": Option(
        truncation.Temperature,
        _number("temperature", lambda x: x >= 0),
        "a number from 0 (greedy) up",
        1.0,
        always=True,
    ),
    "top_n_sigma": Option(
        truncation.TopNSigma, _number("n", lambda x: x >= 0), "a number from 0 (off) up"
    ),
    "top_k": Option(truncation.TopK, _whole("top_k", 0), _OFF_AT_0, 0, always=True),
    "top_p": Option(
        truncation.TopP, _number("top_p", _share), "a number from 0 to 1 (off)", 1.0, always=True
    ),
    "min_p": Option(truncation.MinP, _number("min_p", _share), "a number from 0 (off) to 1"),
    "typical_p": Option(
        truncation.Typical,
        _number("typical_p", lambda x: (x > 0) & (x <= 1)),
        "a number above 0, up to 1 (off)",
    ),
    "epsilon_cutoff": Option(
        truncation.Epsilon,
        _number("epsilon", lambda x: (x >= 0) & (x < 1)),
        "a number from 0 (off) to below 1",
    ),
    "eta_cutoff": Option(
        truncation.Eta,
        _number("epsilon", lambda x: (x >= 0) & (x < 1)),
        "a number from 0 (off) to below 1",
    ),
    "xtc_probability": Option(
        truncation.XTC, _number("probability", _share), "a number from 0 (off) to 1", 0
    ),
    "xtc_threshold": Option(
        truncation.XTC, _number("threshold", _share), "a number from 0 to 1", 0.1
    ),
    "mirostat_tau": Option(
        truncation.Mirostat.start,
        _number("tau", lambda x: x >= 0),
        "a number of bits from 0 (off) up",
        0,
    ),
    "mirostat_eta": Option(
        truncation.Mirostat.start, _number("eta", lambda x: x >= 0), "a number from 0 up", 0.1
    ),
}
