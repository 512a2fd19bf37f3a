"""What the axis `sequence` adds to a step: texts around a ring, or exchanged for heads.

Of a prompt each device runs its own tokens (`mesh.sequence.ways`); a token is run by all of them,
over the slots or the heads that each has.
"""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jaxllm.config import ModelConfig
from jaxllm.mesh.axes import Axes
from jaxllm.mesh.pipeline.places import layers_run
from jaxllm.mesh.rules import share_of
from jaxllm.mesh.sequence.ways import AXIS, Way
from jaxllm.ops.entries import cast
from jaxllm.plan.collective import Collective, Kind


@dataclasses.dataclass(frozen=True)
class Split:
    """A step of so many tokens of each of a device's rows, against a cache of so many slots.

    width: bytes of a number of what layers are given. cache: the cache's format. groups:
    microbatches of rows that a pipeline runs, one in each of its ticks.
    """

    config: ModelConfig
    axes: Axes
    rows: int
    tokens: int
    slots: int
    width: int
    cache: str
    groups: int = 1

    def all(self) -> Iterator[Collective]:
        split = self._way.split
        if self.axes.exchange:
            yield from self._exchanged() if split else self._own_heads()
        else:
            yield from self._around() if split else self._own_slots()
        if split:  # whose last token it is says its logits
            yield self._one("logits", "all-reduce", 1, 4 * self.rows * self.config.vocab_size)

    @property
    def marks(self) -> bool:
        """Whether what stands beside slots is asked of all devices: of a prompt around a ring,
        against slots that are split.
        """
        split = self._way.split and not self.axes.exchange
        return split and self.slots % self.axes.sequence == 0

    @property
    def _way(self) -> Way:
        return Way(self.tokens, self.axes.sequence, self.axes.exchange)

    @property
    def _here(self) -> int:
        """Tokens of a device, of all of its rows."""
        return self.rows * self._way.here

    @property
    def _at_once(self) -> int:
        """Rows that layers run at once."""
        return -(-self.rows // self.groups)

    @property
    def _layers(self) -> int:
        """Of a stage, as its cache has them."""
        return len(layers_run(self.config, self.axes.stage, at_once=False))

    @property
    def _ticks(self) -> int:
        """How often a device runs its layers."""
        return self.groups + self.axes.stage - 1

    def _one(self, what: str, kind: Kind, count: int, size: int, times: int = 1) -> Collective:
        return Collective(what, kind, AXIS, self.axes.sequence, count, size, times)

    def _within(self, what: str, kind: Kind, count: int, size: int, times: int = 1) -> Collective:
        """One of layers, in each tick."""
        return self._one(what, kind, count, size, times * self._ticks)

    def _kept(self, tokens: int) -> list[int]:
        """Bytes of the pieces of so many tokens' keys, or values, as the cache keeps them."""
        heads = share_of(self.config, self.axes).num_key_value_heads
        one = jax.ShapeDtypeStruct((tokens, 1, heads, self.config.head_dim), jnp.float32)
        made = jax.eval_shape(lambda x: cast(x, jnp.dtype(self.cache)), one)
        return [x.size * x.dtype.itemsize for x in jax.tree.leaves(made)]

    def _own_slots(self) -> Iterator[Collective]:
        """Softmaxes of each device's slots are made one."""
        heads = share_of(self.config, self.axes).num_attention_heads
        each = 4 * self._at_once * self.tokens * heads
        yield self._within("largest", "all-reduce", self._layers, each)
        yield self._within("sums", "all-reduce", self._layers, each * (self.config.head_dim + 1))

    def _own_heads(self) -> Iterator[Collective]:
        heads = share_of(self.config, self.axes).num_attention_heads
        size = self._at_once * self.tokens * heads * self.config.head_dim * self.width
        yield self._within("heads", "all-gather", self._layers, size)

    def _exchanged(self) -> Iterator[Collective]:
        share, here = share_of(self.config, self.axes), self._at_once * self._way.here
        queries = share.num_attention_heads * here * self.config.head_dim * self.width
        for what in ("queries", "out"):
            yield self._within(what, "all-to-all", self._layers, queries)
        for size in self._kept(here):
            yield self._within("keys and values", "all-to-all", 2 * self._layers, size)
        yield self._within("positions", "all-gather", 1, 4 * here * self.axes.sequence)

    def _around(self) -> Iterator[Collective]:
        """Keys and values go round among queries; queries round what is cached, with what they have
        seen; then all keys and values into plain order, and round to where they are written.
        """
        n, here = self.axes.sequence, self._at_once * self._way.here
        count = len(layers_run(self.config, self.axes.stage, at_once=True))
        for size in self._kept(here):
            what = "ring: keys and values"
            yield self._within(what, "collective-permute", 2 * count, size, n - 1)
        # Two devices take one turn, which is no loop: their positions go round once for all layers.
        turns = count if n > 2 else 1
        yield self._within("ring: positions", "collective-permute", turns, 4 * here, n - 1)
        queries = here * share_of(self.config, self.axes).num_attention_heads
        size = queries * self.config.head_dim
        for what, number, bytes_ in (
            ("queries", 1, size * self.width),
            ("positions", 1, 4 * here),
            ("largest and sums", 2, 4 * queries),
            ("values", 1, 4 * size),
        ):
            what = f"over the cache: {what}"
            yield self._within(what, "collective-permute", number * count, bytes_, n)
        for size in self._kept(self._here // 2):  # of either half
            yield self._one("into plain order", "collective-permute", 4 * self._layers, size)
        if not self.marks:
            return
        for size in self._kept(self._here):
            yield self._one("written", "collective-permute", 2 * self._layers, size, n - 1)
        yield self._one("slots' tokens", "all-gather", 1, 4 * self.rows * self.slots)
        yield self._one("whether any is cached", "all-reduce", 1, 1)
