"""What one device computes with: its share of each parameter, as the module inside takes it.

Outside of `jax.shard_map` a parameter is one array, or one of `Shares`, over the whole mesh; inside
it is a weight of the module's own, with a leaf around it (`weights.leaves.parted`) where a product
needs a word from other devices.
"""

import dataclasses
from functools import cached_property
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jaxllm import models
from jaxllm.config import ModelConfig
from jaxllm.mesh import specs
from jaxllm.mesh.axes import Axes
from jaxllm.mesh.fsdp import over_data, scattered
from jaxllm.mesh.pipeline.stacked import spec_of_stacked
from jaxllm.mesh.rules import EXPERTS, Over, Split, split_of
from jaxllm.weights.leaves.adapted import Adapted
from jaxllm.weights.leaves.owned import Owned
from jaxllm.weights.leaves.parted import (
    Everywhere,
    Gathered,
    Partial,
    Spread,
    Tokens,
    Vocabulary,
)
from jaxllm.weights.paths import Params, flatten, map_leaves


@dataclasses.dataclass(frozen=True)
class Local:
    """A model's parameters on a mesh, as one device of it has them.

    params: as `shard_map` is given them. rows: the axes over which the rows are split that
    are computed. stream: which tokens a device has between linears (`sequence.megatron`); None:
    all. exact, fsdp, parallel_logits: as of `Meshed`.
    """

    config: ModelConfig
    axes: Axes
    exact: bool
    fsdp: bool
    params: Params
    rows: specs.Rows
    stream: Tokens | None = None
    parallel_logits: bool = False

    @cached_property
    def specs(self) -> Params:
        """Where the arrays of each parameter are, as `jax.shard_map` takes it."""
        return map_leaves(self._spec, self.params)

    def __call__(self, params: Params) -> Params:
        """Inside `shard_map`: what the module takes, of the parts that are here."""
        return map_leaves(self.leaf, params)

    def leaf(self, path: str, part: Any) -> Any:
        """The same of one parameter."""
        split = split_of(self.config, self.exact, path)
        mine = self._said(split, path, self.share(path, part))
        if not split.stack or self.axes.expert == 1:
            return mine
        return Owned(mine, EXPERTS, apart=self.rows is not None and EXPERTS in self.rows)

    def share(self, path: str, part: Any) -> Any:
        """What is here of one parameter, and nothing of what products of shares add up to."""
        spec = self._where[path]
        if staged(self.config, self.axes, path):
            part = jax.tree.map(lambda x: x[0], part)
            spec = jax.tree.map(lambda s: P(*s[1:]), spec, is_leaf=lambda s: isinstance(s, P))
        return scattered(part, spec, self.axes)

    def _said(self, split: Split, path: str, mine: Any) -> Any:
        """A share with what its products need of other devices."""
        over, parts = split.over, self.axes.over(split.over)
        mine = _apart(mine, (self.rows or (), over if split.kind == "row" and parts > 1 else ()))
        if (
            self.stream is not None
            and path == f"{models.family(self.config.model_type).positions}.weight"
        ):
            return Everywhere(mine, self.stream)
        if parts == 1:
            return mine
        if split.kind == "row":
            return Partial(mine, over, self.stream)
        if split.kind == "gathered":
            return Gathered(mine, over, parts)
        if split.kind == "vocabulary":
            size, apart = self.config.vocab_size, self.parallel_logits
            return Vocabulary(mine, over, size, self.stream, apart)
        return Spread(mine, over, self.exact) if split.kind == "norm" else mine

    @cached_property
    def _where(self) -> dict[str, Any]:
        return dict(flatten(self.specs))

    def _spec(self, path: str, leaf: Any) -> Any:
        split = split_of(self.config, self.exact, path)

        def of(leaf: Any) -> Any:
            found = specs.of_parameter(path, leaf, split, self.axes, self.rows)
            return over_data(path, leaf, found, self.axes) if self.fsdp else found

        return spec_of_stacked(leaf, of) if staged(self.config, self.axes, path) else of(leaf)


def staged(config: ModelConfig, axes: Axes, path: str) -> bool:
    """Whether what is at `path` is one of each stage's, side by side."""
    return axes.stage > 1 and path.startswith(f"{models.family(config.model_type).layers}.")


def _apart(leaf: Any, apart: tuple[Over, Over]) -> Any:
    """An adapted weight that is told over which axes devices have rows and columns of their own."""
    if not isinstance(leaf, Adapted):
        return leaf
    return leaf.replace(apart=apart, weight=_apart(leaf.weight, apart))
