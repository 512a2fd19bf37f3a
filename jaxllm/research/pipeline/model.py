"""A sharded model with its layers in the stages of a pipeline."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P

from jaxllm.cache.kv import Segment
from jaxllm.errors import ConfigError
from jaxllm.models.layers import Trace
from jaxllm.ops import native
from jaxllm.ops.compile_cache import CachedJit
from jaxllm.research.pipeline import decode, decode_loop
from jaxllm.research.pipeline.forward import PipelineRunner, check_stages
from jaxllm.research.pipeline.stage_layers import AXIS, LayerTable, assign_layers
from jaxllm.research.pipeline.stage_params import (
    find_stage,
    stack_leaves,
    stack_stages,
    stacked_specs,
    unstack_trace,
)
from jaxllm.sharding import partition_specs
from jaxllm.sharding.fsdp import FsdpSharder, wrap_fsdp
from jaxllm.sharding.local_params import LocalParams
from jaxllm.sharding.mesh_spec import build_mesh, submesh
from jaxllm.sharding.shard_params import ParamSharder, WrapLeaf
from jaxllm.sharding.sharded_model import ShardedModel, lazy_weight, local_module
from jaxllm.sharding.tensor_parallel import SequenceSlice
from jaxllm.weights.paths import Params, map_leaves
from jaxllm.weights.types.lora import LoraWeight


@dataclasses.dataclass(frozen=True)
class StagedModel(ShardedModel):
    """A model with stages.

    The parameters of the layers in one place of all stages are one stack.

    Attributes:
        chunks, microbatches: see `forward.PipelineRunner`.
    """

    options: ClassVar[tuple[str, ...]] = ("exact", "fsdp", "chunks", "microbatches")

    chunks: int = 1
    microbatches: int | None = None

    def check(self) -> None:
        check_stages(self.config, self.precision, self.layer_runner)
        if self.chunks > 1 and self.axes.sequence > 1 and not self.axes.use_ulysses:
            raise ConfigError(
                f"ring attention cannot be combined with stages of {self.chunks} chunks: a ring"
                " needs all devices at once, but the stages run different layers. Use"
                f" sequence={self.axes.sequence}:heads, or one chunk"
            )

    @property
    def layer_runner(self) -> PipelineRunner:
        return PipelineRunner(self.axes.stage, self.chunks, self.microbatches)

    @property
    def layer_table(self) -> LayerTable:
        """The layer numbers of each stage, by place; None: an empty place."""
        return assign_layers(self.config, self.axes.stage, self.chunks)

    @property
    def local_layers(self) -> list[int]:
        return [number for number in self.layer_table[0] if number is not None]

    @property
    def joined_layers(self) -> tuple[tuple[int | None, ...], ...]:
        return tuple(zip(*self.layer_table, strict=True))

    def is_staged(self, path: str) -> bool:
        """Return whether the parameter at `path` is a stack with one entry per stage."""
        return path.startswith(f"{self.layers}.")

    def unsharded_paths(self, path: str) -> tuple[str | None, ...]:
        if not self.is_staged(path):
            return (path,)
        place, dot, rest = path.removeprefix(f"{self.layers}.").partition(".")
        numbers = (row[int(place)] for row in self.layer_table)
        return tuple(None if n is None else f"{self.layers}.{n}{dot}{rest}" for n in numbers)

    def template_paths(self, path: str) -> list[str]:
        """Return the path of each stage's entry at `path`; if empty, in the place before."""
        paths = self.unsharded_paths(path)
        if None not in paths:
            return [name for name in paths if name is not None]
        place, dot, rest = path.removeprefix(f"{self.layers}.").partition(".")
        before = self.template_paths(f"{self.layers}.{int(place) - 1}{dot}{rest}")
        return [name or other for name, other in zip(paths, before, strict=True)]

    def apply(self, variables: Mapping[str, Any], *inputs: Any, **options: Any) -> Trace:
        return unstack_trace(super().apply(variables, *inputs, **options), self.layer_table)

    def local_params(
        self,
        params: Params,
        row_axes: partition_specs.RowAxes,
        token_slice: SequenceSlice | None = None,
    ) -> LocalParams:
        return StagedParams(self, params, row_axes, token_slice)

    def make_placer(self) -> ParamSharder:
        return (FsdpStageSharder if self.fsdp else StageSharder)(self)

    def gather_lazy(self, params: Params) -> Params:
        gathered: Params = {}
        for name, value in params.items():
            paths = self.unsharded_paths(name)
            for stage, path in enumerate(paths):
                if path is not None:
                    take = _take_part(stage if len(paths) > 1 else None)
                    gathered[path] = map_leaves(take, {"": value})[""]
        return gathered

    def check_sites(self, read: Sequence[str] = (), edited: Sequence[str] = ()) -> None:
        for name in edited:
            raise ConfigError(
                f"site {name} cannot be edited on mesh {self.axes}, where no device has all of it."
                " Use a mesh of data only, or one without stage, sequence and :tokens"
            )
        super().check_sites(read)

    def decode_loop(self, rows: int) -> CachedJit | None:
        return None if decode_loop.row_groups(self, rows) is None else decode_loop.PIPELINED_ROUNDS

    def empty_pipeline(self, rows: int) -> jax.Array:
        """Return the activations between stages before the first tick of decoding."""
        shape = (rows // self.axes.stage, 1, self.axes.stage * self.config.hidden_size)
        return jnp.zeros(shape, jnp.dtype(self.precision.activations))

    def run_tick(self, params: Params, *inputs: Any) -> tuple[jax.Array, jax.Array, Segment]:
        """Run each stage's layers on its group (see `decode.run_tick`)."""
        with native.use_one_path(self.precision.invariant):
            return decode.run_tick(self, local_module(self), params, *inputs)


@dataclasses.dataclass(frozen=True)
class StagedParams(LocalParams):
    """The parameters of a model with stages, as one device has them: its entry of each stack."""

    model: StagedModel

    def local_shard(self, path: str, part: Any) -> Any:
        if not self.model.is_staged(path):
            return super().local_shard(path, part)
        part = jax.tree.map(lambda x: x[0], part)
        specs = jax.tree.map(lambda spec: P(*spec[1:]), self.specs_by_path[path])
        return wrap_fsdp(part, specs, self.model.axes)

    def find_specs(self, path: str, leaf: Any) -> Any:
        one = partial(super().find_specs, path)
        return stacked_specs(leaf, one) if self.model.is_staged(path) else one(leaf)


class StageSharder(ParamSharder):
    """Places each layer on the devices of its stage, then stacks the layers of all stages."""

    _model: StagedModel

    @cached_property
    def _table(self) -> LayerTable:
        return self._model.layer_table

    def find_mesh(self, path: str) -> Mesh:
        mesh, stage = build_mesh(self._axes), find_stage(path, self._model.layers, self._table)
        return mesh if stage is None else submesh(mesh, AXIS, stage)

    def finish(self, params: Params) -> Params:
        return stack_stages(params, self._model.layers, self._table, build_mesh(self._axes))

    def attach_adapter(self, path: str, weight: Any, wrap: WrapLeaf) -> Any:
        """Add an adapter's matrices, stacked as the weights are."""
        paths = self._model.unsharded_paths(path)
        if len(paths) == 1:
            return super().attach_adapter(path, weight, wrap)
        names = [name for name in paths if name is not None]
        wrapped = [wrap(name, weight) for name in names]
        if all(x is weight for x in wrapped):
            return weight
        if any(x is weight for x in wrapped):
            raise ConfigError(
                f"the adapter targets only some of {', '.join(names)}, which share one place in the"
                " stages of a pipeline. Target all of them, or use a mesh with stage=1"
            )
        self.check_adapter(path, wrapped[0])
        bare = [x.replace(weight=None) for x in wrapped]
        blank = jax.tree.map(jnp.zeros_like, bare[0])  # the place of a later stage may be empty
        bare += [blank] * (len(paths) - len(names))
        placed = [
            ParamSharder.place_adapter(self, name, x)
            for name, x in zip(self._model.template_paths(path), bare, strict=True)
            if self.is_local(name)
        ]
        arrays = zip(*map(jax.tree.leaves, placed), strict=True)
        mesh = build_mesh(self._axes)
        stacks = [stack_leaves("/".join(names), some, mesh) for some in arrays]
        adapter: Any = jax.tree.unflatten(jax.tree.structure(placed[0]), stacks)
        return adapter.replace(weight=weight)

    def check_adapter(self, path: str, adapted: LoraWeight) -> None:
        if adapted.dropout:
            raise ConfigError(
                "dropout is drawn for all rows at once, but stages run them in microbatches. Drop"
                " it, or use a mesh with stage=1"
            )
        if adapted.magnitude is not None:
            raise ConfigError(
                "DoRA cannot be trained on stages: it needs each layer's row norms, but stages"
                " stack several layers in one array. Train LoRA, or use a mesh with stage=1"
            )
        super().check_adapter(path, adapted)


class FsdpStageSharder(FsdpSharder, StageSharder):
    """The same with matrices over `data` as well."""


def _take_part(stage: int | None) -> Callable[[str, Any], Any]:
    return lambda _, leaf: lazy_weight(leaf, stage)
