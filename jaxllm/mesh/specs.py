"""`PartitionSpec`s for all inputs and outputs of a model on a mesh.

`rows` are always the axes that split the rows of a batch; None: rows are replicated.
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
BY_MODEL = rf"{KEYS_VALUES}|memory\."  # arrays that only the model reads, never the host
MARKS = ("position_BS", "token_BS", "patched_BS")
ROWS = (("data", "expert"), ("data",))  # the first whose size divides the batch is used


def rows_over(axes: Axes, batch: int) -> Rows:
    """Return the axes that split a batch of rows; None: every device runs all rows.

    These are `data` and `expert` if they divide it, or else `data` alone.
    """
    return next((over for over in ROWS if batch % axes.over(over) == 0), None)


def of_parameter(path: str, leaf: Any, split: Split, axes: Axes, rows: Rows) -> Any:
    """Return the specs of a parameter's arrays. Raises ConfigError if it should be sharded."""
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
            f"{path} is not sharded, but the model expects shards. Load it with mesh=, or pass"
            " model.shared(params)"
        )
    return spec_of(split, leaf.ndim)


def groups(axes: Axes) -> tuple[str, ...]:
    """Return the axes that split the heads of a cache.

    The arrays of the pipeline stages are concatenated on this axis, so rows and slots stay where
    they are without stages.
    """
    return (*STAGES, *GROUPS, *((SEQUENCE,) if axes.exchange else ()))


def slot_axis(axes: Axes, slots: int) -> str | None:
    """Return the axis that splits `slots` slots; None: they are not split.

    They are not if the axis does not divide them, or splits heads.
    """
    if axes.sequence == 1 or axes.exchange or slots % axes.sequence:
        return None
    return SEQUENCE


def by_all(x: jax.Array, axes: Axes, spec: P = P()) -> jax.Array:  # noqa: B008  a constant
    """Replicate an array that each of several processes reads on its host.

    The axes in `spec` stay sharded.
    """
    if not several():
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh_of(axes), spec))


def columns(name: str, axis: str | None) -> tuple[str | None, ...]:
    """Return the axes after the rows in the spec of a by-row input."""
    return (axis,) if name.endswith(("_BT", "_BTD")) else ()


def of_cache(path: str, array: Any, rows: Rows, axes: Axes) -> P:
    """Return the spec of a cache array: keys, values and memories by key/value head, or by slots.

    Arrays that tell where tokens are get read on the host too, so every process has all of them.
    """
    if array.ndim == 0 or (several() and not re.match(BY_MODEL, path)):
        return P()
    if re.match(KEYS_VALUES, path):
        return P(rows, slot_axis(axes, array.shape[1]), groups(axes))
    return P(rows, GROUPS) if path.startswith("memory.") and array.ndim > 1 else P(rows)


def of_segment(segment: Segment, batch: int, rows: Rows, axes: Axes) -> Any:
    """Return the specs of a segment. An array that all rows share is replicated over `rows`."""
    slots = slot_axis(axes, segment.position_BS.shape[1])

    def over(x: Any) -> Rows:
        return rows if x.shape[0] == batch else None

    fields: dict[str, Any] = {
        **{name: P(over(segment.k[0]), slots, groups(axes)) for name in ("k", "v")},
        **{n: P(over(getattr(segment, n)), slots) for n in MARKS},
    }
    return Segment(**fields)


def of_memory(config: ModelConfig, rows: Rows) -> tuple[Any, ...]:
    """Return the specs of what layers store besides keys and values; None for nothing."""
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
    """Return the specs of a model's trace.

    Args:
        split: the axis that splits tokens.
        layers: the number of layers of one stage. The other stages' arrays are concatenated with
            them on the axis of heads or features (for mass: slots).
        picked: whether logits are of one column.
        vocabulary: the axes that split logits.
        by_head: whether mass is given for each head.
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
