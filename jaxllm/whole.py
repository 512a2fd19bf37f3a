"""Numbers as arguments: whole ones (Python's, numpy's and JAX's, never a bool), and token ids."""

import operator
from typing import Any

import numpy as np

from jaxllm.errors import JaxllmError, SamplingError, TokenError


def is_whole(x: Any) -> bool:
    """Whether x is a whole number, of Python, numpy or (an array without axes) JAX."""
    if isinstance(x, bool | np.bool_):
        return False
    try:
        operator.index(x)
    except TypeError:  # a tracer's too: inside jit nobody knows its number
        return False
    return True


def is_number(x: Any) -> bool:
    """Whether x is a number, of Python or numpy; NaN and infinity are."""
    return isinstance(x, int | float | np.integer | np.floating) and not isinstance(x, bool)


def whole(
    name: str, x: Any, least: int, most: int | None = None, error: type[JaxllmError] = SamplingError
) -> int:
    """x as an int. Raises `error`, by name, for what is no whole number from least to most."""
    number = operator.index(x) if is_whole(x) else least - 1
    if number < least or (most is not None and number > most):
        up = "up" if most is None else f"to {most}"
        raise error(f"{name} must be a whole number from {least} {up}, got {x!r:.60}")
    return number


def whole_array(name: str, x: Any, error: type[JaxllmError]) -> np.ndarray:
    """Lists, or an array, of whole numbers as a numpy array.

    Raises `error`, with the name, for anything else, ragged lists and more than 64 bits.
    """
    try:
        array = np.asarray(x)
    except (ValueError, TypeError, OverflowError):
        array = np.zeros((), object)
    if array.dtype.kind not in "iu" and array.size:
        what = (
            "numbers of more than 64 bits, or ragged rows" if array.dtype == object else array.dtype
        )
        raise error(f"{name} must be an array of integers, got {what}: {x!r:.60}")
    return array


def check_ids(
    token_X: np.ndarray,
    vocab_size: int,
    what: str = "",
    *,
    real_X: np.ndarray | None = None,
    error: type[JaxllmError] = TokenError,
) -> None:
    """Raise `error` for the first token id outside the vocabulary.

    token_X: whole numbers, `[B, T]`, `[T]` or one. what: of which the message speaks first ("the
    prompt: "). real_X: which of them are tokens, bool; by default all.
    """
    wrong_X = (token_X < 0) | (token_X >= vocab_size)
    wrong_X = wrong_X if real_X is None else wrong_X & real_X
    if np.any(wrong_X):
        at = tuple(np.argwhere(wrong_X)[0])
        names = ("row", "column") if len(at) == 2 else ("token",)
        place = ", ".join(f"{name} {i}" for name, i in zip(names, at, strict=False))
        raise error(
            f"{what}token id {token_X[at]} is outside the vocabulary of {vocab_size}"
            + (place and f" ({place})")
        )
