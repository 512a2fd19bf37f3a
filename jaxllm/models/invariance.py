"""Whether a model keeps the promise of `Precision.invariant`: bits that depend on a row alone."""

import dataclasses
from typing import Any

import jax

from jaxllm.ops import native
from jaxllm.weights.experts import is_kernel_ready
from jaxllm.weights.formats import as_weight
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params, flatten
from jaxllm.weights.types.base import WeightBase


def make_invariant(model: Model) -> Model:
    """Return the model with `Precision.invariant`; a sharded one as it is."""
    if model.is_sharded or model.precision.invariant:
        return model
    clone: Model = model.clone(precision=dataclasses.replace(model.precision, invariant=True))
    return clone


def has_invariant_rows(model: Model, params: Params) -> bool:
    """Whether a text has the same bits alone, among others, and cut into any steps.

    That needs the native kernels, one device, attention to all of the text or a window of it,
    weights that the kernels read, no recurrent layers, no embeddings for each layer (Gemma 4 E2B
    and E4B), and no exact GELU (GPT-NeoX). It also needs
    `Precision.invariant`, unless the instruction set uses one kernel for any number of rows: sets
    without a matrix unit do, for most formats.
    """
    config, precision = model.config, model.precision
    if not native.is_enabled() or model.is_sharded:
        return False
    if jax.default_backend() != "cpu" or config.attention is not None:
        return False
    if config.hidden_act in ("gelu", "gelu_python"):  # XLA's erf depends on the number of rows
        return False
    if config.has_state or config.links_layers:  # XLA's sums and exponentials
        return False
    formats = [precision.activations, *(o.activations for _, o in precision.overrides)]
    inputs = {"bfloat16" if f == "bfloat16" else "float32" for f in formats if f is not None}
    if precision.int8_inputs:
        inputs.add("int8")
    with native.use_one_path(precision.invariant):
        return all(_has_one_kernel(value, inputs) for _, value in flatten(params))


def _has_one_kernel(value: Any, inputs: set[str]) -> bool:
    leaf = as_weight(value)
    if leaf.ndim < 2:
        return True
    if leaf.ndim == 2 and leaf.is_composite:
        parts = leaf.array_fields().values()
        return all(_has_one_kernel(x, inputs) for x in parts if isinstance(x, WeightBase))
    if (matrix := leaf.native_matrix()) is None or (leaf.ndim > 2 and not is_kernel_ready(leaf)):
        return False
    return all(native.kernel_path(matrix.kind, kind).takes_any_rows for kind in inputs)
