"""Conversion of parameters to fake-quantized ones before training, and to integers after it."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.errors import ConfigError
from jaxllm.train.fake.leaf import Fake, Grid
from jaxllm.weights.formats import Weight, format_of, parse
from jaxllm.weights.later import now
from jaxllm.weights.leaves.arrays import DTYPES
from jaxllm.weights.leaves.integers import Integer
from jaxllm.weights.leaves.static import Static, fits
from jaxllm.weights.paths import Params, flatten, map_leaves
from jaxllm.weights.quantize import Rules, format_at

# Tables that may be tied to the LM head, whose inputs are not quantized.
_TABLES = ("embed_tokens.weight", "embed_in.weight", "wte.weight")


def prepare(
    params: Params,
    rules: Rules,
    *,
    learned: bool = False,
    dynamic: bool = False,
    observed: Params | None = None,
    learned_inputs: bool = False,
    starts: int = 0,
) -> Params:
    """Replace each matrix that `rules` quantize by a `Fake`.

    Args:
      rules: as in `weights.quantize.quantize`, with integer formats.
      learned: train the scales, starting from those of rounding to nearest; otherwise each step
        computes them from the weights.
      dynamic: the model quantizes inputs dynamically (`Precision.int8_inputs`).
      observed: the same model quantized with `activations: static` (`jaxllm.compress`); its input
        scales and zero points are used.
      learned_inputs: also train these input scales.
      starts: the first training step that rounds; earlier ones train the float weights.

    Raises ConfigError for other formats, for weights that are not plain arrays or belong to
    experts, and for rules that match no matrix.
    """
    grids = {} if observed is None else _grids(observed)

    def change(path: str, leaf: Weight) -> Weight:
        name = format_at(rules, path, leaf.ndim)
        if name is None:
            return leaf
        to, kept = parse(name), format_of(leaf)
        if not isinstance(to, Integer):
            raise ConfigError(f"{path}: {name} is not an integer format, as QAT needs")
        if kept not in DTYPES:
            raise ConfigError(f"{path} is {kept}: QAT starts from float weights, so dequantize it")
        if leaf.ndim > 2:
            raise ConfigError(
                f"{path} belongs to experts, which QAT does not support: exclude them with a rule"
                " with null, and quantize them afterwards"
            )
        weight = jnp.asarray(leaf)
        scale = zero = None
        if learned:
            made = to.make(weight)
            scale, zero = made.scale.astype(jnp.float32), made.zero
        grid = grids.get(path) if fits(to) else None
        step = grid.step if grid is not None and learned_inputs else None
        rounds = dynamic and grid is None and not path.endswith(_TABLES)
        first = jnp.int32(starts) if starts else None
        return Fake(weight, scale, zero, grid, step, first, to=to, dynamic=rounds)

    made = map_leaves(change, params)
    if not any(isinstance(leaf, Fake) for _, leaf in flatten(made)):
        raise ConfigError("the quantization rules match no matrix of this model")
    return made


def check_formats(rules: Rules) -> None:
    """Raise ConfigError for rules with a format that is not an integer format."""
    names = [rules] if isinstance(rules, str) else [name for _, name in rules if name is not None]
    for name in names:
        if not isinstance(parse(name), Integer):
            raise ConfigError(f"{name} is not an integer format, as QAT needs")


def convert(params: Params) -> Params:
    """Replace each `Fake` by its integers, with the same logits, bit for bit.

    Lazy parameters are gathered one at a time.
    """

    def change(_: str, weight: Any) -> Weight:
        leaf = now(weight)
        return _converted(leaf) if isinstance(leaf, Fake) else leaf

    return map_leaves(change, params)


@jax.jit
def _converted(leaf: Fake) -> Weight:
    return leaf.converted()


def _grids(observed: Params) -> dict[str, Grid]:
    """Return the input scales and zero points by path. Raises ConfigError if there are none."""
    static = {path: leaf for path, leaf in flatten(observed) if isinstance(leaf, Static)}
    if not static:
        raise ConfigError("no input ranges were observed: use a recipe with activations: static")
    return {path: Grid(leaf.step, leaf.zero) for path, leaf in static.items()}
