"""The collectives of context parallelism (axis `sequence`): ring attention or Ulysses.

In prefill each device runs its own tokens (`mesh.sequence.ways`). In decoding all devices run the
token, over their own slots or heads.
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
    """The context-parallel collectives of a step.

    Attributes:
      rows: of a device.
      tokens: new tokens per row.
      slots: of the cache.
      width: bytes per activation.
      cache: the cache's dtype.
      groups: microbatches of a pipeline, one per tick.
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
        if split:  # the device with the last token has the logits
            yield self._one("logits", "all-reduce", 1, 4 * self.rows * self.config.vocab_size)

    @property
    def marks(self) -> bool:
        """Whether devices exchange data about slots: in ring prefill with a sharded cache."""
        split = self._way.split and not self.axes.exchange
        return split and self.slots % self.axes.sequence == 0

    @property
    def _way(self) -> Way:
        return Way(self.tokens, self.axes.sequence, self.axes.exchange)

    @property
    def _here(self) -> int:
        """The tokens of a device in all of its rows."""
        return self.rows * self._way.here

    @property
    def _at_once(self) -> int:
        """The rows that layers run at once."""
        return -(-self.rows // self.groups)

    @property
    def _layers(self) -> int:
        """The number of layers of a stage in its cache."""
        return len(layers_run(self.config, self.axes.stage, at_once=False))

    @property
    def _ticks(self) -> int:
        """The number of pipeline ticks, in each of which a device runs its layers."""
        return self.groups + self.axes.stage - 1

    def _one(self, what: str, kind: Kind, count: int, size: int, times: int = 1) -> Collective:
        return Collective(what, kind, AXIS, self.axes.sequence, count, size, times)

    def _within(self, what: str, kind: Kind, count: int, size: int, times: int = 1) -> Collective:
        """Return a collective of the layers, which runs in each tick."""
        return self._one(what, kind, count, size, times * self._ticks)

    def _kept(self, tokens: int) -> list[int]:
        """Return the bytes of the arrays that store the keys, or the values, of `tokens` tokens."""
        heads = share_of(self.config, self.axes).num_key_value_heads
        one = jax.ShapeDtypeStruct((tokens, 1, heads, self.config.head_dim), jnp.float32)
        made = jax.eval_shape(lambda x: cast(x, jnp.dtype(self.cache)), one)
        return [x.size * x.dtype.itemsize for x in jax.tree.leaves(made)]

    def _own_slots(self) -> Iterator[Collective]:
        """Yield those that merge the softmaxes over each device's slots."""
        heads = share_of(self.config, self.axes).num_attention_heads
        each = 4 * self._at_once * self.tokens * heads
        yield self._within("softmax maxima", "all-reduce", self._layers, each)
        yield self._within(
            "softmax sums", "all-reduce", self._layers, each * (self.config.head_dim + 1)
        )

    def _own_heads(self) -> Iterator[Collective]:
        heads = share_of(self.config, self.axes).num_attention_heads
        size = self._at_once * self.tokens * heads * self.config.head_dim * self.width
        yield self._within("heads", "all-gather", self._layers, size)

    def _exchanged(self) -> Iterator[Collective]:
        share, here = share_of(self.config, self.axes), self._at_once * self._way.here
        queries = share.num_attention_heads * here * self.config.head_dim * self.width
        for what in ("queries", "outputs"):
            yield self._within(what, "all-to-all", self._layers, queries)
        for size in self._kept(here):
            yield self._within("keys and values", "all-to-all", 2 * self._layers, size)
        yield self._within("positions", "all-gather", 1, 4 * here * self.axes.sequence)

    def _around(self) -> Iterator[Collective]:
        """Yield those of ring attention.

        New keys and values rotate past the queries; then the queries, with their partial results,
        rotate past the cache. At the end keys and values are put into plain order (from zigzag) and
        rotate to the devices that store them.
        """
        n, here = self.axes.sequence, self._at_once * self._way.here
        count = len(layers_run(self.config, self.axes.stage, at_once=True))
        for size in self._kept(here):
            what = "ring: keys and values"
            yield self._within(what, "collective-permute", 2 * count, size, n - 1)
        # With two devices there is one turn and no loop, so positions rotate once for all layers.
        turns = count if n > 2 else 1
        yield self._within("ring: positions", "collective-permute", turns, 4 * here, n - 1)
        queries = here * share_of(self.config, self.axes).num_attention_heads
        size = queries * self.config.head_dim
        for what, number, bytes_ in (
            ("queries", 1, size * self.width),
            ("positions", 1, 4 * here),
            ("softmax maxima and sums", 2, 4 * queries),
            ("values", 1, 4 * size),
        ):
            what = f"over the cache: {what}"
            yield self._within(what, "collective-permute", number * count, bytes_, n)
        for size in self._kept(self._here // 2):  # for either half
            yield self._one("undo zigzag", "collective-permute", 4 * self._layers, size)
        if not self.marks:
            return
        for size in self._kept(self._here):
            yield self._one("cache writes", "collective-permute", 2 * self._layers, size, n - 1)
        yield self._one("tokens of slots", "all-gather", 1, 4 * self.rows * self.slots)
        yield self._one("is any slot filled", "all-reduce", 1, 1)
