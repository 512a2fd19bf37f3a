"""Structured pruning of heads and MLP channels, which returns a smaller model.

A configuration has one number of heads and of channels for all layers, so each layer loses equally
many, but may choose which. Heads of GPT-2 cannot be removed, because its configuration, and
transformers' model, require hidden_size = heads x head_dim.
"""

import dataclasses
import re
from collections.abc import Sequence
from functools import partial

import jax.numpy as jnp
import numpy as np

from jaxllm import models
from jaxllm.compress.layerwise import replace_leaves
from jaxllm.compress.recipe import (
    Argument,
    ModelState,
    Options,
    StepContext,
    StepSpec,
)
from jaxllm.config.model import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.research.pruning.parameter_groups import GROUP_KINDS, Groups, group_count, group_slices
from jaxllm.research.pruning.salience import Salience, keep_most_salient, measure_salience
from jaxllm.research.pruning.sparsity import parse_share
from jaxllm.weights.paths import Params

SmallerModel = tuple[ModelConfig, Params]


class GroupOptions(Options, frozen=True):
    """by: criterion of importance: the size of a group's weights, that times the size of their
    inputs, or the change of the loss to first or second order (see `salience`).
    """

    by: Salience = "inputs"


def drop_groups(kind: Groups, context: StepContext[GroupOptions]) -> ModelState:
    """Drop key/value heads with the query heads that share them, or channels of the MLPs."""
    state = context.state
    total = group_count(state.config, kind)
    count = count_removed(total, parse_amount(context.argument), kind)
    narrow_config(state.config, kind, total - count)  # raises before the work
    salience_LG = measure_salience(
        state.model,
        state.params,
        kind,
        context.options.by,
        context.token_NT,
        show_progress=context.show_progress,
    )
    keep = keep_most_salient(salience_LG, count)
    config, params = cut_groups(state.config, state.params, kind, keep)
    return dataclasses.replace(state, config=config, params=params)


def narrow_config(config: ModelConfig, kind: Groups, count: int) -> ModelConfig:
    """Return the configuration with `count` groups in each layer.

    Raises ConfigError if the family does not support it, or `count` is not from 1 to the
    present number.
    """
    group = GROUP_KINDS[kind]
    if not group.members(models.get_family(config.model_type)):
        raise ConfigError(f"{kind} of {config.model_type} cannot be dropped: its MLPs are experts")
    if kind == "heads" and models.get_family(config.model_type).head_norms:
        raise ConfigError(
            f"heads of {config.model_type} cannot be dropped: queries and keys are normalized over"
            " all heads together"
        )
    if kind == "heads" and not all(map(config.value_heads, range(config.num_hidden_layers))):
        raise ConfigError(
            f"heads of {config.model_type} cannot be dropped: some of its layers have no attention"
            " or no keys and values for each head"
        )
    if config.links_layers or len(config.head_dims) > 1:
        raise ConfigError(
            f"{kind} of {config.model_type} cannot be dropped: their sizes differ by layer"
        )
    attention = config.attention
    if kind == "heads" and attention is not None:
        raise ConfigError(
            f"heads with attention of kind {attention.kind!r} cannot be dropped: the pattern of a"
            " head depends on its index"
        )
    if not 1 <= count <= group_count(config, kind):
        raise ConfigError(f"{kind} to keep must be 1 to {group_count(config, kind)}: got {count}")
    try:
        return dataclasses.replace(config, **group.config_changes(config, count))
    except ConfigError as error:
        raise ConfigError(f"{kind} of {config.model_type} cannot be dropped: {error}") from None


def cut_groups(
    config: ModelConfig, params: Params, kind: Groups, keep: Sequence[Sequence[int] | np.ndarray]
) -> SmallerModel:
    """Return the model with only the groups `keep` in each layer, in their order.

    keep: indices of groups, equally many for each layer. Raises ConfigError as `narrow_config`
    does, for an index out of range, and for a quantized weight.
    """
    chosen = [np.unique(np.asarray(layer, int)) for layer in keep]
    count = group_count(config, kind)
    if len(chosen) != config.num_hidden_layers or {len(layer) for layer in chosen} != {
        len(chosen[0])
    }:
        raise ConfigError(
            f"all {config.num_hidden_layers} layers must keep the same number of {kind}"
        )
    if any(layer.min(initial=0) < 0 or layer.max(initial=0) >= count for layer in chosen):
        raise ConfigError(f"{kind} to keep must be indices from 0 to {count - 1}")
    smaller = narrow_config(config, kind, len(chosen[0]))
    narrowed = dict(params)
    for number, layer in enumerate(chosen):
        path = f"{models.get_family(config.model_type).layers}.{number}"
        for share in group_slices(config, kind, params[path], path):
            index = jnp.asarray(np.sort(share.index_Gn[layer].reshape(-1)))
            array = jnp.take(share.array, index, axis=share.axis)
            narrowed[path] = replace_leaves(narrowed[path], share.module, **{share.name: array})
    return smaller, narrowed


def parse_amount(text: str) -> float | int:
    """Parse how much to drop: `25%`, or a count such as 2. Raises ConfigError."""
    return int(text) if re.fullmatch(r"[1-9]\d{0,6}", text) else parse_share(text)


def count_removed(total: int, amount: float | int, noun: str) -> int:
    """Return how many of `total` to drop: `amount` if it is an int, else that share of them.

    A share is rounded, by at most 1 % of the total. Raises ConfigError, naming the possible
    numbers, if that cannot be done.
    """
    count = amount if isinstance(amount, int) else round(amount * total)
    near = isinstance(amount, int) or abs(count - amount * total) <= 0.01 * total
    if near and 0 < count < total:
        return count
    if total < 2:
        raise ConfigError(f"{noun} cannot be dropped: the model has {total}")
    requested = amount if isinstance(amount, int) else f"{amount:.1%} of them"
    possible = ", ".join(f"{n} ({n / total:.1%})" for n in range(1, min(total, 9)))
    more = f", ... {total - 1}" if total > 9 else ""
    raise ConfigError(
        f"number of {noun} to drop, of {total}: got {requested}, expected {possible}{more}"
    )


AMOUNT = Argument("COUNT|SHARE%", parse_amount)
HEADS = StepSpec(
    "drop",
    "heads",
    partial(drop_groups, "heads"),
    "drop key/value heads and their query heads",
    AMOUNT,
    GroupOptions,
)
CHANNELS = StepSpec(
    "drop",
    "channels",
    partial(drop_groups, "channels"),
    "drop channels of the MLPs",
    AMOUNT,
    GroupOptions,
)
