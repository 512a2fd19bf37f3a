"""The base class of weights that wrap one other weight."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.weights.types.arrays import as_weight
from jaxllm.weights.types.base import Format, PartialShape, ReadBlocks, WeightBase, to_device


class WeightWrapper(WeightBase):
    """A weight around `weight`, an array or a leaf, with arrays of its own."""

    is_composite = True
    format_prefix: ClassVar[str]  # prefix of its format's name, with the slash
    allows_composite: ClassVar[bool] = (
        False  # whether the weight may itself be composite, of any type
    )
    sliced_fields: ClassVar[
        tuple[str, ...]
    ] = ()  # fields with the weight's rows and columns, or groups
    weight: Any

    @property
    def inner(self) -> WeightBase:
        """The wrapped weight."""
        return as_weight(self.weight)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.inner.shape

    @property
    def dtype(self) -> Any:
        return self.inner.dtype

    @property
    def format(self) -> str:
        return f"{self.format_prefix}{self.inner.format}"

    def extra_arrays(self) -> dict[str, jax.Array]:
        """Return its own arrays."""
        raise NotImplementedError

    def extra_fields(self) -> dict[str, Any]:
        """Return its array fields except for the weight, if they are set."""
        kept = [f for f in dataclasses.fields(self) if f.metadata.get("pytree_node", True)]  # type: ignore[arg-type]
        found = {f.name: getattr(self, f.name) for f in kept if f.name != "weight"}
        return {name: x for name, x in found.items() if x is not None}

    def check_columns(self, begin: int, end: int) -> None:
        """Raise ConfigError if the columns from `begin` to before `end` cannot be used alone."""

    def arrays(self) -> dict[str, jax.Array]:
        inner = {f".weight{name}": piece for name, piece in self.inner.arrays().items()}
        return {**self.extra_arrays(), **inner}


@dataclasses.dataclass(frozen=True)
class WrapperFormat:
    """The format of a `WeightWrapper`."""

    inner: Any  # the format of the wrapped weight
    format_prefix: ClassVar[str]
    missing_info: ClassVar[str]  # why numbers alone do not make such a weight, and what does

    @property
    def name(self) -> str:
        return f"{self.format_prefix}{self.inner.name}"

    @property
    def lossless_dtype(self) -> str:
        exact: str = self.inner.lossless_dtype
        return exact

    def quantize(self, array: jax.Array) -> NoReturn:
        raise ConfigError(f"{self.name}: {self.missing_info}")

    def quantize_blocks(self, shape: tuple[int, ...], blocks: ReadBlocks) -> NoReturn:
        self.quantize(jnp.empty(0))

    def extra_specs(self, shape: tuple[int, ...]) -> dict[str, tuple[PartialShape, Any]]:
        """Return the shape and dtype of each of its own arrays."""
        raise NotImplementedError

    def wrap(self, weight: Any, arrays: Mapping[str, Any]) -> Any:
        """Wrap a weight with its own arrays."""
        raise NotImplementedError

    def check_arrays(
        self, path: str, shape: tuple[int, ...], arrays: Mapping[str, np.ndarray]
    ) -> None:
        """Raise CheckpointError for invalid values."""
        raise NotImplementedError

    def array_specs(self, shape: tuple[int, ...]) -> dict[str, tuple[PartialShape, Any]]:
        inner = {f".weight{name}": piece for name, piece in self.inner.array_specs(shape).items()}
        return {**self.extra_specs(shape), **inner}

    def from_file(self, path: str, shape: tuple[int, ...], arrays: Mapping[str, np.ndarray]) -> Any:
        weight = self.inner.from_file(f"{path}.weight", shape, self._inner_arrays(shape, arrays))
        self.check_arrays(path, shape, arrays)
        return self.wrap(
            weight, to_device({name: arrays[name] for name in self.extra_specs(shape)})
        )

    def from_arrays(self, shape: tuple[int, ...], arrays: Mapping[str, Any]) -> Any:
        return self.wrap(self.inner.from_arrays(shape, self._inner_arrays(shape, arrays)), arrays)

    def _inner_arrays(self, shape: tuple[int, ...], arrays: Mapping[str, Any]) -> dict[str, Any]:
        return {name: arrays[f".weight{name}"] for name in self.inner.array_specs(shape)}


def parse_inner(name: str, kind: str, inner: Callable[[str], Format]) -> Format | None:
    """Parse the format after `format_prefix` in a name; None for other names.

    Raises:
        ConfigError: if the inner format is composite itself.
    """
    if not name.startswith(kind):
        return None
    stored = name.removeprefix(kind)
    if "/" in stored:
        raise ConfigError(f"{name:.40}: format after {kind} must be simple, got another composite")
    return inner(stored)
