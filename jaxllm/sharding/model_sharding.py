"""The parts of a sharded model: its configuration, its mesh and how it uses it."""

import dataclasses

from jaxllm import models
from jaxllm.config.model import ModelConfig
from jaxllm.sharding.mesh_spec import MeshSpec
from jaxllm.sharding.partition_rules import PartitionRule, find_rule
from jaxllm.sharding.pipeline.forward import PipelineRunner
from jaxllm.sharding.pipeline.stage_layers import LayerTable, assign_layers
from jaxllm.weights.precision import Precision


@dataclasses.dataclass(frozen=True)
class ModelSharding:
    """How a model is sharded.

    Attributes:
        exact: Sum in the order of one device (`sharding.tensor_parallel.RowParallelExact`).
        runner: Runs the layers, in stages or in one.
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
    runner: PipelineRunner = PipelineRunner(1)  # noqa: RUF009  a constant
    fsdp: bool = False
    remat: bool = False
    sharded_rows: bool = False
    sharded_logits: bool = False

    @property
    def layers(self) -> str:
        """The path of the layers, without their number."""
        return models.get_family(self.config.model_type).layers

    @property
    def layer_table(self) -> LayerTable:
        """The layer numbers of each stage, by place; None: an empty place."""
        return assign_layers(self.config, self.axes.stage, self.runner.chunks)

    def find_rule(self, path: str) -> PartitionRule:
        """Return the partition rule of the parameter at `path`."""
        return find_rule(self.config, self.exact, path)

    def is_staged(self, path: str) -> bool:
        """Return whether the parameter at `path` is a stack with one entry per stage."""
        return self.axes.stage > 1 and path.startswith(f"{self.layers}.")

    def unsharded_paths(self, path: str) -> tuple[str | None, ...]:
        """Return the unsharded paths of the parameter at `path`, one per stage; None: empty."""
        if not self.is_staged(path):
            return (path,)
        place, dot, rest = path.removeprefix(f"{self.layers}.").partition(".")
        numbers = (row[int(place)] for row in self.layer_table)
        return tuple(None if n is None else f"{self.layers}.{n}{dot}{rest}" for n in numbers)

    def template_paths(self, path: str) -> list[str]:
        """Return the path of each stage's entry at `path`; if empty, in the place before."""
        paths = self.unsharded_paths(path)
        if None not in paths:
            return [name for name in paths if name is not None]
        place, dot, rest = path.removeprefix(f"{self.layers}.").partition(".")
        before = self.template_paths(f"{self.layers}.{int(place) - 1}{dot}{rest}")
        return [name or other for name, other in zip(paths, before, strict=True)]
