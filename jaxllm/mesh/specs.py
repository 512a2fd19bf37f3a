"""Where on a mesh the arrays are that a model is given and gives back: a `PartitionSpec` for each.

rows: the axes over which rows of a batch are split, None where they are not.
"""

import re
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm.cache.kv import Segment
from jaxllm.config import ModelConfig
from jaxllm.distributed import several
from jaxllm.errors import ConfigError
from jaxllm.mesh.axes import Axes, mesh_of
from jaxllm.mesh.placing import adapted_splits, spec_of, split_within
from jaxllm.mesh.rules import EXPERTS, GROUPS, HEADS, STAGES, Over, Split
from jaxllm.mesh.sequence.ways import AXIS as SEQUENCE
from jaxllm.models.layers import Attended, Layer, Trace
from jaxllm.weights.leaves.adapted import Adapted
from jaxllm.weights.leaves.leaf import Leaf
from jaxllm.weights.leaves.parted import Shares
from jaxllm.weights.leaves.wrapped import Wrapped

Rows = tuple[str, ...] | None
KEYS_VALUES = r"(tail|frozen\.\d+)\.[kv]\."
BY_MODEL = rf"{KEYS_VALUES}|memory\."  # what only the model reads
MARKS = ("position_BS", "token_BS", "patched_BS")
ROWS = (("data", "expert"), ("data",))  # the first of them that divides a batch


def rows_over(axes: Axes, batch: int) -> Rows:
    """The axes over which so many rows are split: `data` and `expert` where those divide them, or
    `data` alone; None: each device runs all of them.
    """
    return next((over for over in ROWS if batch % axes.over(over) == 0), None)


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
        each = {"weight": nested.weight, **nested.others()}
        return nested.replace(
            **{
                name: of_parameter(f"{path}.{name}", x, split_within(leaf, name, split), axes, rows)
                for name, x in each.items()
            }
        )
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


def groups(axes: Axes) -> tuple[str, ...]:
    """The axes over which heads of a cache are split. What each stage of a pipeline has for layers
    of its own stands side by side there: rows and slots are where they are without stages.
    """
    return (*STAGES, *GROUPS, *((SEQUENCE,) if axes.exchange else ()))


def slot_axis(axes: Axes, slots: int) -> str | None:
    """The axis over which so many slots are split, where they divide and are not split by heads."""
    if axes.sequence == 1 or axes.exchange or slots % axes.sequence:
        return None
    return SEQUENCE


def by_all(x: jax.Array, axes: Axes, spec: P = P()) -> jax.Array:  # noqa: B008  a constant
    """What is read on the host, by each of several processes: all of it for each of them, but for
    what `spec` divides.
    """
    if not several():
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh_of(axes), spec))


def columns(name: str, axis: str | None) -> tuple[str | None, ...]:
    """What comes after rows in the spec of what a model is given by row."""
    return (axis,) if name.endswith(("_BT", "_BTD")) else ()


def of_cache(path: str, array: Any, rows: Rows, axes: Axes) -> P:
    """Of an array of a cache: keys, values and memories by key/value head, or by slots. What says
    where tokens are is read on the host too, so each of several processes has all of it.
    """
    if array.ndim == 0 or (several() and not re.match(BY_MODEL, path)):
        return P()
    if re.match(KEYS_VALUES, path):
        return P(rows, slot_axis(axes, array.shape[1]), groups(axes))
    return P(rows, GROUPS) if path.startswith("memory.") and array.ndim > 1 else P(rows)


def of_segment(segment: Segment, batch: int, rows: Rows, axes: Axes) -> Any:
    """What all rows share is on every device of `rows`."""
    slots = slot_axis(axes, segment.position_BS.shape[1])

    def over(x: Any) -> Rows:
        return rows if x.shape[0] == batch else None

    fields: dict[str, Any] = {
        **{name: P(over(segment.k[0]), slots, groups(axes)) for name in ("k", "v")},
        **{n: P(over(getattr(segment, n)), slots) for n in MARKS},
    }
    return Segment(**fields)


def of_memory(config: ModelConfig, rows: Rows) -> tuple[Any, ...]:
    """Of what layers keep beside keys and values; None for a layer that keeps nothing."""
    return tuple(
        jax.tree.map(lambda x: P(rows, GROUPS) if x.ndim else P(rows), config.memory(i))
        for i in range(config.num_hidden_layers)
    )


def of_trace(
    config: ModelConfig,
    rows: Rows,
    axes: Axes,
    split: str | None = None,
    *,
    layers: int,
    picked: bool,
    vocabulary: Over,
    by_head: bool,
) -> Any:
    """Of all that a model computes. split: the axis over which tokens are split. layers: of one
    stage, beside which those of the others stand on the axis of heads or features (of mass: of
    slots). picked: whether logits are of one column. vocabulary: the axes over which logits are
    divided. by_head: whether mass is each head's.
    """
    stream, each = P(rows, split), P(rows, split, STAGES)
    heads = P(rows, split, (*STAGES, *HEADS))
    kept = P(rows, None if axes.exchange else split, groups(axes))
    mass = P(rows, (*STAGES, *HEADS)) if by_head else P(rows, STAGES)
    found: list[Any] = []
    for memory in of_memory(config, rows)[:layers]:
        attended: list[Any] = [heads, kept, kept, heads, each, mass, memory]
        fields: dict[str, Any] = dict.fromkeys(Layer._fields, each)
        fields |= {"attention": Attended(*attended), "mlp_hidden": heads, "memory": memory}
        found.append(Layer(**fields))
    logits: Any = P(rows, None if picked else split, vocabulary or None)
    whole: Any = stream
    return Trace(embeddings=whole, layers=tuple(found), norm=whole, logits=logits)
