"""The base class of weights that wrap one other weight."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.weights.leaves.arrays import as_leaf
from jaxllm.weights.leaves.leaf import Blocks, Format, Leaf, Shape, on_device


class Wrapped(Leaf):
    """A weight around `weight`, an array or a leaf, with arrays of its own."""

    composed = True
    kind: ClassVar[str]  # prefix of its format's name, with the slash
    nests: ClassVar[bool] = False  # whether the weight may itself be composite, of any type
    alike: ClassVar[tuple[str, ...]] = ()  # fields with the weight's rows and columns, or groups
    weight: Any

    @property
    def stored(self) -> Leaf:
        """The wrapped weight."""
        return as_leaf(self.weight)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def dtype(self) -> Any:
        return self.stored.dtype

    @property
    def format(self) -> str:
        return f"{self.kind}{self.stored.format}"

    def beside(self) -> dict[str, jax.Array]:
        """Return its own arrays."""
        raise NotImplementedError

    def others(self) -> dict[str, Any]:
        """Return its array fields except for the weight, if they are set."""
        kept = [f for f in dataclasses.fields(self) if f.metadata.get("pytree_node", True)]  # type: ignore[arg-type]
        found = {f.name: getattr(self, f.name) for f in kept if f.name != "weight"}
        return {name: x for name, x in found.items() if x is not None}

    def check_columns(self, begin: int, end: int) -> None:
        """Raise ConfigError if the columns from `begin` to before `end` cannot be used alone."""

    def pieces(self) -> dict[str, jax.Array]:
        inner = {f".weight{name}": piece for name, piece in self.stored.pieces().items()}
        return {**self.beside(), **inner}


@dataclasses.dataclass(frozen=True)
class WrappedFormat:
    """The format of a `Wrapped`."""

    inner: Any  # the format of the wrapped weight
    kind: ClassVar[str]
    lacking: ClassVar[str]  # why numbers alone do not make such a weight, and what does

    @property
    def name(self) -> str:
        return f"{self.kind}{self.inner.name}"

    @property
    def exact_in(self) -> str:
        exact: str = self.inner.exact_in
        return exact

    def make(self, array: jax.Array) -> NoReturn:
        raise ConfigError(f"{self.name}: {self.lacking}")

    def collect(self, shape: tuple[int, ...], blocks: Blocks) -> NoReturn:
        self.make(jnp.empty(0))

    def beside(self, shape: tuple[int, ...]) -> dict[str, tuple[Shape, Any]]:
        """Return the shape and dtype of each of its own arrays."""
        raise NotImplementedError

    def around(self, weight: Any, pieces: Mapping[str, Any]) -> Any:
        """Wrap a weight with its own arrays."""
        raise NotImplementedError

    def check(self, path: str, shape: tuple[int, ...], pieces: Mapping[str, np.ndarray]) -> None:
        """Raise CheckpointError for invalid values."""
        raise NotImplementedError

    def expected(self, shape: tuple[int, ...]) -> dict[str, tuple[Shape, Any]]:
        inner = {f".weight{name}": piece for name, piece in self.inner.expected(shape).items()}
        return {**self.beside(shape), **inner}

    def assemble(self, path: str, shape: tuple[int, ...], pieces: Mapping[str, np.ndarray]) -> Any:
        weight = self.inner.assemble(f"{path}.weight", shape, self._inner(shape, pieces))
        self.check(path, shape, pieces)
        return self.around(weight, on_device({name: pieces[name] for name in self.beside(shape)}))

    def of_pieces(self, shape: tuple[int, ...], pieces: Mapping[str, Any]) -> Any:
        return self.around(self.inner.of_pieces(shape, self._inner(shape, pieces)), pieces)

    def _inner(self, shape: tuple[int, ...], pieces: Mapping[str, Any]) -> dict[str, Any]:
        return {name: pieces[f".weight{name}"] for name in self.inner.expected(shape)}


def inner_of(name: str, kind: str, inner: Callable[[str], Format]) -> Format | None:
    """Parse the format after `kind` in a name; None for other names.

    Raises:
        ConfigError: if the inner format is composite itself.
    """
    if not name.startswith(kind):
        return None
    stored = name.removeprefix(kind)
    if "/" in stored:
        raise ConfigError(f"{name:.40}: format after {kind} must be simple, got another composite")
    return inner(stored)
