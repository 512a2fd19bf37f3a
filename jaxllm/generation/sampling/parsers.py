"""Parsers: convert the values of sampling options to arrays for their processors.

A parser takes the value and the call's `ParseContext`, and raises TypeError or ValueError for an
invalid value. The tables next to the processors assign a parser to each option.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.generation.sampling.sampler import Processor
from jaxllm.ops.padding import next_power_of_two
from jaxllm.runtime.validation import is_integer, is_number


class ParseContext(NamedTuple):
    """Values of the call that some parsers need besides the option's own value."""

    vocab_size: int | None
    eos_token_ids: Sequence[int]
    max_new_tokens: Any
    forced_bos: Any


Parser = Callable[[Any, ParseContext], dict[str, jax.Array]]


class SamplingOption(NamedTuple):
    """A user option that sets a processor or a part of one.

    Attributes:
        factory: Builds the processor; options with the same factory share one processor.
        parse: Converts the value to keyword arguments of the factory; a ValueError or TypeError
            becomes an error that quotes `meaning`.
        meaning: Valid values.
        default: The value if only other options of the processor are set.
        always_on: Whether the processor is part of every sampler, so that setting it does not
            recompile. Others join the chain only if set.
        is_list: Whether the value for one row is itself a list.
    """

    factory: Callable[..., Processor]
    parse: Parser
    meaning: str
    default: Any = None
    always_on: bool = False
    is_list: bool = False


OFF_AT_0 = "a whole number, 0 is off"
TOKENS = "a list of token ids, or one such list per row"
BiasedSequence = tuple[Sequence[int], float]  # a sequence of token ids, and its bias


def number(field: str, is_valid: Callable[[np.ndarray], Any]) -> Parser:
    """Return a parser for a finite number, or one per row, that passes `is_valid`."""

    def parse(value: Any, facts: ParseContext) -> dict[str, jax.Array]:
        array = np.asarray(value)
        if array.ndim > 1 or array.dtype.kind not in "iuf":
            raise TypeError("not a number or one per row")
        array = array.astype(np.float64)
        if not (np.abs(array) <= np.finfo(np.float32).max).all() or not np.all(is_valid(array)):
            raise ValueError("out of range")
        return {field: jnp.asarray(array, jnp.float32)}

    return parse


def integer(field: str, minimum: int) -> Parser:
    """Return a parser for an integer of at least `minimum`, or one per row."""
    return number(field, lambda x: (x >= minimum) & (x == np.floor(x)))


def tokens(field: str) -> Parser:
    """Return a parser for a list of token ids or a single id."""

    def parse(value: Any, facts: ParseContext) -> dict[str, jax.Array]:
        value = [value] if is_integer(value) else value

        def entries(row: Any) -> list[BiasedSequence]:
            return [([parse_token_id(token, facts)], 0.0) for token in row]

        return {field: _pack(value, entries, _is_per_row(value, list | tuple))[0][..., 0]}

    return parse


def parse_bad_words(value: Any, facts: ParseContext) -> dict[str, jax.Array]:
    """Parse lists of token ids; end-of-text ids alone are dropped."""

    def entries(row: Any) -> list[BiasedSequence]:
        words = [_parse_sequence(word, facts) for word in row]
        # As in transformers, an end-of-text id cannot be a bad word.
        return [
            (word, 0.0) for word in words if not (len(word) == 1 and word[0] in facts.eos_token_ids)
        ]

    rows = _is_per_row(value, None) or any(_is_per_row(row, list | tuple) for row in value)
    return {"token_NS": _pack(value, entries, rows)[0]}


def biases(single: bool) -> Parser:
    """Return a parser for biases of single tokens (OpenAI) or of sequences (transformers)."""

    def parse(value: Any, facts: ParseContext) -> dict[str, jax.Array]:
        def entries(row: Any) -> list[BiasedSequence]:
            pairs: Iterable[Any] = row.items() if isinstance(row, Mapping) else row
            return [
                (
                    _parse_sequence([_parse_key(ids)] if single else ids, facts),
                    _parse_bias(bias, single),
                )
                for ids, bias in pairs
            ]

        per_row = not isinstance(value, Mapping) and _is_per_row(value, Mapping)
        token, bias = _pack(value, entries, per_row)
        return {"token_NS": token, "bias_N": bias}

    return parse


def min_length(field: str) -> Parser:
    """Return a parser for a number of tokens before which end-of-text ids are banned."""

    def parse(value: Any, facts: ParseContext) -> dict[str, jax.Array]:
        return integer(field, 0)(value, facts) | tokens("end_E")(facts.eos_token_ids, facts)

    return parse


def parse_forced_bos(value: Any, facts: ParseContext) -> dict[str, jax.Array]:
    """Parse a token id, or -1 for none."""
    below = np.inf if facts.vocab_size is None else facts.vocab_size
    return number("token", lambda x: (x >= -1) & (x == np.floor(x)) & (x < below))(value, facts)


def parse_forced_eos(value: Any, facts: ParseContext) -> dict[str, jax.Array]:
    """Parse token ids; also return max_new_tokens, which defines the last token."""
    if facts.max_new_tokens is None:
        raise ValueError("requires max_new_tokens, which defines the last token")
    return tokens("token_E")(value, facts) | integer("max_new_tokens", 1)(
        facts.max_new_tokens, facts
    )


def parse_begin_suppress(value: Any, facts: ParseContext) -> dict[str, jax.Array]:
    """Parse token ids; also return the forced first token, after which the text starts."""
    forced = parse_forced_bos(facts.forced_bos, facts)["token"]
    return tokens("token_N")(value, facts) | {"forced_bos": forced}


def parse_token_id(token: Any, facts: ParseContext) -> int:
    """Parse a token id; check it against the vocabulary if that is known."""
    if not is_integer(token):
        raise TypeError(f"a token id must be a whole number, got {token!r:.40}")
    if token < 0 or token >= 1 << 31:
        raise ValueError(f"token id {token} is out of range")
    if facts.vocab_size is not None and token >= facts.vocab_size:
        raise ValueError(f"token id {token} is not in the vocabulary of {facts.vocab_size}")
    return int(token)


def _parse_key(token: Any) -> Any:
    """Convert a JSON object key to a token id; JSON, and so OpenAI, has string keys only."""
    return int(token) if isinstance(token, str) and token.isdecimal() else token


def _parse_sequence(ids: Any, facts: ParseContext) -> list[int]:
    if not isinstance(ids, Sequence | np.ndarray) or not len(ids):
        raise ValueError(f"a token sequence must be a non-empty list, got {ids!r:.40}")
    return [parse_token_id(token, facts) for token in ids]


def _parse_bias(bias: Any, single: bool) -> float:
    limit = 100.0 if single else float(np.finfo(np.float32).max)
    if not is_number(bias) or not abs(bias) <= limit:
        raise ValueError(f"bias {bias!r:.40} is not a number in range")
    return float(bias)


def _is_per_row(value: Any, kind: Any) -> bool:
    """Return whether a list holds one entry per row: some entry is of this kind, or None."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return False
    return any(row is None or (kind is not None and isinstance(row, kind)) for row in value)


def _pack(
    value: Any, entries: Callable[[Any], list[BiasedSequence]], per_row: bool
) -> tuple[jax.Array, jax.Array]:
    """Pack sequences, last token first and padded with -1, into `[N, S]` or `[B, N, S]`; biases."""
    rows = [entries(row if row is not None else ()) for row in (value if per_row else [value])]
    N = next_power_of_two(max(map(len, rows)), 8)
    S = next_power_of_two(max((len(ids) for row in rows for ids, _ in row), default=1))
    token_BNS = np.full((len(rows), N, S), -1, np.int32)
    bias_BN = np.zeros((len(rows), N), np.float32)
    for b, row in enumerate(rows):
        for n, (ids, bias) in enumerate(row):
            token_BNS[b, n, : len(ids)] = ids[::-1]
            bias_BN[b, n] = bias
    if per_row:
        return jnp.asarray(token_BNS), jnp.asarray(bias_BN)
    return jnp.asarray(token_BNS[0]), jnp.asarray(bias_BN[0])


def is_probability(x: np.ndarray) -> np.ndarray:
    """Return whether x is from 0 to 1."""
    return (x >= 0) & (x <= 1)


def any_number(x: np.ndarray) -> bool:
    """Accept every number."""
    return True
