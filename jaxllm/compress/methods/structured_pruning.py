"""Structured pruning: methods that drop heads, channels or layers."""

import dataclasses
import re
from typing import Annotated, Literal

import msgspec
import numpy as np

from jaxllm.compress.matrices.sparsity import parse_share
from jaxllm.compress.recipe import ModelState, Options, StepContext
from jaxllm.compress.structure import block_influence, importance, structure
from jaxllm.compress.structure.importance import Salience
from jaxllm.errors import ConfigError

Ends = Annotated[int, msgspec.Meta(ge=-1)]


class GroupOptions(Options, frozen=True):
    """by: criterion of importance: the size of a group's weights, that times the size of their
    inputs, or the change of the loss to first or second order (see `structure.measure_salience`).
    """

    by: Salience = "inputs"


class LayerOptions(Options, frozen=True):
    """by: influence of single layers, or angle of a run. first, last: layers at either end that
    are never dropped; -1 as in LLM-Pruner, 4 and 2 of 32.
    """

    by: Literal["influence", "angle"] = "influence"
    first: Ends = -1
    last: Ends = -1


def drop_heads(
    state: ModelState, argument: str, options: GroupOptions, context: StepContext
) -> ModelState:
    """Drop key/value heads with the query heads that share them."""
    return _drop_groups(state, "heads", argument, options, context)


def drop_channels(
    state: ModelState, argument: str, options: GroupOptions, context: StepContext
) -> ModelState:
    """Drop channels of the MLPs."""
    return _drop_groups(state, "channels", argument, options, context)


def drop_layers(
    state: ModelState, argument: str, options: LayerOptions, context: StepContext
) -> ModelState:
    """Drop the layers that change the residual stream least.

    Raises ConfigError if modules have formats by path, since the remaining layers are renumbered.
    """
    if any(row.activations or row.output for _, row in state.precision.overrides):
        raise ConfigError("layers cannot be dropped after modules were given formats by path")
    assert context.calibration is not None
    model, count, token_NT = state.model, state.config.num_hidden_layers, _calibration_rows(context)
    gone = structure.count_removed(count, parse_amount(argument), "layers")
    papers = block_influence.default_ends(count)
    first, last = (
        paper if own < 0 else own
        for own, paper in zip((options.first, options.last), papers, strict=True)
    )
    if options.by == "influence":
        measured = block_influence.block_influence(model, state.params, token_NT)
        kept = block_influence.keep_most_influential(measured, gone, first, last)
    else:
        measured = block_influence.angular_distance(model, state.params, token_NT, gone)
        kept = block_influence.keep_outside_run(measured, gone, first, last)
    context.log(f"dropping layers {', '.join(str(i) for i in range(count) if i not in kept)}")
    config, params = structure.cut_layers(state.config, state.params, kept)
    return dataclasses.replace(state, config=config, params=params)


def parse_amount(text: str) -> float | int:
    """Parse how much to drop: `25%`, or a count such as 2. Raises ConfigError."""
    return int(text) if re.fullmatch(r"[1-9]\d{0,6}", text) else parse_share(text)


def _drop_groups(
    state: ModelState,
    kind: structure.Kind,
    argument: str,
    options: GroupOptions,
    context: StepContext,
) -> ModelState:
    total = structure.group_count(state.config, kind)
    gone = structure.count_removed(total, parse_amount(argument), kind)
    structure.narrow_config(state.config, kind, total - gone)  # raises before the work
    found = importance.measure_salience(
        state.model,
        state.params,
        kind,
        options.by,
        _calibration_rows(context),
        show_progress=context.show_progress,
    )
    kept = importance.keep_most_salient(found, gone)
    config, params = structure.cut_groups(state.config, state.params, kind, kept)
    return dataclasses.replace(state, config=config, params=params)


def _calibration_rows(context: StepContext) -> np.ndarray:
    assert context.calibration is not None
    return context.calibration.token_NT
