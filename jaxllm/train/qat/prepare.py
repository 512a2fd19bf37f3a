"""Conversion of parameters to fake-quantized ones before training, and to integers after it."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.errors import ConfigError
from jaxllm.train.qat.weights import FakeQuantWeight, InputQParams
from jaxllm.weights.formats import Weight, parse_format, weight_format
from jaxllm.weights.lazy_gather import load_weight
from jaxllm.weights.paths import Params, flatten, map_leaves
from jaxllm.weights.quantize import Rules, find_format
from jaxllm.weights.types.arrays import DTYPES
from jaxllm.weights.types.int_weight import IntFormat, IntWeight

# Tables that may be tied to the LM head, whose inputs are not quantized.
_TABLES = ("embed_tokens.weight", "embed_in.weight", "wte.weight")


def prepare(
    params: Params,
    rules: Rules,
    *,
    learn_scales: bool = False,
    dynamic_inputs: bool = False,
    observed_params: Params | None = None,
    learn_input_scales: bool = False,
    start_step: int = 0,
) -> Params:
    """Replace each matrix that `rules` quantize by a `FakeQuantWeight`.

    Args:
      rules: as in `weights.quantize.quantize`, with integer formats. learn_scales: train the
      scales, starting from those of rounding to nearest; otherwise each step
        computes them from the weights.
      dynamic_inputs: the model quantizes inputs dynamically (`Precision.int8_inputs`).
      observed_params: the same model quantized with `activations: static` (`jaxllm.compress`); its
      input
        scales and zero points are used.
      learn_input_scales: also train these input scales.
      start_step: the first training step that rounds; earlier ones train the float weights.

    Raises ConfigError for other formats, for weights that are not plain arrays or belong to
    experts, and for rules that match no matrix.
    """
    grids = {} if observed_params is None else _observed_qparams(observed_params)

    def change(path: str, leaf: Weight) -> Weight:
        name = find_format(rules, path, leaf.ndim)
        if name is None:
            return leaf
        to, present = parse_format(name), weight_format(leaf)
        if not (isinstance(to, IntFormat) and to.is_plain):
            raise ConfigError(f"{path}: {name} is not an integer format, as QAT needs")
        if present not in DTYPES:
            raise ConfigError(
                f"{path} is {present}: QAT starts from float weights, so dequantize it"
            )
        if leaf.ndim > 2:
            raise ConfigError(
                f"{path} belongs to experts, which QAT does not support: exclude them with a rule"
                " with null, and quantize them afterwards"
            )
        weight = jnp.asarray(leaf)
        scale = zero = None
        if learn_scales:
            made = to.quantize(weight)
            scale, zero = made.scale.astype(jnp.float32), made.zero
        grid = grids.get(path) if to.supports_input_grid else None
        step = grid.step if grid is not None and learn_input_scales else None
        rounds = dynamic_inputs and grid is None and not path.endswith(_TABLES)
        first = jnp.int32(start_step) if start_step else None
        return FakeQuantWeight(
            weight, scale, zero, grid, step, first, target_format=to, dynamic_inputs=rounds
        )

    made = map_leaves(change, params)
    if not any(isinstance(leaf, FakeQuantWeight) for _, leaf in flatten(made)):
        raise ConfigError("the quantization rules match no matrix of this model")
    return made


def check_formats(rules: Rules) -> None:
    """Raise ConfigError for rules with a format that is not an integer format."""
    names = [rules] if isinstance(rules, str) else [name for _, name in rules if name is not None]
    for name in names:
        to = parse_format(name)
        if not (isinstance(to, IntFormat) and to.is_plain):
            raise ConfigError(f"{name} is not an integer format, as QAT needs")


def convert(params: Params) -> Params:
    """Replace each `FakeQuantWeight` by its integers, with the same logits, bit for bit.

    Lazy parameters are gathered one at a time.
    """

    def change(_: str, weight: Any) -> Weight:
        leaf = load_weight(weight)
        return _to_inference(leaf) if isinstance(leaf, FakeQuantWeight) else leaf

    return map_leaves(change, params)


@jax.jit
def _to_inference(leaf: FakeQuantWeight) -> Weight:
    return leaf.to_inference()


def _observed_qparams(observed_params: Params) -> dict[str, InputQParams]:
    """Return the input scales and zero points by path. Raises ConfigError if there are none."""
    found = {
        path: InputQParams(leaf.input_step, leaf.input_zero)
        for path, leaf in flatten(observed_params)
        if isinstance(leaf, IntWeight)
        and leaf.input_step is not None
        and leaf.input_zero is not None
    }
    if not found:
        raise ConfigError("no input ranges were observed: use a recipe with activations: static")
    return found
