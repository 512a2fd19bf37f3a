"""Values of sampling options as arrays, and the processors that are built from them."""

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from jaxllm.errors import SamplingError
from jaxllm.generation.option_table import OPTIONS, Option
from jaxllm.generation.sampling.sampler import Processor
from jaxllm.ops.padding import next_power_of_two
from jaxllm.runtime.validation import is_integer, is_number

_BIAS_LIMITS = {"logit_bias": 100.0, "sequence_bias": float(np.finfo(np.float32).max)}
_BOUNDS: dict[str, Callable[[Any, Any], Any]] = {
    name: getattr(operator, name) for name in ("ge", "gt", "le", "lt")
}
Biased = tuple[Sequence[int], float]  # a sequence of token ids, and its bias


class Values:
    """The sampling options of a call, checked and converted one by one.

    Attributes:
        given: The options by name, with `max_new_tokens` and `eos_token_id`, which some processors
            need. A number may be a sequence with one for each row; a list of tokens, words or
            biases may be a list of such lists, one for each row (None for an empty one).
        vocab_size: Token ids from this one up are refused; None allows all.
    """

    def __init__(self, given: Mapping[str, Any], vocab_size: int | None = None) -> None:
        self._given, self._vocab_size = given, vocab_size

    def __call__(self, name: str) -> Any:
        """Return an option as an array: numbers, float32 scalar or `[B]`, or token ids.

        Ids are int32 `[N]` or `[B, N]`, padded with -1. Words are `[N, S]` or `[B, N, S]`, each
        last token first; biases are pairs of words, or tokens as words, and numbers.

        Raises SamplingError for an invalid value.
        """
        value = self._given.get(name, OPTIONS[name].default)
        try:
            if name in _BIAS_LIMITS:
                return self._pack_biases(name, value)
            if name == "bad_words_ids":
                return self._pack_words(value)
            return self._numbers(name, value) if OPTIONS[name].per_row else self._pack_tokens(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise SamplingError(
                f"{name} must be {OPTIONS[name].meaning}; got {value!r:.80} ({error})"
            ) from None

    def _numbers(self, name: str, value: Any) -> np.ndarray:
        if name == "max_new_tokens" and value is None:
            raise SamplingError(
                "forced_eos_token_id requires max_new_tokens, which defines the last token"
            )
        array = np.asarray(value)
        if array.ndim > 1 or array.dtype.kind not in "iuf":
            raise TypeError("not a number or one per row")
        array = array.astype(np.float64)
        fits = is_within(array, OPTIONS[name]) & (abs(array) <= np.finfo(np.float32).max)
        if OPTIONS[name].whole:
            fits &= array == np.floor(array)
        if name == "forced_bos_token_id" and self._vocab_size is not None:
            fits &= array < self._vocab_size
        if not np.all(fits):
            raise ValueError("out of range")
        return array.astype(np.float32)

    def _pack_tokens(self, value: Any) -> np.ndarray:
        value = [value] if is_integer(value) else value

        def entries(row: Any) -> list[Biased]:
            return [([self._token_id(token)], 0.0) for token in row]

        return _pack(value, entries, _is_per_row(value, list | tuple))[0][..., 0]

    def _pack_words(self, value: Any) -> np.ndarray:
        ends = [[token] for token in self._given.get("eos_token_id", ())]

        def entries(row: Any) -> list[Biased]:
            words = map(self._sequence, row)
            # As in transformers, an end-of-text id cannot be a bad word.
            return [(word, 0.0) for word in words if word not in ends]

        rows = _is_per_row(value, None) or any(_is_per_row(row, list | tuple) for row in value)
        return _pack(value, entries, rows)[0]

    def _pack_biases(self, name: str, value: Any) -> tuple[np.ndarray, np.ndarray]:
        def bias(x: Any) -> float:
            if not is_number(x) or not abs(x) <= _BIAS_LIMITS[name]:
                raise ValueError(f"bias {x!r:.40} is not a number in range")
            return float(x)

        def entries(row: Any) -> list[Biased]:
            pairs = row.items() if isinstance(row, Mapping) else row
            return [
                (self._sequence([_parse_key(ids)] if name == "logit_bias" else ids), bias(x))
                for ids, x in pairs
            ]

        return _pack(value, entries, not isinstance(value, Mapping) and _is_per_row(value, Mapping))

    def _sequence(self, ids: Any) -> list[int]:
        if not isinstance(ids, Sequence | np.ndarray) or not len(ids):
            raise ValueError(f"a token sequence must be a non-empty list, got {ids!r:.40}")
        return [self._token_id(token) for token in ids]

    def _token_id(self, token: Any) -> int:
        if not is_integer(token):
            raise TypeError(f"a token id must be a whole number, got {token!r:.40}")
        if token < 0 or token >= 1 << 31:
            raise ValueError(f"token id {token} is out of range")
        if self._vocab_size is not None and token >= self._vocab_size:
            raise ValueError(f"token id {token} is not in the vocabulary of {self._vocab_size}")
        return int(token)


class OptionProcessor(Processor):
    """A processor that is made of options: its fields have their names.

    names: those of the options that add it to a sampler; by default all fields.
    """

    names: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "names" not in cls.__dict__:
            cls.names = tuple(f.name for f in dataclasses.fields(cls) if f.name != "kind")

    @classmethod
    def from_options(cls, values: Values) -> Self:
        """Return the processor of a call; its arrays are NumPy's."""
        fields = [f.name for f in dataclasses.fields(cls) if f.name != "kind"]
        arrays: dict[str, Any] = {name: values(name) for name in fields}
        return cls(**arrays)


def is_within(x: Any, option: Option) -> Any:
    """Return whether numbers are finite and within an option's bounds, for each of them."""
    fits = abs(x) < math.inf
    for name, compare in _BOUNDS.items():
        if (bound := getattr(option, name)) is not None:
            fits &= compare(x, bound)
    return fits


def _parse_key(token: Any) -> Any:
    """Convert a JSON object key to a token id; JSON, and so OpenAI, has string keys only."""
    return int(token) if isinstance(token, str) and token.isdecimal() else token


def _is_per_row(value: Any, kind: Any) -> bool:
    """Return whether a list holds one entry per row: some entry is of this kind, or None."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return False
    return any(row is None or (kind is not None and isinstance(row, kind)) for row in value)


def _pack(
    value: Any, entries: Callable[[Any], list[Biased]], per_row: bool
) -> tuple[np.ndarray, np.ndarray]:
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
    return (token_BNS, bias_BN) if per_row else (token_BNS[0], bias_BN[0])
