"""Weights that are had when they are wanted: one after the other they take the room of one."""

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
    """A weight that `read()` gives, on the host; of several processes, which all read it together,
    on the host of each.

    form: what it is, with `jax.ShapeDtypeStruct` in the place of arrays.
    """

    read: Callable[[], Any]
    form: Any


def now(weight: Any) -> Any:
    """A weight, be it there already or to be read."""
    return weight.read() if isinstance(weight, Later) else weight


def leaf_of(weight: Any) -> Leaf:
    """The same as a leaf; of one that is to be read its form."""
    return as_leaf(weight.form if isinstance(weight, Later) else weight)


def tensors_of(weight: Any) -> dict[str, LazyTensor]:
    """Its pieces by name, to be written. Of a `Later` each is read as it is: of what is no array,
    of whose pieces only it itself knows the shapes, all is read once for these, and once for each.
    """
    if not isinstance(weight, Later):
        return {name: LazyTensor.of(np.asarray(x)) for name, x in as_leaf(weight).pieces().items()}
    leaf = leaf_of(weight)
    known = leaf.pieces() if isinstance(leaf, Dense) else as_leaf(weight.read()).pieces()
    forms = {name: (np.dtype(x.dtype), tuple(x.shape)) for name, x in known.items()}

    def read(name: str) -> np.ndarray:
        return np.asarray(as_leaf(weight.read()).pieces()[name])

    return {name: LazyTensor(*form, partial(read, name)) for name, form in forms.items()}
