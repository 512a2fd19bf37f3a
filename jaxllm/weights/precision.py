"""Number formats of weights, activations and cache, as one frozen value.

Norms, rotary angles, softmax, accumulation and logits are always float32.
"""

import dataclasses
import re
from typing import Any

import jax.numpy as jnp

from jaxllm.errors import ConfigError
from jaxllm.files import as_schema, compile_pattern, complaints_of
from jaxllm.weights.formats import Weight, as_format, format_of, parse
from jaxllm.weights.leaves.arrays import DTYPES
from jaxllm.weights.paths import Params, check_params, first_match, flatten, map_leaves
from jaxllm.weights.quantize import Rules, format_at, rules_of
from jaxllm.whole import dtype_name, format_name

CACHE_DTYPES = {**DTYPES, "int8": jnp.int8}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Override:
    """What one module does differently; None means no difference."""

    weights: str | None = None  # any format of `weights.formats`
    activations: str | None = None  # the dtype to which it rounds its input
    output: str | None = None  # the dtype to which it rounds its result; default: the same

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", format_name(self.weights))
        for name in ("activations", "output"):
            if getattr(self, name) is not None:
                _name_format(self, name)
        _check_fields(self)
        if self.weights is not None:
            parse(self.weights)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """Formats of weights, of activations between modules, and of cached keys and values.

    Formats are names, short ones too ("bf16"), or dtypes of NumPy, JAX or PyTorch; they are stored
    as full names. An invalid format or regex raises ConfigError.
    """

    weights: str = "float32"  # of all parameters that `quantize` leaves alone
    activations: str = "float32"
    cache: str = "float32"  # also "int8", with a scale for each token and head
    # The rules by which matrices are quantized, as `weights.quantize.quantize` takes them.
    quantize: str | tuple[tuple[str, str | None], ...] | None = None
    # Linears with integer weights round their input to int8 in blocks of 512 columns (dynamic
    # quantization): less arithmetic, and the one choice here that is not exact. A head that is the
    # token table keeps its input.
    int8_inputs: bool = False
    # Ordered rules of `weights.paths`: `("layers.0", Override(weights="float32"))` covers all of
    # layer 0, `(".*mlp.down_proj", ...)` one linear of each layer. A row that leaves a field None
    # is skipped for that field. A module computes in its own activation format and returns its
    # result in the format of its input stream.
    overrides: tuple[tuple[str, Override], ...] = ()

    def __post_init__(self) -> None:
        _name_format(self, "weights")
        _name_format(self, "activations")
        _name_format(self, "cache", "int8")
        object.__setattr__(self, "quantize", format_name(self.quantize))
        _check_fields(self)
        if self.quantize is not None:
            rules_of(self.quantize)
        for regex, _ in self.overrides:
            compile_pattern(regex, "precision override")

    @classmethod
    def uniform(cls, dtype: str) -> "Precision":
        """Return a Precision with one format for all; `dtype` as `load` takes it."""
        dtype = dtype_name("dtype", dtype)
        return cls(weights=dtype, activations=dtype, cache=dtype)

    @classmethod
    def from_dict(cls, data: Any, where: str = "precision") -> "Precision":
        """Read a Precision from JSON data as `dataclasses.asdict` writes it; fields may be missing.

        Args:
            where: the data's place, for error messages.

        Raises:
            ConfigError: for an unknown field or a wrong value.
        """
        precision: Precision = as_schema(data, cls, where, ConfigError)
        return precision

    def in_dtype(self, dtype: str) -> "Precision":
        """Set one format for weights, activations and cache; quantization rules stay."""
        dtype = dtype_name("dtype", dtype)
        return dataclasses.replace(self, weights=dtype, activations=dtype, cache=dtype)

    def unquantized(self) -> "Precision":
        """Remove all weight quantization, by `quantize` or by an override."""
        rows = [
            (regex, o if o.weights in DTYPES else dataclasses.replace(o, weights=None))
            for regex, o in self.overrides
        ]
        return dataclasses.replace(self, quantize=None, overrides=tuple(rows))

    def format_at(self, path: str, ndim: int) -> str:
        """Return the format in which the parameter at `path` is stored."""
        override = self._override(path, "weights")
        if override is not None:
            return override if override in DTYPES or ndim >= 2 else self.weights
        quantized = None if self.quantize is None else format_at(self.quantize, path, ndim)
        return quantized or self.weights

    def cast(self, path: str, weight: Weight) -> Weight:
        """Convert the parameter at `path` to its format, if it has another one."""
        if format_of(weight) == parse(self.format_at(path, weight.ndim)).name:
            return weight
        for name in self.formats_at(path, weight.ndim):
            weight = as_format(weight, name)
        return weight

    def formats_at(self, path: str, ndim: int) -> tuple[str, ...]:
        """Return the formats to convert the parameter at `path` to; the last one is stored."""
        name = self.format_at(path, ndim)
        first = parse(name).exact_in == self.weights == "bfloat16"
        return ("bfloat16", name) if first and name != "bfloat16" else (name,)

    def activations_at(self, module: str) -> jnp.dtype:
        """Return the dtype in which `module` (a dotted path) takes its input."""
        return jnp.dtype(self._override(module, "activations") or self.activations)

    def output_at(self, module: str) -> str | None:
        """Return the dtype in which `module` returns its result; None: that of its input stream."""
        return self._override(module, "output")

    def _override(self, path: str, what: str) -> str | None:
        values = ((regex, getattr(override, what)) for regex, override in self.overrides)
        return first_match([row for row in values if row[1] is not None], path)


def freeze(rules: Rules) -> str | tuple[tuple[str, str | None], ...]:
    """Return quantization rules as a hashable value. Raises as `rules_of` does."""
    rows, rules = rules_of(rules), format_name(rules)
    return rules if isinstance(rules, str) else tuple(rows)


def exactly(params: Params, precision: Precision) -> Precision:
    """Return a Precision that keeps each of these parameters in its present format.

    Matrices that differ only in their layer number share one rule if they have one format.
    """
    leaves = {path: (leaf.ndim, format_of(leaf)) for path, leaf in flatten(params)}
    kinds: dict[str, set[str]] = {}  # the formats of all matrices that a general rule matches
    for path, (ndim, name) in leaves.items():
        if ndim >= 2:
            kinds.setdefault(_any_layer(path), set()).add(name)
    rows, vectors = {}, {}
    for path, (ndim, name) in leaves.items():
        if ndim >= 2 and name != precision.weights:
            general = _any_layer(path)
            rows[general if len(kinds[general]) == 1 else re.escape(path)] = name
        elif name != precision.weights:  # `quantize` leaves it alone
            vectors[re.escape(path)] = Override(weights=name)
    others = [(regex, dataclasses.replace(o, weights=None)) for regex, o in precision.overrides]
    return dataclasses.replace(
        precision,
        quantize=tuple(rows.items()) or None,
        overrides=(*vectors.items(), *((r, o) for r, o in others if o != Override())),
    )


def _any_layer(path: str) -> str:
    """Return a regex that matches the path with any layer number."""
    return re.sub(r"(?<=\.)\d+(?=\\)", r"\\d+", re.escape(path))


def cast(params: Params, precision: Precision) -> Params:
    """Convert every weight to the format that `precision` gives it."""
    check_params(params)
    if not isinstance(precision, Precision):
        raise ConfigError(
            f"precision must be a Precision, got {precision!r:.60}. For one format use"
            " Precision.uniform(dtype)"
        )
    return map_leaves(precision.cast, params)


def _check_fields(instance: Any) -> None:
    if complaints := complaints_of(instance):
        raise ConfigError(f"precision: {'; '.join(complaints)}")


def _name_format(instance: Any, name: str, *more: str) -> None:
    """Replace a field's dtype by its full name."""
    found = dtype_name(f"precision: {name}", getattr(instance, name), *more)
    object.__setattr__(instance, name, found)
