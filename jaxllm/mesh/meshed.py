"""A model on a mesh: the same module, of one device's share of it, inside one `jax.shard_map`."""

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
    """A model whose parameters and caches are spread over devices; in all else a model.

    Steps call `apply` of it as of any other, with parameters from `shared` or `reader`, and what is
    made of steps is as it was: what goes in and comes out are whole arrays with a sharding. What of
    a call is whose is its `Layout`, what of the parameters its `Local`.

    exact: see `weights.leaves.parted.Gathered`. course: how layers are run, in stages or in one.
    fsdp: whether devices of `data` have parts of each matrix (`mesh.fsdp`). apart: whether each of
    several processes has its own rows of what comes out, as a training wants it; otherwise each has
    all, to be read on the host. parallel_logits: whether logits stay divided over the vocabulary.
    Made by `meshed`, which checks.
    """

    config: ModelConfig
    precision: Precision
    axes: Axes
    exact: bool = False
    course: Stages = Stages(1)
    fsdp: bool = False
    remat: bool = False
    apart: bool = False
    parallel_logits: bool = False

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
        """The numbers of the layers that each stage has, by place; None: an empty one."""
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
        """Parameters that are whole, as this model takes them."""
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
        """The paths of what stands side by side in the parameter at `path`, one for each stage;
        None for one without a layer there.
        """
        if not staged(self.config, self.axes, path):
            return (path,)
        layers = models.family(self.config.model_type).layers
        place, dot, rest = path.removeprefix(f"{layers}.").partition(".")
        numbers = (row[int(place)] for row in self.table)
        return tuple(None if n is None else f"{layers}.{n}{dot}{rest}" for n in numbers)

    @nn.nowrap
    def homes(self, path: str) -> list[str]:
        """Return for each stage a path of what it has at `path`, or in the place before it."""
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
    def local(self, params: Params, rows: specs.Rows, stream: Tokens | None = None) -> Local:
        """What a device takes for these parameters, where it has such rows and tokens of a call."""
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
    """A model on a mesh. chunks, microbatches: see `pipeline.stages.Stages`. fsdp: see `mesh.fsdp`.

    Raises ConfigError where it does not divide, or devices are missing.
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
    inner: nn.Module = models.build(share_of(model.config, model.axes), model.precision)
    if model.axes.stage > 1:
        inner = inner.clone(course=model.course)
    return inner.clone(remat=True) if model.remat else inner
