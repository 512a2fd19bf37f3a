"""Where on a mesh the arrays are that a model is given and gives back: a `PartitionSpec` for each.

rows: the axis over which rows of a batch are split, None where they are not.
"""

import re
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jaxllm.cache.kv import Segment
from jaxllm.config import ModelConfig
from jaxllm.distributed import several
from jaxllm.errors import ConfigError
from jaxllm.mesh.axes import Axes
from jaxllm.mesh.placing import adapted_splits, spec_of
from jaxllm.mesh.rules import EXPERTS, GROUPS, HEADS, STAGES, Split
from jaxllm.models.layers import Attended, Layer, Trace
from jaxllm.weights.leaves.adapted import Adapted
from jaxllm.weights.leaves.leaf import Leaf
from jaxllm.weights.leaves.parted import Shares
from jaxllm.weights.leaves.wrapped import Wrapped

Rows = tuple[str, ...] | None
# What each stage of a pipeline has for layers of its own stands side by side on the axis of heads:
# rows and slots are where they are in a cache without stages.
KEPT = (*STAGES, *GROUPS)
KEYS_VALUES = r"(tail|frozen\.\d+)\.[kv]\."
BY_MODEL = rf"{KEYS_VALUES}|memory\."  # what only the model reads


def of_parameter(path: str, leaf: Any, split: Split, axes: Axes, rows: Rows) -> Any:
    """Raises ConfigError for a parameter that is whole where its shares are wanted."""
    if isinstance(leaf, Adapted):
        fields = {
            name: None if x is None else of_parameter(f"{path}.{name}", x, role, axes, rows)
            for name, role in adapted_splits(leaf, split).items()
            for x in [getattr(leaf, name)]
        }
        some = leaf.choice is not None and leaf.choice.shape[0] > 1
        choice = None if leaf.choice is None else P(rows) if some else P()
        key = None if leaf.key is None else P()
        inner = of_parameter(path, leaf.weight, split, axes, rows)
        return leaf.replace(weight=inner, choice=choice, key=key, **fields)
    if isinstance(leaf, Wrapped) and leaf.nests:
        nested: Any = leaf
        return nested.replace(weight=of_parameter(path, nested.weight, split, axes, rows))
    parts = axes.over(split.over)
    if isinstance(leaf, Shares):
        stack = (EXPERTS,) if split.stack else ()
        return jax.tree.map(lambda _: P(split.over, *stack), leaf)
    if parts == 1:
        return jax.tree.map(lambda _: P(EXPERTS) if split.stack else P(), leaf)
    size = leaf.shape[-1 if split.axis or leaf.ndim == 1 else -2]
    if isinstance(leaf, Leaf) or split.runs > 1 or size % parts:
        raise ConfigError(
            f"{path} is whole, and this model takes shares of it: load it with mesh=, or take"
            " model.shared(params)"
        )
    return spec_of(split, leaf.ndim)


def of_cache(path: str, ndim: int, rows: Rows) -> P:
    """Of an array of a cache: keys, values and memories by key/value head. What says where tokens
    are is read on the host too, so each of several processes has all of it.
    """
    if ndim == 0 or (several() and not re.match(BY_MODEL, path)):
        return P()
    if re.match(KEYS_VALUES, path):
        return P(rows, None, KEPT)
    return P(rows, GROUPS) if path.startswith("memory.") and ndim > 1 else P(rows)


def of_segment(segment: Segment, batch: int, rows: Rows) -> Any:
    """What all rows share is on every device of `rows`."""

    def over(x: Any) -> Rows:
        return rows if x.shape[0] == batch else None

    fields: dict[str, Any] = {
        **{name: P(over(segment.k[0]), None, KEPT) for name in ("k", "v")},
        **{n: P(over(getattr(segment, n))) for n in ("position_BS", "token_BS", "patched_BS")},
    }
    return Segment(**fields)


def of_memory(config: ModelConfig, rows: Rows) -> tuple[Any, ...]:
    """Of what layers keep beside keys and values; None for a layer that keeps nothing."""
    return tuple(
        jax.tree.map(lambda x: P(rows, GROUPS) if x.ndim else P(rows), config.memory(i))
        for i in range(config.num_hidden_layers)
    )


def of_trace(config: ModelConfig, rows: Rows, layers: int, *, by_head: bool) -> Any:
    """Of all that a model computes. layers: of one stage, beside which those of the others stand on
    the axis of heads or features (of mass: of slots). by_head: whether mass is each head's.
    """
    stream, each, groups = P(rows), P(rows, None, STAGES), P(rows, None, KEPT)
    heads = P(rows, None, (*STAGES, *HEADS))
    mass = P(rows, (*STAGES, *HEADS)) if by_head else P(rows, STAGES)
    found: list[Any] = []
    for memory in of_memory(config, rows)[:layers]:
        kept: list[Any] = [heads, groups, groups, heads, each, mass, memory]
        fields: dict[str, Any] = dict.fromkeys(Layer._fields, each)
        fields |= {"attention": Attended(*kept), "mlp_hidden": heads, "memory": memory}
        found.append(Layer(**fields))
    fields = dict.fromkeys(("embeddings", "norm", "logits"), stream)
    return Trace(layers=tuple(found), **fields)
