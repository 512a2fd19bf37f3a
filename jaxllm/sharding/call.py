"""How a call of a model is sharded: which mesh axes split its rows, layers and tokens.

A layout (Shazeer et al. 2018, arXiv 1811.02084, section 3) assigns mesh axes to each dimension of
an array. For a call, rows are split over `data` and `expert`; tokens over `sequence`
(`context_parallel.dispatch`) and, between linears, over `tensor`
(`context_parallel.sequence_parallel`). An axis of size 1 does nothing. Each device then runs the
module's own call on local arrays, inside the one `jax.shard_map` that is made here.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxllm.models.layers import Layer, Trace
from jaxllm.sharding import partition_specs
from jaxllm.sharding.context_parallel import sequence_parallel
from jaxllm.sharding.context_parallel.dispatch import ContextParallel
from jaxllm.sharding.local_params import LocalParams
from jaxllm.sharding.mesh_spec import MeshSpec, build_mesh
from jaxllm.sharding.model_sharding import ModelSharding
from jaxllm.sharding.partition_rules import HEAD_AXES, VOCAB_AXES, AxisNames
from jaxllm.sharding.tensor_parallel import SequenceSlice
from jaxllm.weights.paths import Params


class SplitTrace(Trace):
    """A trace of tokens that are split over devices.

    Writes do not wait for its outputs, since that would gather them on every device.
    """

    @property
    def read_outputs(self) -> tuple[jax.Array, ...]:
        return ()


@dataclasses.dataclass(frozen=True)
class CallSharding:
    """The sharding of one call.

    Attributes:
        columns: Tokens per row.
        single_column: Whether logits are of one column per row.
        mass: Whether the call returns attention mass.
        read: The sites that the call records.
    """

    model: ModelSharding
    batch: int
    columns: int
    single_column: bool
    mass: bool
    read: frozenset[str] = frozenset()

    @property
    def axes(self) -> MeshSpec:
        return self.model.axes

    @property
    def row_axes(self) -> partition_specs.RowAxes:
        """The axes that split rows."""
        return partition_specs.find_row_axes(self.axes, self.batch)

    @property
    def context_parallel(self) -> ContextParallel:
        """How tokens are split over `sequence`."""
        return ContextParallel(self.columns, self.axes.sequence, self.axes.use_ulysses)

    @property
    def token_slice(self) -> SequenceSlice | None:
        """The tokens that each device of `tensor` has between linears; None: all."""
        return sequence_parallel.make_token_slice(self.axes, self.context_parallel.local_columns)

    @property
    def vocab_axes(self) -> AxisNames:
        """The axes that split logits."""
        return VOCAB_AXES if self.model.sharded_logits else ()

    def run(
        self,
        apply: Callable[..., Any],
        local: LocalParams,
        row_inputs: Mapping[str, Any],
        cached: Mapping[str, Any],
    ) -> Trace:
        """Run the call on all devices and return its global trace.

        Args:
            apply: the module's own call, run by each device.
            row_inputs: inputs for each row, by name.
            cached: the call's `segments`, and its `state` if it has one.

        Raises:
            ConfigError: for attention mass of a split text.
        """
        self.context_parallel.check(self.mass)
        row_inputs = self.context_parallel.layout_inputs(
            jax.tree.map(self._replicate, dict(row_inputs))
        )
        positions = [segment.position_BS for segment in cached["segments"]]
        replicated = [partition_specs.slot_axis(self.axes, x.shape[1]) is None for x in positions]
        past = jnp.any(jnp.array([(x >= 0).any() for x in positions]))

        def run(params: Params, row_inputs: Any, cached: Any, past: Any) -> Trace:
            run_local = partial(apply, {"params": local(params)}, **cached)
            if self.token_slice is not None:
                run_local = partial(sequence_parallel.run, run_local, self.token_slice)
            trace = self.context_parallel.run(run_local, row_inputs, replicated, past)
            return _sum_mass(trace) if self.mass else trace

        row_specs = {
            name: P(self.row_axes, *partition_specs.column_axes(name, self.context_parallel.axis))
            for name in row_inputs
        }
        if "edits" in row_inputs:
            row_specs["edits"] = jax.tree.map(self._row_spec, row_inputs["edits"])
        run_sharded = jax.shard_map(
            run,
            mesh=build_mesh(self.axes),
            in_specs=(local.specs, row_specs, self._cache_specs(cached), P()),
            out_specs=self._trace_specs(),
            # The model's loops start from constants, which would have to be marked as varying.
            # Unchecked, derivatives are of the sum over devices of what each returns: `psum` is its
            # own transpose, a replicated input gets the sum of the devices' parts, and each device
            # gets a part of a replicated output's cotangent. So no weight needs its own rule.
            check_vma=False,
        )
        return self._merge_trace(run_sharded(local.params, row_inputs, cached, past))

    def _row_spec(self, x: jax.Array) -> P:
        """Return the spec of an array of edits, `[B or 1, ...]`."""
        return P(self.row_axes if x.shape[0] == self.batch else None)

    def _cache_specs(self, cached: Mapping[str, Any]) -> dict[str, Any]:
        specs = {
            "segments": tuple(
                partition_specs.segment_specs(segment, self.batch, self.row_axes, self.axes)
                for segment in cached["segments"]
            ),
            "state": partition_specs.state_specs(self.model.config, self.row_axes),
        }
        return {name: specs[name] for name in cached}

    def _trace_specs(self) -> Any:
        return partition_specs.trace_specs(
            self.model.config,
            self.row_axes,
            self.axes,
            self.context_parallel.axis,
            layers=self.model.local_layers,
            single_column=self.single_column,
            vocab_axes=self.vocab_axes,
            read=self.read,
        )

    def _merge_trace(self, trace: Trace) -> Trace:
        """Assemble the trace of the call from the global arrays of `shard_map`."""
        trace = self.context_parallel.remove_padding(trace, self.single_column)
        if self.model.sharded_logits:  # the shards of an indivisible vocabulary end beyond it
            trace = trace.replace(logits=trace.logits[..., : self.model.config.vocab_size])
        if not self.model.sharded_rows:
            names = ("embeddings", "norm", "sites")
            outputs = {n: jax.tree.map(self._replicate, getattr(trace, n)) for n in names}
            outputs["logits"] = partition_specs.replicate_for_host(
                trace.logits, self.axes, P(None, None, self.vocab_axes)
            )
            trace = trace.replace(layers=tuple(map(self._replicate_layer, trace.layers)), **outputs)
        splits_tokens = self.axes.sequence_parallel or self.axes.sequence > 1
        return SplitTrace(**vars(trace)) if splits_tokens and self.columns > 1 else trace

    def _replicate(self, x: jax.Array) -> jax.Array:
        return partition_specs.replicate_for_host(x, self.axes)

    def _replicate_layer(self, layer: Layer) -> Layer:
        mass = jax.tree.map(self._replicate, layer.attention.mass)
        attention = layer.attention._replace(mass=mass)
        sites = jax.tree.map(self._replicate, layer.sites)
        return Layer(attention, self._replicate(layer.x), sites)


def _sum_mass(trace: Trace) -> Trace:
    """Sum attention mass over the heads of all devices."""
    layers = []
    for layer in trace.layers:
        mass = layer.attention.mass
        mass = None if mass is None else jax.lax.psum(mass, HEAD_AXES)
        layers.append(layer._replace(attention=layer.attention._replace(mass=mass)))
    return trace.replace(layers=tuple(layers))
