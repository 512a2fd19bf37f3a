"""Number formats of weights, activations and cache, as one frozen value.

Norms, rotary angles, softmax, accumulation and logits are always float32.
"""

import dataclasses
import re
from typing import Any

import jax.numpy as jnp

from jaxllm.errors import ConfigError
from jaxllm.files import compile_pattern
from jaxllm.runtime.schema import as_schema, field_errors
from jaxllm.runtime.validation import canonical_dtype, check_dtype
from jaxllm.weights.formats import Weight, as_format, parse_format, weight_format
from jaxllm.weights.paths import Params, check_params, first_match, flatten, map_leaves
from jaxllm.weights.quantize import Rules, find_format, resolve_rules
from jaxllm.weights.types.arrays import DTYPES

# Parameters that are float32 in every precision: their last bits decide which experts are selected.
_FLOAT32 = re.compile(r".*mlp\.selection\.bias")
CACHE_DTYPES = {**DTYPES, "int8": jnp.int8}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Override:
    """Settings of one module that differ from the rest; None means no difference."""

    weights: str | None = None  # any format of `weights.formats`
    activations: str | None = None  # the dtype to which it rounds its input
    output: str | None = None  # the dtype to which it rounds its result; default: the same

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", canonical_dtype(self.weights))
        for name in ("activations", "output"):
            if getattr(self, name) is not None:
                _normalize_field(self, name)
        _check_fields(self)
        if self.weights is not None:
            parse_format(self.weights)


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
    # A row's bits depend on nothing but the row: the same kernel multiplies one row and thousands.
    # Needs the native kernels (docs/same_bits.md).
    invariant: bool = False
    # Ordered rules of `weights.paths`: `("layers.0", Override(weights="float32"))` covers all of
    # layer 0, `(".*mlp.down_proj", ...)` one linear of each layer. A row that leaves a field None
    # is skipped for that field. A module computes in its own activation format and returns its
    # result in the format of its input stream.
    overrides: tuple[tuple[str, Override], ...] = ()

    def __post_init__(self) -> None:
        _normalize_field(self, "weights")
        _normalize_field(self, "activations")
        _normalize_field(self, "cache", "int8")
        object.__setattr__(self, "quantize", canonical_dtype(self.quantize))
        _check_fields(self)
        if self.quantize is not None:
            resolve_rules(self.quantize)
        for regex, _ in self.overrides:
            compile_pattern(regex, "precision override")

    @classmethod
    def uniform(cls, dtype: str) -> "Precision":
        """Return a Precision with one format for all; `dtype` as `load` takes it."""
        dtype = check_dtype("dtype", dtype)
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

    def with_dtype(self, dtype: str) -> "Precision":
        """Set one format for weights, activations and cache; quantization rules stay."""
        dtype = check_dtype("dtype", dtype)
        return dataclasses.replace(self, weights=dtype, activations=dtype, cache=dtype)

    def without_quantization(self) -> "Precision":
        """Remove all weight quantization, by `quantize` or by an override."""
        rows = [
            (regex, o if o.weights in DTYPES else dataclasses.replace(o, weights=None))
            for regex, o in self.overrides
        ]
        return dataclasses.replace(self, quantize=None, overrides=tuple(rows))

    def param_format(self, path: str, shape: tuple[int, ...]) -> str:
        """Return the format in which the parameter of `shape` at `path` is stored."""
        override = self._find_override(path, "weights")
        if override is not None:
            return override if override in DTYPES or len(shape) >= 2 else self.weights
        if _FLOAT32.fullmatch(path):
            return "float32"
        quantized = None if self.quantize is None else find_format(self.quantize, path, shape)
        return quantized or self.weights

    def cast(self, path: str, weight: Weight) -> Weight:
        """Convert the parameter at `path` to its format, if it has another one."""
        if weight_format(weight) == parse_format(self.param_format(path, weight.shape)).name:
            return weight
        for name in self.format_chain(path, weight.shape):
            weight = as_format(weight, name)
        return weight

    def format_chain(self, path: str, shape: tuple[int, ...]) -> tuple[str, ...]:
        """Return the formats to convert the parameter at `path` to; the last one is stored."""
        name = self.param_format(path, shape)
        first = parse_format(name).lossless_dtype == self.weights == "bfloat16"
        return ("bfloat16", name) if first and name != "bfloat16" else (name,)

    def activation_dtype(self, module: str) -> jnp.dtype:
        """Return the dtype in which `module` (a dotted path) takes its input."""
        return jnp.dtype(self._find_override(module, "activations") or self.activations)

    def output_dtype(self, module: str) -> str | None:
        """Return the dtype in which `module` returns its result; None: that of its input stream."""
        return self._find_override(module, "output")

    def _find_override(self, path: str, what: str) -> str | None:
        values = ((regex, getattr(override, what)) for regex, override in self.overrides)
        return first_match([row for row in values if row[1] is not None], path)


def freeze_rules(rules: Rules) -> str | tuple[tuple[str, str | None], ...]:
    """Return quantization rules as a hashable value. Raises as `resolve_rules` does."""
    rows, rules = resolve_rules(rules), canonical_dtype(rules)
    return rules if isinstance(rules, str) else tuple(rows)


def match_precision(params: Params, precision: Precision) -> Precision:
    """Return a Precision that keeps each of these parameters in its present format.

    Matrices that differ only in their layer number share one rule if they have one format.
    """
    leaves = {
        path: (1 if path.endswith(".bias") else leaf.ndim, weight_format(leaf))
        for path, leaf in flatten(params)
    }
    kinds: dict[str, set[str]] = {}  # the formats of all matrices that a general rule matches
    for path, (ndim, name) in leaves.items():
        if ndim >= 2:
            kinds.setdefault(_layer_pattern(path), set()).add(name)
    rows, vectors = {}, {}
    for path, (ndim, name) in leaves.items():
        if ndim >= 2 and name != precision.weights:
            general = _layer_pattern(path)
            rows[general if len(kinds[general]) == 1 else re.escape(path)] = name
        elif name != precision.weights and not _FLOAT32.fullmatch(path):  # nor does `quantize`
            vectors[re.escape(path)] = Override(weights=name)
    others = [(regex, dataclasses.replace(o, weights=None)) for regex, o in precision.overrides]
    return dataclasses.replace(
        precision,
        quantize=tuple(rows.items()) or None,
        overrides=(*vectors.items(), *((r, o) for r, o in others if o != Override())),
    )


def _layer_pattern(path: str) -> str:
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


def cast_arrays(params: Params, precision: Precision) -> Params:
    """Convert every array to the dtype that `precision` gives it; other formats stay."""

    def change(path: str, leaf: Weight) -> Weight:
        return precision.cast(path, leaf) if weight_format(leaf) in DTYPES else leaf

    return map_leaves(change, params)


def _check_fields(instance: Any) -> None:
    if complaints := field_errors(instance):
        raise ConfigError(f"precision: {'; '.join(complaints)}")


def _normalize_field(instance: Any, name: str, *more: str) -> None:
    """Replace a field's dtype by its full name."""
    dtype = check_dtype(f"precision: {name}", getattr(instance, name), *more)
    object.__setattr__(instance, name, dtype)
