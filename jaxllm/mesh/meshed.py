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
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.mesh import specs
from jaxllm.mesh.axes import Axes, mesh_of, parse
from jaxllm.mesh.beside import beside
from jaxllm.mesh.fsdp import Divided
from jaxllm.mesh.joined import joined
from jaxllm.mesh.layout import Layout
from jaxllm.mesh.local import Local, staged
from jaxllm.mesh.pipeline import rounds
from jaxllm.mesh.pipeline.places import layers_of
from jaxllm.mesh.pipeline.stages import Stages, check_stages
from jaxllm.mesh.placing import Shared, everywhere
from jaxllm.mesh.rules import HEADS, TOKENS, fitted, share_of
from jaxllm.mesh.sequence import megatron
from jaxllm.mesh.sequence.ways import check, check_chunks
from jaxllm.mesh.sequence.writing import SplitSlots
from jaxllm.models.layers import Trace
from jaxllm.weights.leaves.parted import Tokens
from jaxllm.weights.linear import ROUNDED
from jaxllm.weights.paths import InRounds, Params, Placed, map_leaves
from jaxllm.weights.precision import Precision


class Meshed(nn.Module, Placed, InRounds):
    """A model whose parameters and caches are sharded over devices.

    Steps call `apply` as for any model, with parameters from `shared` or `reader`; inputs and
    outputs are global arrays with a sharding. `Layout` describes how a call's arrays are sharded,
    `Local` how the parameters are. Use `meshed` to make one: it checks the configuration.
    """

    config: ModelConfig
    precision: Precision
    axes: Axes
    exact: bool = False  # sum in the order of one device (`weights.leaves.parted.Gathered`)
    course: Stages = Stages(1)  # runs the layers, in stages or in one
    fsdp: bool = False  # shard matrices over `data` too (`mesh.fsdp`)
    remat: bool = False
    # Each process keeps its own rows of the outputs, as training needs; otherwise every process
    # gets all of them, to read on the host.
    apart: bool = False
    parallel_logits: bool = False  # keep logits sharded over the vocabulary

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
        **given: Any,
    ) -> Trace:
        """Return what the module's `__call__` returns. `given` are its further inputs by row."""
        by_row = {
            "token_BT": token_BT,
            "position_BT": position_BT,
            "length_B": length_B,
            "column_B": column_B,
            **given,
        }
        cached = {"segments": segments} | ({"memory": memory} if memory else {})
        (batch, columns), mass = token_BT.shape, attention_mass
        picked = column_B is not None
        layout = Layout(
            self.config,
            self.axes,
            self.table,
            batch,
            columns,
            picked,
            mass,
            self.apart,
            self.parallel_logits,
        )
        local = self.local(variables["params"], layout.rows, layout.stream)
        apply = partial(module_of(self).apply, attention_mass=mass)
        return layout.run(apply, local, by_row, cached)

    @property
    def table(self) -> list[list[int | None]]:
        """The layer numbers of each stage, by place; None: an empty place."""
        return layers_of(self.config, self.axes.stage, self.course.chunks)

    @nn.nowrap
    def kept(self) -> tuple[int, int]:
        return len(self.table[0]), self.config.num_key_value_heads * self.axes.stage

    @nn.nowrap
    def stacks(self) -> tuple[tuple[int | None, ...], ...]:
        return tuple(map(tuple, self.table)) if self.axes.stage > 1 else ()

    @nn.nowrap
    def by_layer(self, kept: Sequence[np.ndarray]) -> list[np.ndarray]:
        parts = [np.split(x, self.stages, axis=2) for x in kept]
        found = {n: x for each, of in zip(zip(*self.table, strict=True), parts, strict=True)
                 for n, x in zip(each, of, strict=True) if n is not None}  # fmt: skip
        return [found[n] for n in sorted(found)]

    @property
    def stages(self) -> int:
        return self.axes.stage

    @nn.nowrap
    def among(self, rows: int) -> int:
        return self.axes.over(specs.rows_over(self.axes, rows) or ())

    @nn.nowrap
    def groups(self, rows: int) -> np.ndarray | None:
        devices = self.among(rows)
        if self.stages == 1 or self.course.chunks > 1 or rows % (devices * self.stages):
            return None
        each = rows // (devices * self.stages)
        return np.tile(np.repeat(np.arange(self.stages, dtype=np.int32), each), devices)

    @nn.nowrap
    def flight(self, rows: int) -> jax.Array:
        shape = (rows // self.stages, 1, self.stages * self.config.hidden_size)
        return jnp.zeros(shape, jnp.dtype(self.precision.activations))

    @nn.nowrap
    def tick(self, params: Params, *given: Any) -> tuple[jax.Array, jax.Array, Segment]:
        return rounds.tick(self, module_of(self), params, *given)

    @nn.nowrap
    def shared(self, params: Params) -> Params:
        """Shard parameters of the unsharded model."""
        reader = self.reader()
        return reader.finished(map_leaves(reader.leaf, params))

    @nn.nowrap
    def everywhere(self, tree: Any) -> Any:
        return jax.tree.map(partial(everywhere, mesh_of(self.axes)), tree)

    @nn.nowrap
    def like(self, config: ModelConfig) -> "Meshed":
        axes, chunks = parse(str(self.axes)), self.course.chunks
        return meshed(config, self.precision, axes, exact=self.exact, chunks=chunks, fsdp=self.fsdp)

    @nn.nowrap
    def names(self, path: str) -> tuple[str | None, ...]:
        """Return the unsharded paths of the parameter at `path`, one per stage; None: empty."""
        if not staged(self.config, self.axes, path):
            return (path,)
        layers = models.family(self.config.model_type).layers
        place, dot, rest = path.removeprefix(f"{layers}.").partition(".")
        numbers = (row[int(place)] for row in self.table)
        return tuple(None if n is None else f"{layers}.{n}{dot}{rest}" for n in numbers)

    @nn.nowrap
    def homes(self, path: str) -> list[str]:
        """Return the path of each stage's entry at `path`; if empty, in the place before."""
        names = self.names(path)
        if None not in names:
            return [name for name in names if name is not None]
        prefix = f"{models.family(self.config.model_type).layers}."
        place, dot, rest = path.removeprefix(prefix).partition(".")
        before = self.homes(f"{prefix}{int(place) - 1}{dot}{rest}")
        return [own or other for own, other in zip(names, before, strict=True)]

    @nn.nowrap
    def later(self, params: Params) -> Params:
        return joined(params, self.names)

    @nn.nowrap
    def beside(self, params: Params, around: Callable[[str, Any], Any]) -> Params:
        return beside(self, params, around)

    @nn.nowrap
    def with_parallel_logits(self) -> "Meshed":
        parts = self.axes.over(TOKENS)
        return self if self.exact or parts == 1 else self.clone(parallel_logits=True)

    @nn.nowrap
    def check_rows(self, rows: int) -> None:
        fitted(self.axes, self.config)  # training may have changed the experts' capacity
        if rows % self.axes.data:
            raise ConfigError(
                f"batch of {rows} rows is not divisible by data={self.axes.data}. Use a multiple of"
                f" {self.axes.data} rows, or another mesh"
            )

    @nn.nowrap
    def plain(self) -> nn.Module:
        return models.build(self.config, self.precision).clone(remat=self.remat)

    @nn.nowrap
    def reader(self) -> Shared:
        """Return the placer that shards parameters as they are read."""
        kind = Divided if self.fsdp else Shared
        return kind(self.config, self.axes, self.exact, self.table)

    @nn.nowrap
    def local(self, params: Params, rows: specs.Rows, stream: Tokens | None = None) -> Local:
        """Return one device's view of these parameters, for a call with such rows and tokens."""
        return Local(
            self.config,
            self.axes,
            self.exact,
            self.fsdp,
            params,
            rows,
            stream,
            self.parallel_logits,
        )

    @nn.nowrap
    def place(self, path: str, array: Any) -> NamedSharding:
        rows = specs.rows_over(self.axes, array.shape[0]) if array.ndim else None
        return NamedSharding(mesh_of(self.axes), specs.of_cache(path, array, rows, self.axes))

    @nn.nowrap
    def splits(self, columns: int) -> bool:
        return columns > 1 and (self.axes.stream or self.axes.sequence > 1)

    @property
    def writer(self) -> SplitSlots | None:  # type: ignore[override]
        if self.axes.sequence == 1 or self.axes.exchange:
            return None
        return SplitSlots(self.axes)


def meshed(
    config: ModelConfig,
    precision: Precision,
    axes: Axes,
    *,
    exact: bool = False,
    chunks: int = 1,
    microbatches: int | None = None,
    fsdp: bool = False,
) -> Meshed:
    """Make a sharded model.

    Args:
        chunks: see `pipeline.stages.Stages`, also for microbatches.
        fsdp: see `mesh.fsdp`.

    Raises:
        ConfigError: if the model does not fit the mesh, or there are too few devices.
    """
    axes = fitted(axes, config)
    check(share_of(config, axes), axes, exact)
    megatron.check(axes, exact)
    mesh_of(axes)
    if not exact:
        check_rounding(config, precision, axes)
    course = Stages(axes.stage, chunks, microbatches)
    check_stages(config, precision, course)
    check_chunks(axes, chunks)
    return Meshed(
        config=config, precision=precision, axes=axes, exact=exact, course=course, fsdp=fsdp
    )


def check_rounding(config: ModelConfig, precision: Precision, axes: Axes) -> None:
    """Raise ConfigError if sharding would split a block of columns that are rounded together."""
    over = axes.over(HEADS)
    if not precision.int8_inputs or over == 1:
        return
    widths = {name: getattr(config, name) for name in models.family(config.model_type).widths}
    heads = config.num_attention_heads * config.head_dim
    for name, size in {"the heads' width": heads, **widths}.items():
        if size // over % ROUNDED:
            raise ConfigError(
                f"int8_inputs rounds inputs in blocks of {ROUNDED} columns, but {name} {size} over"
                f" tensor={over} splits a block. Use exact=True, or a smaller tensor axis"
            )


@cache
def module_of(model: Meshed) -> nn.Module:
    """Return the module that one device runs."""
    inner: nn.Module = models.build(share_of(model.config, model.axes), model.precision)
    if model.axes.stage > 1:
        inner = inner.clone(course=model.course)
    return inner.clone(remat=True) if model.remat else inner
