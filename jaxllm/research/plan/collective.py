"""A collective operation, the bytes that each device sends for it, and the sizes of a step.

With ring algorithms over t devices an all-reduce of n bytes sends 2 n (t - 1) / t from each device;
an all-gather or reduce-scatter sends n (t - 1) / t (Patarasuk and Yuan 2009).
"""

import dataclasses
from typing import Literal

import numpy as np

from jaxllm.config.model import ModelConfig
from jaxllm.models.moe import MoEConfig
from jaxllm.research.pipeline.stage_layers import tick_layers
from jaxllm.sharding.context_parallel.dispatch import ContextParallel
from jaxllm.sharding.mesh_spec import MeshSpec
from jaxllm.sharding.partition_rules import local_config
from jaxllm.sharding.partition_specs import find_row_axes
from jaxllm.weights.precision import Precision

OpKind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"]


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective that a program contains `count` times.

    Attributes:
        axis: the outermost mesh axis that it runs over.
        over: number of devices.
        bytes: size of its result on each device.
        times: number of times that a loop runs it.
    """

    what: str
    kind: OpKind
    axis: str
    over: int
    count: int
    bytes: int
    times: int = 1

    @property
    def total_calls(self) -> int:
        return self.count * self.times

    @property
    def bytes_sent(self) -> float:
        """The bytes that a device sends for all calls of a step."""
        share = (self.over - 1) / self.over
        parts = {
            "all-reduce": 2 * share,
            "all-gather": share,
            "reduce-scatter": self.over * share,  # its result is one shard
            "all-to-all": share,
            "collective-permute": 1.0,
        }
        return self.total_calls * self.bytes * parts[self.kind]


@dataclasses.dataclass(frozen=True)
class StepSizes:
    """The sizes of a step on a mesh.

    Attributes:
        batch: rows over all devices.
        tokens: new tokens per row; with context parallelism they count as divisible by `sequence`.
        slots: of the cache.
        groups: microbatches of a pipeline.
    """

    config: ModelConfig
    precision: Precision
    axes: MeshSpec
    batch: int
    tokens: int
    slots: int
    deterministic_sums: bool = False
    groups: int = 1

    @property
    def data_shards(self) -> int:
        """The number of groups of devices with different rows."""
        return count_data_shards(self.axes, self.batch)

    @property
    def rows(self) -> int:
        """The rows of a device."""
        return self.batch // self.data_shards

    @property
    def share(self) -> ModelConfig:
        """The configuration of a device's share of the model."""
        return local_config(self.config, self.axes)

    @property
    def context_parallel(self) -> ContextParallel:
        return ContextParallel(self.tokens, self.axes.sequence, self.axes.use_ulysses)

    @property
    def tensor_devices(self) -> int:
        return self.axes.tensor * self.axes.kv_replicas

    @property
    def activation_bytes(self) -> int:
        return np.dtype(self.precision.activations).itemsize

    @property
    def local_tokens(self) -> int:
        """The tokens of a row that a device runs."""
        return self.context_parallel.local_columns

    @property
    def num_layers(self) -> int:
        """The number of layers that a device runs at once."""
        return len(self._local_layers)

    @property
    def num_expert_layers(self) -> int:
        """The number of these layers that have experts."""
        config = self.config
        return (
            sum(map(config.is_moe_layer, self._local_layers))
            if isinstance(config, MoEConfig)
            else 0
        )

    @property
    def _local_layers(self) -> list[int]:
        return tick_layers(self.config, self.axes.stage, self.context_parallel.global_sync)

    @property
    def ticks(self) -> int:
        """The number of times that a device runs its layers: the ticks of a pipeline."""
        return self.groups + self.axes.stage - 1 if self.axes.stage > 1 else 1

    @property
    def tick_rows(self) -> int:
        """The rows that layers run at once."""
        return -(-self.rows // self.groups)

    @property
    def tick_tokens(self) -> int:
        """The tokens that layers run at once."""
        return self.tick_rows * self.local_tokens

    @property
    def splits_tokens(self) -> bool:
        """Whether norms and sums are sharded by tokens (sequence parallelism)."""
        return (
            self.axes.sequence_parallel
            and self.local_tokens > 1
            and self.local_tokens % self.tensor_devices == 0
        )

    @property
    def num_routed_rows(self) -> int:
        """The number of rows for experts: tokens times experts per token."""
        k = self.config.num_experts_per_tok if isinstance(self.config, MoEConfig) else 1
        return self.tick_tokens * k


def count_data_shards(axes: MeshSpec, rows: int) -> int:
    """Return the number of groups of devices with different rows, of `rows` rows in all."""
    return axes.num_shards(find_row_axes(axes, rows) or ())


def rows_per_device(axes: MeshSpec, rows: int) -> int:
    """Return how many of `rows` rows a device runs."""
    return rows // count_data_shards(axes, rows)
