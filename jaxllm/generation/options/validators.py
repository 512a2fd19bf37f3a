"""Validators of option values: each returns the normalized value.

An invalid value raises a bare TypeError or ValueError; the caller reports the option's `meaning`.
"""

import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxllm.generation.completion import StoppingCriterion
from jaxllm.generation.loops.finish import MAX_TOKENS
from jaxllm.generation.loops.overflow import OVERFLOWS, OverflowPolicy
from jaxllm.generation.sampling.sampler import Context, Processor
from jaxllm.models.edits import as_edits
from jaxllm.runtime.validation import is_integer, is_number

MAX_SEED = (1 << 64) - 1
Numbers = float | Sequence[float] | np.ndarray
Ids = int | Sequence[int] | np.ndarray
Lists = Sequence[Any] | np.ndarray
ScoreFunction = Callable[[Any, Context], Any]  # (float32 [B, V], the text so far) -> float32 [B, V]


def int_checker(minimum: int, maximum: int = MAX_SEED) -> Callable[[Any], int]:
    """Return a validator of integers from `minimum` to `maximum`."""

    def check(x: Any) -> int:
        if not is_integer(x) or not minimum <= operator.index(x) <= maximum:
            raise ValueError
        return operator.index(x)

    return check


def per_prompt_checker(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a validator of one value, or of a list with one value per prompt."""

    def check_each(x: Any) -> Any:
        is_list = isinstance(x, list | tuple) or (isinstance(x, np.ndarray | jax.Array) and x.ndim)
        return [check(value) for value in x] if is_list else check(x)

    return check_each


def number_checker(minimum: float = -math.inf, maximum: float = math.inf) -> Callable[[Any], float]:
    """Return a validator of finite numbers from `minimum` to `maximum`."""

    def check(x: Any) -> float:
        if not is_number(x) or not math.isfinite(x) or not minimum <= x <= maximum:
            raise ValueError
        return float(x)

    return check


def instance_checker(kind: Any) -> Callable[[Any], Any]:
    """Return a validator of instances of a class or a union of classes."""

    def check(x: Any) -> Any:
        if not isinstance(x, kind):
            raise TypeError
        return x

    return check


def check_bool(x: Any) -> bool:
    """Return a bool."""
    return bool(instance_checker(bool | np.bool_)(x))


def check_texts(x: Any) -> tuple[str, ...]:
    """Return a non-empty text, or a list of them, as a tuple."""
    texts = (x,) if isinstance(x, str) else tuple(instance_checker(list | tuple)(x))
    if not all(isinstance(text, str) and text for text in texts):
        raise TypeError
    return texts


def check_ids(x: Any) -> tuple[int, ...]:
    """Return a token id, or a list of them, as a tuple."""
    ids = (
        (x,) if is_integer(x) else tuple(instance_checker(list | tuple | np.ndarray | jax.Array)(x))
    )
    return tuple(int_checker(0, MAX_TOKENS)(token) for token in ids)


def check_seed(x: Any) -> int | str:
    """Return a 64-bit seed, or "random"."""
    return x if isinstance(x, str) and x == "random" else int_checker(0, MAX_SEED)(x)


def check_acceptance(x: Any) -> str:
    """Return speculative decoding's `acceptance`."""
    if x not in ("text", "distribution"):
        raise ValueError
    return str(x)


def check_early_stopping(x: Any) -> bool | str:
    """Return beam search's `early_stopping`: a bool or "never"."""
    return x if isinstance(x, str) and x == "never" else check_bool(x)


def check_overflow(x: Any) -> OverflowPolicy | None:
    """Return an overflow policy, given by name or as an object."""
    if isinstance(x, str) and x in OVERFLOWS:
        return OVERFLOWS[x]
    policy: OverflowPolicy = instance_checker(OverflowPolicy)(x)
    return policy


def check_processors(x: Any) -> tuple[Any, ...]:
    """Return a list of processors and functions of two arguments, as a tuple."""
    processors = tuple(instance_checker(list | tuple)(x))
    if not all(isinstance(p, Processor) or takes_two_args(p) for p in processors):
        raise TypeError
    return processors


def check_criteria(x: Any) -> tuple[StoppingCriterion, ...]:
    """Return a function of two arguments, or a list of them, as a tuple."""
    criteria = tuple(x) if isinstance(x, list | tuple) else (x,)
    if not all(map(takes_two_args, criteria)):
        raise TypeError
    return criteria


def check_edits(x: Any) -> Any:
    """Return a mapping from names of sites to edits; the model checks what they are."""
    for site, edits in instance_checker(Mapping)(x).items():
        instance_checker(str)(site)
        as_edits(edits)
    return x


def takes_two_args(x: Any) -> bool:
    """Return whether x can be called with two arguments, judging by its signature."""
    try:
        inspect.signature(x).bind(None, None)
    except ValueError:  # it has no signature
        return callable(x)
    except TypeError:
        return False
    return True
