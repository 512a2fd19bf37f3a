"""Microbatches of tokens from many sequences, and the compiled programs that run them.

Sequences are independent, so those with a similar number of tokens are grouped: a row that decodes
one token is not padded to the width of another row's prompt.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import struct

from jaxllm import steps
from jaxllm.cache.commit import commit_state
from jaxllm.cache.kv import EMPTY, MAX_SLOTS, KVCache, Segment, cast_delta
from jaxllm.generation.loops.finish import put_rows, take_rows
from jaxllm.models.modules import select_columns
from jaxllm.models.sites import NO_EDITS, Edits, sites_to_record
from jaxllm.ops.padding import next_power_of_two
from jaxllm.ops.slot_update import NO_SLOT, write_slots
from jaxllm.ops.target import Program, is_accelerator
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params
from jaxllm.weights.types.lora import NO_ADAPTER, choose_adapters

Array = Any  # a jax or numpy array
Sites = dict[str, jax.Array]  # what was read, by full name
MAX_BATCHED_RUN = 32  # tokens; a longer run is never batched, since one already uses all cores


class TokenRun(NamedTuple):
    """Consecutive tokens of one sequence, or of several sequences with the same text.

    Attributes:
        rows: The sequences.
        index_T: Indices of the tokens in the caller's batch.
        token_T: Token ids.
        position_T: Positions in the text.
        slot_T: Cache slots to write: the row's own, or shared ones if there are several rows.
        output_T: Which tokens need an output.
        length: Length of the text including tokens of it that are still to run.
        adapter: Adapter index if rows use different ones (`weights.types.lora.choose_adapters`).
        read: Names of the sites to read at the one token that needs an output.
    """

    rows: tuple[int, ...]
    index_T: np.ndarray
    token_T: np.ndarray
    position_T: np.ndarray
    slot_T: np.ndarray
    output_T: np.ndarray
    length: int
    adapter: int | None = None
    read: tuple[str, ...] = ()

    def slice_tokens(self, tokens: slice) -> "TokenRun":
        """Return the run restricted to a slice of its tokens."""
        return self._replace(**{name: getattr(self, name)[tokens] for name in self._fields[1:6]})


class Microbatch(struct.PyTreeNode):
    """A microbatch of R rows of T tokens; padding has position -1 and slot NO_SLOT.

    Attributes:
        row_R: Cache rows, one beyond the last for padding; None for all rows in order.
        token_RT: Token ids.
        position_RT: Positions in the text.
        slot_RT: Cache slots to write.
        length_R: Length of each row's text.
        column_R: The one column that needs an output; None for all columns.
        adapter_R: Adapter index of each row; None keeps the parameters' own choice.
        edits: Of all cache rows (`site_inputs.stack_rows`).
        page_RP: The rows of the cache's segments that have each row's slots, one after another;
            None: `row_R`.
        read: Names of the sites to read in the column of `column_R`. Static.
    """

    row_R: Array | None
    token_RT: Array
    position_RT: Array
    slot_RT: Array
    length_R: Array
    column_R: Array | None
    adapter_R: Array | None = None
    edits: Edits = NO_EDITS
    page_RP: Array | None = None
    read: tuple[str, ...] = struct.field(pytree_node=False, default=())

    @property
    def segment_rows(self) -> Array | None:
        """The rows of the cache's segments to read and write (`ops.attend`, `write_slots`)."""
        return self.row_R if self.page_RP is None else self.page_RP


def split_microbatches(
    runs: Sequence[TokenRun], limit: int, *, alone: int = MAX_SLOTS
) -> Iterator[list[TokenRun]]:
    """Split and group token runs so that no group has more than `limit` tokens.

    Groups contain runs of one padded width, of which the same sites are read, and either only
    single-row or only shared runs. The tokens of a run keep their order. alone: runs of more tokens
    than this have a group each.
    """
    queue = [run for run in runs if run.index_T.size]
    while queue:
        groups: dict[tuple[int, bool, tuple[str, ...]], list[TokenRun]] = {}
        for run in queue:
            piece = run.slice_tokens(slice(0, limit))
            kind = (padded_width(piece.index_T.size), len(run.rows) > 1, sites_to_read([piece]))
            groups.setdefault(kind, []).append(piece)
        for (width, *_), pieces in groups.items():
            yield from _split_groups(pieces, limit) if width <= alone else ([p] for p in pieces)
        queue = [run.slice_tokens(slice(limit, None)) for run in queue if run.index_T.size > limit]


def split_chunks(runs: Sequence[TokenRun], chunk: int) -> Iterator[list[TokenRun]]:
    """Split token runs into chunks that run alone, and last groups of all single tokens, one for
    each set of sites to read.

    So the shape in which a token runs depends only on its own text. Longer runs must begin at a
    multiple of `chunk`.
    """
    pieces = [
        run.slice_tokens(slice(start, start + chunk))
        for run in runs
        for start in range(0, run.index_T.size, chunk)
    ]
    yield from ([piece] for piece in pieces if piece.index_T.size > 1)
    single: dict[tuple[str, ...], list[TokenRun]] = {}
    for piece in pieces:
        if piece.index_T.size == 1:
            single.setdefault(piece.read, []).append(piece)
    yield from single.values()


def sites_to_read(runs: Sequence[TokenRun]) -> tuple[str, ...]:
    """Return the sites to read of a group: none if no token of it needs an output."""
    return runs[0].read if any(run.output_T.any() for run in runs) else ()


def _split_groups(pieces: list[TokenRun], limit: int) -> Iterator[list[TokenRun]]:
    group: list[TokenRun] = []
    for piece in pieces:
        if group and sum(p.index_T.size for p in group) + piece.index_T.size > limit:
            yield group
            group = []
        group.append(piece)
    yield group


def padded_width(tokens: int) -> int:
    """Return a padded width: few widths mean few compiled programs. On an accelerator 64 tokens
    take as long as one.
    """
    return 1 if tokens == 1 else next_power_of_two(tokens, 64 if is_accelerator() else 8)


def bucket_rows(count: int) -> int:
    """Return the number of rows that a program for `count` rows has: 1, 4, 8, 16, ...

    Each number of rows compiles its own programs, and up to four cost little more than one.
    """
    return 1 if count == 1 else max(4, next_power_of_two(count))


def pack_microbatch(
    runs: Sequence[TokenRun],
    rows: int,
    *,
    invariant_rows: bool = False,
    size: int | None = None,
    width: int | None = None,
) -> tuple[Microbatch, np.ndarray]:
    """Pack token runs into a microbatch; also return the microbatch row of each run.

    rows: number of cache rows. invariant_rows: whether shapes do not change bits. Single tokens
    then use as few rows as they need, as wider runs always do; else all, like a decode step. size,
    width: of the microbatch; by default one of few.
    """
    if width is None:
        width = padded_width(max(run.index_T.size for run in runs))
    few = size or (bucket_rows(len(runs)) if invariant_rows else next_power_of_two(len(runs)))
    uses_all_rows = (width == 1 and not invariant_rows) or few >= rows
    R = rows if uses_all_rows else few
    at = np.array([run.rows[0] for run in runs]) if uses_all_rows else np.arange(len(runs))
    row_R = np.full(R, rows, np.int32)
    token_RT, position_RT = np.zeros((R, width), np.int32), np.full((R, width), EMPTY, np.int32)
    slot_RT = np.full((R, width), NO_SLOT, np.int32)
    length_R, column_R = np.ones(R, np.int32), np.zeros(R, np.int32)
    for r, run in zip(at, runs, strict=True):
        real = slice(0, run.index_T.size)
        row_R[r] = run.rows[0]
        token_RT[r, real], position_RT[r, real] = run.token_T, run.position_T
        slot_RT[r, real], length_R[r] = run.slot_T, run.length
        column_R[r] = np.argmax(run.output_T)
    several = any(np.count_nonzero(run.output_T) > 1 for run in runs)
    places = Microbatch(
        None if uses_all_rows else row_R,
        token_RT,
        position_RT,
        slot_RT,
        length_R,
        None if several else column_R,
        row_adapters({r: run.adapter for r, run in zip(at, runs, strict=True)}, R),
        read=sites_to_read(runs),
    )
    return places, at


def row_adapters(adapters: Mapping[int, int | None], rows: int) -> np.ndarray | None:
    """Return each row's adapter index, int32 `[rows]`, or None if no row has one."""
    if all(adapter is None for adapter in adapters.values()):
        return None
    adapter_R = np.full(rows, NO_ADAPTER, np.int32)
    for row, adapter in adapters.items():
        adapter_R[row] = NO_ADAPTER if adapter is None else adapter
    return adapter_R


def run_microbatch(
    model: Model,
    params: Params,
    cache: KVCache,
    microbatch: Microbatch,
) -> tuple[jax.Array, KVCache, Sites]:
    """Run a microbatch without any checks; return its logits, float32 `[R, 1 or T, V]`, the cache,
    which is written in place, and what was read.

    The caller updates the cache's `cursor` and `next_position_B`. Sites have their axes with one
    token.
    """
    out, tail, state, sites = _RUN(cache.tail, cache.frozen, model, params, microbatch, cache.state)
    return out, cache.replace(tail=tail, state=state), sites


def compile_microbatch(
    model: Model, params: Params, cache: KVCache, microbatch: Microbatch
) -> jax.ShapeDtypeStruct:
    """Compile what `run_microbatch` runs, without running it; return its output's shape.

    cache: arrays or their shapes.
    """
    lowered = _RUN.lower(cache.tail, cache.frozen, model, params, microbatch, cache.state)
    lowered.compile()
    out = lowered.out_info[0]
    return jax.ShapeDtypeStruct(out.shape, out.dtype)


def _run(
    tail: Segment,
    pool: tuple[Segment, ...],
    model: Model,
    params: Params,
    microbatch: Microbatch,
    state: tuple[Any, ...],
) -> tuple[jax.Array, Segment, tuple[Any, ...], Sites]:
    row_R = microbatch.row_R
    out, delta, waits, sites = run_tokens(
        model, params, (*pool, tail), take_rows(state, row_R), microbatch
    )
    after = commit_state(delta.state, delta.position_BS, waits)
    new = cast_delta(delta, tail)
    tail = write_slots(tail, new, microbatch.slot_RT, microbatch.segment_rows, wait_for=waits)
    return out, tail, put_rows(state, row_R, after), sites


def run_tokens(
    model: Model,
    params: Params,
    segments: tuple[Segment, ...],
    state: tuple[Any, ...],
    microbatch: Microbatch,
) -> tuple[jax.Array, Any, tuple[jax.Array, ...], Sites]:
    """Return the logits, the delta, what the cache's writes wait for, and sites.

    state: of these rows.
    """
    token_RT = microbatch.token_RT
    if microbatch.adapter_R is not None:
        params = choose_adapters(params, microbatch.adapter_R)
    trace, delta, _ = steps.run_model(
        model,
        params,
        segments,
        token_RT,
        microbatch.position_RT,
        length_B=microbatch.length_R,
        column_B=microbatch.column_R,
        state=state,
        row_B=microbatch.segment_rows,
        edits=take_rows(microbatch.edits, microbatch.row_R),
        read=sites_to_record(microbatch.read),
    )
    sites = {
        name: x if name == "logits" else select_columns(x, microbatch.column_R)
        for name, x in trace.read_sites(microbatch.read).items()
    }
    return trace.logits, delta, trace.read_outputs, sites


_RUN = Program(_run, static_argnums=2, donate_argnums=(0, 5))
