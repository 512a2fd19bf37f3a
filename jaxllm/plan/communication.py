"""The collectives of a step, by kind, axis, number and bytes.

Tests compare them with compiled programs (`sharding.collective_stats`). All-reduces and gathered
logits are float32, like the results of matmuls. Independent all-reduces over the same devices count
as one, since XLA combines them.
"""

import math
from collections.abc import Iterator

import numpy as np

from jaxllm.models import get_family
from jaxllm.models.moe import MoEConfig
from jaxllm.plan.collective import Collective, Kind, Step
from jaxllm.plan.context_parallel import gathers_slots, sequence_traffic
from jaxllm.sharding.expert_parallel import BUFFER_FACTOR
from jaxllm.weights.formats import parse_format
from jaxllm.weights.types.arrays import DTYPES


def step_collectives(step: Step) -> list[Collective]:
    """Return the collectives of a step, with the logits of one token per row.

    Expert buffers are those for balanced routing.
    """
    return [c for c in _all_traffic(step) if c.over > 1 and c.count > 0]


def _all_traffic(step: Step) -> Iterator[Collective]:
    mask_bytes = step.tokens + gathers_slots(step)  # XLA adds "is any slot filled" to the mask
    yield Collective("padding mask", "all-reduce", "data", step.data_shards, 1, mask_bytes)
    yield from _embedding_traffic(step)
    yield from _layer_traffic(step)
    if step.axes.stage > 1:
        yield from _stage_traffic(step)
    if step.axes.expert > 1:
        yield from _expert_traffic(step)
    if step.axes.sequence > 1:
        yield from sequence_traffic(step)


def _embedding_traffic(step: Step) -> Iterator[Collective]:
    """Yield those of embeddings and logits; the vocabulary is sharded over tensor and stage."""
    c, p, over = step.config, step.axes.stage, step.tensor_devices * step.axes.stage
    axis = "stage" if step.axes.stage > 1 else "tensor"
    table = parse_format(
        step.precision.param_format(
            f"{get_family(c.model_type).token_table}.weight", (c.vocab_size, c.hidden_size)
        )
    ).lossless_dtype
    total = step.rows * step.local_tokens * c.hidden_size * np.dtype(DTYPES[table]).itemsize
    if step.splits_tokens:
        shard = total // step.tensor_devices
        yield Collective("embeddings", "reduce-scatter", "tensor", step.tensor_devices, 1, shard)
        yield Collective("embeddings over stages", "all-reduce", "stage", p, 1, shard)
        norm = step.rows * step.local_tokens * c.hidden_size * step.activation_bytes
        yield Collective("final norm", "all-gather", "tensor", step.tensor_devices, 1, norm)
    else:
        yield Collective("embeddings", "all-reduce", axis, over, 1, total)
    logits = step.rows * -(-c.vocab_size // over) * over * 4
    yield Collective("logits", "all-gather", axis, over, 1, logits)


def _layer_traffic(step: Step) -> Iterator[Collective]:
    """Yield two all-reduces per layer, or the all-gathers that replace them in exact mode."""
    c, t = step.config, step.tensor_devices
    count, routed = step.num_layers, step.num_expert_layers
    out = step.tick_tokens * c.hidden_size * 4
    if step.deterministic_sums:
        expert_size = c.expert_size if isinstance(c, MoEConfig) else 0
        for what, number, features, rows in (
            ("attention", count, c.num_attention_heads * c.head_dim, step.tick_tokens),
            ("MLP", count - routed, c.intermediate_size, step.tick_tokens),
            ("experts", routed, expert_size, _expert_capacity(step)),
        ):
            inputs, outputs = rows * features * step.activation_bytes, rows * c.hidden_size * 4
            yield _layer_collective(step, f"{what}: inputs", "all-gather", number, inputs)
            yield _layer_collective(step, f"{what}: outputs", "all-gather", number, outputs)
    elif step.splits_tokens:
        read = step.tick_tokens * c.hidden_size * step.activation_bytes
        yield _layer_collective(step, "attention, MLP: inputs", "all-gather", 2 * count, read)
        yield _layer_collective(step, "attention, MLP", "reduce-scatter", 2 * count, out // t)
    elif getattr(c, "use_parallel_residual", False):  # neither waits for the other
        yield _layer_collective(step, "attention and MLP", "all-reduce", count, 2 * out)
    else:
        yield _layer_collective(step, "attention", "all-reduce", count, out)
        yield _layer_collective(step, "MLP", "all-reduce", count - routed, out)
        yield _layer_collective(step, "experts", "all-reduce", routed, out)
    if get_family(c.model_type).head_norms:
        yield from _norm_traffic(step, count)


def _norm_traffic(step: Step, count: int) -> Iterator[Collective]:
    """Yield those of norms over all heads: sums of squares; if exact, inputs and weights."""
    c, copies = step.config, step.axes.kv_replicas > 1
    squares = step.tick_tokens * 4
    for member in get_family(c.model_type).head_norms:
        over = step.axes.tensor if member.kv_heads_only else step.tensor_devices
        heads = c.num_key_value_heads if member.kv_heads_only else c.num_attention_heads
        features = heads * c.head_dim
        what = "norm of keys" if member.kv_heads_only else "norm of queries"
        if step.deterministic_sums:
            dtype = step.precision.param_format("norm.weight", (features,))
            weights = features * np.dtype(DTYPES[dtype]).itemsize
            wide = step.tick_tokens * features * step.activation_bytes
            yield _layer_collective(step, what, "all-gather", count, wide, over)
            yield _layer_collective(step, f"{what}: weights", "all-gather", count, weights, over)
        elif copies:  # keys are sharded over fewer devices than queries
            yield _layer_collective(step, what, "all-reduce", count, squares, over)
    if not step.deterministic_sums and not copies:
        both = squares * len(get_family(c.model_type).head_norms)
        yield _layer_collective(step, "norms", "all-reduce", count, both)


def _layer_collective(
    step: Step, what: str, kind: Kind, number: int, size: int, over: int | None = None
) -> Collective:
    return Collective(what, kind, "tensor", over or step.tensor_devices, number, size, step.ticks)


def _stage_traffic(step: Step) -> Iterator[Collective]:
    p, shards = step.axes.stage, step.tensor_devices if step.splits_tokens else 1
    token = step.config.hidden_size * step.activation_bytes
    block = step.tick_tokens // shards * token
    yield Collective("stage outputs", "collective-permute", "stage", p, 1, block, step.ticks)
    output = step.rows * step.local_tokens // shards * token
    yield Collective("last stage's output", "all-reduce", "stage", p, 1, output)


def _expert_traffic(step: Step) -> Iterator[Collective]:
    """Yield the all-to-alls to experts and back, or an all-reduce if rows do not divide.

    Buffers are 1.5 times an even share; less balanced routing needs more than is counted here.
    """
    c, e = step.config, step.axes.expert
    count, sum_ = step.num_expert_layers, _expert_capacity(step) * c.hidden_size * 4
    if step.data_shards < step.axes.data * e:
        yield Collective("expert outputs", "all-reduce", "expert", e, count, sum_, step.ticks)
        return
    inputs = _expert_capacity(step) * c.hidden_size * step.activation_bytes
    for what, size in (
        ("to experts", inputs),
        ("expert ids", 4 * _expert_capacity(step)),
        ("from experts", sum_),
    ):
        yield Collective(what, "all-to-all", "expert", e, count, size, step.ticks)
    if _expert_capacity(step) < e * step.num_routed_rows:
        yield Collective("largest expert load", "all-reduce", "expert", e, count, 4, step.ticks)


def _expert_capacity(step: Step) -> int:
    """The rows that a device's experts run in total."""
    e = step.axes.expert
    if e == 1 or step.data_shards < step.axes.data * e:
        return step.num_routed_rows
    return e * min(step.num_routed_rows, math.ceil(int(BUFFER_FACTOR * step.num_routed_rows) / e))
