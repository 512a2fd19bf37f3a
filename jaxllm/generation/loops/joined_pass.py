"""One pass of the model for the rows that decode and a part of a prompt, which reads the weights
once.

The model sees each token as a row of its own. Only attention needs to know which text a token
belongs to, so it gets the microbatches back. Where bits depend on a row alone
(`has_invariant_rows`), they are those of two passes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxllm import models, ops, steps
from jaxllm.cache.kv import KVCache, Segment, cast_delta
from jaxllm.generation.loops.microbatch import (
    MAX_BATCHED_RUN,
    Microbatch,
    TokenRun,
    pack_microbatch,
)
from jaxllm.models.layers import ParallelHooks
from jaxllm.models.modules import select_columns
from jaxllm.ops import native
from jaxllm.ops.slot_update import write_slots
from jaxllm.ops.target import Program
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params

LEAST_ROOM = 4  # tokens: the native kernels multiply as many rows at once


def fit_part(room: int, singles: int) -> int:
    """Return about `room` tokens: with so many rows of single tokens a multiple of four."""
    part = room - singles % LEAST_ROOM
    return part if part > 2 else part + LEAST_ROOM


def can_join(groups: Sequence[Sequence[TokenRun]]) -> bool:
    """Whether to run two groups in one pass: a part of a prompt, then single tokens.

    A longer part takes so long that reading the weights again is nothing, and each shape is a
    program. Adapters are read once for each row, so a prompt's tokens are not rows then.
    """
    if len(groups) != 2:
        return False
    (part, *more), single = groups
    return (
        not more
        and 1 < part.index_T.size <= MAX_BATCHED_RUN
        and single[0].index_T.size == 1
        and all(run.adapter is None and not run.read for run in (part, *single))
    )


def joined_width(part: int, singles: int) -> int:
    """Return the usual width of a part of a prompt beside so many rows of single tokens."""
    fitting = (fit_part(size, singles) for size in (4, 8, 16, 32, 64))
    return next(size for size in fitting if size >= part)


def pack_joined(
    groups: Sequence[Sequence[TokenRun]],
    rows: int,
    size: int | None = None,
    width: int | None = None,
) -> list[tuple[Microbatch, Any]]:
    """Pack two groups that `can_join`; return what `pack_microbatch` returns of each.

    size, width: of the rows of single tokens, and of the part; by default the usual ones.
    """
    part, single = groups
    singles = pack_microbatch(single, rows, invariant_rows=True, size=size)
    width = width or joined_width(part[0].index_T.size, len(singles[0].token_RT))
    return [pack_microbatch(part, rows, invariant_rows=True, width=width), singles]


def run_joined(
    model: Model, params: Params, cache: KVCache, microbatches: Sequence[Microbatch]
) -> tuple[list[jax.Array], KVCache]:
    """Run microbatches in one pass; return the logits `[R, 1, V]` of each, and the cache, which is
    written in place.
    """
    logits, tail = _RUN(cache.tail, cache.frozen, model, params, tuple(microbatches))
    return logits, cache.replace(tail=tail)


def compile_joined(
    model: Model, params: Params, cache: KVCache, microbatches: Sequence[Microbatch]
) -> list[jax.ShapeDtypeStruct]:
    """Compile what `run_joined` runs; return the shapes of its logits. cache: arrays or shapes."""
    lowered = _RUN.lower(cache.tail, cache.frozen, model, params, tuple(microbatches))
    lowered.compile()
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in lowered.out_info[0]]


def _run(
    tail: Segment,
    pool: tuple[Segment, ...],
    model: Model,
    params: Params,
    microbatches: tuple[Microbatch, ...],
) -> tuple[list[jax.Array], Segment]:
    line = _Line(microbatches)
    lengths = [jnp.repeat(x.length_R, x.token_RT.shape[1]) for x in microbatches]
    trace, delta, _ = steps.run_model(
        model,
        params,
        (*pool, tail),
        line.join([x.token_RT for x in microbatches]),
        line.join([x.position_RT for x in microbatches]),
        length_B=jnp.concatenate(lengths),
        hooks=ParallelHooks(line.attend),
    )
    normed = [
        select_columns(x, places.column_R)
        for places, x in zip(microbatches, line.cut(trace.norm), strict=True)
    ]
    with native.use_one_path(model.precision.invariant):
        head = models.head_params(model, params)
        logits = models.compute_logits(model, head, jnp.concatenate(normed))
    for places, new in zip(microbatches, line.cut(cast_delta(delta, tail)), strict=True):
        rows = places.segment_rows
        tail = write_slots(tail, new, places.slot_RT, rows, wait_for=trace.read_outputs)
    return jnp.split(logits, [normed[0].shape[0]]), tail


class _Line(NamedTuple):
    """The tokens of microbatches in a line, one row each."""

    microbatches: tuple[Microbatch, ...]

    def join(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """Return `[tokens, 1, ...]` from `[R, T, ...]` of each microbatch."""
        return jnp.concatenate([x.reshape(-1, 1, *x.shape[2:]) for x in arrays])

    def cut(self, joined: Any) -> list[Any]:
        """Return each microbatch's part of a pytree of arrays `[tokens, 1, ...]`."""
        parts, end = [], 0
        for places in self.microbatches:
            start, shape = end, places.token_RT.shape
            end += places.token_RT.size
            rows = jax.tree.map(lambda x, a=start, b=end: x[a:b], joined)
            parts.append(jax.tree.map(lambda x, s=shape: x.reshape(*s, *x.shape[2:]), rows))
        return parts

    def attend(
        self, q: jax.Array, at: jax.Array, parts: Sequence[ops.Part], *_: Any, **options: Any
    ) -> tuple[jax.Array, ops.Part]:
        """Compute attention of each microbatch over its own rows (`layers.AttendFunction`)."""
        *past, new = parts
        heads = [
            ops.attend(q, at, [*past, new], row_B=places.segment_rows, **options)[0]
            for places, (q, at, new) in zip(self.microbatches, self.cut((q, at, new)), strict=True)
        ]
        return self.join(heads), new


_RUN = Program(_run, static_argnums=2, donate_argnums=0)
