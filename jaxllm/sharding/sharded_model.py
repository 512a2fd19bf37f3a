"""A sharded model: the module of one device's share, run inside one `jax.shard_map`."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any, ClassVar, TypeVar

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxllm import models
from jaxllm.cache.kv import Segment
from jaxllm.config.model import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.layers import Trace
from jaxllm.models.sites import SITES, split_name
from jaxllm.runtime.multihost import to_host
from jaxllm.runtime.plugins import find_plugins
from jaxllm.sharding import partition_specs
from jaxllm.sharding.call import CallSharding
from jaxllm.sharding.context_parallel import sequence_parallel
from jaxllm.sharding.context_parallel.dispatch import SplitCacheWriter, check_context_parallel
from jaxllm.sharding.fsdp import FsdpSharder
from jaxllm.sharding.local_params import LocalParams
from jaxllm.sharding.mesh_spec import PLUGIN_AXES, MeshSpec, build_mesh, parse_mesh
from jaxllm.sharding.model_sharding import ModelSharding
from jaxllm.sharding.partition_rules import HEAD_AXES, VOCAB_AXES, local_config, resolve_mesh
from jaxllm.sharding.shard_list import ShardList
from jaxllm.sharding.shard_params import ParamSharder, WrapLeaf, replicate
from jaxllm.sharding.tensor_parallel import SequenceSlice
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

    options: ClassVar[tuple[str, ...]] = ("exact", "fsdp")  # fields that `make_sharded_model` sets

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
        local = self.local_params(variables["params"], call.row_axes, call.token_slice)
        apply = partial(local_module(self).apply, attention_mass=attention_mass, read=read)
        return call.run(apply, local, row_inputs, cached)

    def local_params(
        self,
        params: Params,
        row_axes: partition_specs.RowAxes,
        token_slice: SequenceSlice | None = None,
    ) -> LocalParams:
        """Return the parameters as one device has them."""
        return LocalParams(self, params, row_axes, token_slice)

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

    def make_placer(self) -> ParamSharder:
        """Return the placer that shards parameters as they are read."""
        return (FsdpSharder if self.fsdp else ParamSharder)(self)

    def shard(self, params: Params) -> Params:
        placer = self.make_placer()
        return placer.finish(map_leaves(placer.place_weight, params))

    def gather_lazy(self, params: Params) -> Params:
        return map_leaves(lambda _, leaf: lazy_weight(leaf), params)

    def check_sites(self, read: Sequence[str] = (), edited: Sequence[str] = ()) -> None:
        is_split = self.axes.sequence > 1 or self.axes.sequence_parallel
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
                    + (" one without sequence and :tokens" if is_split else " attn_out")
                )

    def num_data_shards(self, rows: int) -> int:
        return self.axes.num_shards(partition_specs.find_row_axes(self.axes, rows) or ())

    def with_sharded_logits(self) -> "ShardedModel":
        """Return itself if the vocabulary is not sharded, or sums are in the order of one device.

        See `Model.with_sharded_logits`.
        """
        is_sharded = self.axes.num_shards(VOCAB_AXES) > 1
        return self.clone(sharded_logits=True) if is_sharded and not self.exact else self

    def check(self) -> None:
        """Raise ConfigError if its layers cannot be run on its mesh."""

    def with_config(self, config: ModelConfig, precision: Precision) -> "ShardedModel":
        """Return a model that is sharded as this one. Raises ConfigError if it cannot be."""
        options = {name: getattr(self, name) for name in self.options}
        return make_sharded_model(config, precision, parse_mesh(str(self.axes)), **options)


def make_sharded_model(
    config: ModelConfig,
    precision: Precision,
    axes: MeshSpec,
    *,
    exact: bool = False,
    fsdp: bool = False,
    **options: Any,
) -> ShardedModel:
    """Make a sharded model.

    Args:
        fsdp: see `sharding.fsdp`.
        options: those of the package that carries out an axis (`mesh_spec.PLUGIN_AXES`).

    Raises:
        ConfigError: if the model does not fit the mesh, or there are too few devices.
    """
    axes = resolve_mesh(axes, config)
    check_context_parallel(local_config(config, axes), axes, exact)
    sequence_parallel.check(axes, exact)
    build_mesh(axes)
    if not exact:
        check_int8_blocks(config, precision, axes)
    kind = ShardedModel
    for name in PLUGIN_AXES:
        if getattr(axes, name) > 1:
            kind = find_plugins("mesh_axes")[name].load()
    if unknown := options.keys() - {*kind.options}:
        raise ConfigError(f"mesh {axes} has no options {', '.join(sorted(unknown))}. Drop them")
    model = kind(config, precision, axes, exact=exact, fsdp=fsdp, **options)
    model.check()
    return model


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
    return other.with_config(model.config, model.precision)


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


def attach_adapter(model: Model, params: Params, wrap: WrapLeaf) -> Params:
    """Add an adapter for training to parameters where they are, and place its arrays.

    Args, Raises: as `ParamSharder.attach_adapter`.
    """
    if not isinstance(model, ShardedModel):
        return map_leaves(wrap, params)
    placer = model.make_placer()
    return map_leaves(lambda path, weight: placer.attach_adapter(path, weight, wrap), params)


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
    if model.layer_runner is not None:
        module = module.clone(runner=model.layer_runner)
    return module.clone(remat=True) if model.remat else module


def lazy_weight(leaf: Any, part: int | None = None) -> LazyWeight:
    """Return a parameter of the unsharded model, whose shards are merged in their own format.

    Args:
        part: the index on the first axis of all arrays, if several parameters share them.
    """

    def own(x: jax.Array) -> np.ndarray:  # sliced on the host: devices may slice by summing
        array = np.asarray(to_host(x))
        return array if part is None else array[part]

    def read() -> Any:
        local_leaves = jax.tree.map(own, leaf)
        return jax.tree.map(_merge_shards, local_leaves, is_leaf=lambda x: isinstance(x, ShardList))

    form = jax.eval_shape(lambda: leaf if part is None else jax.tree.map(lambda x: x[0], leaf))
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
