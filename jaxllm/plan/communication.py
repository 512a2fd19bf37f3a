"""The collectives of a step, by kind, axis, number and bytes.

Tests compare them with compiled programs (`sharding.collective_stats`). All-reduces and gathered
logits are float32, like the results of matmuls. Independent all-reduces over the same devices count
as one, since XLA combines them.
"""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from jaxllm.config.model import ModelConfig
from jaxllm.models import get_family
from jaxllm.models.moe import MoEConfig
from jaxllm.plan.collective import Collective, Kind
from jaxllm.plan.context_parallel import SequenceTraffic
from jaxllm.sharding.context_parallel.dispatch import ContextParallel
from jaxllm.sharding.expert_parallel import BUFFER_FACTOR
from jaxllm.sharding.mesh_spec import MeshSpec
from jaxllm.sharding.partition_specs import find_row_axes
from jaxllm.sharding.pipeline.stage_layers import tick_layers
from jaxllm.weights.formats import parse_format
from jaxllm.weights.precision import Precision
from jaxllm.weights.types.arrays import DTYPES


def rows_per_device(axes: MeshSpec, rows: int) -> int:
    """Return how many of `rows` rows a device runs."""
    return rows // _data_shards(axes, rows)


def _data_shards(axes: MeshSpec, rows: int) -> int:
    """Return the number of groups of devices with different rows."""
    return axes.num_shards(find_row_axes(axes, rows) or ())


def step_collectives(
    config: ModelConfig,
    precision: Precision,
    axes: MeshSpec,
    rows: int,
    tokens: int,
    slots: int,
    *,
    deterministic_sums: bool = False,
    groups: int = 1,
) -> list[Collective]:
    """Return the collectives of a step of `tokens` tokens per row, with the logits of one of them.

    Expert buffers are those for balanced routing; with context parallelism, `tokens` counts as
    divisible by `sequence`.

    Args:
      slots: of the cache.
      groups: microbatches of a pipeline.
    """
    among = _data_shards(axes, rows)
    each = _Step(
        config, precision, axes, rows // among, among, tokens, slots, deterministic_sums, groups
    )
    return [c for c in each.collectives() if c.over > 1 and c.count > 0]


@dataclasses.dataclass(frozen=True)
class _Step:
    """A step. rows: of a device. among: number of groups of devices with different rows."""

    config: ModelConfig
    precision: Precision
    axes: MeshSpec
    rows: int
    data_shards: int
    tokens: int
    slots: int
    deterministic_sums: bool
    groups: int

    def collectives(self) -> Iterator[Collective]:
        text = self.sequence_traffic
        # XLA combines "is any slot filled" with this collective. With stages it does not: it writes
        # the groups of the two in different forms.
        alone = text.gathers_slots and self.axes.stage > 1
        said = self.tokens + (text.gathers_slots and not alone)
        yield Collective("padding mask", "all-reduce", "data", self.data_shards, 1, said)
        yield Collective(
            "is any slot filled", "all-reduce", "data", self.data_shards, int(alone), 1
        )
        yield from self.embedding_traffic()
        yield from self.layer_traffic()
        if self.axes.stage > 1:
            yield from self.stage_traffic()
        if self.axes.expert > 1:
            yield from self.expert_traffic()
        if self.axes.sequence > 1:
            yield from text.collectives()

    @property
    def sequence_traffic(self) -> SequenceTraffic:
        sizes = (self.rows, self.tokens, self.slots, self.activation_bytes)
        return SequenceTraffic(self.config, self.axes, *sizes, self.precision.cache, self.groups)

    @property
    def tensor_devices(self) -> int:
        return self.axes.tensor * self.axes.kv_replicas

    @property
    def activation_bytes(self) -> int:
        """The bytes per activation."""
        return np.dtype(self.precision.activations).itemsize

    @property
    def local_tokens(self) -> int:
        """The tokens of a row that a device runs."""
        return ContextParallel(self.tokens, self.axes.sequence, self.axes.use_ulysses).local_columns

    @property
    def local_layers(self) -> list[int]:
        """The layers that a device runs at once."""
        way = ContextParallel(self.tokens, self.axes.sequence, self.axes.use_ulysses)
        return tick_layers(self.config, self.axes.stage, way.global_sync)

    @property
    def num_expert_layers(self) -> int:
        """The number of these layers that have experts."""
        config = self.config
        return (
            sum(map(config.is_moe_layer, self.local_layers)) if isinstance(config, MoEConfig) else 0
        )

    @property
    def ticks(self) -> int:
        """The number of times that a device runs its layers: the ticks of a pipeline."""
        return self.groups + self.axes.stage - 1 if self.axes.stage > 1 else 1

    @property
    def tick_tokens(self) -> int:
        """The tokens that layers run at once."""
        return -(-self.rows // self.groups) * self.local_tokens

    def embedding_traffic(self) -> Iterator[Collective]:
        """Yield those of embeddings and logits; the vocabulary is sharded over tensor and stage."""
        c, p, over = self.config, self.axes.stage, self.tensor_devices * self.axes.stage
        axis = "stage" if self.axes.stage > 1 else "tensor"
        table = parse_format(
            self.precision.param_format(f"{get_family(c.model_type).token_table}.weight", 2)
        ).lossless_dtype
        whole = self.rows * self.local_tokens * c.hidden_size * np.dtype(DTYPES[table]).itemsize
        if self.splits_tokens:
            own = whole // self.tensor_devices
            yield Collective("embeddings", "reduce-scatter", "tensor", self.tensor_devices, 1, own)
            yield Collective("embeddings over stages", "all-reduce", "stage", p, 1, own)
            norm = self.rows * self.local_tokens * c.hidden_size * self.activation_bytes
            yield Collective("final norm", "all-gather", "tensor", self.tensor_devices, 1, norm)
        else:
            yield Collective("embeddings", "all-reduce", axis, over, 1, whole)
        logits = self.rows * -(-c.vocab_size // over) * over * 4
        yield Collective("logits", "all-gather", axis, over, 1, logits)

    @property
    def splits_tokens(self) -> bool:
        """Whether norms and sums are sharded by tokens (sequence parallelism)."""
        return (
            self.axes.sequence_parallel
            and self.local_tokens > 1
            and self.local_tokens % self.tensor_devices == 0
        )

    def layer_traffic(self) -> Iterator[Collective]:
        """Yield two all-reduces per layer, or the all-gathers that replace them in exact mode."""
        c, t = self.config, self.tensor_devices
        count, routed = len(self.local_layers), self.num_expert_layers
        out = self.tick_tokens * c.hidden_size * 4
        if self.deterministic_sums:
            for what, number, features, some in (
                ("attention", count, c.num_attention_heads * c.head_dim, self.tick_tokens),
                ("MLP", count - routed, c.intermediate_size, self.tick_tokens),
                ("experts", routed, _expert_size(c), self.expert_capacity),
            ):
                given, whole = some * features * self.activation_bytes, some * c.hidden_size * 4
                yield self._layer_collective(f"{what}: inputs", "all-gather", number, given)
                yield self._layer_collective(f"{what}: outputs", "all-gather", number, whole)
        elif self.splits_tokens:
            read = self.tick_tokens * c.hidden_size * self.activation_bytes
            yield self._layer_collective("attention, MLP: inputs", "all-gather", 2 * count, read)
            yield self._layer_collective("attention, MLP", "reduce-scatter", 2 * count, out // t)
        elif getattr(c, "use_parallel_residual", False):  # neither waits for the other
            yield self._layer_collective("attention and MLP", "all-reduce", count, 2 * out)
        else:
            yield self._layer_collective("attention", "all-reduce", count, out)
            yield self._layer_collective("MLP", "all-reduce", count - routed, out)
            yield self._layer_collective("experts", "all-reduce", routed, out)
        if get_family(c.model_type).head_norms:
            yield from self.norm_traffic(count)

    def norm_traffic(self, count: int) -> Iterator[Collective]:
        """Yield those of norms over all heads: sums of squares; if exact, inputs and weights."""
        c, copies = self.config, self.axes.kv_replicas > 1
        squares = self.tick_tokens * 4
        for member in get_family(c.model_type).head_norms:
            over = self.axes.tensor if member.kv_heads_only else self.tensor_devices
            heads = c.num_key_value_heads if member.kv_heads_only else c.num_attention_heads
            features = heads * c.head_dim
            what = "norm of keys" if member.kv_heads_only else "norm of queries"
            if self.deterministic_sums:
                kept = self.precision.param_format("norm.weight", 1)
                weights = features * np.dtype(DTYPES[kept]).itemsize
                wide = self.tick_tokens * features * self.activation_bytes
                yield self._layer_collective(what, "all-gather", count, wide, over)
                yield self._layer_collective(f"{what}: weights", "all-gather", count, weights, over)
            elif copies:  # keys are sharded over fewer devices than queries
                yield self._layer_collective(what, "all-reduce", count, squares, over)
        if not self.deterministic_sums and not copies:
            both = squares * len(get_family(c.model_type).head_norms)
            yield self._layer_collective("norms", "all-reduce", count, both)

    def _layer_collective(
        self, what: str, kind: Kind, number: int, size: int, over: int | None = None
    ) -> Collective:
        return Collective(
            what, kind, "tensor", over or self.tensor_devices, number, size, self.ticks
        )

    def stage_traffic(self) -> Iterator[Collective]:
        p, own = self.axes.stage, self.tensor_devices if self.splits_tokens else 1
        token = self.config.hidden_size * self.activation_bytes
        block = self.tick_tokens // own * token
        yield Collective("stage outputs", "collective-permute", "stage", p, 1, block, self.ticks)
        whole = self.rows * self.local_tokens // own * token
        yield Collective("last stage's output", "all-reduce", "stage", p, 1, whole)

    def expert_traffic(self) -> Iterator[Collective]:
        """Yield the all-to-alls to experts and back, or an all-reduce if rows do not divide.

        Buffers are 1.5 times an even share; less balanced routing needs more than is counted here.
        """
        c, e = self.config, self.axes.expert
        count, sum_ = self.num_expert_layers, self.expert_capacity * c.hidden_size * 4
        if self.data_shards < self.axes.data * e:
            yield Collective("expert outputs", "all-reduce", "expert", e, count, sum_, self.ticks)
            return
        given = self.expert_capacity * c.hidden_size * self.activation_bytes
        for what, size in (
            ("to experts", given),
            ("expert ids", 4 * self.expert_capacity),
            ("from experts", sum_),
        ):
            yield Collective(what, "all-to-all", "expert", e, count, size, self.ticks)
        if self.expert_capacity < e * self.num_routed_rows:
            yield Collective("largest expert load", "all-reduce", "expert", e, count, 4, self.ticks)

    @property
    def num_routed_rows(self) -> int:
        """The number of rows for experts: tokens times experts per token."""
        k = self.config.num_experts_per_tok if isinstance(self.config, MoEConfig) else 1
        return self.tick_tokens * k

    @property
    def expert_capacity(self) -> int:
        """The rows that a device's experts run in total."""
        e = self.axes.expert
        if e == 1 or self.data_shards < self.axes.data * e:
            return self.num_routed_rows
        return e * min(
            self.num_routed_rows, math.ceil(int(BUFFER_FACTOR * self.num_routed_rows) / e)
        )


def _expert_size(config: ModelConfig) -> int:
    return config.expert_size if isinstance(config, MoEConfig) else 0
