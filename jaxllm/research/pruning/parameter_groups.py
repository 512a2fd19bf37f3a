"""Groups of parameters that can be dropped together: a key/value head, or a channel of the MLP.

A key/value head goes with all query heads that share it, so their ratio stays.
`Family.head_linears` and `Family.channel_linears` list the parameters of a head and of a channel.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxllm import models
from jaxllm.compress.layerwise import get_module
from jaxllm.config.model import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.family import Family, ParallelLinear
from jaxllm.weights.formats import weight_format
from jaxllm.weights.paths import Params
from jaxllm.weights.types.base import WeightBase

Groups = Literal["heads", "channels"]


class GroupKind(NamedTuple):
    """A kind of group.

    group_count: groups per layer. members: their parameters. config_changes: config fields that
    change with the number of groups.
    """

    group_count: Callable[[ModelConfig], int]
    members: Callable[[Family], tuple[ParallelLinear, ...]]
    config_changes: Callable[[ModelConfig, int], dict[str, Any]]


def _fewer_heads(config: ModelConfig, count: int) -> dict[str, Any]:
    ratio = config.num_attention_heads // config.num_key_value_heads
    return {"num_key_value_heads": count, "num_attention_heads": count * ratio}


GROUP_KINDS: dict[Groups, GroupKind] = {
    "heads": GroupKind(lambda c: c.num_key_value_heads, lambda f: f.head_linears, _fewer_heads),
    "channels": GroupKind(
        lambda c: c.intermediate_size,
        lambda f: f.channel_linears,
        lambda _, n: {"intermediate_size": n},
    ),
}


def group_count(config: ModelConfig, kind: Groups) -> int:
    """Return the number of groups per layer: key/value heads, or channels."""
    return GROUP_KINDS[kind].group_count(config)


class GroupSlice(NamedTuple):
    """The part of each group in one parameter: `index_Gn` `[groups, n]` along `axis` of `array`.

    module, name: the parameter's place in its layer.
    """

    module: str
    name: str
    array: Any
    axis: int
    index_Gn: np.ndarray


def group_slices(
    config: ModelConfig, kind: Groups, layer: Params, path: str
) -> Iterator[GroupSlice]:
    """Yield the parts of a layer's groups in every parameter. path: the layer's, for messages.

    Raises ConfigError for a quantized weight.
    """
    count = group_count(config, kind)
    for member in GROUP_KINDS[kind].members(models.get_family(config.model_type)):
        for name, array in get_module(layer, member.linear).items():
            if isinstance(array, WeightBase):
                raise ConfigError(
                    f"{path}.{member.linear}.{name} is {weight_format(array)}: drop {kind} before"
                    " quantizing"
                )
            if name == "bias" and member.axis == 1:
                continue  # belongs to the sum over all groups
            index = np.arange(array.shape[member.axis])
            parts_RGn = index.reshape(member.fused_parts, count, -1)
            index_Gn = np.moveaxis(parts_RGn, 1, 0).reshape(count, -1)
            yield GroupSlice(member.linear, name, array, member.axis, index_Gn)
