"""Bytes on each device: exact for weights and caches, estimated for temporaries of a step.

The size of a device's shard comes from the code that shards weights
(`sharding.shard_params.TensorSplit`), applied to shapes. If the size of a format depends on the
values (bitmaps, packed bfloat16), it is taken from the file, or computed as if no weight were 0 and
no exponent rare.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np

from jaxllm import models
from jaxllm.cache.kv import init_cache
from jaxllm.checkpoints.native import Checkpoint
from jaxllm.config.model import ModelConfig
from jaxllm.models.moe import MoEConfig, max_read_fraction
from jaxllm.ops.attention import BLOCK
from jaxllm.research.pipeline.stage_layers import assign_layers
from jaxllm.research.plan.collective import StepSizes
from jaxllm.research.sparse.weight import TAIL_PADDING, SparseFormat
from jaxllm.sharding.context_parallel import sequence_parallel
from jaxllm.sharding.mesh_spec import MeshSpec
from jaxllm.sharding.partition_rules import HEAD_AXES, REPLICATED, PartitionRule, find_rule
from jaxllm.sharding.shard_params import plan_split
from jaxllm.weights.experts import plan_blocks
from jaxllm.weights.formats import abstract_weight, parse_format
from jaxllm.weights.paths import flatten
from jaxllm.weights.precision import Precision

ERROR_FACTOR = 1.75  # the memory of a compiled step is within this factor of `working_bytes`


@dataclasses.dataclass(frozen=True)
class WeightBytes:
    """Bytes of one device's parameters, in total and as read by a decoding step."""

    total: int
    read_per_step: int


def weight_bytes(
    checkpoint: Checkpoint,
    precision: Precision,
    axes: MeshSpec,
    deterministic_sums: bool,
    rows: int,
) -> WeightBytes:
    """Return the bytes of a checkpoint's parameters on the most loaded device.

    rows: batch size; it determines how many experts a step reads. Raises ConfigError for sizes that
    do not divide.
    """
    config = checkpoint.config
    shapes = dict(flatten(models.param_shapes(models.build(config))))
    tables = models.get_family(config.model_type).embedding_tables
    prefix = f"{models.get_family(config.model_type).layers}."
    stage_layers = assign_layers(config, axes.stage)[0]  # no stage has more layers than the first
    total = read = 0
    alike: dict[Any, int] = {}  # sizes by format and shape, since layers are alike
    for path, shape in shapes.items():
        split = find_rule(config, deterministic_sums, path)
        name = checkpoint.formats.get(path) or precision.format_chain(path, shape.shape)[-1]
        count = alike.get((name, split, shape.shape))
        if count is None:
            count = _param_bytes(checkpoint, name, path, shape, split, axes)
            if path not in checkpoint.formats:  # else the size may depend on the values
                alike[name, split, shape.shape] = count
        if (
            path.startswith(prefix)
            and int(path.removeprefix(prefix).split(".")[0]) not in stage_layers
        ):
            continue
        total += count
        table = path.removesuffix(".weight") in tables
        head = config.tie_word_embeddings and path == f"{tables[0]}.weight"
        if head or not table:
            read += round(count * max_read_fraction(config, shape.ndim, rows))
    return WeightBytes(total, read)


def _param_bytes(
    checkpoint: Checkpoint,
    name: str,
    path: str,
    shape: jax.ShapeDtypeStruct,
    split: PartitionRule,
    axes: MeshSpec,
) -> int:
    """Return the bytes of one device's shard of a parameter in a format."""
    sizes = list(shape.shape)
    if split.is_expert_stack:
        sizes[0] //= axes.expert
    cut = None if split is REPLICATED else plan_split(path, tuple(sizes), split, axes)
    weight = abstract_weight(name, tuple(sizes))
    if weight is not None:
        return _tree_bytes(
            weight if cut is None else jax.eval_shape(lambda x: cut.take_shard(x, 0), weight)
        )
    if cut is not None:
        sizes[-1 if split.axis else -2] = cut.shard_size * split.fused_parts
    return _rebuilt_bytes(
        checkpoint, path, name, tuple(sizes), 1 if cut is None else cut.num_shards
    )


def _rebuilt_bytes(
    checkpoint: Checkpoint, path: str, name: str, shape: tuple[int, ...], parts: int
) -> int:
    """Return the bytes of a shard in a format whose array sizes depend on the values."""
    sparse = isinstance(parse_format(name), SparseFormat)
    blind, total = math.prod(shape) + TAIL_PADDING if sparse else 0, 0
    for piece, (size, dtype) in parse_format(name).array_specs(shape).items():
        if None not in size:
            total += math.prod(size) * np.dtype(dtype).itemsize  # type: ignore[arg-type]
        elif (known := checkpoint.tensors.get(f"{path}{piece}")) is not None:
            total += -(-known.nbytes // parts)
        else:
            total += blind * np.dtype(dtype).itemsize
    return total


def _tree_bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def cache_bytes(step: StepSizes) -> int:
    """Return the bytes of one device's part of a cache with the rows and slots of a step."""
    axes = step.axes
    slot, memory = _slot_bytes(step.share, step.precision.cache)
    slot = slot // step.config.num_hidden_layers * len(assign_layers(step.config, axes.stage)[0])
    described = 9 * step.rows * step.slots  # a slot's position, its token, whether it was patched
    apart = axes.sequence if axes.use_ulysses or step.slots % axes.sequence == 0 else 1
    keys = -(-slot * step.rows * step.slots // apart)
    return keys + memory * step.rows + described


@functools.cache
def _slot_bytes(share: ModelConfig, dtype: str) -> tuple[int, int]:
    """Return the bytes of a slot's keys and values in all layers, and of a row's memory."""
    cache = jax.eval_shape(lambda: init_cache(share, 1, 1, dtype=dtype))
    return _tree_bytes((cache.tail.k, cache.tail.v)), _tree_bytes(cache.state)


def working_bytes(step: StepSizes) -> int:
    """Estimate the temporary bytes of a step, without our kernels.

    The terms follow the `memory_analysis` of compiled programs. XLA:CPU widens types narrower than
    float32. The terms are:
      - the new keys and values of all layers, which are written at the end. If tokens are sharded
        also a copy of the cache, since XLA does not order its reads and writes there.
      - eight float32 arrays of the size of the residual stream. With sequence parallelism four of
        them have only a device's own tokens.
      - the larger of attention (scores and weights of a block of slots, and the block itself) and
        the hidden activations of an MLP.
      - the buffers of experts.
    """
    config, axes, share, here = step.config, step.axes, step.share, step.local_tokens
    slot, _ = _slot_bytes(share, step.precision.cache)
    layers = len(assign_layers(config, axes.stage)[0])
    new_keys = slot // config.num_hidden_layers * layers * step.rows * here
    unordered = step.tokens > 1 and (axes.sequence > 1 or axes.sequence_parallel)
    copied = cache_bytes(step) if unordered else 0
    stream = 4 * step.rows * here * config.hidden_size
    shards = (
        1 if sequence_parallel.make_token_slice(axes, here) is None else axes.num_shards(HEAD_AXES)
    )
    seen = max(_block_size(step.slots), _block_size(step.tokens))
    heads, keys = share.num_attention_heads, share.num_key_value_heads
    scores = 2 * 4 * step.tick_rows * heads * here * seen
    scores += 4 * 4 * step.tick_rows * seen * keys * max(config.head_dims)
    hidden = 2 * 4 * step.tick_tokens * share.intermediate_size
    layer = max(scores, hidden) + _expert_bytes(share, axes, step.tick_tokens)
    return copied + new_keys + 4 * stream + 4 * stream // shards + layer


def _block_size(slots: int) -> int:
    """Return the slots per attention block; fewer than two blocks are one (`ops.attention`)."""
    return slots if slots < 2 * BLOCK else BLOCK


def _expert_bytes(share: ModelConfig, axes: MeshSpec, tokens: int) -> int:
    """Return the bytes of a layer's expert buffers: routed rows, and the rows padded to blocks."""
    if not isinstance(share, MoEConfig):
        return 0
    rows, experts = tokens * share.num_experts_per_tok, share.num_experts // axes.expert
    width, count = plan_blocks(rows, experts)
    return 4 * (rows + width * count) * (2 * share.hidden_size + 3 * share.expert_size)
