"""Lazily gathered weights, to bound peak memory to one weight."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.leaves.arrays import Dense, as_leaf
from jaxllm.weights.leaves.leaf import Leaf


@dataclasses.dataclass(frozen=True)
class Later:
    """A weight that `read()` gathers to the host.

    Several processes read it together, each to its host.

    `form` is the weight with `jax.ShapeDtypeStruct` in place of arrays.
    """

    read: Callable[[], Any]
    form: Any


def now(weight: Any) -> Any:
    """Return the weight, read if it is lazy."""
    return weight.read() if isinstance(weight, Later) else weight


def leaf_of(weight: Any) -> Leaf:
    """Return the weight as a leaf; for a lazy one its `form`."""
    return as_leaf(weight.form if isinstance(weight, Later) else weight)


def tensors_of(weight: Any) -> dict[str, LazyTensor]:
    """Return the weight's arrays by name, as lazy tensors to be written.

    A `Later` is read once for each array. If it is no array it is read once more, since only the
    weight itself has the shapes of its arrays.
    """
    if not isinstance(weight, Later):
        return {name: LazyTensor.of(np.asarray(x)) for name, x in as_leaf(weight).pieces().items()}
    leaf = leaf_of(weight)
    known = leaf.pieces() if isinstance(leaf, Dense) else as_leaf(weight.read()).pieces()
    forms = {name: (np.dtype(x.dtype), tuple(x.shape)) for name, x in known.items()}

    def read(name: str) -> np.ndarray:
        return np.asarray(as_leaf(weight.read()).pieces()[name])

    return {name: LazyTensor(*form, partial(read, name)) for name, form in forms.items()}
