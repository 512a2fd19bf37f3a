"""Number formats as one frozen value: of the weights, the activations and the cache.

Norms, rotary angles, softmax, accumulation and logits are float32 whatever is chosen here.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.errors import ConfigError
from jaxllm.weights.paths import Params, first_match, map_leaves

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
CACHE_DTYPES = {**DTYPES, "int8": jnp.int8}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Override:
    """What one module does differently; None means as everywhere else."""

    weights: str | None = None
    activations: str | None = None

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value is not None:
                _check(name, value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """Formats of the weights, of the activations between modules, and of keys and values cached.

    cache: also "int8", with a scale for each token and head.

    overrides: ordered rows `(regex over module paths, Override)`; the first row that matches a
    module or one of its parents wins: `("layers.0", Override(weights="float32"))` covers all of
    layer 0, `(".*mlp.down_proj", ...)` one linear of each layer. A module computes in its own
    activations format and hands its result back in the format of the stream it was given.

    Raises ConfigError for an unknown format or a broken regex.
    """

    weights: str = "float32"
    activations: str = "float32"
    cache: str = "float32"
    overrides: tuple[tuple[str, Override], ...] = ()

    def __post_init__(self) -> None:
        _check("weights", self.weights)
        _check("activations", self.activations)
        _check("cache", self.cache, CACHE_DTYPES)
        for regex, _ in self.overrides:
            try:
                re.compile(regex)
            except re.error as error:
                raise ConfigError(
                    f"precision override {regex!r} is no valid regex: {error}"
                ) from None

    @classmethod
    def uniform(cls, dtype: str) -> "Precision":
        """The same format everywhere."""
        return cls(weights=dtype, activations=dtype, cache=dtype)

    def weights_at(self, module: str) -> jnp.dtype:
        """The format in which the parameters of `module` (a dotted path) are kept."""
        return jnp.dtype(self._override(module, "weights") or self.weights)

    def activations_at(self, module: str) -> jnp.dtype:
        """The format in which `module` (a dotted path) takes its input."""
        return jnp.dtype(self._override(module, "activations") or self.activations)

    def _override(self, module: str, what: str) -> str | None:
        names = module.split(".")
        parents = [".".join(names[:n]) for n in range(len(names), 0, -1)]
        rows = [(regex, v) for regex, o in self.overrides if (v := getattr(o, what)) is not None]
        for regex, value in rows:
            if any(first_match([(regex, True)], parent) for parent in parents):
                return value
        return None


def cast(params: Params, precision: Precision) -> Params:
    """The parameters with every array in the format that `precision` keeps it in."""

    def to(path: str, leaf: jax.Array) -> jax.Array:
        return leaf.astype(precision.weights_at(path.rpartition(".")[0]))

    return map_leaves(to, params)


def _check(name: str, dtype: str, known: Mapping[str, Any] = DTYPES) -> None:
    if dtype not in known:
        raise ConfigError(f"precision: {name} must be one of {', '.join(known)}, got {dtype!r}")
