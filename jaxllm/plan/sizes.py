"""Bytes on each device: exact for weights and caches, estimated for temporaries of a step.

The size of a device's shard comes from the code that shards weights (`placing.Cut`), applied to
shapes. If the size of a format depends on the values (bitmaps, packed bfloat16), it is taken from
the file, or computed as if no weight were 0 and no exponent rare.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np

from jaxllm import models
from jaxllm.cache.kv import init_cache
from jaxllm.checkpoint import Checkpoint
from jaxllm.config import ModelConfig
from jaxllm.mesh.axes import Axes
from jaxllm.mesh.pipeline.places import layers_of
from jaxllm.mesh.placing import cut_of
from jaxllm.mesh.rules import HEADS, WHOLE, Split, share_of, split_of
from jaxllm.mesh.sequence import megatron
from jaxllm.mesh.sequence.ways import Way
from jaxllm.models.experts import MixtureConfig, share_read
from jaxllm.ops.attention import BLOCK
from jaxllm.plan.traffic import rows_of
from jaxllm.weights.experts import blocks_of
from jaxllm.weights.formats import form, parse
from jaxllm.weights.leaves.sparse import SPARE, SparseFormat
from jaxllm.weights.paths import flatten
from jaxllm.weights.precision import Precision

WITHIN = 1.75  # the memory of a compiled step is within this factor of `working`


@dataclasses.dataclass(frozen=True)
class Weights:
    """Bytes of one device's parameters, and of those that a decoding step reads."""

    held: int
    read: int


def weights(
    opened: Checkpoint, precision: Precision, axes: Axes, exact: bool, rows: int
) -> Weights:
    """Return the bytes of a checkpoint's parameters on the most loaded device.

    rows: batch size; it determines how many experts a step reads. Raises ConfigError for sizes that
    do not divide.
    """
    config = opened.config
    shapes = dict(flatten(models.param_shapes(models.build(config))))
    tables = models.family(config.model_type).tables
    prefix = f"{models.family(config.model_type).layers}."
    own = layers_of(config, axes.stage)[0]  # no stage has more layers than the first
    held = read = 0
    alike: dict[Any, int] = {}  # sizes by format and shape, since layers are alike
    for path, shape in shapes.items():
        split = split_of(config, exact, path)
        name = opened.formats.get(path) or precision.formats_at(path, shape.ndim)[-1]
        count = alike.get((name, split, shape.shape))
        if count is None:
            count = _bytes(opened, name, path, shape, split, axes)
            if path not in opened.formats:  # else the size may depend on the values
                alike[name, split, shape.shape] = count
        if path.startswith(prefix) and int(path.removeprefix(prefix).split(".")[0]) not in own:
            continue
        held += count
        table = path.removesuffix(".weight") in tables
        head = config.tie_word_embeddings and path == f"{tables[0]}.weight"
        if head or not table:
            read += round(count * share_read(config, shape.ndim, rows))
    return Weights(held, read)


def _bytes(
    opened: Checkpoint,
    name: str,
    path: str,
    shape: jax.ShapeDtypeStruct,
    split: Split,
    axes: Axes,
) -> int:
    """Return the bytes of one device's shard of a parameter in a format."""
    kept = list(shape.shape)
    if split.stack:
        kept[0] //= axes.expert
    cut = None if split is WHOLE else cut_of(path, tuple(kept), split, axes)
    whole = form(name, tuple(kept))
    if whole is not None:
        return _size(whole if cut is None else jax.eval_shape(lambda x: cut.share(x, 0), whole))
    if cut is not None:
        kept[-1 if split.axis else -2] = cut.each * split.runs
    return _remade(opened, path, name, tuple(kept), 1 if cut is None else cut.parts)


def _remade(opened: Checkpoint, path: str, name: str, shape: tuple[int, ...], parts: int) -> int:
    """Return the bytes of a shard in a format whose array sizes depend on the values."""
    sparse = isinstance(parse(name), SparseFormat)
    blind, total = math.prod(shape) + SPARE if sparse else 0, 0
    for piece, (size, dtype) in parse(name).expected(shape).items():
        if None not in size:
            total += math.prod(size) * np.dtype(dtype).itemsize  # type: ignore[arg-type]
        elif (known := opened.tensors.get(f"{path}{piece}")) is not None:
            total += -(-known.nbytes // parts)
        else:
            total += blind * np.dtype(dtype).itemsize
    return total


def _size(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def cache(config: ModelConfig, precision: Precision, axes: Axes, rows: int, capacity: int) -> int:
    """Return the bytes of one device's part of a cache of `rows` rows of `capacity` tokens."""
    rows = rows_of(axes, rows)
    slot, memory = _row(share_of(config, axes), precision.cache)
    slot = slot // config.num_hidden_layers * len(layers_of(config, axes.stage)[0])
    described = 9 * rows * capacity  # a slot's position, its token, whether it was patched
    apart = axes.sequence if axes.exchange or capacity % axes.sequence == 0 else 1
    keys = -(-slot * rows * capacity // apart)
    return keys + memory * rows + described


@functools.cache
def _row(share: ModelConfig, dtype: str) -> tuple[int, int]:
    """Return the bytes of a slot's keys and values in all layers, and of a row's memory."""
    made = jax.eval_shape(lambda: init_cache(share, 1, 1, dtype=dtype))
    return _size((made.tail.k, made.tail.v)), _size(made.memory)


def working(
    config: ModelConfig,
    precision: Precision,
    axes: Axes,
    rows: int,
    tokens: int,
    slots: int,
    groups: int = 1,
) -> int:
    """Estimate the temporary bytes of a step of `tokens` new tokens per row, without our kernels.

    The terms follow the `memory_analysis` of compiled programs. XLA:CPU widens types narrower than
    float32. The terms are:
      - the new keys and values of all layers, which are written at the end. If tokens are sharded
        also a copy of the cache, since XLA does not order its reads and writes there.
      - eight float32 arrays of the size of the residual stream. With sequence parallelism four of
        them have only a device's own tokens.
      - the larger of attention (scores and weights of a block of slots, and the block itself) and
        the hidden activations of an MLP.
      - the buffers of experts.

    groups: microbatches of a pipeline.
    """
    local, share = rows_of(axes, rows), share_of(config, axes)
    here = Way(tokens, axes.sequence, axes.exchange).here
    at_once = -(-local // groups)  # rows that a layer runs
    slot, _ = _row(share, precision.cache)
    places = len(layers_of(config, axes.stage)[0])
    kept = slot // config.num_hidden_layers * places * local * here
    unordered = tokens > 1 and (axes.sequence > 1 or axes.stream)
    copied = cache(config, precision, axes, rows, slots) if unordered else 0
    stream = 4 * local * here * config.hidden_size
    own = 1 if megatron.tokens_of(axes, here) is None else axes.over(HEADS)
    seen = max(_block(slots), _block(tokens))
    heads, keys = share.num_attention_heads, share.num_key_value_heads
    scores = 2 * 4 * at_once * heads * here * seen
    scores += 4 * 4 * at_once * seen * keys * config.head_dim
    hidden = 2 * 4 * at_once * here * share.intermediate_size
    layer = max(scores, hidden) + _experts(share, axes, at_once * here)
    return copied + kept + 4 * stream + 4 * stream // own + layer


def _block(slots: int) -> int:
    """Return the slots per attention block; fewer than two blocks are one (`ops.attention`)."""
    return slots if slots < 2 * BLOCK else BLOCK


def _experts(share: ModelConfig, axes: Axes, tokens: int) -> int:
    """Return the bytes of a layer's expert buffers: routed rows, and the rows padded to blocks."""
    if not isinstance(share, MixtureConfig):
        return 0
    rows, own = tokens * share.num_experts_per_tok, share.num_experts // axes.expert
    width, count = blocks_of(rows, own)
    return 4 * (rows + width * count) * (2 * share.hidden_size + 3 * share.expert_size)
