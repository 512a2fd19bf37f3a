"""The collectives of context parallelism (axis `sequence`): ring attention or Ulysses.

In prefill each device runs its own tokens (`sharding.context_parallel`). In decoding all devices
run the token, over their own slots or heads.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jaxllm.ops.kv_quant import cast
from jaxllm.plan.collective import Collective, Kind, Step
from jaxllm.sharding.context_parallel.dispatch import AXIS
from jaxllm.sharding.pipeline.stage_layers import tick_layers


def sequence_traffic(step: Step) -> Iterator[Collective]:
    """Yield the context-parallel collectives of a step."""
    split = step.context_parallel.is_split
    if step.axes.use_ulysses:
        yield from _ulysses(step) if split else _ulysses_decode(step)
    else:
        yield from _ring(step) if split else _split_cache(step)
    if split:  # the device with the last token has the logits
        yield _collective(step, "logits", "all-reduce", 1, 4 * step.rows * step.config.vocab_size)


def gathers_slots(step: Step) -> bool:
    """Whether devices ask whether any slot is filled: in ring prefill with a sharded cache."""
    split = step.context_parallel.is_split and not step.axes.use_ulysses
    return split and step.slots % step.axes.sequence == 0


def _collective(
    step: Step, what: str, kind: Kind, count: int, size: int, times: int = 1
) -> Collective:
    return Collective(what, kind, AXIS, step.axes.sequence, count, size, times)


def _layer_collective(
    step: Step, what: str, kind: Kind, count: int, size: int, times: int = 1
) -> Collective:
    """Return a collective of the layers, which runs in each tick."""
    return _collective(step, what, kind, count, size, times * (step.groups + step.axes.stage - 1))


def _stage_layers(step: Step) -> int:
    """Return the number of layers of a stage in its cache."""
    return len(tick_layers(step.config, step.axes.stage, global_sync=False))


def _cache_bytes(step: Step, tokens: int) -> list[int]:
    """Return the bytes of the arrays that store the keys, or the values, of `tokens` tokens."""
    heads = step.share.num_key_value_heads
    keys = jax.ShapeDtypeStruct((tokens, 1, heads, step.config.head_dim), jnp.float32)
    arrays = jax.eval_shape(lambda x: cast(x, jnp.dtype(step.precision.cache)), keys)
    return [x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays)]


def _split_cache(step: Step) -> Iterator[Collective]:
    """Yield those that merge the softmaxes over each device's slots."""
    heads = step.share.num_attention_heads
    each = 4 * step.tick_rows * step.tokens * heads
    yield _layer_collective(step, "softmax maxima", "all-reduce", _stage_layers(step), each)
    yield _layer_collective(
        step, "softmax sums", "all-reduce", _stage_layers(step), each * (step.config.head_dim + 1)
    )


def _ulysses_decode(step: Step) -> Iterator[Collective]:
    heads = step.share.num_attention_heads
    size = step.tick_rows * step.tokens * heads * step.config.head_dim * step.activation_bytes
    yield _layer_collective(step, "heads", "all-gather", _stage_layers(step), size)


def _ulysses(step: Step) -> Iterator[Collective]:
    here = step.tick_tokens
    queries = step.share.num_attention_heads * here * step.config.head_dim * step.activation_bytes
    for what in ("queries", "outputs"):
        yield _layer_collective(step, what, "all-to-all", _stage_layers(step), queries)
    for size in _cache_bytes(step, here):
        yield _layer_collective(
            step, "keys and values", "all-to-all", 2 * _stage_layers(step), size
        )
    yield _layer_collective(step, "positions", "all-gather", 1, 4 * here * step.axes.sequence)


def _ring(step: Step) -> Iterator[Collective]:
    """Yield those of ring attention.

    New keys and values rotate past the queries; then the queries, with their partial results,
    rotate past the cache. At the end keys and values are put into plain order (from zigzag) and
    rotate to the devices that store them.
    """
    n, here = step.axes.sequence, step.tick_tokens
    count = len(tick_layers(step.config, step.axes.stage, global_sync=True))
    for size in _cache_bytes(step, here):
        what = "ring: keys and values"
        yield _layer_collective(step, what, "collective-permute", 2 * count, size, n - 1)
    # With two devices there is one turn and no loop, so positions rotate once for all layers.
    turns = count if n > 2 else 1
    yield _layer_collective(step, "ring: positions", "collective-permute", turns, 4 * here, n - 1)
    queries = here * step.share.num_attention_heads
    size = queries * step.config.head_dim
    for what, number, bytes_ in (
        ("queries", 1, size * step.activation_bytes),
        ("positions", 1, 4 * here),
        ("softmax maxima and sums", 2, 4 * queries),
        ("values", 1, 4 * size),
    ):
        what = f"over the cache: {what}"
        yield _layer_collective(step, what, "collective-permute", number * count, bytes_, n)
    for size in _cache_bytes(step, step.rows * step.local_tokens // 2):  # for either half
        yield _collective(step, "undo zigzag", "collective-permute", 4 * _stage_layers(step), size)
    if not gathers_slots(step):
        return
    for size in _cache_bytes(step, step.rows * step.local_tokens):
        yield _collective(
            step, "cache writes", "collective-permute", 2 * _stage_layers(step), size, n - 1
        )
