"""How a call uses the axis `sequence`: where its tokens are, and which attention it runs.

Norms, linears and MLPs work token by token, so each device runs them on its own tokens of a split
text. Only attention differs: `models.layers.attend` calls one of the classes here. A few tokens, as
in decoding, are not split: every device runs them, with its shard of the cache.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.mesh.axes import Axes
from jaxllm.mesh.sequence import order, ring, slots, ulysses
from jaxllm.models.layers import Across
from jaxllm.ops import Part
from jaxllm.ops.attention import Queries, attend
from jaxllm.ops.masked import attend_masked, within_documents

AXIS = "sequence"
Found = tuple[jax.Array, Part]


@dataclasses.dataclass(frozen=True)
class Way:
    """How rows of `columns` tokens are split over the axis `sequence`.

    Split tokens are padded to a length that can be cut, and for a ring put in zigzag order.
    """

    columns: int
    devices: int
    exchange: bool = False  # by Ulysses instead of a ring

    @property
    def split(self) -> bool:
        """Whether each device has only some of the tokens."""
        return 1 < self.devices <= self.columns // 2

    @property
    def axis(self) -> str | None:
        """The axis that splits columns."""
        return AXIS if self.split else None

    @property
    def here(self) -> int:
        """Number of columns on one device."""
        return len(self.order) // self.devices if self.split else self.columns

    @property
    def at_once(self) -> bool:
        """Whether attention needs every device: a ring's collective-permutes have no groups."""
        return self.split and not self.exchange

    def check(self, attention_mass: Any) -> None:
        """Raise ConfigError for attention mass: no device has all scores of a head."""
        if self.devices > 1 and attention_mass is not False:
            raise ConfigError(
                "attention mass is not available for a text that is split over devices: mesh"
                f" sequence={self.devices} must be sequence=1"
            )

    @property
    def order(self) -> np.ndarray:
        """The permutation of the padded columns."""
        width = order.padded(self.columns, self.devices)
        return np.arange(width) if self.exchange else order.zigzag(width, self.devices)

    def laid_out(self, by_row: Mapping[str, Any]) -> dict[str, Any]:
        """Pad and permute the columns of a call's inputs by row."""
        if not self.split:
            return dict(by_row)
        there = self.order
        padding = len(there) - self.columns

        def lay(name: str, x: Any) -> Any:
            if x is None:
                return x
            if name == "column_B":
                return jnp.asarray(np.argsort(there).astype(np.int32))[x]
            if not name.endswith(("_BT", "_BTD")):
                return x
            pads = [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)
            return jnp.pad(x, pads, constant_values=-1 if name == "position_BT" else 0)[:, there]

        return {name: lay(name, x) for name, x in by_row.items()}

    def across(self, whole: Sequence[bool] = (), past: Any = False) -> Across:
        """Return the attention of a call over the axis.

        Args:
            whole: whether each segment of the cache has all its slots on every device.
            past: bool, whether anything is cached.
        """
        if self.devices == 1:
            return Across()
        if not self.split:
            return Across(OwnHeads() if self.exchange else OwnSlots(tuple(whole)))
        if self.exchange:
            return Across(Exchanged())
        return Across(Around(tuple(whole), past), at_once=self.at_once)

    def run(
        self, apply: Callable[..., Any], by_row: dict[str, Any], whole: Sequence[bool], past: Any
    ) -> Any:
        """Return this device's trace in plain order, inside `shard_map`.

        Args:
            apply: the module's call, of `across` and of `by_row`.
            whole: as in `across`, and so is past.
        """
        across = self.across(whole, past)
        if not self.split:
            return apply(across=across, **by_row)
        column_B, mine = by_row["column_B"], self.here
        here_B = None
        if column_B is not None:
            here_B = column_B // mine == jax.lax.axis_index(AXIS)
            by_row = {**by_row, "column_B": column_B % mine}
        trace = apply(across=across, **by_row)
        logits = trace.logits
        if here_B is not None:
            logits = jax.lax.psum(jnp.where(here_B[:, None, None], logits, 0.0), AXIS)
        if self.exchange:
            return trace.replace(logits=logits)
        if here_B is None:
            logits = order.to_plain(logits, AXIS)
        return order.to_plain(trace.replace(logits=None), AXIS).replace(logits=logits)

    def cut(self, trace: Any, picked: bool) -> Any:
        """Remove padding from a trace. `picked`: its logits are of one column."""
        if not self.split or len(self.order) == self.columns:
            return trace
        bare = jax.tree.map(lambda x: x[:, : self.columns], trace.replace(logits=None))
        return bare.replace(logits=trace.logits if picked else trace.logits[:, : self.columns])


def check(config: ModelConfig, axes: Axes, exact: bool) -> None:
    """Raise ConfigError for attention that cannot use the axis. `config` is that of one device."""
    if axes.sequence == 1:
        return
    if exact:
        raise ConfigError(
            "exact=True cannot be combined with a split text, whose sums have another order: mesh"
            f" {axes} must have sequence=1"
        )
    long = config.long_attention(0)
    if long is not None or any(rope.extended for rope in config.ropes):
        kind = "Self-Extend" if long is None else f"attention of kind {long.kind!r}"
        raise ConfigError(f"{kind} cannot split a text: mesh {axes} must have sequence=1")
    if axes.exchange:
        heads = config.num_attention_heads, config.num_key_value_heads
        ulysses.check_heads(*heads, axes.sequence, cached=True)


def check_chunks(axes: Axes, chunks: int) -> None:
    """Raise ConfigError for ring attention in stages with chunks.

    Stages then run different layers at one tick, but a ring needs all devices.
    """
    if chunks > 1 and axes.sequence > 1 and not axes.exchange:
        raise ConfigError(
            f"ring attention cannot be combined with stages of {chunks} chunks: a ring needs all"
            " devices at once, but the stages run different layers. Use"
            f" sequence={axes.sequence}:heads, or one chunk"
        )


@dataclasses.dataclass(frozen=True)
class Around:
    """Ring attention: keys and values of split tokens rotate, and queries rotate over the cache."""

    whole: tuple[bool, ...]
    past: Any

    def __call__(
        self, q: jax.Array, at: jax.Array, parts: Sequence[Part], document_BT: Any, **rules: Any
    ) -> Found:
        *cached, new = parts
        found = ring.attend(q, at, new, axis=AXIS, document_BT=document_BT, **rules)
        if not cached:
            return found[0].astype(q.dtype), new
        here = _once(cached, self.whole)

        def visit(q: jax.Array, at: jax.Array) -> tuple[jax.Array, jax.Array]:
            return slots.attend_round(Queries.of(q, at, here, **rules), here, AXIS)

        def nothing(q: jax.Array, at: jax.Array) -> tuple[jax.Array, jax.Array]:
            return jnp.zeros_like(found[0]), jnp.full_like(found[1], -jnp.inf)

        before = jax.lax.cond(self.past, visit, nothing, q, at)
        return slots.mixed([before, found]).astype(q.dtype), new


@dataclasses.dataclass(frozen=True)
class OwnSlots:
    """Replicated tokens attend to a cache whose slots are sharded."""

    whole: tuple[bool, ...]

    def __call__(
        self, q: jax.Array, at: jax.Array, parts: Sequence[Part], document_BT: Any, **rules: Any
    ) -> Found:
        _no_documents(document_BT)
        here = _once(parts, (*self.whole, True))
        return slots.attend(Queries.of(q, at, here, **rules), here, AXIS), parts[-1]


@dataclasses.dataclass(frozen=True)
class Exchanged:
    """Ulysses: split tokens are exchanged for heads, which attend to a cache of the same heads."""

    def __call__(
        self, q: jax.Array, at: jax.Array, parts: Sequence[Part], document_BT: Any, **rules: Any
    ) -> Found:
        *cached, new = parts
        q, k, v = ulysses.to_heads((q, new.k_BSKH, new.v_BSKH), AXIS)
        at = ulysses.of_all(at, AXIS)
        if document_BT is not None:
            document_BT = ulysses.of_all(document_BT, AXIS)
        new = Part(k, v, at)
        out = _dense(q, at, [*cached, new], document_BT, **rules)
        return ulysses.to_tokens(out, AXIS), new


@dataclasses.dataclass(frozen=True)
class OwnHeads:
    """Replicated tokens: each device attends with some heads, to a cache of these heads."""

    def __call__(
        self, q: jax.Array, at: jax.Array, parts: Sequence[Part], document_BT: Any, **rules: Any
    ) -> Found:
        *cached, new = parts
        q, k, v = ulysses.own_heads((q, new.k_BSKH, new.v_BSKH), AXIS)
        new = Part(k, v, new.position_BS)
        out = _dense(q, at, [*cached, new], document_BT, **rules)
        return jax.lax.all_gather(out, AXIS, axis=2, tiled=True), new


def _dense(
    q: jax.Array,
    at: jax.Array,
    parts: Sequence[Part],
    document_BT: jax.Array | None,
    *,
    scale: float,
    window: int | None,
    cap: float | None,
) -> jax.Array:
    if document_BT is None:
        return attend(q, at, parts, scale=scale, window=window, cap=cap)[0]
    mask = within_documents(at, parts, document_BT, window=window)
    return attend_masked(q, parts, mask, scale=scale, cap=cap)


def _once(parts: Sequence[Part], whole: Sequence[bool]) -> list[Part]:
    pairs = zip(parts, whole, strict=True)
    return [slots.once(part, AXIS) if shared else part for part, shared in pairs]


def _no_documents(document_BT: Any) -> None:
    if document_BT is not None:
        raise ConfigError(
            "rows of several documents are too short for the sequence axis. Use at least twice as"
            " many columns as it has devices"
        )
