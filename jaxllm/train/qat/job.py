"""Quantization-aware training as a job, from a float model to a quantized one."""

import dataclasses
from pathlib import Path

from jaxllm import models
from jaxllm.errors import ConfigError
from jaxllm.lm import LM
from jaxllm.runtime.validation import check_dtype
from jaxllm.train.jobs import TrainJob
from jaxllm.train.objective import NextToken, Objective
from jaxllm.train.qat.prepare import convert, prepare
from jaxllm.weights.paths import Params
from jaxllm.weights.precision import cast, freeze_rules, match_precision
from jaxllm.weights.quantize import Rules


def qat(
    lm: LM,
    rules: Rules,
    *,
    dtype: str = "float32",
    learn_scales: bool = False,
    dynamic_inputs: bool = False,
    observed_params: Params | None = None,
    learn_input_scales: bool = False,
    start_step: int = 0,
    objective: Objective | None = None,
) -> TrainJob:
    """Train all weights, those that `rules` select with fake quantization.

    The result is a quantized checkpoint with the logits of the last step, bit for bit. The other
    arguments and errors are those of `prepare.prepare`.

    Args:
      lm: in float32, since the master weights start as its parameters.
      dtype: of computation, and of the weights that are not quantized.

    Raises ConfigError if `learn_input_scales` is given without `observed_params`, and on a mesh if
    it would split a quantization group or if `dynamic_inputs` is set.
    """
    if learn_input_scales and observed_params is None:
        raise ConfigError("learned_inputs needs observed input ranges: give observed")
    dtype = check_dtype("dtype", dtype)
    floats = dataclasses.replace(lm.model.precision, quantize=None, int8_inputs=dynamic_inputs)
    floats = floats.with_dtype(dtype)
    # `quantize` does not affect training, but it makes the rules part of the run's settings.
    ran = dataclasses.replace(floats, quantize=freeze_rules(rules))

    if dynamic_inputs and lm.model.is_sharded:
        raise ConfigError(
            "dynamic quantization of inputs (int8_inputs) cannot be trained on a mesh: drop one"
        )
    start = lm.model.gather(lm.params)

    def prepare_params(params: Params) -> Params:
        made = prepare(
            params, rules, learn_scales=learn_scales, dynamic_inputs=dynamic_inputs,
            observed_params=observed_params,
            learn_input_scales=learn_input_scales, start_step=start_step,
        )  # fmt: skip
        return lm.model.shard(made)

    def finish(params: Params, directory: Path) -> None:
        made = convert(lm.model.gather_lazy(params))
        model = models.build(lm.config, match_precision(made, floats))
        recipe = (*lm.recipe, f"train: qat {rules if isinstance(rules, str) else 'by rules'}")
        dataclasses.replace(lm, params=made, model=model, recipe=recipe).save(directory)

    return TrainJob(
        lm=dataclasses.replace(lm, model=lm.model.clone(precision=ran)),
        params=prepare_params(start),
        compute_params=None if dtype == "float32" else prepare_params(cast(start, floats)),
        objective=objective or NextToken(),
        finish=finish,
    )
