"""Parsers: convert the values of sampling options to arrays for their processors.

A parser takes the value and the call's `Facts`, and raises TypeError or ValueError for an invalid
value. The tables next to the processors assign a parser to each option.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.decode.sampling.sampler import Processor
from jaxllm.shapes import power_of_two
from jaxllm.whole import is_number, is_whole


class Facts(NamedTuple):
    """Values of the call that some parsers need besides the option's own value."""

    vocab_size: int | None
    end: Sequence[int]
    max_new_tokens: Any
    forced_bos: Any


Reader = Callable[[Any, Facts], dict[str, jax.Array]]


class SamplingOption(NamedTuple):
    """A user option that sets a processor or a part of one.

    Attributes:
        make: Builds the processor; options with the same maker share one processor.
        read: Converts the value to keyword arguments of the maker; a ValueError or TypeError
            becomes an error that quotes `meaning`.
        meaning: Valid values.
        help: Effect of the option.
        default: The value if only other options of the processor are set.
        always: Whether the processor is part of every sampler, so that setting it does not
            recompile. Others join the chain only if set.
        a_list: Whether the value for one row is itself a list.
    """

    make: Callable[..., Processor]
    read: Reader
    meaning: str
    help: str
    default: Any = None
    always: bool = False
    a_list: bool = False


OFF_AT_0 = "a whole number, 0 is off"
TOKENS = "a list of token ids, or one such list per row"
Biased = tuple[Sequence[int], float]  # a sequence of token ids, and its bias


def number(field: str, allowed: Callable[[np.ndarray], Any]) -> Reader:
    """Return a parser for a finite number, or one per row, that passes `allowed`."""

    def read(value: Any, facts: Facts) -> dict[str, jax.Array]:
        array = np.asarray(value)
        if array.ndim > 1 or array.dtype.kind not in "iuf":
            raise TypeError("not a number or one per row")
        array = array.astype(np.float64)
        if not (np.abs(array) <= np.finfo(np.float32).max).all() or not np.all(allowed(array)):
            raise ValueError("out of range")
        return {field: jnp.asarray(array, jnp.float32)}

    return read


def whole_number(field: str, least: int) -> Reader:
    """Return a parser for an integer of at least `least`, or one per row."""
    return number(field, lambda x: (x >= least) & (x == np.floor(x)))


def tokens(field: str) -> Reader:
    """Return a parser for a list of token ids or a single id."""

    def read(value: Any, facts: Facts) -> dict[str, jax.Array]:
        value = [value] if is_whole(value) else value

        def entries(row: Any) -> list[Biased]:
            return [([token_id(token, facts)], 0.0) for token in row]

        return {field: _pack(value, entries, _holds(value, list | tuple))[0][..., 0]}

    return read


def words(value: Any, facts: Facts) -> dict[str, jax.Array]:
    """Parse lists of token ids; end-of-text ids alone are dropped."""

    def entries(row: Any) -> list[Biased]:
        words = [_sequence(word, facts) for word in row]
        # As in transformers, an end-of-text id cannot be a bad word.
        return [(word, 0.0) for word in words if not (len(word) == 1 and word[0] in facts.end)]

    rows = _holds(value, None) or any(_holds(row, list | tuple) for row in value)
    return {"token_NS": _pack(value, entries, rows)[0]}


def biases(single: bool) -> Reader:
    """Return a parser for biases of single tokens (OpenAI) or of sequences (transformers)."""

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


def min_length(field: str) -> Reader:
    """Return a parser for a number of tokens before which end-of-text ids are banned."""

    def read(value: Any, facts: Facts) -> dict[str, jax.Array]:
        return whole_number(field, 0)(value, facts) | tokens("end_E")(facts.end, facts)

    return read


def forced_bos(value: Any, facts: Facts) -> dict[str, jax.Array]:
    """Parse a token id, or -1 for none."""
    below = np.inf if facts.vocab_size is None else facts.vocab_size
    return number("token", lambda x: (x >= -1) & (x == np.floor(x)) & (x < below))(value, facts)


def forced_eos(value: Any, facts: Facts) -> dict[str, jax.Array]:
    """Parse token ids; also return max_new_tokens, which defines the last token."""
    if facts.max_new_tokens is None:
        raise ValueError("requires max_new_tokens, which defines the last token")
    return tokens("token_E")(value, facts) | whole_number("max_new_tokens", 1)(
        facts.max_new_tokens, facts
    )


def begin_suppress(value: Any, facts: Facts) -> dict[str, jax.Array]:
    """Parse token ids; also return the forced first token, after which the text starts."""
    forced = forced_bos(facts.forced_bos, facts)["token"]
    return tokens("token_N")(value, facts) | {"forced_bos": forced}


def token_id(token: Any, facts: Facts) -> int:
    """Parse a token id; check it against the vocabulary if that is known."""
    if not is_whole(token):
        raise TypeError(f"a token id must be a whole number, got {token!r:.40}")
    if token < 0 or token >= 1 << 31:
        raise ValueError(f"token id {token} is out of range")
    if facts.vocab_size is not None and token >= facts.vocab_size:
        raise ValueError(f"token id {token} is not in the vocabulary of {facts.vocab_size}")
    return int(token)


def _key(token: Any) -> Any:
    """Convert a JSON object key to a token id; JSON, and so OpenAI, has string keys only."""
    return int(token) if isinstance(token, str) and token.isdecimal() else token


def _sequence(ids: Any, facts: Facts) -> list[int]:
    if not isinstance(ids, Sequence | np.ndarray) or not len(ids):
        raise ValueError(f"a token sequence must be a non-empty list, got {ids!r:.40}")
    return [token_id(token, facts) for token in ids]


def _bias(bias: Any, single: bool) -> float:
    limit = 100.0 if single else float(np.finfo(np.float32).max)
    if not is_number(bias) or not abs(bias) <= limit:
        raise ValueError(f"bias {bias!r:.40} is not a number in range")
    return float(bias)


def _holds(value: Any, kind: Any) -> bool:
    """Return whether a list holds one entry per row: some entry is of this kind, or None."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return False
    return any(row is None or (kind is not None and isinstance(row, kind)) for row in value)


def _pack(
    value: Any, entries: Callable[[Any], list[Biased]], per_row: bool
) -> tuple[jax.Array, jax.Array]:
    """Pack sequences, last token first and padded with -1, into `[N, S]` or `[B, N, S]`; biases."""
    rows = [entries(row if row is not None else ()) for row in (value if per_row else [value])]
    N = power_of_two(max(map(len, rows)), 8)
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


def share(x: np.ndarray) -> np.ndarray:
    """Return whether x is from 0 to 1."""
    return (x >= 0) & (x <= 1)


def anything(x: np.ndarray) -> bool:
    """Accept every number."""
    return True
