"""A sharded model: the module of one device's share, run inside one `jax.shard_map`."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

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
from jaxllm.sharding import partition_specs
from jaxllm.sharding.adapters import attach_adapter
from jaxllm.sharding.call import CallSharding
from jaxllm.sharding.context_parallel import sequence_parallel
from jaxllm.sharding.context_parallel.dispatch import check_chunks, check_context_parallel
from jaxllm.sharding.context_parallel.split_cache_update import SplitCacheWriter
from jaxllm.sharding.fsdp import FsdpSharder
from jaxllm.sharding.gather_params import gather_lazy
from jaxllm.sharding.local_params import LocalParams, is_staged
from jaxllm.sharding.mesh_spec import MeshSpec, build_mesh, parse_mesh
from jaxllm.sharding.partition_rules import HEAD_AXES, VOCAB_AXES, fit_mesh, local_config
from jaxllm.sharding.pipeline import decode
from jaxllm.sharding.pipeline.forward import PipelineRunner, check_stages
from jaxllm.sharding.pipeline.stage_layers import assign_layers
from jaxllm.sharding.shard_params import ParamSharder, replicate
from jaxllm.sharding.tensor_parallel import SequenceSlice
from jaxllm.weights.linear import INT8_BLOCK
from jaxllm.weights.paths import Params, PipelinedDecoder, ShardedModelBase, map_leaves
from jaxllm.weights.precision import Precision


class ShardedModel(nn.Module, ShardedModelBase, PipelinedDecoder):
    """A model whose parameters and caches are sharded over devices.

    Steps call `apply` as for any model, with parameters from `shared` or `make_placer`; inputs and
    outputs are global arrays with a sharding. `CallSharding` describes how a call's arrays are
    sharded, `LocalParams` how the parameters are. Use `make_sharded_model` to make one: it checks
    the configuration.
    """

    config: ModelConfig
    precision: Precision
    axes: MeshSpec
    exact: bool = (
        False  # sum in the order of one device (`sharding.tensor_parallel.RowParallelExact`)
    )
    runner: PipelineRunner = PipelineRunner(1)  # runs the layers, in stages or in one
    fsdp: bool = False  # shard matrices over `data` too (`sharding.fsdp`)
    remat: bool = False
    # Each process keeps its own rows of the outputs, as training needs; otherwise every process
    # gets all of them, to read on the host.
    keep_sharded_outputs: bool = False
    sharded_logits: bool = False  # keep logits sharded over the vocabulary

    @nn.nowrap
    def apply(  # type: ignore[override]
        self,
        variables: Mapping[str, Any],
        token_BT: jax.Array,
        position_BT: jax.Array,
        length_B: jax.Array,
        segments: tuple[Segment, ...] = (),
        column_B: jax.Array | None = None,
        attention_mass: Any = False,
        *,
        memory: tuple[Any, ...] = (),
        **extra: Any,
    ) -> Trace:
        """Return what the module's `__call__` returns. `extra` are its further inputs by row."""
        by_row = {
            "token_BT": token_BT,
            "position_BT": position_BT,
            "length_B": length_B,
            "column_B": column_B,
            **extra,
        }
        cached = {"segments": segments} | ({"memory": memory} if memory else {})
        (batch, columns), mass = token_BT.shape, attention_mass
        picked = column_B is not None
        layout = CallSharding(
            self.config,
            self.axes,
            self.layer_table,
            batch,
            columns,
            picked,
            mass,
            self.keep_sharded_outputs,
            self.sharded_logits,
        )
        local = self.local_params(variables["params"], layout.row_axes, layout.token_slice)
        apply = partial(local_module(self).apply, attention_mass=mass)
        return layout.run(apply, local, by_row, cached)

    @property
    def layer_table(self) -> list[list[int | None]]:
        """The layer numbers of each stage, by place; None: an empty place."""
        return assign_layers(self.config, self.axes.stage, self.runner.chunks)

    @nn.nowrap
    def cache_shape(self) -> tuple[int, int]:
        return len(self.layer_table[0]), self.config.num_key_value_heads * self.axes.stage

    @nn.nowrap
    def stage_layers(self) -> tuple[tuple[int | None, ...], ...]:
        return tuple(map(tuple, self.layer_table)) if self.axes.stage > 1 else ()

    @nn.nowrap
    def unstack_layers(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        parts = [np.split(x, self.num_stages, axis=2) for x in arrays]
        found = {n: x for each, of in zip(zip(*self.layer_table, strict=True), parts, strict=True)
                 for n, x in zip(each, of, strict=True) if n is not None}  # fmt: skip
        return [found[n] for n in sorted(found)]

    @property
    def num_stages(self) -> int:
        return self.axes.stage

    @nn.nowrap
    def num_data_shards(self, rows: int) -> int:
        return self.axes.num_shards(partition_specs.find_row_axes(self.axes, rows) or ())

    @nn.nowrap
    def row_groups(self, rows: int) -> np.ndarray | None:
        devices = self.num_data_shards(rows)
        if self.num_stages == 1 or self.runner.chunks > 1 or rows % (devices * self.num_stages):
            return None
        each = rows // (devices * self.num_stages)
        return np.tile(np.repeat(np.arange(self.num_stages, dtype=np.int32), each), devices)

    @nn.nowrap
    def empty_pipeline(self, rows: int) -> jax.Array:
        shape = (rows // self.num_stages, 1, self.num_stages * self.config.hidden_size)
        return jnp.zeros(shape, jnp.dtype(self.precision.activations))

    @nn.nowrap
    def run_tick(self, params: Params, *given: Any) -> tuple[jax.Array, jax.Array, Segment]:
        return decode.run_tick(self, local_module(self), params, *given)

    @nn.nowrap
    def shard(self, params: Params) -> Params:
        """Shard parameters of the unsharded model."""
        reader = self.make_placer()
        return reader.finish(map_leaves(reader.place_weight, params))

    @nn.nowrap
    def replicate(self, tree: Any) -> Any:
        return jax.tree.map(partial(replicate, build_mesh(self.axes)), tree)

    @nn.nowrap
    def with_config(self, config: ModelConfig) -> "ShardedModel":
        axes, chunks = parse_mesh(str(self.axes)), self.runner.chunks
        return make_sharded_model(
            config, self.precision, axes, exact=self.exact, chunks=chunks, fsdp=self.fsdp
        )

    @nn.nowrap
    def unsharded_paths(self, path: str) -> tuple[str | None, ...]:
        """Return the unsharded paths of the parameter at `path`, one per stage; None: empty."""
        if not is_staged(self.config, self.axes, path):
            return (path,)
        layers = models.get_family(self.config.model_type).layers
        place, dot, rest = path.removeprefix(f"{layers}.").partition(".")
        numbers = (row[int(place)] for row in self.layer_table)
        return tuple(None if n is None else f"{layers}.{n}{dot}{rest}" for n in numbers)

    @nn.nowrap
    def template_paths(self, path: str) -> list[str]:
        """Return the path of each stage's entry at `path`; if empty, in the place before."""
        names = self.unsharded_paths(path)
        if None not in names:
            return [name for name in names if name is not None]
        prefix = f"{models.get_family(self.config.model_type).layers}."
        place, dot, rest = path.removeprefix(prefix).partition(".")
        before = self.template_paths(f"{prefix}{int(place) - 1}{dot}{rest}")
        return [own or other for own, other in zip(names, before, strict=True)]

    @nn.nowrap
    def gather_lazy(self, params: Params) -> Params:
        return gather_lazy(params, self.unsharded_paths)

    @nn.nowrap
    def attach_adapter(self, params: Params, wrap: Callable[[str, Any], Any]) -> Params:
        return attach_adapter(self, params, wrap)

    @nn.nowrap
    def with_sharded_logits(self) -> "ShardedModel":
        parts = self.axes.num_shards(VOCAB_AXES)
        return self if self.exact or parts == 1 else self.clone(sharded_logits=True)

    @nn.nowrap
    def check_rows(self, rows: int) -> None:
        fit_mesh(self.axes, self.config)  # training may have changed the experts' capacity
        if rows % self.axes.data:
            raise ConfigError(
                f"batch of {rows} rows is not divisible by data={self.axes.data}. Use a multiple of"
                f" {self.axes.data} rows, or another mesh"
            )

    @nn.nowrap
    def unsharded(self) -> nn.Module:
        return models.build(self.config, self.precision).clone(remat=self.remat)

    @nn.nowrap
    def make_placer(self) -> ParamSharder:
        """Return the placer that shards parameters as they are read."""
        kind = FsdpSharder if self.fsdp else ParamSharder
        return kind(self.config, self.axes, self.exact, self.layer_table)

    @nn.nowrap
    def local_params(
        self, params: Params, rows: partition_specs.RowAxes, stream: SequenceSlice | None = None
    ) -> LocalParams:
        """Return one device's view of these parameters, for a call with such rows and tokens."""
        return LocalParams(
            self.config,
            self.axes,
            self.exact,
            self.fsdp,
            params,
            rows,
            stream,
            self.sharded_logits,
        )

    @nn.nowrap
    def cache_sharding(self, path: str, array: Any) -> NamedSharding:
        rows = partition_specs.find_row_axes(self.axes, array.shape[0]) if array.ndim else None
        return NamedSharding(
            build_mesh(self.axes), partition_specs.cache_spec(path, array, rows, self.axes)
        )

    @nn.nowrap
    def splits_tokens(self, columns: int) -> bool:
        return columns > 1 and (self.axes.sequence_parallel or self.axes.sequence > 1)

    @property
    def cache_writer(self) -> SplitCacheWriter | None:  # type: ignore[override]
        if self.axes.sequence == 1 or self.axes.use_ulysses:
            return None
        return SplitCacheWriter(self.axes)


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
        chunks: see `pipeline.stages.PipelineRunner`, also for microbatches.
        fsdp: see `sharding.fsdp`.

    Raises:
        ConfigError: if the model does not fit the mesh, or there are too few devices.
    """
    axes = fit_mesh(axes, config)
    check_context_parallel(local_config(config, axes), axes, exact)
    sequence_parallel.check(axes, exact)
    build_mesh(axes)
    if not exact:
        check_int8_blocks(config, precision, axes)
    course = PipelineRunner(axes.stage, chunks, microbatches)
    check_stages(config, precision, course)
    check_chunks(axes, chunks)
    return ShardedModel(
        config=config, precision=precision, axes=axes, exact=exact, runner=course, fsdp=fsdp
    )


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
        if size // over % INT8_BLOCK:
            raise ConfigError(
                f"int8_inputs rounds inputs in blocks of {INT8_BLOCK} columns, but {name} {size}"
                " over"
                f" tensor={over} splits a block. Use exact=True, or a smaller tensor axis"
            )


@cache
def local_module(model: ShardedModel) -> nn.Module:
    """Return the module that one device runs."""
    inner: nn.Module = models.build(local_config(model.config, model.axes), model.precision)
    if model.axes.stage > 1:
        inner = inner.clone(runner=model.runner)
    return inner.clone(remat=True) if model.remat else inner
