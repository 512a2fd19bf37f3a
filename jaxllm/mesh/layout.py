"""How a call of a model is sharded: which mesh axes split its rows, layers and tokens.

A layout (Shazeer et al. 2018, arXiv 1811.02084, section 3) assigns mesh axes to each dimension of
an array. For a call, rows are split over `data` and `expert`; layers over stages; tokens over
`sequence` (`sequence.ways`) and, between linears, over `tensor` (`sequence.megatron`). An axis of
size 1 does nothing. Each device then runs the module's own call on local arrays, inside the one
`jax.shard_map` that is made here.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxllm.config import ModelConfig
from jaxllm.mesh import specs
from jaxllm.mesh.axes import Axes, mesh_of
from jaxllm.mesh.local import Local
from jaxllm.mesh.pipeline.places import Table
from jaxllm.mesh.pipeline.stacked import unfolded
from jaxllm.mesh.rules import HEADS, TOKENS, Over
from jaxllm.mesh.sequence import megatron
from jaxllm.mesh.sequence.ways import Way
from jaxllm.models.layers import Layer, Trace
from jaxllm.weights.leaves.parted import Tokens
from jaxllm.weights.paths import Params


@dataclasses.dataclass(frozen=True)
class Layout:
    """The sharding of one call."""

    config: ModelConfig
    axes: Axes
    table: Table  # the layer numbers of each stage
    batch: int
    columns: int  # tokens per row
    picked: bool = False  # whether logits are of one column per row
    mass: Any = False  # the attention mass that the call returns, as `attention_mass` of a model
    apart: bool = False  # as in `Meshed`
    parallel_logits: bool = False  # as in `Meshed`

    @property
    def rows(self) -> specs.Rows:
        """The axes that split rows."""
        return specs.rows_over(self.axes, self.batch)

    @property
    def way(self) -> Way:
        """How tokens are split over `sequence`."""
        return Way(self.columns, self.axes.sequence, self.axes.exchange)

    @property
    def stream(self) -> Tokens | None:
        """The tokens that each device of `tensor` has between linears; None: all."""
        return megatron.tokens_of(self.axes, self.way.here)

    @property
    def vocabulary(self) -> Over:
        """The axes that split logits."""
        return TOKENS if self.parallel_logits else ()

    def run(
        self,
        apply: Callable[..., Any],
        local: Local,
        by_row: Mapping[str, Any],
        cached: Mapping[str, Any],
    ) -> Trace:
        """Run the call on all devices and return its global trace.

        Args:
            apply: the module's own call, run by each device.
            by_row: inputs for each row, by name.
            cached: the call's `segments`, and its `memory` if it has one.

        Raises:
            ConfigError: for attention mass of a split text.
        """
        self.way.check(self.mass)
        by_row = self.way.laid_out(jax.tree.map(self._by_all, dict(by_row)))
        marks = [segment.position_BS for segment in cached["segments"]]
        whole = [specs.slot_axis(self.axes, x.shape[1]) is None for x in marks]
        past = jnp.any(jnp.array([(x >= 0).any() for x in marks]))

        def run(params: Params, by_row: Any, cached: Any, past: Any) -> Trace:
            mine = partial(apply, {"params": local(params)}, **cached)
            mine = mine if self.stream is None else partial(megatron.run, mine, self.stream)
            trace = self.way.run(mine, by_row, whole, past)
            return _summed(trace) if self.mass is True else trace

        spread = jax.shard_map(
            run,
            mesh=mesh_of(self.axes),
            in_specs=(local.specs, self._of_rows(by_row), self._of_cached(cached), P()),
            out_specs=self._of_trace(),
            # The model's loops start from constants, which would have to be marked as varying.
            # Unchecked, derivatives are of the sum over devices of what each returns: `psum` is its
            # own transpose, a replicated input gets the sum of the devices' parts, and each device
            # gets a part of a replicated output's cotangent. So no weight needs its own rule.
            check_vma=False,
        )
        return self._joined(spread(local.params, by_row, cached, past))

    def _of_rows(self, by_row: Mapping[str, Any]) -> dict[str, P]:
        return {name: P(self.rows, *specs.columns(name, self.way.axis)) for name in by_row}

    def _of_cached(self, cached: Mapping[str, Any]) -> dict[str, Any]:
        where = {
            "segments": tuple(
                specs.of_segment(segment, self.batch, self.rows, self.axes)
                for segment in cached["segments"]
            ),
            "memory": specs.of_memory(self.config, self.rows),
        }
        return {name: where[name] for name in cached}

    def _of_trace(self) -> Any:
        return specs.of_trace(
            self.config,
            self.rows,
            self.axes,
            self.way.axis,
            layers=len(self.table[0]),
            picked=self.picked,
            vocabulary=self.vocabulary,
            by_head=self.mass == "heads",
        )

    def _joined(self, trace: Trace) -> Trace:
        """Assemble the trace of the call from the global arrays of `shard_map`."""
        trace = self.way.cut(trace, self.picked)
        if self.parallel_logits:  # the shards of an indivisible vocabulary end beyond it
            trace = trace.replace(logits=trace.logits[..., : self.config.vocab_size])
        if not self.apart:
            seen = {n: self._by_all(getattr(trace, n)) for n in ("embeddings", "norm")}
            seen["logits"] = specs.by_all(trace.logits, self.axes, P(None, None, self.vocabulary))
            trace = trace.replace(layers=tuple(map(self._layer_by_all, trace.layers)), **seen)
        return trace if self.axes.stage == 1 else unfolded(trace, self.table, self.mass)

    def _by_all(self, x: jax.Array) -> jax.Array:
        return specs.by_all(x, self.axes)

    def _layer_by_all(self, layer: Layer) -> Layer:
        mass = jax.tree.map(self._by_all, layer.attention.mass)
        attention = layer.attention._replace(mass=mass)
        return layer._replace(x=self._by_all(layer.x), attention=attention)


def _summed(trace: Trace) -> Trace:
    """Sum attention mass over the heads of all devices."""
    layers = []
    for layer in trace.layers:
        mass = layer.attention.mass
        mass = None if mass is None else jax.lax.psum(mass, HEADS)
        layers.append(layer._replace(attention=layer.attention._replace(mass=mass)))
    return trace.replace(layers=tuple(layers))
