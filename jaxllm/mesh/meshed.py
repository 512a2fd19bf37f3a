"""A model on a mesh: the same module, of one device's share of it, inside one `jax.shard_map`."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jaxllm import models
from jaxllm.cache.kv import Segment
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.mesh.axes import Axes, mesh_of
from jaxllm.mesh.placing import Shared, adapted_splits, spec_of
from jaxllm.mesh.rules import GROUPS, HEADS, Split, fitted, share_of, split_of
from jaxllm.models.layers import Attended, Layer, Trace
from jaxllm.weights.leaves.adapted import Adapted
from jaxllm.weights.leaves.leaf import Leaf
from jaxllm.weights.leaves.parted import Gathered, Partial, Shares, Spread, Vocabulary
from jaxllm.weights.paths import Params, Placed, map_leaves
from jaxllm.weights.precision import Precision

ROWS = "data"


class Meshed(nn.Module, Placed):
    """A model whose parameters and caches are spread over devices; in all else a model.

    Steps call `apply` of it as of any other, with parameters from `shared`, and everything that
    goes by steps is as it was. What it is given and gives back are whole arrays with a sharding.
    Rows of a batch are split over `data` where they divide; otherwise each of its devices runs all
    of them. exact: see `weights.leaves.parted.Gathered`. Made by `meshed`, which checks.
    """

    config: ModelConfig
    precision: Precision
    axes: Axes
    exact: bool = False
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
        **given: Any,
    ) -> Trace:
        """What the model's `__call__` gives."""
        params, batch = variables["params"], token_BT.shape[0]
        rows = self._rows(batch)
        by_row = {
            "token_BT": token_BT,
            "position_BT": position_BT,
            "length_B": length_B,
            "column_B": column_B,
            **{name: x for name, x in given.items() if name != "memory"},
        }
        memory = given.get("memory", ())
        inner = module_of(self)

        def run(params: Params, by_row: Any, segments: Any, memory: Any) -> Trace:
            more = {"memory": memory} if memory else {}
            trace = inner.apply(
                {"params": map_leaves(self._mine, params)},
                segments=segments,
                attention_mass=attention_mass,
                **by_row,
                **more,
            )
            assert isinstance(trace, Trace)
            return _summed(trace) if attention_mass is True else trace

        spread = jax.shard_map(
            run,
            mesh=mesh_of(self.axes),
            in_specs=(
                map_leaves(lambda path, leaf: self._spec(path, leaf, rows), params),
                P(rows),
                tuple(_segment_specs(s, batch, rows) for s in segments),
                self._memory_specs(rows) if memory else (),
            ),
            out_specs=self._trace_specs(rows, attention_mass),
            check_vma=False,
        )
        trace: Trace = spread(params, by_row, segments, memory)
        return trace

    @nn.nowrap
    def shared(self, params: Params) -> Params:
        """Parameters that are whole, as this model takes them."""
        return map_leaves(self.reader().leaf, params)

    @nn.nowrap
    def reader(self) -> Shared:
        """Where they go as they are read."""
        return Shared(self.config, self.axes, self.exact)

    @nn.nowrap
    def place(self, path: str, array: Any) -> Sharding:
        """Of an array of a cache."""
        name, *_ = path.split(".")
        batch = self._rows(array.shape[0]) if array.ndim else None
        if path.startswith(("tail.k.", "tail.v.")):
            spec = P(batch, None, GROUPS)
        elif name == "memory" and array.ndim > 1:
            spec = P(batch, GROUPS)
        else:
            spec = P(batch) if array.ndim else P()
        return NamedSharding(mesh_of(self.axes), spec)

    @nn.nowrap
    def _rows(self, batch: int) -> str | None:
        """The axis over which so many rows are split; None: none."""
        return ROWS if batch % self.axes.data == 0 else None

    @nn.nowrap
    def _spec(self, path: str, leaf: Any, rows: str | None) -> Any:
        return _leaf_spec(path, leaf, split_of(self.config, self.exact, path), self.axes, rows)

    @nn.nowrap
    def _mine(self, path: str, leaf: Any) -> Any:
        """What the module inside takes for the parameter at `path`."""
        split = split_of(self.config, self.exact, path)
        parts = self.axes.over(split.over)
        mine = jax.tree.map(
            lambda x: x.share() if isinstance(x, Shares) else x,
            leaf,
            is_leaf=lambda x: isinstance(x, Shares),
        )
        if parts == 1:
            return mine
        if split.kind == "row":
            return Partial(mine, split.over)
        if split.kind == "gathered":
            return Gathered(mine, split.over, parts)
        if split.kind == "vocabulary":
            return Vocabulary(mine, split.over, self.config.vocab_size)
        if split.kind == "norm":
            return Spread(mine, split.over, self.exact)
        return mine

    @nn.nowrap
    def _memory_specs(self, rows: str | None) -> tuple[Any, ...]:
        return tuple(
            jax.tree.map(lambda x: P(rows, GROUPS) if x.ndim else P(rows), self.config.memory(i))
            for i in range(self.config.num_hidden_layers)
        )

    @nn.nowrap
    def _trace_specs(self, rows: str | None, attention_mass: Any) -> Trace:
        stream, heads, groups = P(rows), P(rows, None, HEADS), P(rows, None, GROUPS)
        mass = P(rows, HEADS) if attention_mass == "heads" else P(rows)
        memory = self._memory_specs(rows)
        layers = tuple(
            Layer(
                attention_norm=stream,
                attention=Attended(
                    heads, groups, groups, heads, stream, mass, memory[i] or stream
                ),
                mlp_norm=stream,
                mlp_hidden=P(rows, None, HEADS),
                mlp=stream,
                x=stream,
                memory=memory[i] or stream,
                router=stream,
            )
            for i in range(self.config.num_hidden_layers)
        )
        return Trace(stream, layers, stream, stream)


def meshed(
    config: ModelConfig, precision: Precision, axes: Axes, *, exact: bool = False
) -> Meshed:
    """A model on a mesh. Raises ConfigError where it does not divide, or devices are missing."""
    axes = fitted(axes, config)
    mesh_of(axes)
    return Meshed(config=config, precision=precision, axes=axes, exact=exact)


@cache
def module_of(model: Meshed) -> nn.Module:
    """The module that one device runs."""
    inner: nn.Module = models.build(share_of(model.config, model.axes), model.precision)
    return inner.clone(remat=True) if model.remat else inner


def _summed(trace: Trace) -> Trace:
    """The trace with attention mass over all heads."""
    layers = []
    for layer in trace.layers:
        mass = layer.attention.mass
        mass = None if mass is None else jax.lax.psum(mass, HEADS)
        layers.append(layer._replace(attention=layer.attention._replace(mass=mass)))
    summed: Trace = trace.replace(layers=tuple(layers))
    return summed


def _segment_specs(segment: Segment, batch: int, rows: str | None) -> Segment:
    """What all rows share is on every device of `data`."""

    def over(x: jax.Array) -> str | None:
        return rows if x.shape[0] == batch else None

    kv = P(over(segment.k[0]), None, GROUPS)
    beside = (segment.position_BS, segment.token_BS, segment.patched_BS)
    return Segment(kv, kv, *(P(over(x)) for x in beside))  # type: ignore[arg-type]


def _leaf_spec(path: str, leaf: Any, split: Split, axes: Axes, rows: str | None) -> Any:
    """The specs of a parameter's arrays. Raises ConfigError for one that is not split as it must
    be."""
    if isinstance(leaf, Adapted):
        roles = adapted_splits(leaf, split)
        pieces = {
            name: None if x is None else _leaf_spec(f"{path}.{name}", x, role, axes, rows)
            for name, role in roles.items()
            for x in [getattr(leaf, name)]
        }
        choice = None
        if leaf.choice is not None:
            choice = P(rows) if leaf.choice.shape[0] > 1 else P()
        key = None if leaf.key is None else P()
        inner = _leaf_spec(path, leaf.weight, split, axes, rows)
        return leaf.replace(weight=inner, choice=choice, key=key, **pieces)
    parts = axes.over(split.over)
    if isinstance(leaf, Shares):
        return jax.tree.map(lambda _: P(split.over), leaf)
    if parts == 1:
        return jax.tree.map(lambda _: P(), leaf)
    size = leaf.shape[-1 if split.axis or leaf.ndim == 1 else -2]
    if isinstance(leaf, Leaf) or split.runs > 1 or size % parts:
        raise ConfigError(
            f"{path} is whole, and this model takes shares of it: load it with mesh=, or take"
            " model.shared(params)"
        )
    return spec_of(split, leaf.ndim)
