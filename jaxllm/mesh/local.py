"""The parameters of one device: its shard of each, in the form that the module takes.

Outside of `jax.shard_map` a parameter is one array over the whole mesh, or one of `Shares`. Inside,
it is an ordinary weight of the module, wrapped in a parallel weight (`weights.leaves.parted`) if a
product needs communication.
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
    """The parameters of a sharded model, as one device has them."""

    config: ModelConfig
    axes: Axes
    exact: bool
    fsdp: bool
    params: Params  # global, as passed to `shard_map`
    rows: specs.Rows  # the axes that split the rows of the call
    stream: Tokens | None = None  # a device's tokens between linears (`megatron`); None: all
    parallel_logits: bool = False

    @cached_property
    def specs(self) -> Params:
        """The `in_specs` of the parameters for `jax.shard_map`."""
        return map_leaves(self._spec, self.params)

    def __call__(self, params: Params) -> Params:
        """Convert local shards to the module's parameters, inside `shard_map`."""
        return map_leaves(self.leaf, params)

    def leaf(self, path: str, part: Any) -> Any:
        """Convert one parameter's shard."""
        split = split_of(self.config, self.exact, path)
        mine = self._said(split, path, self.share(path, part))
        if not split.stack or self.axes.expert == 1:
            return mine
        return Owned(mine, EXPERTS, apart=self.rows is not None and EXPERTS in self.rows)

    def share(self, path: str, part: Any) -> Any:
        """Return the shard of one parameter, without the wrapper that reduces its products."""
        spec = self._where[path]
        if staged(self.config, self.axes, path):
            part = jax.tree.map(lambda x: x[0], part)
            spec = jax.tree.map(lambda s: P(*s[1:]), spec, is_leaf=lambda s: isinstance(s, P))
        return scattered(part, spec, self.axes)

    def _said(self, split: Split, path: str, mine: Any) -> Any:
        """Wrap a shard in the parallel weight that its partition rule needs."""
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
    """Return whether the parameter at `path` is a stack with one entry per stage."""
    return axes.stage > 1 and path.startswith(f"{models.family(config.model_type).layers}.")


def _apart(leaf: Any, apart: tuple[Over, Over]) -> Any:
    """Set the mesh axes that split rows and columns in adapted weights."""
    if not isinstance(leaf, Adapted):
        return leaf
    return leaf.replace(apart=apart, weight=_apart(leaf.weight, apart))
