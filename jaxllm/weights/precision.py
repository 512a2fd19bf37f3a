"""Number formats as one frozen value: of the weights, the activations and the cache.

Norms, rotary angles, softmax, accumulation and logits are float32 whatever is chosen here.
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
    """What one module does differently; None means as everywhere else.

    weights: any format of `weights.formats`. activations: the format to which it rounds its input.
    output: that to which it rounds its result, by default the same.
    """

    weights: str | None = None
    activations: str | None = None
    output: str | None = None

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
    """Formats of the weights, of the activations between modules, and of keys and values cached.

    weights: of all that `quantize` leaves alone. quantize: what matrices are quantized to, as
    `weights.quantize.quantize` takes it. cache: also "int8", with a scale for each token and head.

    int8_inputs: linears with integer weights round their input to int8 in blocks of 512 columns
    (dynamic quantization): less arithmetic, and the one choice here that is not exact. A head that
    is the tokens' table keeps its input.

    overrides: ordered rules `(regex, Override)`, of `weights.paths`: `("layers.0",
    Override(weights="float32"))` covers all of layer 0, `(".*mlp.down_proj", ...)` one linear of
    each layer; a row that is silent on a field is passed over for it. A module computes in its own
    activations format and hands its result back in the format of the stream it was given.

    Formats are names, short ones too ("bf16"), or dtypes of NumPy, JAX or PyTorch, and are kept as
    full names. Raises ConfigError for an unknown format or a broken regex.
    """

    weights: str = "float32"
    activations: str = "float32"
    cache: str = "float32"
    quantize: str | tuple[tuple[str, str | None], ...] | None = None
    int8_inputs: bool = False
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
        """The same format everywhere; `dtype` as `load` takes it."""
        dtype = dtype_name("dtype", dtype)
        return cls(weights=dtype, activations=dtype, cache=dtype)

    @classmethod
    def from_dict(cls, data: Any, where: str = "precision") -> "Precision":
        """From what JSON holds, as `dataclasses.asdict` gives it; fields may be left out.

        where: its place, for messages. Raises ConfigError for an unknown field or a wrong value.
        """
        precision: Precision = as_schema(data, cls, where, ConfigError)
        return precision

    def in_dtype(self, dtype: str) -> "Precision":
        """With weights, activations and cache in one format, as `load` takes it; what is quantized
        stays so.
        """
        dtype = dtype_name("dtype", dtype)
        return dataclasses.replace(self, weights=dtype, activations=dtype, cache=dtype)

    def unquantized(self) -> "Precision":
        """With no weights quantized, by `quantize` or by an override."""
        rows = [
            (regex, o if o.weights in DTYPES else dataclasses.replace(o, weights=None))
            for regex, o in self.overrides
        ]
        return dataclasses.replace(self, quantize=None, overrides=tuple(rows))

    def format_at(self, path: str, ndim: int) -> str:
        """The format in which the parameter at `path` is kept."""
        override = self._override(path, "weights")
        if override is not None:
            return override if override in DTYPES or ndim >= 2 else self.weights
        quantized = None if self.quantize is None else format_at(self.quantize, path, ndim)
        return quantized or self.weights

    def cast(self, path: str, weight: Weight) -> Weight:
        """The parameter at `path` in the format that it is kept in; as it is where it has it."""
        if format_of(weight) == parse(self.format_at(path, weight.ndim)).name:
            return weight
        for name in self.formats_at(path, weight.ndim):
            weight = as_format(weight, name)
        return weight

    def formats_at(self, path: str, ndim: int) -> tuple[str, ...]:
        """The formats that the parameter at `path` goes through, one after the other: the last is
        the one that it is kept in."""
        name = self.format_at(path, ndim)
        first = parse(name).exact_in == self.weights == "bfloat16"
        return ("bfloat16", name) if first and name != "bfloat16" else (name,)

    def activations_at(self, module: str) -> jnp.dtype:
        """The format in which `module` (a dotted path) takes its input."""
        return jnp.dtype(self._override(module, "activations") or self.activations)

    def output_at(self, module: str) -> str | None:
        """The format in which `module` hands its result back; None: as the stream it was given."""
        return self._override(module, "output")

    def _override(self, path: str, what: str) -> str | None:
        values = ((regex, getattr(override, what)) for regex, override in self.overrides)
        return first_match([row for row in values if row[1] is not None], path)


def freeze(rules: Rules) -> str | tuple[tuple[str, str | None], ...]:
    """Quantization rules as a value that hashes. Raises what `rules_of` raises."""
    rows, rules = rules_of(rules), format_name(rules)
    return rules if isinstance(rules, str) else tuple(rows)


def exactly(params: Params, precision: Precision) -> Precision:
    """The same but for the weights, of which each is kept in the format that it has.

    Matrices that differ by their layer's number alone have one rule where they have one format.
    """
    leaves = {path: (leaf.ndim, format_of(leaf)) for path, leaf in flatten(params)}
    kinds: dict[str, set[str]] = {}  # the formats of all that a general rule names
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
    """A regex for the path, whatever the numbers in it."""
    return re.sub(r"(?<=\.)\d+(?=\\)", r"\\d+", re.escape(path))


def cast(params: Params, precision: Precision) -> Params:
    """The parameters with every leaf in the format that `precision` keeps it in."""
    check_params(params)
    if not isinstance(precision, Precision):
        raise ConfigError(
            f"precision must be a Precision, got {precision!r:.60}. Of one format:"
            " Precision.uniform(dtype)"
        )
    return map_leaves(precision.cast, params)


def _check_fields(instance: Any) -> None:
    if complaints := complaints_of(instance):
        raise ConfigError(f"precision: {'; '.join(complaints)}")


def _name_format(instance: Any, name: str, *more: str) -> None:
    """Write the field's number format by its full name."""
    found = dtype_name(f"precision: {name}", getattr(instance, name), *more)
    object.__setattr__(instance, name, found)
