"""Structure: heads, MLP channels and layers cut away whole; what is left is a smaller model.

A key/value head goes with all query heads that share it, so that their ratio stays. What belongs to
a head or a channel the family's table says (`Family.heads`, `Family.channels`). A configuration has
one number of heads and one of channels for all layers, so each layer loses as many, of its own
choice. GPT-2 keeps its heads: its configuration, and transformers' model, have
hidden_size = heads x head_dim.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxllm import models
from jaxllm.compress.layers.stream import at, put
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.family import Family, Member
from jaxllm.weights.formats import format_of
from jaxllm.weights.leaves.leaf import Leaf
from jaxllm.weights.paths import Params

Kind = Literal["heads", "channels"]
Smaller = tuple[ModelConfig, Params]


class _Width(NamedTuple):
    """A kind of group. count: of a layer's groups. changed: the fields with so many of them."""

    count: Callable[[ModelConfig], int]
    members: Callable[[Family], tuple[Member, ...]]
    changed: Callable[[ModelConfig, int], dict[str, Any]]


def _fewer_heads(config: ModelConfig, count: int) -> dict[str, Any]:
    ratio = config.num_attention_heads // config.num_key_value_heads
    return {"num_key_value_heads": count, "num_attention_heads": count * ratio}


_WIDTHS: dict[Kind, _Width] = {
    "heads": _Width(lambda c: c.num_key_value_heads, lambda f: f.heads, _fewer_heads),
    "channels": _Width(
        lambda c: c.intermediate_size, lambda f: f.channels, lambda _, n: {"intermediate_size": n}
    ),
}


def groups(config: ModelConfig, kind: Kind) -> int:
    """How many groups each layer has: key/value heads, or channels."""
    return _WIDTHS[kind].count(config)


def narrower(config: ModelConfig, kind: Kind, count: int) -> ModelConfig:
    """The configuration with so many groups in each layer.

    Raises ConfigError for a family that has no such configuration, and for a number that is not
    from 1 to as many as there are.
    """
    width = _WIDTHS[kind]
    if not width.members(models.family(config.model_type)):
        raise ConfigError(f"{kind} of {config.model_type} cannot be cut: its MLPs are experts")
    if kind == "heads" and models.family(config.model_type).norms:
        raise ConfigError(
            f"heads of {config.model_type} cannot be cut: its queries and keys are normalized over"
            " all heads at once, which those that stay would not be"
        )
    attention = config.long_attention(0)
    if kind == "heads" and attention is not None:
        raise ConfigError(
            f"heads with attention of kind {attention.kind!r} cannot be cut: what each of them sees"
            " goes by its number"
        )
    if not 1 <= count <= width.count(config):
        raise ConfigError(f"of {width.count(config)} {kind} 1 at least stay, got {count}")
    try:
        return dataclasses.replace(config, **width.changed(config, count))
    except ConfigError as error:
        raise ConfigError(f"{kind} of {config.model_type} cannot be cut: {error}") from None


def cut(
    config: ModelConfig, params: Params, kind: Kind, kept: Sequence[Sequence[int] | np.ndarray]
) -> Smaller:
    """The model with only the groups `kept` of each layer, in their order.

    kept: numbers of groups, for each layer as many. Raises ConfigError as `narrower` does, for
    groups that there are not, and for a quantized weight.
    """
    chosen = [np.unique(np.asarray(layer, int)) for layer in kept]
    count = groups(config, kind)
    if len(chosen) != config.num_hidden_layers or {len(layer) for layer in chosen} != {
        len(chosen[0])
    }:
        raise ConfigError(f"each of {config.num_hidden_layers} layers keeps as many {kind}")
    if any(layer.min(initial=0) < 0 or layer.max(initial=0) >= count for layer in chosen):
        raise ConfigError(f"a layer has the {kind} 0 to {count - 1}")
    smaller = narrower(config, kind, len(chosen[0]))
    found = dict(params)
    for number, layer in enumerate(chosen):
        path = f"{models.family(config.model_type).layers}.{number}"
        for share in shares(config, kind, params[path], path):
            index = jnp.asarray(np.sort(share.index_Gn[layer].reshape(-1)))
            array = jnp.take(share.array, index, axis=share.axis)
            found[path] = put(found[path], share.module, **{share.name: array})
    return smaller, found


def cut_layers(config: ModelConfig, params: Params, kept: Sequence[int]) -> Smaller:
    """The model with only the layers `kept`, in their order.

    Raises ConfigError for layers that there are not, and where a layer would compute another thing
    in its new place (an attention window, or a scale, that goes by a layer's number).
    """
    numbers, count = sorted(set(kept)), config.num_hidden_layers
    if not numbers or numbers[0] < 0 or numbers[-1] >= count:
        raise ConfigError(f"some of the layers 0 to {count - 1} stay, got {list(kept)}")
    cut = config.with_layers(numbers)
    for place, number in enumerate(numbers):
        if cut.computes(place) != config.computes(number):
            raise ConfigError(
                f"layer {number} of this {config.model_type} would not be itself as layer {place}:"
                " what it computes depends on its number"
            )
    name = models.family(config.model_type).layers
    layers = {f"{name}.{i}": params[f"{name}.{number}"] for i, number in enumerate(numbers)}
    rest = {path: x for path, x in params.items() if not path.startswith(f"{name}.")}
    return cut, {**rest, **layers}


class Share(NamedTuple):
    """What groups have of one parameter: `index_Gn` `[groups, n]` along `axis` of `array`.

    module, name: where it is in its layer.
    """

    module: str
    name: str
    array: Any
    axis: int
    index_Gn: np.ndarray


def shares(config: ModelConfig, kind: Kind, layer: Params, path: str) -> Iterator[Share]:
    """All that the groups of a layer have. path: the layer's, for messages.

    Raises ConfigError for a quantized weight.
    """
    width = _WIDTHS[kind]
    for member in width.members(models.family(config.model_type)):
        for name, array in at(layer, member.linear).items():
            if isinstance(array, Leaf):
                raise ConfigError(
                    f"{path}.{member.linear}.{name} is {format_of(array)}: {kind} are cut before"
                    " weights are quantized"
                )
            if name == "bias" and member.axis == 1:
                continue  # of what all groups together put out
            index = np.arange(array.shape[member.axis])
            parts_RGn = index.reshape(member.runs, width.count(config), -1)
            index_Gn = np.moveaxis(parts_RGn, 1, 0).reshape(width.count(config), -1)
            yield Share(member.linear, name, array, member.axis, index_Gn)


def removed(total: int, wanted: float | int, what: str) -> int:
    """How many of `total` go: `wanted` itself where it is a whole number, else that share of them,
    which may be off by a hundredth of the total.

    Raises ConfigError, with what is possible, for a number that is not.
    """
    found = wanted if isinstance(wanted, int) else round(wanted * total)
    near = isinstance(wanted, int) or abs(found - wanted * total) <= 0.01 * total
    if near and 0 < found < total:
        return found
    if total < 2:
        raise ConfigError(f"{what}: there is nothing that could go of {total}")
    asked = wanted if isinstance(wanted, int) else f"{wanted:.1%} of them"
    shown = ", ".join(f"{n} ({n / total:.1%})" for n in range(1, min(total, 9)))
    more = f", ... {total - 1}" if total > 9 else ""
    raise ConfigError(f"of {total} {what} can go {shown}{more}: got {asked}")
