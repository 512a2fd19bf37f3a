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
from jaxllm.mesh.placing import cut_of
from jaxllm.mesh.rules import WHOLE, share_of, split_of
from jaxllm.models.experts import share_read
from jaxllm.plan.traffic import rows_of
from jaxllm.weights.formats import form, parse
from jaxllm.weights.leaves.sparse import SPARE, SparseFormat
from jaxllm.weights.paths import flatten
from jaxllm.weights.precision import Precision


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
    held = read = 0
    for path, shape in shapes.items():
        count = _bytes(opened, precision, path, shape, axes, exact)
        if axes.stage > 1 and path.split(".")[0] == models.family(config.model_type).layers:
            count //= axes.stage
        held += count
        table = path.removesuffix(".weight") in tables
        head = config.tie_word_embeddings and path == f"{tables[0]}.weight"
        if head or not table:
            read += round(count * share_read(config, shape.ndim, rows))
    return Weights(held, read)


def _bytes(
    opened: Checkpoint,
    precision: Precision,
    path: str,
    shape: jax.ShapeDtypeStruct,
    axes: Axes,
    exact: bool,
) -> int:
    """Of one device's share of a parameter."""
    split, kept = split_of(opened.config, exact, path), list(shape.shape)
    if split.stack:
        kept[0] //= axes.expert
    cut = None if split is WHOLE else cut_of(path, tuple(kept), split, axes)
    name = opened.formats.get(path) or precision.formats_at(path, len(kept))[-1]
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
    described = 9 * rows * capacity  # a slot's position, its token, whether it was patched
    keys = -(-slot * rows * capacity // (axes.stage * axes.sequence))
    return keys + memory * rows // axes.stage + described


@functools.cache
def _row(share: ModelConfig, dtype: str) -> tuple[int, int]:
    """Bytes of a slot's keys and values in all layers, and of a row's memory."""
    made = jax.eval_shape(lambda: init_cache(share, 1, 1, dtype=dtype))
    return _size((made.tail.k, made.tail.v)), _size(made.memory)


def working(config: ModelConfig, axes: Axes, rows: int, tokens: int, slots: int) -> int:
    """About what a step of `tokens` new tokens a row holds beside weights and cache, in bytes.

    The largest of: logits and what sampling makes of them, an MLP's hidden numbers, the scores of
    attention; and the stream that all of them stand beside. All float32, as they are computed.
    """
    rows = rows_of(axes, rows)
    share = share_of(config, axes)
    stream = 4 * rows * tokens * config.hidden_size
    logits = 3 * 4 * rows * config.vocab_size
    hidden = 3 * 4 * rows * tokens * share.intermediate_size
    scores = 2 * 4 * rows * share.num_attention_heads * tokens * (slots + tokens)
    return 4 * stream + max(logits, hidden, scores)
