"""Quantization-aware training with inputs that are quantized on calibrated grids."""

import dataclasses
from typing import Any

import jax
from flax import struct

from jaxllm.errors import ConfigError
from jaxllm.lm import LM
from jaxllm.research.qat import job
from jaxllm.research.qat.weights import FakeQuantWeight, fake_quantize
from jaxllm.research.static_inputs.weight import (
    MAX_INPUT,
    MIN_INPUT,
    PREFIX,
    StaticWeight,
    add_input_grid,
    supports_input_grid,
)
from jaxllm.train.jobs import TrainJob
from jaxllm.weights.formats import Weight
from jaxllm.weights.paths import Params, flatten, map_leaves
from jaxllm.weights.quantize import Rules


class StaticFakeQuantWeight(FakeQuantWeight):
    """A `FakeQuantWeight` whose inputs are rounded on a grid, as in `StaticWeight`.

    Attributes:
        step: the grid's scale, float32 scalar.
        middle: the code of 0, int32 scalar.
        learns_step: whether `step` is trained.
    """

    step: jax.Array = struct.field(kw_only=True)
    middle: jax.Array = struct.field(kw_only=True)
    learns_step: bool = struct.field(pytree_node=False, default=False, kw_only=True)

    @property
    def trainable_fields(self) -> tuple[str, ...]:  # type: ignore[override]
        return (*super().trainable_fields, *(["step"] if self.learns_step else []))

    @property
    def format(self) -> str:
        return f"{self.format_prefix}{PREFIX}{self.target_format.name}"

    def to_inference(self) -> StaticWeight:
        # Sums of the codes as they are stored, whatever else is compiled with them.
        return add_input_grid(jax.lax.optimization_barrier(self.quantize()), self.step, self.middle)

    def fake_quantize_inputs(self, x_RI: jax.Array) -> jax.Array:
        step, zero = self.step.reshape(1, 1), self.middle.reshape(1, 1)
        factor = (x_RI.shape[1] * MAX_INPUT) ** -0.5
        return fake_quantize(x_RI, step, zero, (MIN_INPUT, MAX_INPUT), factor)


def qat(
    lm: LM,
    rules: Rules,
    observed_params: Params,
    *,
    learn_input_scales: bool = False,
    **options: Any,
) -> TrainJob:
    """Train as `research.qat.job.qat`, with inputs on the grids of `observed_params`.

    Args:
        options: Those of `research.qat.job.qat`.
    """
    made = job.qat(lm, rules, **options)

    def add_grids(params: Params) -> Params:
        params = lm.model.gather(params)
        return lm.model.shard(add_observed_grids(params, observed_params, learn_input_scales))

    compute_params = made.compute_params and add_grids(made.compute_params)
    return dataclasses.replace(made, params=add_grids(made.params), compute_params=compute_params)


def add_observed_grids(params: Params, observed_params: Params, learn_scales: bool) -> Params:
    """Add grids of inputs to the fake-quantized weights that have one in `observed_params`.

    Args:
        observed_params: the same model quantized with `activations: static` (`jaxllm.compress`).
        learn_scales: train the grids' scales.

    Raises:
        ConfigError: If no weight of `observed_params` has a grid.
    """
    observed = {
        path: leaf for path, leaf in flatten(observed_params) if isinstance(leaf, StaticWeight)
    }
    if not observed:
        raise ConfigError("no input ranges were observed: use a recipe with activations: static")

    def change(path: str, leaf: Weight) -> Weight:
        grid = observed.get(path)
        if grid is None or not isinstance(leaf, FakeQuantWeight):
            return leaf
        if not supports_input_grid(leaf.target_format):
            return leaf
        fields = {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
        fields |= {"step": grid.step, "middle": grid.zero, "dynamic_inputs": False}
        return StaticFakeQuantWeight(**fields, learns_step=learn_scales)

    return map_leaves(change, params)
