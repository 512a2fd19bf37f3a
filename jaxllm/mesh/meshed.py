"""A model on a mesh: the same module, of one device's share of it, inside one `jax.shard_map`."""

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm import models
from jaxllm.cache.kv import Segment
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.mesh import specs
from jaxllm.mesh.axes import Axes, mesh_of
from jaxllm.mesh.placing import Shared
from jaxllm.mesh.rules import GROUPS, HEADS, fitted, share_of, split_of
from jaxllm.mesh.sequence import megatron
from jaxllm.mesh.sequence.ways import check, way_of
from jaxllm.mesh.sequence.writing import SplitSlots
from jaxllm.models.layers import Across, Attend, Trace
from jaxllm.weights.leaves.parted import Everywhere, Gathered, Partial, Shares, Spread, Vocabulary
from jaxllm.weights.linear import ROUNDED
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
        batch, columns = token_BT.shape
        rows, way = self._rows(batch), way_of(self.axes, columns)
        way.check(attention_mass)
        stream = megatron.takes(self.axes, HEADS, way.here)
        by_row = {
            "token_BT": token_BT,
            "position_BT": position_BT,
            "length_B": length_B,
            "column_B": column_B,
            **given,
        }
        by_row = way.laid_out(by_row)
        whole = [specs.slot_axis(self.axes, s.position_BS.shape[1]) is None for s in segments]
        past = jnp.any(jnp.array([(s.position_BS >= 0).any() for s in segments]))

        def run(params: Params, by_row: Any, segments: Any, memory: Any, past: Any) -> Any:
            more = {"memory": memory} if memory else {}
            mine = {"params": map_leaves(partial(self._mine, stream), params)}
            bare = partial(
                inner.apply, mine, segments=segments, attention_mass=attention_mass, **more
            )

            def apply(attend: Attend | None = None, **by_row: Any) -> Any:
                if stream:
                    return megatron.run(bare, HEADS, attend, by_row)
                return bare(across=Across(attend), **by_row)

            trace = way.run(apply, by_row, whole, past)
            return _summed(trace) if attention_mass is True else trace

        def spec(path: str, leaf: Any) -> Any:
            how = split_of(self.config, self.exact, path)
            return specs.of_parameter(path, leaf, how, self.axes, rows)

        spread = jax.shard_map(
            run,
            mesh=mesh_of(self.axes),
            in_specs=(
                map_leaves(spec, params),
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
                picked=column_B is not None,
                by_head=attention_mass == "heads",
            ),
            # The model's loops begin with constants, which would have to be said to vary.
            check_vma=False,
        )
        trace: Trace = spread(params, by_row, segments, memory, past)
        return way.cut(trace, column_B is not None)

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
        return NamedSharding(mesh_of(self.axes), specs.of_cache(path, array, rows, self.axes))

    @property
    def writer(self) -> SplitSlots | None:  # type: ignore[override]
        if self.axes.sequence == 1 or self.axes.exchange:
            return None
        return SplitSlots(self.axes, ROWS, GROUPS)

    @nn.nowrap
    def _rows(self, batch: int) -> specs.Rows:
        """The axis over which so many rows are split."""
        return ROWS if batch % self.axes.data == 0 else None

    @nn.nowrap
    def _mine(self, stream: bool, path: str, leaf: Any) -> Any:
        """What the module inside takes for the parameter at `path`. stream: whether that of tokens
        is split.
        """
        split = split_of(self.config, self.exact, path)
        parts = self.axes.over(split.over)
        mine = jax.tree.map(
            lambda x: x.share() if isinstance(x, Shares) else x,
            leaf,
            is_leaf=lambda x: isinstance(x, Shares),
        )
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


def meshed(config: ModelConfig, precision: Precision, axes: Axes, *, exact: bool = False) -> Meshed:
    """A model on a mesh. Raises ConfigError where it does not divide, or devices are missing."""
    axes = fitted(axes, config)
    check(share_of(config, axes), axes, exact)
    megatron.check(config, axes, exact)
    mesh_of(axes)
    if not exact:
        check_rounding(config, precision, axes)
    return Meshed(config=config, precision=precision, axes=axes, exact=exact)


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
    return inner.clone(remat=True) if model.remat else inner


def _summed(trace: Any) -> Any:
    """The trace with attention mass over the heads of all devices."""
    layers = []
    for layer in trace.layers:
        mass = layer.attention.mass
        mass = None if mass is None else jax.lax.psum(mass, HEADS)
        layers.append(layer._replace(attention=layer.attention._replace(mass=mass)))
    return trace.replace(layers=tuple(layers))
