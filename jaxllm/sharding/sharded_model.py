"""A sharded model: the module of one device's share, run inside one `jax.shard_map`."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxllm import models
from jaxllm.cache.kv import Segment
from jaxllm.config.model import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.layers import Trace
from jaxllm.models.sites import SITES, split_name
from jaxllm.ops import native
from jaxllm.runtime.multihost import to_host
from jaxllm.sharding import partition_specs
from jaxllm.sharding.call import CallSharding
from jaxllm.sharding.context_parallel import sequence_parallel
from jaxllm.sharding.context_parallel.dispatch import (
    SplitCacheWriter,
    check_chunks,
    check_context_parallel,
)
from jaxllm.sharding.fsdp import FsdpSharder
from jaxllm.sharding.local_params import LocalParams
from jaxllm.sharding.mesh_spec import MeshSpec, build_mesh, parse_mesh
from jaxllm.sharding.model_sharding import ModelSharding
from jaxllm.sharding.partition_rules import HEAD_AXES, VOCAB_AXES, local_config, resolve_mesh
from jaxllm.sharding.pipeline import decode
from jaxllm.sharding.pipeline.forward import PipelineRunner, check_stages
from jaxllm.sharding.shard_list import ShardList
from jaxllm.sharding.shard_params import ParamSharder, replicate
from jaxllm.weights.lazy_gather import LazyWeight
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params, Placement, map_leaves
from jaxllm.weights.precision import Precision
from jaxllm.weights.types.base import INPUT_BLOCK, WeightBase

V = TypeVar("V")


@dataclasses.dataclass(frozen=True)
class ShardedModel(ModelSharding, Model):
    """A model whose parameters and caches are sharded over devices.

    Steps call `apply` as for any model, with parameters from `shard` or `make_placer`; inputs and
    outputs are global arrays with a sharding. `CallSharding` describes how a call's arrays are
    sharded, `LocalParams` how the parameters are. Use `make_sharded_model` to make one: it checks
    the configuration.
    """

    def clone(self, **changes: Any) -> "ShardedModel":
        """Return the model with other fields, as a Flax module does."""
        return dataclasses.replace(self, **changes)

    def apply(
        self,
        variables: Mapping[str, Any],
        token_BT: jax.Array,
        position_BT: jax.Array,
        length_B: jax.Array,
        segments: tuple[Segment, ...] = (),
        column_B: jax.Array | None = None,
        attention_mass: bool = False,
        *,
        state: tuple[Any, ...] = (),
        read: frozenset[str] = frozenset(),
        **extra: Any,
    ) -> Trace:
        """Return what the module's `__call__` returns. `extra` are its further inputs by row."""
        row_inputs = {
            "token_BT": token_BT,
            "position_BT": position_BT,
            "length_B": length_B,
            "column_B": column_B,
            **extra,
        }
        cached = {"segments": segments} | ({"state": state} if state else {})
        batch, columns = token_BT.shape
        call = CallSharding(self, batch, columns, column_B is not None, attention_mass, read)
        local = LocalParams(self, variables["params"], call.row_axes, call.token_slice)
        apply = partial(local_module(self).apply, attention_mass=attention_mass, read=read)
        return call.run(apply, local, row_inputs, cached)

    @property
    def cache_sharding(self) -> Placement:
        return self._find_cache_sharding

    def _find_cache_sharding(self, path: str, array: Any) -> NamedSharding:
        rows = partition_specs.find_row_axes(self.axes, array.shape[0]) if array.ndim else None
        spec = partition_specs.cache_spec(path, array, rows, self.axes)
        return NamedSharding(build_mesh(self.axes), spec)

    @property
    def cache_writer(self) -> SplitCacheWriter | None:
        if self.axes.sequence == 1 or self.axes.use_ulysses:
            return None
        return SplitCacheWriter(self.axes)

    @property
    def stage_layers(self) -> tuple[tuple[int | None, ...], ...]:
        return tuple(map(tuple, self.layer_table)) if self.axes.stage > 1 else ()

    def make_placer(self) -> ParamSharder:
        """Return the placer that shards parameters as they are read."""
        return (FsdpSharder if self.fsdp else ParamSharder)(self)

    def shard(self, params: Params) -> Params:
        placer = self.make_placer()
        return placer.finish(map_leaves(placer.place_weight, params))

    def gather_lazy(self, params: Params) -> Params:
        return gather_lazy(params, self.unsharded_paths)

    def check_sites(self, read: Sequence[str] = (), edited: Sequence[str] = ()) -> None:
        is_split = self.axes.stage > 1 or self.axes.sequence > 1 or self.axes.sequence_parallel
        over = self.axes.num_shards(HEAD_AXES)
        for name in read:
            if over > 1 and name.endswith(".attn.result"):
                raise ConfigError(f"site {name} cannot be read with tensor={over}. Read attn.z")
        for name in edited:
            is_sharded = over > 1 and not {"D", "E", "V"} & {*SITES[split_name(name)[1]].axes}
            if is_split or is_sharded:
                raise ConfigError(
                    f"site {name} cannot be edited on mesh {self.axes}, where no device has all of"
                    " it. Use a mesh of data only, or"
                    + (" one without stage, sequence and :tokens" if is_split else " attn_out")
                )

    def num_data_shards(self, rows: int) -> int:
        return self.axes.num_shards(partition_specs.find_row_axes(self.axes, rows) or ())

    def with_sharded_logits(self) -> "ShardedModel":
        """Return itself if the vocabulary is not sharded, or sums are in the order of one device.

        See `Model.with_sharded_logits`.
        """
        is_sharded = self.axes.num_shards(VOCAB_AXES) > 1
        return self.clone(sharded_logits=True) if is_sharded and not self.exact else self

    # Decoding in stages (`generation.loops.pipelined`).

    def empty_pipeline(self, rows: int) -> jax.Array:
        """Return the activations between stages before the first tick."""
        shape = (rows // self.axes.stage, 1, self.axes.stage * self.config.hidden_size)
        return jnp.zeros(shape, jnp.dtype(self.precision.activations))

    def run_tick(self, params: Params, *inputs: Any) -> tuple[jax.Array, jax.Array, Segment]:
        """Run each stage's layers on its group (see `pipeline.decode.run_tick`)."""
        with native.use_one_path(self.precision.invariant):
            return decode.run_tick(self, local_module(self), params, *inputs)


def make_sharded_model(
    config: ModelConfig,
    precision: Precision,
    axes: MeshSpec,
    *,
    exact: bool = False,
    chunks: int = 1,
    microbatches: int | None = None,
    fsdp: bool = False,
) -> ShardedModel:
    """Make a sharded model.

    Args:
        chunks: see `pipeline.forward.PipelineRunner`, also for microbatches.
        fsdp: see `sharding.fsdp`.

    Raises:
        ConfigError: if the model does not fit the mesh, or there are too few devices.
    """
    axes = resolve_mesh(axes, config)
    check_context_parallel(local_config(config, axes), axes, exact)
    sequence_parallel.check(axes, exact)
    build_mesh(axes)
    if not exact:
        check_int8_blocks(config, precision, axes)
    runner = PipelineRunner(axes.stage, chunks, microbatches)
    check_stages(config, precision, runner)
    check_chunks(axes, chunks)
    return ShardedModel(config, precision, axes, exact, runner, fsdp)


def unshard_model(model: Model) -> Model:
    """Return the model on one device."""
    if not isinstance(model, ShardedModel):
        return model
    return models.build(model.config, model.precision).clone(remat=model.remat)


def shard_model_like(model: Model, other: Model) -> Model:
    """Return `model`, a model on one device, sharded as `other` is.

    Raises:
        ConfigError: if it cannot be.
    """
    if not isinstance(other, ShardedModel):
        return model
    return make_sharded_model(
        model.config, model.precision, parse_mesh(str(other.axes)),
        exact=other.exact, chunks=other.runner.chunks, fsdp=other.fsdp,
    )  # fmt: skip


def with_sharded_rows(model: Model) -> Model:
    """Return the model for training: the host of a process reads no rows of the outputs."""
    return model.clone(sharded_rows=True) if isinstance(model, ShardedModel) else model


def check_rows(model: Model, rows: int) -> None:
    """Raise ConfigError if a training batch of `rows` rows cannot be split."""
    if not isinstance(model, ShardedModel):
        return
    resolve_mesh(model.axes, model.config)  # training may have changed the experts' capacity
    if rows % model.axes.data:
        raise ConfigError(
            f"batch of {rows} rows is not divisible by data={model.axes.data}. Use a multiple of"
            f" {model.axes.data} rows, or another mesh"
        )


def replicate_arrays(model: Model, tree: V) -> V:
    """Replicate arrays that are not parameters (such as a trained prompt) on a model's devices."""
    if not isinstance(model, ShardedModel):
        return tree
    replicated: V = jax.tree.map(partial(replicate, build_mesh(model.axes)), tree)
    return replicated


def check_int8_blocks(config: ModelConfig, precision: Precision, axes: MeshSpec) -> None:
    """Raise ConfigError if sharding would split a block of columns that are rounded together."""
    over = axes.num_shards(HEAD_AXES)
    if not precision.int8_inputs or over == 1:
        return
    widths = {
        name: getattr(config, name) for name in models.get_family(config.model_type).width_fields
    }
    heads = config.num_attention_heads * config.head_dim
    for name, size in {"the heads' width": heads, **widths}.items():
        if size // over % INPUT_BLOCK:
            raise ConfigError(
                f"int8_inputs rounds inputs in blocks of {INPUT_BLOCK} columns, but {name} {size}"
                f" over tensor={over} splits a block. Use exact=True, or a smaller tensor axis"
            )


@cache
def local_module(model: ModelSharding) -> nn.Module:
    """Return the module that one device runs."""
    module: Any = models.build(local_config(model.config, model.axes), model.precision)
    if model.axes.stage > 1:
        module = module.clone(runner=model.runner)
    return module.clone(remat=True) if model.remat else module


def gather_lazy(params: Params, names: Callable[[str], tuple[str | None, ...]]) -> Params:
    """Return the parameters of the unsharded model, a `LazyWeight` each.

    Shards are merged in their own format, and the layers of pipeline stages are separated.

    Args:
        names: gives the paths of the entries of a stacked parameter, one per stage; None: empty.
    """
    gathered: Params = {}
    for name, value in params.items():
        each = names(name)
        for i, own in enumerate(each):
            if own is None:
                continue
            stage = i if len(each) > 1 else None
            gathered[own] = map_leaves(partial(_lazy_weight, stage), {"": value})[""]
    return gathered


def _lazy_weight(stage: int | None, _: str, leaf: Any) -> LazyWeight:
    """Return one parameter, or a stage's entry of a stacked one."""

    def own(x: jax.Array) -> np.ndarray:  # sliced on the host: devices may slice by summing
        array = np.asarray(to_host(x))
        return array if stage is None else array[stage]

    def read() -> Any:
        local_leaves = jax.tree.map(own, leaf)
        return jax.tree.map(_merge_shards, local_leaves, is_leaf=lambda x: isinstance(x, ShardList))

    form = jax.eval_shape(lambda: leaf if stage is None else jax.tree.map(lambda x: x[0], leaf))
    if isinstance(form, ShardList) and not isinstance(form.shards, WeightBase):
        form = jax.ShapeDtypeStruct(form.shape, form.dtype)
    return LazyWeight(read, form)


def _merge_shards(x: Any) -> Any:
    """Merge shards on the host, bit for bit: a device may merge by summing, and -0 becomes 0."""
    if not isinstance(x, ShardList):
        return x
    if isinstance(x.shards, WeightBase):
        return x.merge()
    rows = x.shards.reshape(-1, *x.shards.shape[2:])
    return rows[x.row_index(rows.ndim)]
