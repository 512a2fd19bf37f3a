"""Structured pruning: removes heads, MLP channels and layers, and returns a smaller model.

A key/value head goes with all query heads that share it, so their ratio stays.
`Family.head_linears` and `Family.channel_linears` list the parameters of a head and of a channel. A
configuration has one number of heads and of channels for all layers, so each layer loses equally
many, but may choose which. Heads of GPT-2 cannot be removed, because its configuration, and
transformers' model, require hidden_size = heads x head_dim.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxllm import models
from jaxllm.compress.layers.layerwise import get_module, replace_leaves
from jaxllm.config.model import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.family import Family, ParallelLinear
from jaxllm.weights.formats import weight_format
from jaxllm.weights.paths import Params
from jaxllm.weights.types.base import WeightBase

Kind = Literal["heads", "channels"]
SmallerModel = tuple[ModelConfig, Params]


class _Width(NamedTuple):
    """A kind of group. count: groups per layer. changed: config fields for a number of groups."""

    group_count: Callable[[ModelConfig], int]
    members: Callable[[Family], tuple[ParallelLinear, ...]]
    config_changes: Callable[[ModelConfig, int], dict[str, Any]]


def _fewer_heads(config: ModelConfig, count: int) -> dict[str, Any]:
    ratio = config.num_attention_heads // config.num_key_value_heads
    return {"num_key_value_heads": count, "num_attention_heads": count * ratio}


_WIDTHS: dict[Kind, _Width] = {
    "heads": _Width(lambda c: c.num_key_value_heads, lambda f: f.head_linears, _fewer_heads),
    "channels": _Width(
        lambda c: c.intermediate_size,
        lambda f: f.channel_linears,
        lambda _, n: {"intermediate_size": n},
    ),
}


def group_count(config: ModelConfig, kind: Kind) -> int:
    """Return the number of groups per layer: key/value heads, or channels."""
    return _WIDTHS[kind].group_count(config)


def narrow_config(config: ModelConfig, kind: Kind, count: int) -> ModelConfig:
    """Return the configuration with `group_count` groups in each layer.

    Raises ConfigError if the family does not support it, or `group_count` is not from 1 to the
    present number.
    """
    width = _WIDTHS[kind]
    if not width.members(models.get_family(config.model_type)):
        raise ConfigError(f"{kind} of {config.model_type} cannot be dropped: its MLPs are experts")
    if kind == "heads" and models.get_family(config.model_type).head_norms:
        raise ConfigError(
            f"heads of {config.model_type} cannot be dropped: queries and keys are normalized over"
            " all heads together"
        )
    attention = config.long_attention(0)
    if kind == "heads" and attention is not None:
        raise ConfigError(
            f"heads with attention of kind {attention.kind!r} cannot be dropped: the pattern of a"
            " head depends on its index"
        )
    if not 1 <= count <= width.group_count(config):
        raise ConfigError(f"{kind} to keep must be 1 to {width.group_count(config)}: got {count}")
    try:
        return dataclasses.replace(config, **width.config_changes(config, count))
    except ConfigError as error:
        raise ConfigError(f"{kind} of {config.model_type} cannot be dropped: {error}") from None


def cut_groups(
    config: ModelConfig, params: Params, kind: Kind, keep: Sequence[Sequence[int] | np.ndarray]
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
    found = dict(params)
    for number, layer in enumerate(chosen):
        path = f"{models.get_family(config.model_type).layers}.{number}"
        for share in group_slices(config, kind, params[path], path):
            index = jnp.asarray(np.sort(share.index_Gn[layer].reshape(-1)))
            array = jnp.take(share.array, index, axis=share.axis)
            found[path] = replace_leaves(found[path], share.module, **{share.name: array})
    return smaller, found


def cut_layers(config: ModelConfig, params: Params, keep: Sequence[int]) -> SmallerModel:
    """Return the model with only the layers `keep`, in their order.

    Raises ConfigError for missing layers, and if a layer would compute something else at its new
    index (an attention window, or a scale, may depend on the index).
    """
    numbers, count = sorted(set(keep)), config.num_hidden_layers
    if not numbers or numbers[0] < 0 or numbers[-1] >= count:
        raise ConfigError(
            f"layers to keep must be from 0 to {count - 1}, at least one: got {list(keep)}"
        )
    cut = config.with_layers(numbers)
    for place, number in enumerate(numbers):
        if cut.layer_signature(place) != config.layer_signature(number):
            raise ConfigError(
                f"layer {number} of this {config.model_type} cannot become layer {place}: what it"
                " computes depends on its index"
            )
    name = models.get_family(config.model_type).layers
    layers = {f"{name}.{i}": params[f"{name}.{number}"] for i, number in enumerate(numbers)}
    rest = {path: x for path, x in params.items() if not path.startswith(f"{name}.")}
    return cut, {**rest, **layers}


class GroupSlice(NamedTuple):
    """The part of each group in one parameter: `index_Gn` `[groups, n]` along `axis` of `array`.

    module, name: the parameter's place in its layer.
    """

    module: str
    name: str
    array: Any
    axis: int
    index_Gn: np.ndarray


def group_slices(config: ModelConfig, kind: Kind, layer: Params, path: str) -> Iterator[GroupSlice]:
    """Yield the parts of a layer's groups in every parameter. path: the layer's, for messages.

    Raises ConfigError for a quantized weight.
    """
    width = _WIDTHS[kind]
    for member in width.members(models.get_family(config.model_type)):
        for name, array in get_module(layer, member.linear).items():
            if isinstance(array, WeightBase):
                raise ConfigError(
                    f"{path}.{member.linear}.{name} is {weight_format(array)}: drop {kind} before"
                    " quantizing"
                )
            if name == "bias" and member.axis == 1:
                continue  # belongs to the sum over all groups
            index = np.arange(array.shape[member.axis])
            parts_RGn = index.reshape(member.fused_parts, width.group_count(config), -1)
            index_Gn = np.moveaxis(parts_RGn, 1, 0).reshape(width.group_count(config), -1)
            yield GroupSlice(member.linear, name, array, member.axis, index_Gn)


def count_removed(total: int, amount: float | int, noun: str) -> int:
    """Return how many of `total` to drop: `amount` if it is an int, else that share of them.

    A share is rounded, by at most 1 % of the total. Raises ConfigError, naming the possible
    numbers, if that cannot be done.
    """
    found = amount if isinstance(amount, int) else round(amount * total)
    near = isinstance(amount, int) or abs(found - amount * total) <= 0.01 * total
    if near and 0 < found < total:
        return found
    if total < 2:
        raise ConfigError(f"{noun} cannot be dropped: the model has {total}")
    asked = amount if isinstance(amount, int) else f"{amount:.1%} of them"
    shown = ", ".join(f"{n} ({n / total:.1%})" for n in range(1, min(total, 9)))
    more = f", ... {total - 1}" if total > 9 else ""
    raise ConfigError(f"number of {noun} to drop, of {total}: got {asked}, expected {shown}{more}")
