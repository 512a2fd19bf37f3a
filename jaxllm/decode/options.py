"""Sampling options by the names that users know, and the sampler that they make."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.decode.sampling import Processor, Sampler
from jaxllm.decode.truncation import Temperature, TopK, TopP
from jaxllm.errors import SamplingError


class Option(NamedTuple):
    """How users set a processor: its maker, the value that leaves it out, and what is allowed.

    always: part of every sampler, so that setting it compiles nothing; the others join the chain
    when they are given.
    """

    make: Callable[[Any], Processor]
    off: float
    allowed: Callable[[np.ndarray], np.ndarray]
    meaning: str
    always: bool = False


# In the order in which they are applied.
PROCESSORS: dict[str, Option] = {
    "temperature": Option(Temperature, 1.0, lambda x: x >= 0, "a number from 0 (greedy) up", True),
    "top_k": Option(
        TopK, 0, lambda x: (x >= 0) & (x == np.floor(x)), "a whole number, 0 is off", True
    ),
    "top_p": Option(TopP, 1.0, lambda x: (x >= 0) & (x <= 1), "a number from 0 to 1", True),
}


def make_sampler(**options: Any) -> Sampler:
    """A sampler with the processors of these options, in the order of the table.

    options: names of `PROCESSORS`; each a number, or a sequence with one number a row. New values
    compile nothing, a new set of processors does.

    Raises SamplingError for a name that is not in the table or a value out of its range.
    """
    if unknown := sorted(set(options) - set(PROCESSORS)):
        raise SamplingError(
            f"no sampling option {', '.join(unknown)} (known: {', '.join(PROCESSORS)})"
        )
    return Sampler(
        tuple(
            option.make(_checked(name, options.get(name, option.off), option))
            for name, option in PROCESSORS.items()
            if option.always or name in options
        )
    )


def _checked(name: str, value: Any, option: Option) -> jax.Array:
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        array = np.array(math.nan)
    if array.ndim > 1 or not (np.isfinite(array) & option.allowed(array)).all():
        raise SamplingError(f"{name} must be {option.meaning}; got {value!r:.80}")
    return jnp.asarray(array, jnp.float32)
