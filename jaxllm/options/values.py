"""Validators of option values: each returns the normalized value.

An invalid value raises a bare TypeError or ValueError; the caller reports the option's `meaning`.
"""

import inspect
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from jaxllm.decode.loops.overflow import OVERFLOWS, Overflow
from jaxllm.decode.loops.text import MOST_TOKENS
from jaxllm.decode.sampling.sampler import Context, Processor
from jaxllm.whole import is_number, is_whole

MOST_SEED = (1 << 64) - 1
Numbers = float | Sequence[float] | np.ndarray
Ids = int | Sequence[int] | np.ndarray
Lists = Sequence[Any] | np.ndarray
Scores = Callable[[Any, Context], Any]  # (float32 [B, V], the text so far) -> float32 [B, V]
Ends = Callable[[str | None, list[int]], bool]  # (text, ids) of a continuation so far -> stop here


@runtime_checkable
class Assistant(Protocol):
    """Draft model with the same vocabulary: an `LM`."""

    @property
    def model(self) -> Any: ...
    @property
    def params(self) -> Any: ...


def whole_number(least: int, most: int = MOST_SEED) -> Callable[[Any], int]:
    """Return a validator of integers from `least` to `most`."""

    def check(x: Any) -> int:
        if not is_whole(x) or not least <= operator.index(x) <= most:
            raise ValueError
        return operator.index(x)

    return check


def one_or_each(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a validator of one value, or of a list with one value per prompt."""

    def each(x: Any) -> Any:
        many = isinstance(x, list | tuple) or (isinstance(x, np.ndarray | jax.Array) and x.ndim)
        return [check(one) for one in x] if many else check(x)

    return each


def number(least: float = -math.inf, most: float = math.inf) -> Callable[[Any], float]:
    """Return a validator of finite numbers from `least` to `most`."""

    def check(x: Any) -> float:
        if not is_number(x) or not math.isfinite(x) or not least <= x <= most:
            raise ValueError
        return float(x)

    return check


def instance(kind: Any) -> Callable[[Any], Any]:
    """Return a validator of instances of a class or a union of classes."""

    def check(x: Any) -> Any:
        if not isinstance(x, kind):
            raise TypeError
        return x

    return check


def flag(x: Any) -> bool:
    """Return a bool."""
    return bool(instance(bool | np.bool_)(x))


def texts(x: Any) -> tuple[str, ...]:
    """Return a non-empty text, or a list of them, as a tuple."""
    texts = (x,) if isinstance(x, str) else tuple(instance(list | tuple)(x))
    if not all(isinstance(text, str) and text for text in texts):
        raise TypeError
    return texts


def ids(x: Any) -> tuple[int, ...]:
    """Return a token id, or a list of them, as a tuple."""
    ids = (x,) if is_whole(x) else tuple(instance(list | tuple | np.ndarray | jax.Array)(x))
    return tuple(whole_number(0, MOST_TOKENS)(token) for token in ids)


def seed(x: Any) -> int | str:
    """Return a 64-bit seed, or "random"."""
    return x if isinstance(x, str) and x == "random" else whole_number(0, MOST_SEED)(x)


def early(x: Any) -> bool | str:
    """Return beam search's `early_stopping`: a bool or "never"."""
    return x if isinstance(x, str) and x == "never" else flag(x)


def policy(x: Any) -> Overflow | None:
    """Return an overflow policy, given by name or as an object."""
    if isinstance(x, str) and x in OVERFLOWS:
        return OVERFLOWS[x]
    policy: Overflow = instance(Overflow)(x)
    return policy


def processors(x: Any) -> tuple[Any, ...]:
    """Return a list of processors and functions of two arguments, as a tuple."""
    found = tuple(instance(list | tuple)(x))
    if not all(isinstance(p, Processor) or takes_two(p) for p in found):
        raise TypeError
    return found


def criteria(x: Any) -> tuple[Ends, ...]:
    """Return a function of two arguments, or a list of them, as a tuple."""
    found = tuple(x) if isinstance(x, list | tuple) else (x,)
    if not all(map(takes_two, found)):
        raise TypeError
    return found


def takes_two(x: Any) -> bool:
    """Return whether x can be called with two arguments, judging by its signature."""
    try:
        inspect.signature(x).bind(None, None)
    except ValueError:  # it has no signature
        return callable(x)
    except TypeError:
        return False
    return True
