"""The base class of weights that wrap one other weight."""

from typing import Any, ClassVar

from jaxllm.weights.types.arrays import as_weight
from jaxllm.weights.types.base import WeightBase


class WeightWrapper(WeightBase):
    """A weight around `weight`, an array or another weight, with arrays of its own."""

    is_composite = True
    format_prefix: ClassVar[str]  # prefix of its format's name, with the slash
    allows_composite: ClassVar[bool] = False  # whether the weight may itself be composite
    sliced_fields: ClassVar[tuple[str, ...]] = ()  # fields with the weight's rows and columns
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

    def check_columns(self, begin: int, end: int) -> None:
        """Raise ConfigError if the columns from `begin` to before `end` cannot be used alone."""
