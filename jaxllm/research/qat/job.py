"""Quantization-aware training as a job, from a float model to a quantized one.

Parameters become fake-quantized ones before training, and integers after it.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm import models
from jaxllm.errors import ConfigError
from jaxllm.lm import LM
from jaxllm.research.qat.weights import FakeQuantWeight
from jaxllm.runtime.validation import check_dtype
from jaxllm.train.jobs import TrainJob
from jaxllm.train.objective import NextToken, Objective
from jaxllm.weights.formats import Weight, parse_format, weight_format
from jaxllm.weights.lazy_gather import load_weight
from jaxllm.weights.paths import Params, flatten, map_leaves
from jaxllm.weights.precision import cast_arrays, freeze_rules, match_precision
from jaxllm.weights.quantize import Rules, find_format
from jaxllm.weights.types.arrays import DTYPES
from jaxllm.weights.types.int_weight import IntFormat


def qat(
    lm: LM,
    rules: Rules,
    *,
    dtype: str = "float32",
    learn_scales: bool = False,
    dynamic_inputs: bool = False,
    start_step: int = 0,
    objective: Objective | None = None,
) -> TrainJob:
    """Train all weights; `rules` select the ones with fake quantization.

    The result is a quantized checkpoint with the logits of the last step, bit for bit. The other
    arguments and errors are those of `prepare`.

    Args:
        lm: in float32, since the master weights start as its parameters.
        dtype: of computation, and of the weights that are not quantized.

    Raises:
        ConfigError: On a mesh if it would split a quantization group or if `dynamic_inputs` is set.
    """
    dtype = check_dtype("dtype", dtype)
    floats = dataclasses.replace(lm.model.precision, quantize=None, int8_inputs=dynamic_inputs)
    floats = floats.with_dtype(dtype)
    # `quantize` does not affect training, but it makes the rules part of the run's settings.
    precision = dataclasses.replace(floats, quantize=freeze_rules(rules))

    if dynamic_inputs and lm.model.is_sharded:
        raise ConfigError(
            "dynamic quantization of inputs (int8_inputs) cannot be trained on a mesh: drop one"
        )
    start = lm.model.gather(lm.params)

    def prepare_params(params: Params) -> Params:
        prepared = prepare(
            params, rules, learn_scales=learn_scales, dynamic_inputs=dynamic_inputs,
            start_step=start_step,
        )  # fmt: skip
        return lm.model.shard(prepared)

    def finish(params: Params, directory: Path) -> None:
        integers = convert(lm.model.gather_lazy(params))
        model = models.build(lm.config, match_precision(integers, floats))
        recipe = (*lm.recipe, f"train: qat {rules if isinstance(rules, str) else 'by rules'}")
        dataclasses.replace(lm, params=integers, model=model, recipe=recipe).save(directory)

    return TrainJob(
        lm=dataclasses.replace(lm, model=lm.model.clone(precision=precision)),
        params=prepare_params(start),
        compute_params=None if dtype == "float32" else prepare_params(cast_arrays(start, floats)),
        objective=objective or NextToken(),
        finish=finish,
    )


# Tables that may be tied to the LM head, whose inputs are not quantized.
_TABLES = ("embed_tokens.weight", "embed_in.weight", "wte.weight")


def prepare(
    params: Params,
    rules: Rules,
    *,
    learn_scales: bool = False,
    dynamic_inputs: bool = False,
    start_step: int = 0,
) -> Params:
    """Replace each matrix that `rules` quantize by a `FakeQuantWeight`.

    Args:
        rules: as in `weights.quantize.quantize`, with integer formats.
        learn_scales: train the scales, starting from those of rounding to nearest; otherwise each
            step computes them from the weights.
        dynamic_inputs: the model quantizes inputs dynamically (`Precision.int8_inputs`).
        start_step: the first training step that rounds; earlier ones train the float weights.

    Raises ConfigError for other formats, for weights that are not plain arrays or belong to
    experts, and for rules that match no matrix.
    """
    rules = parse_format(rules).name if isinstance(rules, str) else rules  # "int4" are integers

    def change(path: str, leaf: Weight) -> Weight:
        name = find_format(rules, path, leaf.shape)
        if name is None:
            return leaf
        to, present = _parse_integer_format(name, f"{path}: "), weight_format(leaf)
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
        rounds = dynamic_inputs and not path.endswith(_TABLES)
        first = jnp.int32(start_step) if start_step else None
        return FakeQuantWeight(weight, scale, zero, first, target_format=to, dynamic_inputs=rounds)

    made = map_leaves(change, params)
    if not any(isinstance(leaf, FakeQuantWeight) for _, leaf in flatten(made)):
        raise ConfigError("the quantization rules match no matrix of this model")
    return made


def check_formats(rules: Rules) -> None:
    """Raise ConfigError for rules with a format that is not an integer format."""
    names = [rules] if isinstance(rules, str) else [name for _, name in rules if name is not None]
    for name in names:
        _parse_integer_format(name)


def _parse_integer_format(name: str, prefix: str = "") -> IntFormat:
    format = parse_format(name)
    if not (isinstance(format, IntFormat) and format.is_plain):
        raise ConfigError(f"{prefix}{name} is not an integer format, as QAT needs")
    return format


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
