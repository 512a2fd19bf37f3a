"""Bytes on each device: of weights and caches exactly, of what a step computes about.

What a device has of a weight is asked of the code that cuts weights (`placing.Cut`), with shapes in
place of numbers. Where numbers decide what a format stores (bitmaps, packed bfloat16) it is counted
as if no weight were 0 and no exponent rare, or by what the file has of them.
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

WITHIN = 1.75  # what a step holds is at most so many times `working`, and at least so small a part


@dataclasses.dataclass(frozen=True)
class Weights:
    """Bytes of one device's parameters. read: of which a step of one token a row reads so many."""

    held: int
    read: int


def weights(
    opened: Checkpoint, precision: Precision, axes: Axes, exact: bool, rows: int
) -> Weights:
    """What the most loaded device has of a checkpoint's parameters in the formats of `precision`.

    rows: of a batch, for how many experts a step runs. Raises ConfigError for what does not divide.
    """
    config = opened.config
    shapes = dict(flatten(models.param_shapes(models.build(config))))
    tables = models.family(config.model_type).tables
    prefix = f"{models.family(config.model_type).layers}."
    own = layers_of(config, axes.stage)[0]  # the first stage has as many as any
    held = read = 0
    alike: dict[Any, int] = {}  # layers are: what one's share takes is found once
    for path, shape in shapes.items():
        split = split_of(config, exact, path)
        name = opened.formats.get(path) or precision.formats_at(path, shape.ndim)[-1]
        count = alike.get((name, split, shape.shape))
        if count is None:
            count = _bytes(opened, name, path, shape, split, axes)
            if path not in opened.formats:  # whose numbers may decide
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
    """Of one device's share of a parameter in a format."""
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
    """Of a share that is made anew of its numbers, of which some pieces' lengths are not known."""
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
    """Bytes of one device's part of a cache of so many rows with room for so many tokens."""
    rows = rows_of(axes, rows)
    slot, memory = _row(share_of(config, axes), precision.cache)
    slot = slot // config.num_hidden_layers * len(layers_of(config, axes.stage)[0])
    described = 9 * rows * capacity  # a slot's position, its token, whether it was patched
    apart = axes.sequence if axes.exchange or capacity % axes.sequence == 0 else 1
    keys = -(-slot * rows * capacity // apart)
    return keys + memory * rows + described


@functools.cache
def _row(share: ModelConfig, dtype: str) -> tuple[int, int]:
    """Bytes of a slot's keys and values in all layers, and of a row's memory."""
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
    """About what a step of `tokens` new tokens a row holds beside weights and cache, in bytes,
    where no kernels of ours run. groups: microbatches of a pipeline.

    What compiled programs hold (`memory_analysis`), by what it is: the new keys and values of all
    layers, which are written at the end, where tokens are split beside a copy of the cache
    (XLA knows no order between reading and writing it there); the stream and what is made of it on
    the way, some eight of its size in float32, half of them of a device's own tokens where norms
    and sums are split; the larger of what a layer makes of it, scores of a block of slots and their
    weights beside the block itself, or hidden numbers of an MLP; and what experts make, whose loops
    have room of their own. XLA:CPU widens what is narrower than float32.
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
    """Slots that attention looks at together: fewer than two blocks are one (`ops.attention`)."""
    return slots if slots < 2 * BLOCK else BLOCK


def _experts(share: ModelConfig, axes: Axes, tokens: int) -> int:
    """Of a layer of experts: rows, what is given and made, and both in blocks that are filled."""
    if not isinstance(share, MixtureConfig):
        return 0
    rows, own = tokens * share.num_experts_per_tok, share.num_experts // axes.expert
    width, count = blocks_of(rows, own)
    return 4 * (rows + width * count) * (2 * share.hidden_size + 3 * share.expert_size)
