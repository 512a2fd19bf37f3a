"""A model on a mesh: the same module, of one device's share of it, inside one `jax.shard_map`."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm import models
from jaxllm.cache.kv import Segment
from jaxllm.config import ModelConfig
from jaxllm.mesh import specs
from jaxllm.mesh.axes import Axes, mesh_of
from jaxllm.mesh.placing import Shared
from jaxllm.mesh.rules import HEADS, fitted, share_of, split_of
from jaxllm.models.layers import Trace
from jaxllm.weights.leaves.parted import Gathered, Partial, Shares, Spread, Vocabulary
from jaxllm.weights.paths import Params, Placed, map_leaves
from jaxllm.weights.precision import Precision

ROWS = "data"


class Meshed(nn.Module, Placed):
    """A model whose parameters and caches are spread over devices; in all else a model.

    Steps call `apply` of it as of any other, with parameters from `shared` or `reader`, and what is
    made of steps is as it was: what goes in and comes out are whole arrays with a sharding. Rows of
    a batch are split over `data` where they divide; otherwise each of its devices runs all of them.
    exact: see `weights.leaves.parted.Gathered`. Made by `meshed`, which checks.
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
        *,
        memory: tuple[Any, ...] = (),
        **given: Any,
    ) -> Trace:
        """What the model's `__call__` gives, of the same. given: what else it takes, by row."""
        params, inner = variables["params"], module_of(self)
        batch = token_BT.shape[0]
        rows = self._rows(batch)
        by_row = {
            "token_BT": token_BT,
            "position_BT": position_BT,
            "length_B": length_B,
            "column_B": column_B,
            **given,
        }

        def run(params: Params, by_row: Any, segments: Any, memory: Any) -> Any:
            more = {"memory": memory} if memory else {}
            mine = {"params": map_leaves(self._mine, params)}
            trace: Any = inner.apply(
                mine, segments=segments, attention_mass=attention_mass, **by_row, **more
            )
            return _summed(trace) if attention_mass is True else trace

        def spec(path: str, leaf: Any) -> Any:
            split = split_of(self.config, self.exact, path)
            return specs.of_parameter(path, leaf, split, self.axes, rows)

        spread = jax.shard_map(
            run,
            mesh=mesh_of(self.axes),
            in_specs=(
                map_leaves(spec, params),
                P(rows),
                tuple(specs.of_segment(segment, batch, rows) for segment in segments),
                specs.of_memory(self.config, rows) if memory else (),
            ),
            out_specs=specs.of_trace(self.config, rows, by_head=attention_mass == "heads"),
            # The model's loops begin with constants, which would have to be said to vary.
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
        """Where parameters go as they are read."""
        return Shared(self.config, self.axes, self.exact)

    @nn.nowrap
    def place(self, path: str, array: Any) -> NamedSharding:
        rows = self._rows(array.shape[0]) if array.ndim else None
        return NamedSharding(mesh_of(self.axes), specs.of_cache(path, array.ndim, rows))

    @nn.nowrap
    def _rows(self, batch: int) -> specs.Rows:
        """The axis over which so many rows are split."""
        return ROWS if batch % self.axes.data == 0 else None

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
        return Spread(mine, split.over, self.exact) if split.kind == "norm" else mine


def meshed(config: ModelConfig, precision: Precision, axes: Axes, *, exact: bool = False) -> Meshed:
    """A model on a mesh. Raises ConfigError where it does not divide, or devices are missing."""
    axes = fitted(axes, config)
    mesh_of(axes)
    return Meshed(config=config, precision=precision, axes=axes, exact=exact)


@cache
def module_of(model: Meshed) -> nn.Module:
    """The module that one device runs."""
    inner: nn.Module = models.build(share_of(model.config, model.axes), model.precision)
    return inner.clone(remat=True) if model.remat else inner


def _summed(trace: Any) -> Any:
    """The trace with attention mass over the heads of all devices."""
    layers = []
    for layer in trace.layers:
        mass = layer.attention.mass
        mass = None if mass is None else jax.lax.psum(mass, HEADS)
        layers.append(layer._replace(attention=layer.attention._replace(mass=mass)))
    return trace.replace(layers=tuple(layers))
