"""Readers: what users write for a sampling option as the arrays of its processor.

A reader takes the value and the `Facts` of the call, and raises TypeError or ValueError for what it
cannot take; the rows beside the processors say of each option which reader is its own.
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
    """What the readers of some options need to know beside the option's own value."""

    vocab_size: int | None
    end: Sequence[int]
    max_new_tokens: Any
    forced_bos: Any


Reader = Callable[[Any, Facts], dict[str, jax.Array]]


class SamplingOption(NamedTuple):
    """How users set a processor, or a part of it: a row beside the processor's class.

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


OFF_AT_0 = "a whole number, 0 is off"
TOKENS = "a list of token ids, or one such list a row"
Biased = tuple[Sequence[int], float]  # a sequence of tokens, and its bias


def number(field: str, allowed: Callable[[np.ndarray], Any]) -> Reader:
    """A reader of a number, or one a row, that must be finite and allowed."""

    def read(value: Any, facts: Facts) -> dict[str, jax.Array]:
        array = np.asarray(value)
        if array.ndim > 1 or array.dtype.kind not in "iuf":
            raise TypeError("neither a number nor one a row")
        array = array.astype(np.float64)
        if not (np.abs(array) <= np.finfo(np.float32).max).all() or not np.all(allowed(array)):
            raise ValueError("out of range")
        return {field: jnp.asarray(array, jnp.float32)}

    return read


def whole_number(field: str, least: int) -> Reader:
    """A reader of a whole number from `least` up, or one a row."""
    return number(field, lambda x: (x >= least) & (x == np.floor(x)))


def tokens(field: str) -> Reader:
    """A reader of token ids; a single one is a list of one."""

    def read(value: Any, facts: Facts) -> dict[str, jax.Array]:
        value = [value] if is_whole(value) else value

        def entries(row: Any) -> list[Biased]:
            return [([token_id(token, facts)], 0.0) for token in row]

        return {field: _pack(value, entries, _holds(value, list | tuple))[0][..., 0]}

    return read


def words(value: Any, facts: Facts) -> dict[str, jax.Array]:
    """Lists of token ids, the end of text left out."""

    def entries(row: Any) -> list[Biased]:
        words = [_sequence(word, facts) for word in row]
        # As in transformers, the end of text is no bad word.
        return [(word, 0.0) for word in words if not (len(word) == 1 and word[0] in facts.end)]

    rows = _holds(value, None) or any(_holds(row, list | tuple) for row in value)
    return {"token_NS": _pack(value, entries, rows)[0]}


def biases(single: bool) -> Reader:
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


def min_length(field: str) -> Reader:
    """A reader of a number of tokens; the ids that it keeps back are the end of text's."""

    def read(value: Any, facts: Facts) -> dict[str, jax.Array]:
        return whole_number(field, 0)(value, facts) | tokens("end_E")(facts.end, facts)

    return read


def forced_bos(value: Any, facts: Facts) -> dict[str, jax.Array]:
    """A token id, or -1 for none."""
    below = np.inf if facts.vocab_size is None else facts.vocab_size
    return number("token", lambda x: (x >= -1) & (x == np.floor(x)) & (x < below))(value, facts)


def forced_eos(value: Any, facts: Facts) -> dict[str, jax.Array]:
    """Token ids, and which place in the text is the last."""
    if facts.max_new_tokens is None:
        raise ValueError("it needs max_new_tokens, to know which token is the last")
    return tokens("token_E")(value, facts) | whole_number("max_new_tokens", 1)(
        facts.max_new_tokens, facts
    )


def begin_suppress(value: Any, facts: Facts) -> dict[str, jax.Array]:
    """Token ids, and the forced first token after which the text begins."""
    forced = forced_bos(facts.forced_bos, facts)["token"]
    return tokens("token_N")(value, facts) | {"forced_bos": forced}


def token_id(token: Any, facts: Facts) -> int:
    """A token id as an int; of the vocabulary, where that is known."""
    if not is_whole(token):
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
    if not isinstance(ids, Sequence | np.ndarray) or not len(ids):
        raise ValueError(f"a sequence of tokens cannot be {ids!r:.40}")
    return [token_id(token, facts) for token in ids]


def _bias(bias: Any, single: bool) -> float:
    limit = 100.0 if single else float(np.finfo(np.float32).max)
    if not is_number(bias) or not abs(bias) <= limit:
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
    """From 0 to 1."""
    return (x >= 0) & (x <= 1)


def anything(x: np.ndarray) -> bool:
    """Every number."""
    return True
