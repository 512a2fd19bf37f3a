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
from jaxllm.mesh.rules import share_of
from jaxllm.mesh.sequence.ways import AXIS, Way
from jaxllm.ops.entries import cast
from jaxllm.plan.collective import Collective, Kind


@dataclasses.dataclass(frozen=True)
class Split:
    """A step of so many tokens of each of a device's rows, against a cache of so many slots.

    width: bytes of a number of what layers are given. cache: the cache's format.
    """

    config: ModelConfig
    axes: Axes
    rows: int
    tokens: int
    slots: int
    width: int
    cache: str

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
    def _layers(self) -> int:
        return self.config.num_hidden_layers

    def _one(self, what: str, kind: Kind, count: int, size: int, times: int = 1) -> Collective:
        return Collective(what, kind, AXIS, self.axes.sequence, count, size, times)

    def _kept(self, tokens: int) -> list[int]:
        """Bytes of the pieces of so many tokens' keys, or values, as the cache keeps them."""
        heads = share_of(self.config, self.axes).num_key_value_heads
        one = jax.ShapeDtypeStruct((tokens, 1, heads, self.config.head_dim), jnp.float32)
        made = jax.eval_shape(lambda x: cast(x, jnp.dtype(self.cache)), one)
        return [x.size * x.dtype.itemsize for x in jax.tree.leaves(made)]

    def _own_slots(self) -> Iterator[Collective]:
        """Softmaxes of each device's slots are made one."""
        heads = share_of(self.config, self.axes).num_attention_heads
        each = 4 * self.rows * self.tokens * heads
        yield self._one("largest", "all-reduce", self._layers, each)
        yield self._one("sums", "all-reduce", self._layers, each * (self.config.head_dim + 1))

    def _own_heads(self) -> Iterator[Collective]:
        heads = share_of(self.config, self.axes).num_attention_heads
        size = self.rows * self.tokens * heads * self.config.head_dim * self.width
        yield self._one("heads", "all-gather", self._layers, size)

    def _exchanged(self) -> Iterator[Collective]:
        share, wide = share_of(self.config, self.axes), self._here * self.config.head_dim
        queries = share.num_attention_heads * wide * self.width
        for what in ("queries", "out"):
            yield self._one(what, "all-to-all", self._layers, queries)
        for size in self._kept(self._here):
            yield self._one("keys and values", "all-to-all", 2 * self._layers, size)
        positions = 4 * self._here * self.axes.sequence
        yield self._one("positions", "all-gather", 1, positions)

    def _around(self) -> Iterator[Collective]:
        """Keys and values go round among queries; queries round what is cached, with what they have
        seen; then all keys and values into plain order, and round to where they are written.
        """
        n, count, here = self.axes.sequence, self._layers, self._here
        for size in self._kept(here):
            yield self._one("ring: keys and values", "collective-permute", 2 * count, size, n - 1)
        # Two devices take one turn, which is no loop: their positions go round once for all layers.
        turns = count if n > 2 else 1
        yield self._one("ring: positions", "collective-permute", turns, 4 * here, n - 1)
        queries = here * share_of(self.config, self.axes).num_attention_heads
        size = queries * self.config.head_dim
        for what, number, bytes_ in (
            ("queries", 1, size * self.width),
            ("positions", 1, 4 * here),
            ("largest and sums", 2, 4 * queries),
            ("values", 1, 4 * size),
        ):
            what = f"over the cache: {what}"
            yield self._one(what, "collective-permute", number * count, bytes_, n)
        for size in self._kept(here // 2):  # of either half
            yield self._one("into plain order", "collective-permute", 4 * count, size)
        if not self.marks:
            return
        for size in self._kept(here):
            yield self._one("written", "collective-permute", 2 * count, size, n - 1)
        yield self._one("slots' tokens", "all-gather", 1, 4 * self.rows * self.slots)
        yield self._one("whether any is cached", "all-reduce", 1, 1)
