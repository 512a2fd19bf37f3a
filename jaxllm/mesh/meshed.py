"""A model on a mesh: the same module, of one device's share of it, inside one `jax.shard_map`."""

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm import models
from jaxllm.cache.kv import Segment
from jaxllm.config import ModelConfig
from jaxllm.distributed import several
from jaxllm.errors import ConfigError
from jaxllm.mesh import specs
from jaxllm.mesh.axes import Axes, mesh_of
from jaxllm.mesh.fsdp import Divided, over_data, scattered
from jaxllm.mesh.joined import joined
from jaxllm.mesh.pipeline import rounds
from jaxllm.mesh.pipeline.stacked import spec_of_stacked, unfolded
from jaxllm.mesh.pipeline.stages import Stages, check_stages, layers_of
from jaxllm.mesh.placing import Shared
from jaxllm.mesh.rules import EXPERTS, GROUPS, HEADS, Split, fitted, share_of, split_of
from jaxllm.mesh.sequence import megatron
from jaxllm.mesh.sequence.ways import check, way_of
from jaxllm.mesh.sequence.writing import SplitSlots
from jaxllm.models.layers import Across, Attend, Trace
from jaxllm.weights.leaves.adapted import Adapted
from jaxllm.weights.leaves.owned import Owned
from jaxllm.weights.leaves.parted import Everywhere, Gathered, Partial, Spread, Vocabulary
from jaxllm.weights.linear import ROUNDED
from jaxllm.weights.paths import InRounds, Params, Placed, flatten, map_leaves
from jaxllm.weights.precision import Precision

ROWS = (("data", "expert"), ("data",))  # the first of them that divides a batch


class Meshed(nn.Module, Placed, InRounds):
    """A model whose parameters and caches are spread over devices; in all else a model.

    Steps call `apply` of it as of any other, with parameters from `shared` or `reader`, and what is
    made of steps is as it was: what goes in and comes out are whole arrays with a sharding. Rows of
    a batch are split over `data` and `expert` where they divide, or over `data` alone; otherwise
    each of its devices runs all of them.
    exact: see `weights.leaves.parted.Gathered`. course: how layers are run, in stages or in one.
    fsdp: whether devices of `data` have parts of each matrix (`mesh.fsdp`). Made by `meshed`, which
    checks.
    """

    config: ModelConfig
    precision: Precision
    axes: Axes
    exact: bool = False
    course: Stages = Stages(1)
    fsdp: bool = False
    remat: bool = False

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
        """What the model's `__call__` gives, of the same. given: what else it takes, by row."""
        params, inner = variables["params"], module_of(self)
        batch, columns = token_BT.shape
        rows, way = self.rows_over(batch), way_of(self.axes, columns)
        way.check(attention_mass)
        stream = megatron.takes(self.axes, HEADS, way.here)
        named = {
            "token_BT": token_BT,
            "position_BT": position_BT,
            "length_B": length_B,
            "column_B": column_B,
            **given,
        }
        by_row = way.laid_out(jax.tree.map(self._by_all, named))
        whole = [specs.slot_axis(self.axes, s.position_BS.shape[1]) is None for s in segments]
        past = jnp.any(jnp.array([(s.position_BS >= 0).any() for s in segments]))

        placed = self.parameter_specs(params, rows)
        where = dict(flatten(placed))

        def run(params: Params, by_row: Any, segments: Any, memory: Any, past: Any) -> Any:
            more = {"memory": memory} if memory else {}

            def mine(path: str, leaf: Any) -> Any:
                return self.local(rows, where[path], path, leaf, stream=stream)

            own = {"params": map_leaves(mine, params)}
            bare = partial(
                inner.apply, own, segments=segments, attention_mass=attention_mass, **more
            )

            def apply(attend: Attend | None = None, **by_row: Any) -> Any:
                if stream:
                    return megatron.run(bare, HEADS, attend, by_row)
                return bare(across=Across(attend), **by_row)

            trace = way.run(apply, by_row, whole, past)
            return _summed(trace) if attention_mass is True else trace

        spread = jax.shard_map(
            run,
            mesh=mesh_of(self.axes),
            in_specs=(
                placed,
                {name: P(rows, *specs.columns(name, way.axis)) for name in by_row},
                tuple(specs.of_segment(segment, batch, rows, self.axes) for segment in segments),
                specs.of_memory(self.config, rows) if memory else (),
                P(),
            ),
            out_specs=specs.of_trace(
                self.config,
                rows,
                self.axes,
                way.axis,
                layers=self.kept()[0],
                picked=column_B is not None,
                by_head=attention_mass == "heads",
            ),
            # The model's loops begin with constants, which would have to be said to vary. Without
            # that, derivatives are those of the sum over devices of what each gives, of which each
            # has its part: `psum` is its own transpose, an input that devices share is given the
            # sum of their parts, an output that they share a part each. No leaf has its own.
            check_vma=False,
        )
        trace: Trace = way.cut(spread(params, by_row, segments, memory, past), column_B is not None)
        seen = {n: self._by_all(getattr(trace, n)) for n in ("logits", "embeddings", "norm")}
        layers = tuple(layer._replace(x=self._by_all(layer.x)) for layer in trace.layers)
        trace = trace.replace(layers=layers, **seen)
        return trace if self.axes.stage == 1 else unfolded(trace, self.table, attention_mass)

    @property
    def table(self) -> list[list[int]]:
        """The numbers of the layers that each stage has."""
        return layers_of(self.config, self.axes.stage, self.course.chunks)

    @nn.nowrap
    def kept(self) -> tuple[int, int]:
        stages = self.axes.stage
        heads = self.config.num_key_value_heads
        return self.config.num_hidden_layers // stages, heads * stages

    @property
    def stages(self) -> int:
        return self.axes.stage

    @nn.nowrap
    def groups(self, rows: int) -> np.ndarray | None:
        over = self.rows_over(rows)
        devices = 1 if over is None else self.axes.over(over)
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
        """Parameters that are whole, as this model takes them."""
        reader = self.reader()
        return reader.finished(map_leaves(reader.leaf, params))

    @nn.nowrap
    def names(self, path: str) -> tuple[str, ...]:
        """The paths of what stands side by side in the parameter at `path`, one for each stage."""
        if not self._staged(path):
            return (path,)
        layers = models.family(self.config.model_type).layers
        place, dot, rest = path.removeprefix(f"{layers}.").partition(".")
        return tuple(f"{layers}.{row[int(place)]}{dot}{rest}" for row in self.table)

    @nn.nowrap
    def whole(self, params: Params) -> Params:
        """Parameters as a model of one device has them, on the host, but for quantized `Shares`."""

        return joined(params, self.names)

    @nn.nowrap
    def beside(self, params: Params) -> Params:
        if self.axes.stage > 1:
            raise ConfigError(
                "an adapter is trained on a mesh with stage=1: stages are of models whose weights"
                " are trained"
            )
        for path, leaf in flatten(params):
            if isinstance(leaf, Adapted) and leaf.dropout and self.axes.sequence > 1:
                raise ConfigError(
                    "dropout is drawn for rows of whole texts, and sequence divides them: leave it"
                    " out, or use a mesh with sequence=1"
                )
            parts = self.axes.over(split_of(self.config, self.exact, path).over)
            dora = isinstance(leaf, Adapted) and leaf.magnitude is not None
            if dora and leaf.site == "rows" and parts > 1:
                raise ConfigError(
                    f"{path}: lengths of the columns of a table whose rows are divided are not"
                    " trained: leave it out of DoRA's targets, or use a mesh with tensor=1"
                )
        return map_leaves(self.reader().beside, params)

    @nn.nowrap
    def check_rows(self, rows: int) -> None:
        fitted(self.axes, self.config)  # a training may have changed what experts take
        if rows % self.axes.data:
            raise ConfigError(
                f"a batch of {rows} rows does not divide over data={self.axes.data}: train on"
                " batches of a multiple of it, or with another mesh"
            )

    @nn.nowrap
    def plain(self) -> nn.Module:
        return models.build(self.config, self.precision).clone(remat=self.remat)

    @nn.nowrap
    def reader(self) -> Shared:
        """Where parameters go as they are read."""
        kind = Divided if self.fsdp else Shared
        return kind(self.config, self.axes, self.exact, self.table)

    @nn.nowrap
    def parameter_specs(self, params: Params, rows: specs.Rows) -> Params:
        """Where the arrays of parameters are, as `jax.shard_map` takes it."""

        def spec(path: str, leaf: Any) -> Any:
            split = split_of(self.config, self.exact, path)

            def of(leaf: Any) -> Any:
                found = specs.of_parameter(path, leaf, split, self.axes, rows)
                return over_data(path, leaf, found, self.axes) if self.fsdp else found

            return spec_of_stacked(leaf, of) if self._staged(path) else of(leaf)

        return map_leaves(spec, params)

    @nn.nowrap
    def place(self, path: str, array: Any) -> NamedSharding:
        rows = self.rows_over(array.shape[0]) if array.ndim else None
        return NamedSharding(mesh_of(self.axes), specs.of_cache(path, array, rows, self.axes))

    @nn.nowrap
    def apart(self, columns: int) -> bool:
        return columns > 1 and (self.axes.stream or self.axes.sequence > 1)

    @property
    def writer(self) -> SplitSlots | None:  # type: ignore[override]
        if self.axes.sequence == 1 or self.axes.exchange:
            return None
        return SplitSlots(self.axes, ("data",), GROUPS)

    @nn.nowrap
    def rows_over(self, batch: int) -> specs.Rows:
        """The axes over which so many rows are split."""
        return next((over for over in ROWS if batch % self.axes.over(over) == 0), None)

    @nn.nowrap
    def _by_all(self, x: jax.Array) -> jax.Array:
        """What is read on the host, by each of several processes: all rows for each of them."""
        if self.axes.data == 1 or not several():
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh_of(self.axes), P()))

    @nn.nowrap
    def _staged(self, path: str) -> bool:
        """Whether the parameter at `path` is one of each stage's."""
        layers = models.family(self.config.model_type).layers
        return self.axes.stage > 1 and path.startswith(f"{layers}.")

    @nn.nowrap
    def local(self, rows: specs.Rows, spec: Any, path: str, leaf: Any, stream: bool = False) -> Any:
        """What the module inside takes for the parameter at `path`. spec: where its arrays are.
        stream: whether that of tokens is split.
        """
        split = split_of(self.config, self.exact, path)
        mine = self._share(rows, split, spec, path, leaf, stream)
        if not split.stack or self.axes.expert == 1:
            return mine
        return Owned(mine, EXPERTS, apart=rows is not None and EXPERTS in rows)

    @nn.nowrap
    def _share(
        self, rows: specs.Rows, split: Split, spec: Any, path: str, leaf: Any, stream: bool
    ) -> Any:
        parts = self.axes.over(split.over)
        if self._staged(path):
            leaf = jax.tree.map(lambda x: x[0], leaf)
            spec = jax.tree.map(lambda s: P(*s[1:]), spec, is_leaf=lambda s: isinstance(s, P))
        mine = scattered(leaf, spec, self.axes)
        mine = _apart(mine, (rows or (), split.over if split.kind == "row" and parts > 1 else ()))
        positions = models.family(self.config.model_type).positions
        if stream and path == f"{positions}.weight":
            return Everywhere(mine, HEADS)
        if parts == 1:
            return mine
        if split.kind == "row":
            return Partial(mine, split.over, stream)
        if split.kind == "gathered":
            return Gathered(mine, split.over, parts)
        if split.kind == "vocabulary":
            return Vocabulary(mine, split.over, self.config.vocab_size, stream)
        return Spread(mine, split.over, self.exact) if split.kind == "norm" else mine


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
    """A model on a mesh. chunks, microbatches: see `pipeline.stages.Stages`. fsdp: see `mesh.fsdp`.

    Raises ConfigError where it does not divide, or devices are missing.
    """
    axes = fitted(axes, config)
    check(share_of(config, axes), axes, exact)
    megatron.check(config, axes, exact)
    mesh_of(axes)
    if several() and axes.stage * axes.expert * axes.sequence > 1:
        raise ConfigError(f"mesh {axes}: over several processes data and tensor alone are divided")
    if (axes.sequence > 1 or axes.stream) and axes.stage * axes.expert > 1:
        raise ConfigError(
            f"mesh {axes}: tokens of a text are split beside data and tensor, not beside stages or"
            " experts: leave out one of them"
        )
    if not exact:
        check_rounding(config, precision, axes)
    course = Stages(axes.stage, chunks, microbatches)
    check_stages(config, precision, course)
    return Meshed(
        config=config, precision=precision, axes=axes, exact=exact, course=course, fsdp=fsdp
    )


def check_rounding(config: ModelConfig, precision: Precision, axes: Axes) -> None:
    """Raises ConfigError where inputs are rounded in blocks, one of which would be cut."""
    over = axes.over(HEADS)
    if not precision.int8_inputs or over == 1:
        return
    widths = {name: getattr(config, name) for name in models.family(config.model_type).widths}
    heads = config.num_attention_heads * config.head_dim
    for name, size in {"the heads' width": heads, **widths}.items():
        if size // over % ROUNDED:
            raise ConfigError(
                f"int8_inputs rounds inputs in blocks of {ROUNDED} columns, and {name} {size}"
                f" over tensor={over} would cut one: take the exact mode, which does not"
            )


@cache
def module_of(model: Meshed) -> nn.Module:
    """The module that one device runs."""
    config = model.config
    if model.axes.stage > 1:
        config = config.with_layers(model.table[0])
    inner: nn.Module = models.build(share_of(config, model.axes), model.precision)
    if model.axes.stage > 1:
        inner = inner.clone(course=model.course)
    return inner.clone(remat=True) if model.remat else inner


def _apart(leaf: Any, apart: tuple[tuple[str, ...], tuple[str, ...]]) -> Any:
    """An adapted weight that is told over which axes devices have rows and columns of their own."""
    if not isinstance(leaf, Adapted):
        return leaf
    return leaf.replace(apart=apart, weight=_apart(leaf.weight, apart))


def _summed(trace: Any) -> Any:
    """The trace with attention mass over the heads of all devices."""
    layers = []
    for layer in trace.layers:
        mass = layer.attention.mass
        mass = None if mass is None else jax.lax.psum(mass, HEADS)
        layers.append(layer._replace(attention=layer.attention._replace(mass=mass)))
    return trace.replace(layers=tuple(layers))
