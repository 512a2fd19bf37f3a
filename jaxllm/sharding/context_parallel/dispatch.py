"""How a call uses the axis `sequence`: where its tokens are, and which attention it runs.

Norms, linears and MLPs work token by token, so each device runs them on its own tokens of a split
text. Only attention differs: `models.layers.attend` calls one of the functions here. A few tokens,
as in decoding, are not split: every device runs them, with its shard of the cache.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxllm.cache.kv import Segment
from jaxllm.config.model import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.layers import ParallelHooks
from jaxllm.ops import Part
from jaxllm.ops.attention import Queries, attend
from jaxllm.ops.masked import attend_with_mask, document_mask
from jaxllm.ops.slot_update import NO_SLOT, delay_entries, write_at_cursor
from jaxllm.sharding import partition_specs
from jaxllm.sharding.context_parallel import ring, split_cache, ulysses, zigzag
from jaxllm.sharding.context_parallel.ring import pass_on
from jaxllm.sharding.mesh_spec import MeshSpec, build_mesh

AXIS = "sequence"
AttentionResult = tuple[jax.Array, Part]


@dataclasses.dataclass(frozen=True)
class ContextParallel:
    """How rows of `columns` tokens are split over the axis `sequence`.

    Split tokens are padded to a length that can be cut, and for a ring put in zigzag order.
    """

    columns: int
    devices: int
    use_ulysses: bool = False  # by Ulysses instead of a ring

    @property
    def is_split(self) -> bool:
        """Whether each device has only some of the tokens."""
        return 1 < self.devices <= self.columns // 2

    @property
    def axis(self) -> str | None:
        """The axis that splits columns."""
        return AXIS if self.is_split else None

    @property
    def local_columns(self) -> int:
        """Number of columns on one device."""
        return len(self.column_order) // self.devices if self.is_split else self.columns

    @property
    def global_sync(self) -> bool:
        """Whether attention needs every device: a ring's collective-permutes have no groups."""
        return self.is_split and not self.use_ulysses

    def check(self, attention_mass: Any) -> None:
        """Raise ConfigError for attention mass: no device has all scores of a head."""
        if self.devices > 1 and attention_mass is not False:
            raise ConfigError(
                "attention mass is not available for a text that is split over devices: mesh"
                f" sequence={self.devices} must be sequence=1"
            )

    @property
    def column_order(self) -> np.ndarray:
        """The permutation of the padded columns."""
        width = zigzag.pad_length(self.columns, self.devices)
        return np.arange(width) if self.use_ulysses else zigzag.zigzag(width, self.devices)

    def layout_inputs(self, row_inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Pad and permute the columns of a call's inputs by row."""
        if not self.is_split:
            return dict(row_inputs)
        order = self.column_order
        padding = len(order) - self.columns

        def lay(name: str, x: Any) -> Any:
            if x is None:
                return x
            if name == "column_B":
                return jnp.asarray(np.argsort(order).astype(np.int32))[x]
            if not name.endswith(("_BT", "_BTD")):
                return x
            pads = [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)
            return jnp.pad(x, pads, constant_values=-1 if name == "position_BT" else 0)[:, order]

        return {name: lay(name, x) for name, x in row_inputs.items()}

    def make_hooks(self, replicated: Sequence[bool] = (), has_past: Any = False) -> ParallelHooks:
        """Return the attention of a call over the axis.

        Args:
            replicated: whether each segment of the cache has all its slots on every device.
            has_past: bool, whether anything is cached.
        """
        if self.devices == 1:
            return ParallelHooks()
        if not self.is_split:
            return ParallelHooks(
                decode_ulysses if self.use_ulysses else SplitCacheAttention(tuple(replicated))
            )
        if self.use_ulysses:
            return ParallelHooks(attend_ulysses)
        return ParallelHooks(
            RingAttention(tuple(replicated), has_past), global_sync=self.global_sync
        )

    def run(
        self,
        apply: Callable[..., Any],
        row_inputs: dict[str, Any],
        replicated: Sequence[bool],
        has_past: Any,
    ) -> Any:
        """Return this device's trace in plain order, inside `shard_map`.

        Args:
            apply: the module's call, of `make_hooks` and of `row_inputs`.
            replicated: as in `make_hooks`, and so is past.
        """
        across = self.make_hooks(replicated, has_past)
        if not self.is_split:
            return apply(hooks=across, **row_inputs)
        column_B, local_columns = row_inputs["column_B"], self.local_columns
        is_local_B = None
        if column_B is not None:
            is_local_B = column_B // local_columns == jax.lax.axis_index(AXIS)
            row_inputs = {**row_inputs, "column_B": column_B % local_columns}
        trace = apply(hooks=across, **row_inputs)
        logits = trace.logits
        if is_local_B is not None:
            logits = jax.lax.psum(jnp.where(is_local_B[:, None, None], logits, 0.0), AXIS)
        if self.use_ulysses:
            return trace.replace(logits=logits)
        if is_local_B is None:
            logits = zigzag.to_plain(logits, AXIS)
        return zigzag.to_plain(trace.replace(logits=None), AXIS).replace(logits=logits)

    def remove_padding(self, trace: Any, single_column: bool) -> Any:
        """Remove padding from a trace. `single_column`: its logits are of one column."""
        if not self.is_split or len(self.column_order) == self.columns:
            return trace
        bare = jax.tree.map(lambda x: x[:, : self.columns], trace.replace(logits=None))
        return bare.replace(
            logits=trace.logits if single_column else trace.logits[:, : self.columns]
        )


def check_context_parallel(config: ModelConfig, axes: MeshSpec, exact: bool) -> None:
    """Raise ConfigError for attention that cannot use the axis. `config` is that of one device."""
    if axes.sequence == 1:
        return
    if exact:
        raise ConfigError(
            "exact=True cannot be combined with a split text, whose sums have another order: mesh"
            f" {axes} must have sequence=1"
        )
    if (kind := config.attention) is not None:
        raise ConfigError(
            f"attention of kind {kind.kind!r} cannot split a text: mesh {axes} must have sequence=1"
        )
    if axes.use_ulysses:
        heads = config.num_attention_heads, config.num_key_value_heads
        ulysses.check_heads(*heads, axes.sequence, cached=True)


@dataclasses.dataclass(frozen=True)
class RingAttention:
    """Ring attention: keys and values of split tokens rotate, and queries rotate over the cache."""

    replicated: tuple[bool, ...]
    has_past: Any

    def __call__(
        self,
        q: jax.Array,
        at: jax.Array,
        parts: Sequence[Part],
        document_BT: Any,
        *,
        sink_N: jax.Array | None = None,
        **options: Any,
    ) -> AttentionResult:
        *cached, new = parts
        new_output = ring.attend(q, at, new, axis=AXIS, document_BT=document_BT, **options)
        outputs = [new_output]
        if sink_N is not None:
            log_BTN = jnp.broadcast_to(sink_N.astype(jnp.float32)[None, None], new_output[1].shape)
            outputs.append((jnp.zeros_like(new_output[0]), log_BTN))
        if not cached:
            return split_cache.combine_outputs(outputs).astype(q.dtype), new
        local = _keep_shared_once(cached, self.replicated)

        def attend_past(q: jax.Array, at: jax.Array) -> tuple[jax.Array, jax.Array]:
            queries = Queries.from_heads(q, at, local, **options)
            return split_cache.attend_pass_q(queries, local, AXIS)

        def nothing(q: jax.Array, at: jax.Array) -> tuple[jax.Array, jax.Array]:
            return jnp.zeros_like(new_output[0]), jnp.full_like(new_output[1], -jnp.inf)

        before = jax.lax.cond(self.has_past, attend_past, nothing, q, at)
        return split_cache.combine_outputs([before, *outputs]).astype(q.dtype), new


@dataclasses.dataclass(frozen=True)
class SplitCacheAttention:
    """Replicated tokens attend to a cache whose slots are sharded."""

    replicated: tuple[bool, ...]

    def __call__(
        self,
        q: jax.Array,
        at: jax.Array,
        parts: Sequence[Part],
        document_BT: Any,
        *,
        sink_N: jax.Array | None = None,
        **options: Any,
    ) -> AttentionResult:
        _check_no_documents(document_BT)
        local = _keep_shared_once(parts, (*self.replicated, True))
        queries = Queries.from_heads(q, at, local, **options)
        return split_cache.attend(queries, local, AXIS, sink_N), parts[-1]


def attend_ulysses(
    q: jax.Array, at: jax.Array, parts: Sequence[Part], document_BT: Any, **options: Any
) -> AttentionResult:
    """Exchange split tokens for heads, which attend to a cache of the same heads (Ulysses)."""
    *cached, new = parts
    q, k, v = ulysses.to_heads((q, new.k_BSKH, new.v_BSKH), AXIS)
    at = ulysses.gather_tokens(at, AXIS)
    if document_BT is not None:
        document_BT = ulysses.gather_tokens(document_BT, AXIS)
    new = Part(k, v, at)
    out = _attend_local(q, at, [*cached, new], document_BT, **options)
    return ulysses.to_tokens(out, AXIS), new


def decode_ulysses(
    q: jax.Array, at: jax.Array, parts: Sequence[Part], document_BT: Any, **options: Any
) -> AttentionResult:
    """Attend with replicated tokens: each device with some heads, to a cache of these heads."""
    *cached, new = parts
    q, k, v = ulysses.take_heads((q, new.k_BSKH, new.v_BSKH), AXIS)
    new = Part(k, v, new.position_BS)
    out = _attend_local(q, at, [*cached, new], document_BT, **options)
    return jax.lax.all_gather(out, AXIS, axis=2, tiled=True), new


def _attend_local(
    q: jax.Array,
    at: jax.Array,
    parts: Sequence[Part],
    document_BT: jax.Array | None,
    *,
    scale: float,
    window: int | None,
    cap: float | None,
    sink_N: jax.Array | None = None,
) -> jax.Array:
    if sink_N is not None:
        sink_N = ulysses.take_heads(sink_N[None, None], AXIS)[0, 0]
    options: Any = {"scale": scale, "cap": cap, "sink_N": sink_N}
    if document_BT is None:
        return attend(q, at, parts, window=window, **options)[0]
    return attend_with_mask(
        q, parts, document_mask(at, parts, document_BT, window=window), **options
    )


def _keep_shared_once(parts: Sequence[Part], replicated: Sequence[bool]) -> list[Part]:
    pairs = zip(parts, replicated, strict=True)
    return [split_cache.keep_on_first(part, AXIS) if shared else part for part, shared in pairs]


def _check_no_documents(document_BT: Any) -> None:
    if document_BT is not None:
        raise ConfigError(
            "rows of several documents are too short for the sequence axis. Use at least twice as"
            " many columns as it has devices"
        )


@dataclasses.dataclass(frozen=True)
class SplitCacheWriter:
    """`ops.slot_update.write_at_cursor` for a tail with S / n slots on each of n devices.

    Split entries rotate over the devices, so that none ever holds all of them.
    """

    axes: MeshSpec

    def __call__(
        self, cursor: jax.Array, tail: Segment, new: Segment, wait_for: tuple[jax.Array, ...]
    ) -> Segment:
        columns, devices = new.position_BS.shape[1], self.axes.sequence
        if tail.position_BS.shape[1] % devices:
            return write_at_cursor(cursor, tail, new, wait_for)
        split = ContextParallel(columns, devices).is_split and columns % devices == 0
        rows, groups = (
            partition_specs.find_row_axes(self.axes, tail.position_BS.shape[0]),
            partition_specs.cache_head_axes(self.axes),
        )
        own, entering = (P(rows, axis, groups) for axis in (AXIS, AXIS if split else None))
        write = jax.shard_map(
            partial(_write_local, split),
            mesh=build_mesh(self.axes),
            in_specs=(P(), own, entering),
            out_specs=own,
            check_vma=False,
        )
        entries = (new.k, new.v)
        entries = delay_entries(entries, wait_for[0]) if wait_for else entries
        k, v = write(cursor, (tail.k, tail.v), entries)
        old, marks = ((x.position_BS, x.token_BS, x.patched_BS) for x in (tail, new))
        position, token, patched = write_at_cursor(cursor, old, marks, wait_for)
        return Segment(k, v, position, token, patched)


def _write_local(split: bool, cursor: jax.Array, tail: Any, new: Any) -> Any:
    """Write entries to this device's slots, inside `shard_map`."""
    slots = jax.tree.leaves(tail)[0].shape[1]
    columns, index = jax.tree.leaves(new)[0].shape[1], jax.lax.axis_index(AXIS)

    def write_slots(tail: Any, new: Any, number: Any) -> Any:
        slot_T = cursor + number * columns - index * slots + jnp.arange(columns, dtype=jnp.int32)
        slot_T = jnp.where(slot_T < 0, NO_SLOT, slot_T)

        def write_leaf(old: jax.Array, new: jax.Array) -> jax.Array:
            return old.at[:, slot_T].set(new.astype(old.dtype), mode="drop")

        return jax.tree.map(write_leaf, tail, new)

    if not split:
        return write_slots(tail, new, 0)
    devices = jax.lax.axis_size(AXIS)

    def run_round(carry: Any, number: jax.Array) -> tuple[Any, None]:
        tail, new = carry
        return (write_slots(tail, new, (index - number) % devices), pass_on(new, AXIS)), None

    numbers = jnp.arange(devices - 1, dtype=jnp.int32)
    (tail, new), _ = jax.lax.scan(run_round, (tail, new), numbers)
    return write_slots(tail, new, (index + 1) % devices)
