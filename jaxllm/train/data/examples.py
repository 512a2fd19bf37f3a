"""Examples as one array of tokens, with a loss mask, and their train/validation split."""

import dataclasses
from array import array
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

import numpy as np

from jaxllm.errors import ConfigError, TokenError
from jaxllm.runtime.validation import as_token_array, check_int
from jaxllm.train.data.rows import Example

_MAX_ID = (1 << 31) - 1

# What to do with an example that is longer than a row:
#   split: continue it in further rows, which do not attend to the earlier ones. If it begins with
#     the begin-of-text token, that also replaces the first token of those rows.
#   left: drop the beginning of the prompt, except the begin-of-text token; if that is not enough,
#     also the end of the completion.
#   right: drop its end.
LongPolicy = Literal["split", "left", "right"]


@dataclasses.dataclass(frozen=True, eq=False)
class Examples:
    """Concatenated examples, in 5 bytes per token.

    Attributes:
        token_N: int32 ids.
        loss_mask_N: bool, which tokens are learned; None for all.
        begin_E: int64 `[examples + 1]`, the start of each example.
        long: see `LongPolicy`.
        bos: the begin-of-text token that examples start with, if any.
        source: a description of their origin, as JSON values.
    """

    token_N: np.ndarray
    loss_mask_N: np.ndarray | None
    begin_E: np.ndarray
    long: LongPolicy = "split"
    bos: int | None = None
    source: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.begin_E) - 1

    def leading_bos(self, begin: int) -> int:
        """Return the begin-of-text token if it is at an example's beginning, else -1."""
        is_there = self.bos is not None and self.token_N[begin : begin + 1].tolist() == [self.bos]
        return int(self.token_N[begin]) if is_there else -1

    def __getitem__(self, number: int) -> Example:
        place = slice(*self.begin_E[number : number + 2])
        token_T = self.token_N[place]
        counts_T = (
            np.ones(len(token_T), bool) if self.loss_mask_N is None else self.loss_mask_N[place]
        )
        return Example(token_T, counts_T)


Pieces = Iterable[tuple[Any, Any]]  # of one example: token ids, and their loss mask or None


def build_examples(
    examples: Iterable[Pieces],
    *,
    long: LongPolicy = "split",
    bos: int | None = None,
    source: Mapping[str, Any] | None = None,
) -> Examples:
    """Concatenate examples in one array of tokens that grows in place, without a second copy.

    Raises TokenError if there are none or for invalid ids, ConfigError for an unknown `long`.
    """
    if long not in (known := get_args(LongPolicy)):
        raise ConfigError(f"long must be one of {', '.join(known)}, got {long!r:.40}")
    if bos is not None:
        bos = check_int("bos", bos, 0, _MAX_ID, TokenError)
    tokens, begin, counts = array("i"), array("q", [0]), None
    for number, pieces in enumerate(examples):
        for token_T, loss_mask_T in pieces:
            ids = as_token_array(f"example {number}", token_T)
            if loss_mask_T is not None and counts is None:
                counts = bytearray(b"\1") * len(tokens)
            tokens.frombytes(ids.tobytes())
            if counts is not None:
                marks = np.ones(len(ids), bool) if loss_mask_T is None else loss_mask_T
                counts += np.ascontiguousarray(marks, bool).tobytes()
        begin.append(len(tokens))
    if len(begin) == 1:
        raise TokenError("there is no data to train on: no examples")
    counts_N = None if counts is None else np.frombuffer(counts, bool)
    return Examples(_as_array(tokens), counts_N, _as_array(begin), long, bos, dict(source or {}))


def from_ids(documents: Iterable[Any], **options: Any) -> Examples:
    """Make examples of documents of token ids, all of them learned.

    Args:
        documents: lists of ids, or a matrix whose rows are documents. options: as of
            `build_examples`.

    Raises:
        TokenError: If there are none, and for ids outside 0 to 2**31 - 1.
    """
    return build_examples(([(ids, None)] for ids in _check_iterable(documents)), **options)


def _check_iterable(documents: Any) -> Iterable[Any]:
    if not isinstance(documents, Iterable):
        raise TokenError(f"examples must be a list, got {documents!r:.60}")
    return documents


def _as_array(numbers: "array[int]") -> np.ndarray:
    """View an `array` as a read-only numpy array, without a copy."""
    array_N = np.frombuffer(numbers, np.dtype(numbers.typecode))
    array_N.setflags(write=False)
    return array_N


def split_examples(examples: Examples, fraction: float, seed: int = 0) -> tuple[Examples, Examples]:
    """Return training and validation examples, split at random; both keep their order.

    A single example is cut: its end is held out.

    Raises:
        ConfigError: If `fraction` is not between 0 and 1.
        TokenError: If there are too few tokens to split.
    """
    if not 0 < fraction < 1:
        raise ConfigError(f"the held-out share must be between 0 and 1, got {fraction}")
    count = len(examples)
    if count == 1:
        size = len(examples.token_N)
        end = size - max(2, round(fraction * size))
        if end < 2:
            raise TokenError(f"{size} tokens are too few to hold some out: give validation data")
        end_part = _slice_tokens(examples, end, size)
        if (bos := examples.leading_bos(0)) >= 0:  # in place of a token that is not learned
            token_N = end_part.token_N.copy()
            token_N[0] = bos
            end_part = dataclasses.replace(end_part, token_N=token_N)
        return _slice_tokens(examples, 0, end), end_part
    held = np.zeros(count, bool)
    chosen = np.random.default_rng(seed).permutation(count)
    held[chosen[: min(count - 1, max(1, round(fraction * count)))]] = True
    return _select_examples(examples, ~held), _select_examples(examples, held)


def _slice_tokens(examples: Examples, start: int, end: int) -> Examples:
    counts_N = None if examples.loss_mask_N is None else examples.loss_mask_N[start:end]
    begin_E = np.array([0, end - start], np.int64)
    return dataclasses.replace(
        examples, token_N=examples.token_N[start:end], loss_mask_N=counts_N, begin_E=begin_E
    )


def _select_examples(examples: Examples, chosen_E: np.ndarray) -> Examples:
    length_E = np.diff(examples.begin_E)
    chosen_N = np.repeat(chosen_E, length_E)
    begin_E = np.concatenate([[0], np.cumsum(length_E[chosen_E])]).astype(np.int64)
    counts_N = None if examples.loss_mask_N is None else examples.loss_mask_N[chosen_N]
    return dataclasses.replace(
        examples, token_N=examples.token_N[chosen_N], loss_mask_N=counts_N, begin_E=begin_E
    )
