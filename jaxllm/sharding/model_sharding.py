"""The parts of a sharded model: its configuration, its mesh and how it uses it."""

import dataclasses

from jaxllm import models
from jaxllm.config.model import ModelConfig
from jaxllm.models.run_blocks import LayerRunner
from jaxllm.sharding.mesh_spec import MeshSpec
from jaxllm.sharding.partition_rules import PartitionRule, find_rule
from jaxllm.weights.precision import Precision


@dataclasses.dataclass(frozen=True)
class ModelSharding:
    """How a model is sharded.

    Attributes:
        exact: Sum in the order of one device (`sharding.tensor_parallel.RowParallelExact`).
        fsdp: Shard matrices over `data` too (`sharding.fsdp`).
        remat: As in `models.decoder.Decoder`.
        sharded_rows: Each process keeps its own rows of the outputs, as training needs; otherwise
            every process gets all of them, to read on the host.
        sharded_logits: Keep logits sharded over the vocabulary.
    """

    config: ModelConfig
    precision: Precision
    axes: MeshSpec
    exact: bool = False
    fsdp: bool = False
    remat: bool = False
    sharded_rows: bool = False
    sharded_logits: bool = False

    @property
    def layers(self) -> str:
        """The path of the layers, without their number."""
        return models.get_family(self.config.model_type).layers

    @property
    def layer_runner(self) -> LayerRunner | None:
        """What runs the layers that a device has; None: it runs all, one after the other."""
        return None

    @property
    def local_layers(self) -> list[int]:
        """The numbers of the layers that a device has, or the first one if they differ."""
        return [*range(self.config.num_hidden_layers)]

    def find_rule(self, path: str) -> PartitionRule:
        """Return the partition rule of the parameter at `path`."""
        return find_rule(self.config, self.exact, path)
