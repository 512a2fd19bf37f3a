"""Parameters and caches of all pipeline stages as stacked arrays.

A parameter in one place of each stage is one leaf whose arrays have a first axis over stages. The
outputs and caches of layers are `[B, T, ...]`; the stages' are concatenated on the third axis, so
rows and slots stay where steps expect them.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jaxllm.errors import ConfigError
from jaxllm.models.layers import Layer, Trace
from jaxllm.ops.kv_quant import Entries
from jaxllm.research.pipeline.stage_layers import AXIS, LayerTable
from jaxllm.runtime.multihost import all_gather_objects
from jaxllm.sharding.mesh_spec import is_local, submesh
from jaxllm.sharding.partition_specs import feature_axis
from jaxllm.sharding.shard_list import concat_shards, equalize_over_mesh
from jaxllm.weights.load import NotLocal
from jaxllm.weights.paths import Params, map_leaves
from jaxllm.weights.types.base import WeightBase
from jaxllm.weights.types.lora import LoraWeight


class StackedTrace(Trace, kw_only=True):
    """A trace of all layers, with the keys and values of stacked stages."""

    stacked_kv: tuple[tuple[Entries, ...], tuple[Entries, ...]]

    @property
    def read_outputs(self) -> tuple[jax.Array, ...]:
        return ()  # new keys exist only after all ticks, which have read the cache by then

    @property
    def k(self) -> tuple[Entries, ...]:
        return self.stacked_kv[0]

    @property
    def v(self) -> tuple[Entries, ...]:
        return self.stacked_kv[1]


def unstack_trace(trace: Trace, table: LayerTable) -> StackedTrace:
    """Split a trace of stacked stages into one layer each."""
    stages = len(table)

    def split_stages(layer: Layer) -> list[Layer]:
        axes = jax.tree.map(lambda _: 2, layer)
        axes = axes._replace(sites={site: feature_axis(site) for site in layer.sites})
        if layer.attention.mass is not None:
            axes = axes._replace(attention=axes.attention._replace(mass=1))
        leaves, form = jax.tree.flatten(layer)
        each = [
            jnp.split(x, stages, axis)
            for x, axis in zip(leaves, jax.tree.leaves(axes), strict=True)
        ]
        return [jax.tree.unflatten(form, [x[i] for x in each]) for i in range(stages)]

    layers = dict[int, Layer]()
    for place, layer in enumerate(trace.layers):
        each = zip((row[place] for row in table), split_stages(layer), strict=True)
        layers |= {number: one for number, one in each if number is not None}
    return StackedTrace(
        trace.embeddings,
        tuple(layers[i] for i in sorted(layers)),
        trace.norm,
        trace.logits,
        trace.sites,
        stacked_kv=(trace.k, trace.v),
    )


def find_stage(path: str, prefix: str, table: LayerTable) -> int | None:
    """Return the stage that has a parameter's layer; None: the parameter is of no layer."""
    if not path.startswith(f"{prefix}."):
        return None
    number = int(path.removeprefix(f"{prefix}.").partition(".")[0])
    return next(stage for stage, row in enumerate(table) if number in row)


def stack_stages(params: Params, prefix: str, table: LayerTable, mesh: Mesh) -> Params:
    """Stack the layers of all stages by place, with zeros if a stage has no layer.

    Nothing is sent: each array's shards stay on the devices of their stage. The layers are removed
    from `params` one array at a time, so that none is in memory twice for long.

    Raises:
        ConfigError: for layers in one place with different formats.
    """
    layers = {f"{prefix}.{i}" for row in table for i in row if i is not None}
    stacked = {name: value for name, value in params.items() if name not in layers}

    def stack_nodes(path: str, nodes: Sequence[Any]) -> Any:
        if not isinstance(nodes[0], dict):
            return stack_leaves(path, nodes, mesh)
        names = [*nodes[0]]
        return {k: stack_nodes(f"{path}.{k}", [node.pop(k) for node in nodes]) for k in names}

    for place, numbers in enumerate(zip(*table, strict=True)):
        names = [f"{prefix}.{i}" for i in numbers if i is not None]
        nodes = [params.pop(name) for name in names]
        for stage in range(len(names), len(table)):  # only later stages have empty places
            like = stacked[f"{prefix}.{place - 1}"]
            nodes.append(map_leaves(partial(zeros_on_stage, mesh, stage), like))
        stacked[f"{prefix}.{place}"] = stack_nodes("/".join(names), nodes)
    return stacked


def zeros_on_stage(mesh: Mesh, stage: int, _: str, leaf: Any) -> Any:
    """Return zeros on a stage's devices, in the shapes of the stage's entries of a stack.

    They fill an empty place, which is never read.
    """
    own = submesh(mesh, AXIS, stage)
    if not is_local(own):
        return NotLocal()

    def zeros(x: jax.Array) -> jax.Array:
        spec = x.sharding.spec  # type: ignore[attr-defined]
        return jnp.zeros(x.shape[1:], x.dtype, device=NamedSharding(own, P(*spec[1:])))

    return jax.tree.map(zeros, leaf)


def stack_leaves(path: str, leaves: Sequence[Any], mesh: Mesh) -> Any:
    """Stack one leaf of each stage. Raises ConfigError if their formats differ."""
    if any(isinstance(x, LoraWeight) and x.owner is not None for x in leaves):
        raise ConfigError(
            "loaded adapters cannot be combined with pipeline stages. Merge one into the weights"
            " (jaxllm merge), or use a mesh with stage=1"
        )

    def join(*arrays: jax.Array) -> jax.Array:
        return concat_shards([x[None] for x in arrays], mesh, AXIS, 0)

    local_leaves = [x for x in leaves if not isinstance(x, NotLocal)]
    forms = list(itertools.chain(*all_gather_objects([_format_name(x) for x in local_leaves])))
    try:
        if len({*forms}) > 1:
            raise ValueError
        return jax.tree.map(join, *equalize_over_mesh(mesh, local_leaves))
    except (ValueError, AttributeError):
        raise ConfigError(
            f"{path} share one place of the stages, so they must have one format: got"
            f" {', '.join(forms)}"
        ) from None


def _format_name(leaf: Any) -> str:
    """Return the format of a leaf, or for other objects the dtype or type."""
    if isinstance(leaf, WeightBase):  # a jax.Array has a `format` too, its memory layout
        return leaf.format
    return str(getattr(leaf, "dtype", type(leaf).__name__))


def stacked_specs(leaf: Any, stage_specs: Callable[[Any], Any]) -> Any:
    """Return the specs of a stacked parameter's arrays; `stage_specs` returns those of one
    stage.
    """
    one = jax.eval_shape(lambda leaf: jax.tree.map(lambda x: x[0], leaf), leaf)
    specs: Any = jax.tree.map(lambda spec: P(AXIS, *spec), stage_specs(one))
    return specs
