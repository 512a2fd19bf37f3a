"""Quantization-aware training as a job, from a float model to a quantized one."""

import dataclasses
from pathlib import Path

from jaxllm import models
from jaxllm.api import LM
from jaxllm.errors import ConfigError
from jaxllm.train.fake.prepare import convert, prepare
from jaxllm.train.jobs import Job, shared
from jaxllm.train.objective import NextToken, Objective
from jaxllm.weights.paths import Params, Placed, later, of_one_device
from jaxllm.weights.precision import cast, exactly, freeze
from jaxllm.weights.quantize import Rules
from jaxllm.whole import dtype_name


def qat(
    lm: LM,
    rules: Rules,
    *,
    dtype: str = "float32",
    learned: bool = False,
    dynamic: bool = False,
    observed: Params | None = None,
    learned_inputs: bool = False,
    starts: int = 0,
    objective: Objective | None = None,
) -> Job:
    """Train all weights, those that `rules` select with fake quantization.

    The result is a quantized checkpoint with the logits of the last step, bit for bit. The other
    arguments and errors are those of `prepare.prepare`.

    Args:
      lm: in float32, since the master weights start as its parameters.
      dtype: of computation, and of the weights that are not quantized.

    Raises ConfigError if `learned_inputs` is given without `observed`, and on a mesh if it would
    split a quantization group or if `dynamic` is set.
    """
    if learned_inputs and observed is None:
        raise ConfigError("learned_inputs needs observed input ranges: give observed")
    dtype = dtype_name("dtype", dtype)
    floats = dataclasses.replace(lm.model.precision, quantize=None, int8_inputs=dynamic)
    floats = floats.in_dtype(dtype)
    # `quantize` does not affect training, but it makes the rules part of the run's settings.
    ran = dataclasses.replace(floats, quantize=freeze(rules))

    if dynamic and isinstance(lm.model, Placed):
        raise ConfigError(
            "dynamic quantization of inputs (int8_inputs) cannot be trained on a mesh: drop one"
        )
    start = of_one_device(lm.model, lm.params)

    def prepared(params: Params) -> Params:
        made = prepare(
            params, rules, learned=learned, dynamic=dynamic, observed=observed,
            learned_inputs=learned_inputs, starts=starts,
        )  # fmt: skip
        return shared(lm.model, made)

    def finish(params: Params, directory: Path) -> None:
        made = convert(later(lm.model, params))
        model = models.build(lm.config, exactly(made, floats))
        recipe = (*lm.recipe, f"train: qat {rules if isinstance(rules, str) else 'by rules'}")
        dataclasses.replace(lm, params=made, model=model, recipe=recipe).save(directory)

    return Job(
        lm=dataclasses.replace(lm, model=lm.model.clone(precision=ran)),
        params=prepared(start),
        like=None if dtype == "float32" else prepared(cast(start, floats)),
        objective=objective or NextToken(),
        finish=finish,
    )
