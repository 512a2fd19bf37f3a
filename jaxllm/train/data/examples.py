"""Examples held as one array of tokens, and how one that is longer than a row is shortened."""

import dataclasses
from array import array
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

import numpy as np

from jaxllm.errors import ConfigError, TokenError
from jaxllm.train.data.rows import Example
from jaxllm.whole import token_array, whole

_MOST_ID = (1 << 31) - 1

# What becomes of an example that is longer than a row:
#   split: it goes on in further rows, each of which sees nothing of the one before.
#   left: the beginning of what is only read is left out, but for the begin-of-text token; then the
#     end of what is learned.
#   right: its end is left out.
Long = Literal["split", "left", "right"]


@dataclasses.dataclass(frozen=True, eq=False)
class Examples:
    """Examples one after the other, in 5 bytes a token.

    token_N: int32. counts_N: bool, which of them are learned; None for all. begin_E: int64
    `[examples + 1]`, where each begins. long: see `Long`. bos: the begin-of-text token that
    examples begin with, None where they do not. source, JSON-able, says what they are made of.
    """

    token_N: np.ndarray
    counts_N: np.ndarray | None
    begin_E: np.ndarray
    long: Long = "split"
    bos: int | None = None
    source: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.begin_E) - 1

    def __getitem__(self, number: int) -> Example:
        place = slice(*self.begin_E[number : number + 2])
        token_T = self.token_N[place]
        counts_T = np.ones(len(token_T), bool) if self.counts_N is None else self.counts_N[place]
        return Example(token_T, counts_T)


class Growing:
    """Examples in the making: one array of tokens that grows in place, never held twice."""

    def __init__(self) -> None:
        self._tokens, self._begin = array("i"), array("q", [0])
        self._counts: bytearray | None = None

    def extend(self, token_T: Any, counts_T: Any = None) -> None:
        """More tokens of the example at hand; counts_T: which are learned, by default all."""
        ids = token_array(f"example {len(self._begin) - 1}", token_T)
        if counts_T is not None and self._counts is None:
            self._counts = bytearray(b"\1") * len(self._tokens)
        self._tokens.frombytes(ids.tobytes())
        if self._counts is not None:
            marks = np.ones(len(ids), bool) if counts_T is None else counts_T
            self._counts += np.ascontiguousarray(marks, bool).tobytes()

    def end(self) -> None:
        """The example at hand is complete."""
        self._begin.append(len(self._tokens))

    def done(
        self, long: Long, bos: int | None, source: Mapping[str, Any] | None = None
    ) -> Examples:
        """All of them. Raises TokenError where there is none, ConfigError for another `long`."""
        if long not in (known := get_args(Long)):
            raise ConfigError(f"long must be one of {', '.join(known)}, got {long!r:.40}")
        if bos is not None:
            bos = whole("bos", bos, 0, _MOST_ID, TokenError)
        if len(self._begin) == 1:
            raise TokenError("there is no data to train on: no examples")
        counts_N = None if self._counts is None else np.frombuffer(self._counts, bool)
        return Examples(
            _ints(self._tokens), counts_N, _ints(self._begin), long, bos, dict(source or {})
        )


def from_examples(
    examples: Iterable[Example],
    *,
    long: Long = "split",
    bos: int | None = None,
    source: Mapping[str, Any] | None = None,
) -> Examples:
    """The examples side by side; each is read once and then let go.

    Raises TokenError for token ids and marks of unequal lengths, and where there is no example.
    """
    growing = Growing()
    for number, example in enumerate(_each(examples)):
        if not isinstance(example, tuple | list) or len(example) != 2:
            raise TokenError(
                f"example {number} must be an Example(token ids, marks of what is learned), got"
                f" {example!r:.60}"
            )
        token_T = token_array(f"example {number}", example[0])
        counts_T = np.asarray(example[1])
        if counts_T.dtype.kind != "b" and counts_T.size:
            raise TokenError(
                f"example {number}: marks of what is learned must be True or False, got"
                f" {counts_T.dtype}"
            )
        if counts_T.shape != token_T.shape:
            raise TokenError(
                f"example {number} has {len(token_T)} tokens and {counts_T.size} marks of what is"
                " learned: give one for each"
            )
        growing.extend(token_T, counts_T)
        growing.end()
    return growing.done(long, bos, source)


def from_ids(
    documents: Iterable[Any], *, bos: int | None = None, source: Mapping[str, Any] | None = None
) -> Examples:
    """Documents of token ids, all of which are learned; the rows of a matrix are documents.

    Raises TokenError where there is none, and for what is no list of ids from 0 to 2**31 - 1.
    """
    growing = Growing()
    for ids in _each(documents):
        growing.extend(ids)
        growing.end()
    return growing.done("split", bos, source)


def _each(documents: Any) -> Iterable[Any]:
    if not isinstance(documents, Iterable):
        raise TokenError(f"give a list of texts, of token ids each; got {documents!r:.60}")
    return documents


def _ints(numbers: "array[int]") -> np.ndarray:
    """What has grown in place, as numpy sees it; `array` keeps the numbers."""
    found = np.frombuffer(numbers, np.dtype(numbers.typecode))
    found.setflags(write=False)
    return found
