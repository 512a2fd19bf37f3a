"""Metadata of a model family: module paths, shardable dimensions, config fields."""

import dataclasses
from typing import NamedTuple

import flax.linen as nn

from jaxllm.config.model import ModelConfig


class LinearGroup(NamedTuple):
    """Linears of a layer that share one input.

    Attributes:
        input: The input's site (`sites.LAYER_SITES`).
        linears: Their paths in the layer.
        output: The site of their sublayer's output.
        source: The module that produces the input, up to an elementwise product; a scale of the
            input's channels can be divided out of its weights. A norm, or a linear whose last rows
            produce it.
    """

    input: str
    linears: tuple[str, ...]
    output: str
    source: str | None


class ParallelLinear(NamedTuple):
    """A linear of a layer that can be sharded by head or by channel.

    Attributes:
        linear: Its path in the layer.
        axis: 0 if output rows are sharded (with the bias), 1 if input columns are.
        fused_parts: Number of fused matrices, each of which is sharded by itself.
        kv_heads_only: Whether it is sharded by key/value heads only, without query heads.
    """

    linear: str
    axis: int
    fused_parts: int = 1
    kv_heads_only: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Metadata of the models of one `model_type`.

    Module paths are relative to the model, and within layers relative to the layer. None: the
    family has no such module.

    Attributes:
        config, module: The classes of configuration and model.
        token_table, position_table: Paths of the token and learned-position tables.
        embeddings, norm: Activation names of the embeddings and of the final norm's output.
        layers: Path of the layers, without their number.
        attention_norm, mlp_norm: The norms before attention and before the MLP.
        attention: Activation name of attention's output.
        mlp_down: The MLP's last linear.
        block: The class of a layer.
        linear_groups: A layer's linears in execution order, without experts; a layer may lack some.
        head_linears: Linears sharded by key/value head with its query heads.
        channel_linears: Linears sharded by hidden channel of the MLP.
        expert_linears: Linears of experts, and of the dense layers beside them, that are sharded by
            hidden channel, in families that do not shard `channel_linears`.
        head_norms: Norms over all heads at once.
        width_fields: The config fields with the number of hidden channels.
        router: The router, in place of `mlp_down` in layers with experts.
        output_scale: A layer's parameter that scales its output, the stream included.
    """

    config: type[ModelConfig]
    module: type[nn.Module]
    token_table: str
    position_table: str | None
    embeddings: str
    layers: str
    attention_norm: str | None
    attention: str
    mlp_norm: str | None
    mlp_down: str
    norm: str
    block: type[nn.Module]
    linear_groups: tuple[LinearGroup, ...]
    head_linears: tuple[ParallelLinear, ...]
    channel_linears: tuple[ParallelLinear, ...]
    expert_linears: tuple[ParallelLinear, ...] = ()
    head_norms: tuple[ParallelLinear, ...] = ()
    width_fields: tuple[str, ...] = ("intermediate_size",)
    router: str | None = None
    output_scale: str | None = None

    @property
    def embedding_tables(self) -> tuple[str, ...]:
        """The paths of all embedding tables."""
        return (
            (self.token_table,)
            if self.position_table is None
            else (self.token_table, self.position_table)
        )
