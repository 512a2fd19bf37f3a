"""Parameters made ready for quantization-aware training, and made integers after it."""

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

# Whose product as a head keeps its inputs.
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
    """The parameters with a `Fake` in place of each matrix that `rules` gives integers.

    rules: as `weights.quantize.quantize` takes them, with formats of integers. learned: scales are
    trained with the weights, from those that rounding to the nearest has; else each step finds them
    anew. dynamic: the model rounds inputs as they come (`Precision.int8_inputs`). observed: the
    same model quantized with `activations: static` (`jaxllm.compress`), whose grids of inputs are
    taken: seen in some batches, then fixed. learned_inputs: their steps are trained too. starts:
    the first step of training that rounds; those before it train the weights as they are.

    Raises ConfigError for a format that is none of integers, for weights that are no arrays or are
    of experts, and for rules that name no matrix.
    """
    grids = {} if observed is None else _grids(observed)

    def change(path: str, leaf: Weight) -> Weight:
        name = format_at(rules, path, leaf.ndim)
        if name is None:
            return leaf
        to, kept = parse(name), format_of(leaf)
        if not isinstance(to, Integer):
            raise ConfigError(f"{path}: {name} is no format of integers, which training could fake")
        if kept not in DTYPES:
            raise ConfigError(f"{path} is {kept}: what is trained must be an array: dequantize it")
        if leaf.ndim > 2:
            raise ConfigError(
                f"{path} is of experts, which are not trained for integers: let them"
                " be by a rule with null, and quantize them afterwards"
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
        raise ConfigError("the rules of quantization name no matrix of this model")
    return made


def check_formats(rules: Rules) -> None:
    """Raise ConfigError for rules with a format that is none of integers."""
    names = [rules] if isinstance(rules, str) else [name for _, name in rules if name is not None]
    for name in names:
        if not isinstance(parse(name), Integer):
            raise ConfigError(f"{name} is no format of integers, which training could fake")


def convert(params: Params) -> Params:
    """The parameters with the integers that each `Fake` stands for: its logits, bit for bit. Those
    that are to be had later are had one at a time.
    """

    def change(_: str, weight: Any) -> Weight:
        leaf = now(weight)
        return _converted(leaf) if isinstance(leaf, Fake) else leaf

    return map_leaves(change, params)


@jax.jit
def _converted(leaf: Fake) -> Weight:
    return leaf.converted()


def _grids(observed: Params) -> dict[str, Grid]:
    """Raises ConfigError where no input has been observed."""
    static = {path: leaf for path, leaf in flatten(observed) if isinstance(leaf, Static)}
    if not static:
        raise ConfigError("no grid of inputs was observed: activations: static finds them")
    return {path: Grid(leaf.step, leaf.zero) for path, leaf in static.items()}
