"""The collectives of context parallelism (axis `sequence`): ring attention or Ulysses.

In prefill each device runs its own tokens (`sharding.context_parallel`). In decoding all devices
run the token, over their own slots or heads.
"""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jaxllm.config.model import ModelConfig
from jaxllm.ops.kv_quant import cast
from jaxllm.plan.collective import Collective, Kind
from jaxllm.sharding.context_parallel.dispatch import AXIS, ContextParallel
from jaxllm.sharding.mesh_spec import MeshSpec
from jaxllm.sharding.partition_rules import local_config
from jaxllm.sharding.pipeline.stage_layers import tick_layers


@dataclasses.dataclass(frozen=True)
class SequenceTraffic:
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
    axes: MeshSpec
    rows: int
    tokens: int
    slots: int
    width: int
    cache: str
    groups: int = 1

    def collectives(self) -> Iterator[Collective]:
        split = self._context_parallel.is_split
        if self.axes.use_ulysses:
            yield from self._ulysses() if split else self._ulysses_decode()
        else:
            yield from self._ring() if split else self._split_cache()
        if split:  # the device with the last token has the logits
            yield self._collective(
                "logits", "all-reduce", 1, 4 * self.rows * self.config.vocab_size
            )

    @property
    def gathers_slots(self) -> bool:
        """Whether devices exchange data about slots: in ring prefill with a sharded cache."""
        split = self._context_parallel.is_split and not self.axes.use_ulysses
        return split and self.slots % self.axes.sequence == 0

    @property
    def _context_parallel(self) -> ContextParallel:
        return ContextParallel(self.tokens, self.axes.sequence, self.axes.use_ulysses)

    @property
    def _local_tokens(self) -> int:
        """The tokens of a device in all of its rows."""
        return self.rows * self._context_parallel.local_columns

    @property
    def _local_rows(self) -> int:
        """The rows that layers run at once."""
        return -(-self.rows // self.groups)

    @property
    def _layers(self) -> int:
        """The number of layers of a stage in its cache."""
        return len(tick_layers(self.config, self.axes.stage, global_sync=False))

    @property
    def _ticks(self) -> int:
        """The number of pipeline ticks, in each of which a device runs its layers."""
        return self.groups + self.axes.stage - 1

    def _collective(
        self, what: str, kind: Kind, count: int, size: int, times: int = 1
    ) -> Collective:
        return Collective(what, kind, AXIS, self.axes.sequence, count, size, times)

    def _layer_collective(
        self, what: str, kind: Kind, count: int, size: int, times: int = 1
    ) -> Collective:
        """Return a collective of the layers, which runs in each tick."""
        return self._collective(what, kind, count, size, times * self._ticks)

    def _cache_bytes(self, tokens: int) -> list[int]:
        """Return the bytes of the arrays that store the keys, or the values, of `tokens` tokens."""
        heads = local_config(self.config, self.axes).num_key_value_heads
        one = jax.ShapeDtypeStruct((tokens, 1, heads, self.config.head_dim), jnp.float32)
        made = jax.eval_shape(lambda x: cast(x, jnp.dtype(self.cache)), one)
        return [x.size * x.dtype.itemsize for x in jax.tree.leaves(made)]

    def _split_cache(self) -> Iterator[Collective]:
        """Yield those that merge the softmaxes over each device's slots."""
        heads = local_config(self.config, self.axes).num_attention_heads
        each = 4 * self._local_rows * self.tokens * heads
        yield self._layer_collective("softmax maxima", "all-reduce", self._layers, each)
        yield self._layer_collective(
            "softmax sums", "all-reduce", self._layers, each * (self.config.head_dim + 1)
        )

    def _ulysses_decode(self) -> Iterator[Collective]:
        heads = local_config(self.config, self.axes).num_attention_heads
        size = self._local_rows * self.tokens * heads * self.config.head_dim * self.width
        yield self._layer_collective("heads", "all-gather", self._layers, size)

    def _ulysses(self) -> Iterator[Collective]:
        share, here = (
            local_config(self.config, self.axes),
            self._local_rows * self._context_parallel.local_columns,
        )
        queries = share.num_attention_heads * here * self.config.head_dim * self.width
        for what in ("queries", "outputs"):
            yield self._layer_collective(what, "all-to-all", self._layers, queries)
        for size in self._cache_bytes(here):
            yield self._layer_collective("keys and values", "all-to-all", 2 * self._layers, size)
        yield self._layer_collective("positions", "all-gather", 1, 4 * here * self.axes.sequence)

    def _ring(self) -> Iterator[Collective]:
        """Yield those of ring attention.

        New keys and values rotate past the queries; then the queries, with their partial results,
        rotate past the cache. At the end keys and values are put into plain order (from zigzag) and
        rotate to the devices that store them.
        """
        n, here = self.axes.sequence, self._local_rows * self._context_parallel.local_columns
        count = len(tick_layers(self.config, self.axes.stage, global_sync=True))
        for size in self._cache_bytes(here):
            what = "ring: keys and values"
            yield self._layer_collective(what, "collective-permute", 2 * count, size, n - 1)
        # With two devices there is one turn and no loop, so positions rotate once for all layers.
        turns = count if n > 2 else 1
        yield self._layer_collective(
            "ring: positions", "collective-permute", turns, 4 * here, n - 1
        )
        queries = here * local_config(self.config, self.axes).num_attention_heads
        size = queries * self.config.head_dim
        for what, number, bytes_ in (
            ("queries", 1, size * self.width),
            ("positions", 1, 4 * here),
            ("softmax maxima and sums", 2, 4 * queries),
            ("values", 1, 4 * size),
        ):
            what = f"over the cache: {what}"
            yield self._layer_collective(what, "collective-permute", number * count, bytes_, n)
        for size in self._cache_bytes(self._local_tokens // 2):  # for either half
            yield self._collective("undo zigzag", "collective-permute", 4 * self._layers, size)
        if not self.gathers_slots:
            return
        for size in self._cache_bytes(self._local_tokens):
            yield self._collective(
                "cache writes", "collective-permute", 2 * self._layers, size, n - 1
            )
        yield self._collective("tokens of slots", "all-gather", 1, 4 * self.rows * self.slots)
        yield self._collective("is any slot filled", "all-reduce", 1, 1)
