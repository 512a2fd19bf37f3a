"""Lazily gathered weights, to bound peak memory to one weight."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.types.arrays import DenseWeight, as_weight
from jaxllm.weights.types.base import WeightBase


@dataclasses.dataclass(frozen=True)
class LazyWeight:
    """A weight that `read()` gathers to the host.

    Several processes read it together, each to its host.

    `abstract` is the weight with `jax.ShapeDtypeStruct` in place of arrays.
    """

    read: Callable[[], Any]
    abstract: Any


def load_weight(weight: Any) -> Any:
    """Return the weight, read if it is lazy."""
    return weight.read() if isinstance(weight, LazyWeight) else weight


def peek_weight(weight: Any) -> WeightBase:
    """Return the weight as a leaf; for a lazy one its `abstract`."""
    return as_weight(weight.abstract if isinstance(weight, LazyWeight) else weight)


def to_lazy_tensors(weight: Any) -> dict[str, LazyTensor]:
    """Return the weight's arrays by name, as lazy tensors to be written.

    A `LazyWeight` is read once for each array. If it is no array it is read once more, since only
    the weight itself has the shapes of its arrays.
    """
    if not isinstance(weight, LazyWeight):
        return {
            name: LazyTensor.from_array(np.asarray(x))
            for name, x in as_weight(weight).arrays().items()
        }
    leaf = peek_weight(weight)
    known = leaf.arrays() if isinstance(leaf, DenseWeight) else as_weight(weight.read()).arrays()
    forms = {name: (np.dtype(x.dtype), tuple(x.shape)) for name, x in known.items()}

    def read(name: str) -> np.ndarray:
        return np.asarray(as_weight(weight.read()).arrays()[name])

    return {name: LazyTensor(*form, partial(read, name)) for name, form in forms.items()}
