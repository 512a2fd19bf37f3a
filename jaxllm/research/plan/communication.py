"""The collectives of a step, by kind, axis, number and bytes.

Tests compare them with compiled programs (`sharding.collective_stats`). All-reduces and gathered
logits are float32, like the results of matmuls. Independent all-reduces over the same devices count
as one, since XLA combines them.
"""

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.models import get_family
from jaxllm.models.moe import MoEConfig
from jaxllm.ops.kv_quant import cast
from jaxllm.research.pipeline.stage_layers import tick_layers
from jaxllm.research.plan.collective import Collective, OpKind, StepSizes
from jaxllm.sharding.context_parallel.dispatch import AXIS
from jaxllm.sharding.expert_parallel import BUFFER_FACTOR
from jaxllm.weights.formats import parse_format
from jaxllm.weights.types.arrays import DTYPES


def step_collectives(step: StepSizes) -> list[Collective]:
    """Return the collectives of a step, with the logits of one token per row.

    Expert buffers are those for balanced routing.
    """
    return [c for c in _all_traffic(step) if c.over > 1 and c.count > 0]


def _all_traffic(step: StepSizes) -> Iterator[Collective]:
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


def _embedding_traffic(step: StepSizes) -> Iterator[Collective]:
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


def _layer_traffic(step: StepSizes) -> Iterator[Collective]:
    """Yield two all-reduces per layer, or the all-gathers that replace them in exact mode."""
    c, t = step.config, step.tensor_devices
    count, routed = step.num_layers, step.num_expert_layers
    out = step.tick_tokens * c.hidden_size * 4
    size, shared_size = (
        (c.expert_size, c.shared_expert_size) if isinstance(c, MoEConfig) else (0, 0)
    )
    shared = routed if shared_size else 0
    if step.deterministic_sums:
        for what, number, features, rows in (
            ("attention", count, c.num_attention_heads * c.head_dim, step.tick_tokens),
            ("MLP", count - routed, c.intermediate_size, step.tick_tokens),
            ("experts", routed, size, _expert_capacity(step)),
            ("shared experts", shared, shared_size, step.tick_tokens),
        ):
            inputs, outputs = rows * features * step.activation_bytes, rows * c.hidden_size * 4
            yield _layer_collective(step, f"{what}: inputs", "all-gather", number, inputs)
            yield _layer_collective(step, f"{what}: outputs", "all-gather", number, outputs)
    elif step.splits_tokens:
        read = step.tick_tokens * c.hidden_size * step.activation_bytes
        yield _layer_collective(step, "attention, MLP: inputs", "all-gather", 2 * count, read)
        sums = 2 * count + shared
        yield _layer_collective(step, "attention, MLP", "reduce-scatter", sums, out // t)
    elif getattr(c, "use_parallel_residual", False):  # neither waits for the other
        yield _layer_collective(step, "attention and MLP", "all-reduce", count, 2 * out)
    else:
        yield _layer_collective(step, "attention", "all-reduce", count, out)
        yield _layer_collective(step, "MLP", "all-reduce", count - routed, out)
        both = 2 * out if shared else out  # neither waits for the other
        yield _layer_collective(step, "experts", "all-reduce", routed, both)
    if get_family(c.model_type).head_norms:
        yield from _norm_traffic(step, count)


def _norm_traffic(step: StepSizes, count: int) -> Iterator[Collective]:
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
    step: StepSizes, what: str, kind: OpKind, number: int, size: int, over: int | None = None
) -> Collective:
    return Collective(what, kind, "tensor", over or step.tensor_devices, number, size, step.ticks)


def _stage_traffic(step: StepSizes) -> Iterator[Collective]:
    p, shards = step.axes.stage, step.tensor_devices if step.splits_tokens else 1
    token = step.config.hidden_size * step.activation_bytes
    block = step.tick_tokens // shards * token
    yield Collective("stage outputs", "collective-permute", "stage", p, 1, block, step.ticks)
    output = step.rows * step.local_tokens // shards * token
    yield Collective("last stage's output", "all-reduce", "stage", p, 1, output)


def _expert_traffic(step: StepSizes) -> Iterator[Collective]:
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


def _expert_capacity(step: StepSizes) -> int:
    """The rows that a device's experts run in total."""
    e = step.axes.expert
    if e == 1 or step.data_shards < step.axes.data * e:
        return step.num_routed_rows
    return e * min(step.num_routed_rows, math.ceil(int(BUFFER_FACTOR * step.num_routed_rows) / e))


def sequence_traffic(step: StepSizes) -> Iterator[Collective]:
    """Yield the context-parallel collectives of a step."""
    split = step.context_parallel.is_split
    if step.axes.use_ulysses:
        yield from _ulysses(step) if split else _ulysses_decode(step)
    else:
        yield from _ring(step) if split else _split_cache(step)
    if split:  # the device with the last token has the logits
        yield _collective(step, "logits", "all-reduce", 1, 4 * step.rows * step.config.vocab_size)


def gathers_slots(step: StepSizes) -> bool:
    """Whether devices ask whether any slot is filled: in ring prefill with a sharded cache."""
    split = step.context_parallel.is_split and not step.axes.use_ulysses
    return split and step.slots % step.axes.sequence == 0


def _collective(
    step: StepSizes, what: str, kind: OpKind, count: int, size: int, times: int = 1
) -> Collective:
    return Collective(what, kind, AXIS, step.axes.sequence, count, size, times)


def _tick_collective(
    step: StepSizes, what: str, kind: OpKind, count: int, size: int, times: int = 1
) -> Collective:
    """Return a collective of the layers, which runs in each tick."""
    return _collective(step, what, kind, count, size, times * (step.groups + step.axes.stage - 1))


def _stage_layers(step: StepSizes) -> int:
    """Return the number of layers of a stage in its cache."""
    return len(tick_layers(step.config, step.axes.stage, global_sync=False))


def _cache_bytes(step: StepSizes, tokens: int) -> list[int]:
    """Return the bytes of the arrays that store the keys, or the values, of `tokens` tokens."""
    heads = step.share.num_key_value_heads
    keys = jax.ShapeDtypeStruct((tokens, 1, heads, step.config.head_dim), jnp.float32)
    arrays = jax.eval_shape(lambda x: cast(x, jnp.dtype(step.precision.cache)), keys)
    return [x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays)]


def _split_cache(step: StepSizes) -> Iterator[Collective]:
    """Yield the collectives that merge the softmaxes over each device's slots."""
    heads = step.share.num_attention_heads
    each = 4 * step.tick_rows * step.tokens * heads
    yield _tick_collective(step, "softmax maxima", "all-reduce", _stage_layers(step), each)
    yield _tick_collective(
        step, "softmax sums", "all-reduce", _stage_layers(step), each * (step.config.head_dim + 1)
    )


def _ulysses_decode(step: StepSizes) -> Iterator[Collective]:
    heads = step.share.num_attention_heads
    size = step.tick_rows * step.tokens * heads * step.config.head_dim * step.activation_bytes
    yield _tick_collective(step, "heads", "all-gather", _stage_layers(step), size)


def _ulysses(step: StepSizes) -> Iterator[Collective]:
    here = step.tick_tokens
    queries = step.share.num_attention_heads * here * step.config.head_dim * step.activation_bytes
    for what in ("queries", "outputs"):
        yield _tick_collective(step, what, "all-to-all", _stage_layers(step), queries)
    for size in _cache_bytes(step, here):
        yield _tick_collective(step, "keys and values", "all-to-all", 2 * _stage_layers(step), size)
    yield _tick_collective(step, "positions", "all-gather", 1, 4 * here * step.axes.sequence)


def _ring(step: StepSizes) -> Iterator[Collective]:
    """Yield those of ring attention.

    New keys and values rotate past the queries; then the queries, with their partial results,
    rotate past the cache. At the end keys and values are put into plain order (from zigzag) and
    rotate to the devices that store them.
    """
    n, here = step.axes.sequence, step.tick_tokens
    count = len(tick_layers(step.config, step.axes.stage, global_sync=True))
    for size in _cache_bytes(step, here):
        what = "ring: keys and values"
        yield _tick_collective(step, what, "collective-permute", 2 * count, size, n - 1)
    # With two devices there is one turn and no loop, so positions rotate once for all layers.
    turns = count if n > 2 else 1
    yield _tick_collective(step, "ring: positions", "collective-permute", turns, 4 * here, n - 1)
    queries = here * step.share.num_attention_heads
    size = queries * step.config.head_dim
    for what, number, bytes_ in (
        ("queries", 1, size * step.activation_bytes),
        ("positions", 1, 4 * here),
        ("softmax maxima and sums", 2, 4 * queries),
        ("values", 1, 4 * size),
    ):
        what = f"over the cache: {what}"
        yield _tick_collective(step, what, "collective-permute", number * count, bytes_, n)
    for size in _cache_bytes(step, step.rows * step.local_tokens // 2):  # for either half
        yield _collective(step, "undo zigzag", "collective-permute", 4 * _stage_layers(step), size)
    if not gathers_slots(step):
        return
    for size in _cache_bytes(step, step.rows * step.local_tokens):
        yield _collective(
            step, "cache writes", "collective-permute", 2 * _stage_layers(step), size, n - 1
        )
