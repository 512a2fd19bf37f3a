"""Quantization-aware training as a job: a float model begins it, a quantized one ends it."""

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
    """All weights, those that `rules` name as the integers that they become. The result is a
    checkpoint of integers, whose logits are those of the last step, bit for bit.

    lm: in float32, since what is trained begins from these numbers. dtype: what the model runs in
    and what is not quantized is written in. The rest as `prepare.prepare` has it, and what it
    raises; ConfigError where inputs are to be learned that were not observed, and on a mesh where
    it would cut what is rounded together.
    """
    if learned_inputs and observed is None:
        raise ConfigError("steps of inputs are learned from observed ones: there are none")
    dtype = dtype_name("dtype", dtype)
    floats = dataclasses.replace(lm.model.precision, quantize=None, int8_inputs=dynamic)
    floats = floats.in_dtype(dtype)
    # What the model is told of its weights changes nothing in training, but is part of whose run
    # it is.
    ran = dataclasses.replace(floats, quantize=freeze(rules))

    if dynamic and isinstance(lm.model, Placed):
        raise ConfigError(
            "inputs that are rounded as they come (int8_inputs) are trained on one device: on a"
            " mesh leave them out"
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
