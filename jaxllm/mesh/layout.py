"""How a call of a model is laid out on a mesh: which axes divide its rows, layers and tokens.

A layout (Shazeer et al. 2018, arXiv 1811.02084, section 3) says of each dimension of what is
computed which axes of the mesh divide it. Here of a call that is rows, over `data` and `expert`;
layers, in stages; tokens, over `sequence` (`sequence.ways`) and, between linears, over `tensor`
(`sequence.megatron`). Each is nothing where its axis has size 1. What is left to a device is the
module's own call on arrays of its own, inside the one `jax.shard_map` that is made here.
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
    """Of a call with tokens `[batch, columns]`.

    table: the numbers of the layers that each stage has. picked: whether logits are of one column
    of a row. mass: what is said of attention, as the model is asked for it. apart, parallel_logits:
    as of `Meshed`.
    """

    config: ModelConfig
    axes: Axes
    table: Table
    batch: int
    columns: int
    picked: bool = False
    mass: Any = False
    apart: bool = False
    parallel_logits: bool = False

    @property
    def rows(self) -> specs.Rows:
        """The axes that divide rows."""
        return specs.rows_over(self.axes, self.batch)

    @property
    def way(self) -> Way:
        """What is done with tokens over `sequence`."""
        return Way(self.columns, self.axes.sequence, self.axes.exchange)

    @property
    def stream(self) -> Tokens | None:
        """Which tokens devices of `tensor` have between linears; None: all."""
        return megatron.tokens_of(self.axes, self.way.here)

    @property
    def vocabulary(self) -> Over:
        """The axes over which logits are divided."""
        return TOKENS if self.parallel_logits else ()

    def run(
        self,
        apply: Callable[..., Any],
        local: Local,
        by_row: Mapping[str, Any],
        cached: Mapping[str, Any],
    ) -> Trace:
        """The trace of the call, whole.

        apply: the module's own, which each device runs. by_row: what it is given for each row, by
        name; cached: its `segments`, and its `memory` where it has one. Raises ConfigError for
        attention mass of a split text.
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
            # The model's loops begin with constants, which would have to be said to vary. Without
            # that, derivatives are those of the sum over devices of what each gives, of which each
            # has its part: `psum` is its own transpose, an input that devices share is given the
            # sum of their parts, an output that they share a part each. No leaf has its own.
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
        """The call's own trace, of what devices have found."""
        trace = self.way.cut(trace, self.picked)
        if self.parallel_logits:  # shares of a vocabulary that does not divide end beyond it
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
    """The trace with attention mass over the heads of all devices."""
    layers = []
    for layer in trace.layers:
        mass = layer.attention.mass
        mass = None if mass is None else jax.lax.psum(mass, HEADS)
        layers.append(layer._replace(attention=layer.attention._replace(mass=mass)))
    return trace.replace(layers=tuple(layers))
