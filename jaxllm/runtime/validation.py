"""Argument validation: integers (of Python, NumPy or JAX, never a bool), token ids and dtypes."""

import operator
from typing import Any

import numpy as np

from jaxllm.errors import ConfigError, JaxllmError, SamplingError, TokenError

Dtype = Any  # a name ("bfloat16", "bf16"), or a dtype or scalar type of NumPy, JAX or PyTorch

# Common names of dtypes.
DTYPE_ALIASES = {
    **dict.fromkeys(("float32", "fp32", "f32", "float"), "float32"),
    **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
    **dict.fromkeys(("float16", "fp16", "f16", "half"), "float16"),
}


def is_integer(x: Any) -> bool:
    """Return whether x is an integer of Python, NumPy or JAX (a 0-d array), and not a bool."""
    if isinstance(x, bool | np.bool_):
        return False
    try:
        operator.index(x)
    except TypeError:  # also for tracers, which have no value
        return False
    return True


def is_number(x: Any) -> bool:
    """Return whether x is a number of Python or NumPy, NaN and infinity included; not a bool."""
    return isinstance(x, int | float | np.integer | np.floating) and not isinstance(x, bool)


def check_int(
    name: str,
    x: Any,
    minimum: int,
    maximum: int | None = None,
    error: type[JaxllmError] = SamplingError,
) -> int:
    """Return x as an int. Raises `error` unless x is an integer from `minimum` to `maximum`."""
    number = operator.index(x) if is_integer(x) else minimum - 1
    if number < minimum or (maximum is not None and number > maximum):
        up = "up" if maximum is None else f"to {maximum}"
        raise error(f"{name} must be a whole number from {minimum} {up}, got {x!r:.60}")
    return number


def check_seed(seed: Any) -> int:
    """Return a training seed. Raises ConfigError unless it has 32 bits, as JAX's keys take."""
    return check_int("seed", seed, 0, (1 << 32) - 1, ConfigError)


def check_int_array(name: str, x: Any, error: type[JaxllmError]) -> np.ndarray:
    """Return lists or an array of integers as a NumPy array.

    Raises `error` for other types, ragged lists and integers of more than 64 bits.
    """
    try:
        array = np.asarray(x)
    except (ValueError, TypeError, OverflowError):
        array = np.zeros((), object)
    if array.dtype.kind not in "iu" and array.size:
        what = str(array.dtype)
        if array.dtype == object:
            many = isinstance(x, list | tuple | np.ndarray)
            what = "numbers of more than 64 bits, or ragged rows" if many else type(x).__name__
        raise error(f"{name} must be an array of integers, got {what}: {x!r:.60}")
    return array


def canonical_dtype(x: Dtype) -> Any:
    """Return the full name of a dtype; return other values unchanged.

    x: a name or alias ("bf16"), or a dtype or scalar type of NumPy, JAX, ml_dtypes or PyTorch.
    """
    if type(x).__module__ == "torch" and type(x).__name__ == "dtype":
        x = str(x).removeprefix("torch.")
    elif isinstance(x, np.dtype | type):
        try:
            x = np.dtype(x).name
        except TypeError:
            return x
    return DTYPE_ALIASES.get(x, x) if isinstance(x, str) else x


def check_dtype(name: str, x: Dtype, *more: str) -> str:
    """Return the full name of a floating-point dtype, or of one of `more`.

    Args:
        name: the argument's name, for the message.
        x: as for `canonical_dtype`.

    Raises:
        ConfigError: for anything else.
    """
    dtype, known = canonical_dtype(x), (*dict.fromkeys(DTYPE_ALIASES.values()), *more)
    if not isinstance(dtype, str) or dtype not in known:
        raise ConfigError(
            f"{name} must be one of {', '.join(known)} (or fp32, bf16, fp16, or a dtype of NumPy,"
            f" JAX or PyTorch), got {x!r:.60}"
        )
    return dtype


def as_token_array(label: str, ids: Any) -> np.ndarray:
    """Return the token ids of one text as int32 `[T]`.

    Args:
        label: the text's name, for the message.

    Raises:
        TokenError: for non-integers, several rows, and ids beyond int32.
    """
    array = check_int_array(label, ids, TokenError)
    if array.ndim != 1:
        raise TokenError(
            f"{label} must be one list of token ids, got shape {array.shape}: {ids!r:.60}. Pass"
            " each"
            " text separately"
        )
    if array.size and (array.min() < 0 or array.max() > np.iinfo(np.int32).max):
        wrong = array.min() if array.min() < 0 else array.max()
        raise TokenError(f"{label} has token id {wrong}, expected 0 to 2**31 - 1")
    return array.astype(np.int32)


def check_token_ids(
    token_X: np.ndarray,
    vocab_size: int,
    prefix: str = "",
    *,
    real_X: np.ndarray | None = None,
    error: type[JaxllmError] = TokenError,
) -> None:
    """Raise `error` for the first token id outside the vocabulary.

    token_X: integers, `[B, T]`, `[T]` or a scalar. what: a prefix of the message ("the prompt: ").
    real_X: bool mask of the tokens to check; by default all.
    """
    wrong_X = (token_X < 0) | (token_X >= vocab_size)
    wrong_X = wrong_X if real_X is None else wrong_X & real_X
    if np.any(wrong_X):
        at = tuple(np.argwhere(wrong_X)[0])
        names = ("row", "column") if len(at) == 2 else ("token",)
        place = ", ".join(f"{name} {i}" for name, i in zip(names, at, strict=False))
        raise error(
            f"{prefix}token id {token_X[at]} is outside the vocabulary of {vocab_size}"
            + (place and f" ({place})")
        )
