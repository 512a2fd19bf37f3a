"""Examples held as one array of tokens, and how one that is longer than a row is shortened."""

import dataclasses
from array import array
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np

from jaxllm.errors import TokenError
from jaxllm.train.data.rows import Example

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
        ids = np.ascontiguousarray(token_T, np.int32)
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
        """All of them. Raises TokenError where there is none."""
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
    for number, (token_T, counts_T) in enumerate(examples):
        if len(token_T) != len(counts_T):
            raise TokenError(
                f"example {number} has {len(token_T)} tokens and {len(counts_T)} marks of what is"
                " learned: give one for each"
            )
        growing.extend(token_T, counts_T)
        growing.end()
    return growing.done(long, bos, source)


def from_ids(
    documents: Iterable[Any], *, bos: int | None = None, source: Mapping[str, Any] | None = None
) -> Examples:
    """Documents of token ids, all of which are learned. Raises TokenError where there is none."""
    growing = Growing()
    for ids in documents:
        growing.extend(ids)
        growing.end()
    return growing.done("split", bos, source)


def _ints(numbers: "array[int]") -> np.ndarray:
    """What has grown in place, as numpy sees it; `array` keeps the numbers."""
    found = np.frombuffer(numbers, np.dtype(numbers.typecode))
    found.setflags(write=False)
    return found
