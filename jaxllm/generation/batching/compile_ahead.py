"""Compile the programs of a serving loop before requests need them, without running them."""

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxllm.cache.prefix_cache import cut_chunk, write_chunk
from jaxllm.generation.batching.active import (
    ActiveRequest,
    ServeState,
    draw_rows,
    fill_row,
    one_row,
    round_arguments,
    top_width,
)
from jaxllm.generation.batching.prefix_store import Prefix
from jaxllm.generation.batching.requests import Request
from jaxllm.generation.loops.draft import cut_rows
from jaxllm.generation.loops.joined_pass import compile_joined, fit_part, pack_joined
from jaxllm.generation.loops.microbatch import (
    Microbatch,
    TokenRun,
    bucket_rows,
    compile_microbatch,
    pack_microbatch,
)
from jaxllm.generation.loops.rounds import SERVED_ROUNDS
from jaxllm.generation.sampling.sampler import Sampler
from jaxllm.generation.sampling.stacked import fit_sampler, rare_sampler, stack_sampler
from jaxllm.ops.target import is_accelerator
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params

_NOTHING_RAN = Prefix(0, 0, None, [], 0, [], 0)


class Loop(NamedTuple):
    """A serving loop: its model, its state, and the arguments of `serve`.

    chunk, multiple: the most prompt tokens of a step, and of what number the first ones are a
    multiple (`PrefixStore`). invariant_rows: whether shapes do not change bits.
    """

    model: Model
    params: Params
    state: ServeState
    chunk: int
    burst: int
    multiple: int
    invariant_rows: bool


class LoopQuery(NamedTuple):
    """Takes the place of a request. The loop adds these kinds of samplers to its state, and calls
    `reply` with itself. Do not keep the state's arrays: the loop writes them in place.
    """

    samplers: Sequence[Sampler]
    reply: Callable[[Loop], Any]


def keep_shapes(loop: Loop) -> Loop:
    """Return the loop with the shapes of its state's arrays."""

    def shape(x: jax.Array) -> jax.ShapeDtypeStruct:
        sharding = x.sharding if x.committed else None
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    state = loop.state
    draft = state.draft
    cache, rows, *written = jax.tree.map(shape, (state.cache, state.rows, draft.tail, draft.state))
    state = state._replace(cache=cache, rows=rows, draft=draft.with_written(*written))
    return loop._replace(state=state)


def compile_ahead(loop: Loop, adapter: int | None, chunk_size: int | None) -> Iterator[None]:
    """Compile the programs of usual requests in the order of their use; yield after each.

    loop: with the shapes of its state (`keep_shapes`). adapter: as in `Request`. chunk_size: of the
    prefix cache, if there is one.
    """
    state, rows, number = loop.state, loop.state.cache.batch, np.int32(0)
    if not state.kinds:  # no usual request is possible
        return
    _compile_fill(state)
    if chunk_size is not None and chunk_size <= state.capacity:
        cut = cut_chunk.lower(state.cache.tail, number, number, chunk_size)
        cut.compile()
        write_chunk.lower(state.cache.tail, cut.out_info, number, number).compile()
    yield
    chunk = loop.multiple if loop.multiple > 1 else loop.chunk
    usual = (256, 1, 64, 512, 128, 1024, 2048) if is_accelerator() else (32, 1, 64, 16, 128, 8, 256)
    widths = [n for n in usual if n <= min(chunk, state.capacity)]
    counts, drawn = sorted({min(bucket_rows(n + 1), rows) for n in range(rows)}), []
    for count in counts:
        for width in widths if count == 1 else (1, 64 if is_accelerator() else 8):
            if width == 1 or count == 1 or loop.multiple == 1:
                drawn.append((yield from _compile_step(loop, count, width, adapter)))
        if loop.invariant_rows and adapter is None:
            for room in (n for n in (8, 4, 16, 32) if n <= chunk):
                _compile_joined(loop, count, fit_part(room, count))
                yield
    if state.draft.width:
        for count in counts:
            yield from _compile_burst(loop, count, adapter)
    rare = _add_rare(loop)
    _compile_fill(rare.state)
    for places, at, out in drawn:
        yield
        _compile_draw(rare, _fill_state(rare, len(at), adapter), places, at, out)


def _add_rare(loop: Loop) -> Loop:
    """Return the loop, with shapes, as it is once a request with rare options has come."""
    state, vocab_size = loop.state, loop.model.config.vocab_size
    width, rows = state.rows.context.token_BL.shape[1], state.cache.batch
    kind, sampler = fit_sampler(rare_sampler(vocab_size), vocab_size, width)
    held = dict(zip(state.kinds, state.rows.samplers, strict=True))
    held[kind] = jax.eval_shape(lambda: stack_sampler(sampler, rows))
    kinds, samplers = zip(*sorted(held.items(), key=lambda item: str(item[0])), strict=True)
    return loop._replace(
        state=state._replace(kinds=kinds, rows=state.rows.replace(samplers=samplers))
    )


def _compile_fill(state: ServeState) -> None:
    """Compile what puts a request into a row, for each kind of sampler."""
    bare = state.rows.replace(samplers=())
    filled = one_row(bare, np.zeros(1, np.int32), 1, 0, np.zeros(bare.eos_BE.shape[1], np.int32))
    for stacked in state.rows.samplers:
        sampler = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stacked)
        states = (state.cache.state, state.draft.state)
        places = (state.cache.tail.position_BS, states, bare, stacked, np.int32(0), np.int32(0))
        fill_row.lower(*places, filled, sampler).compile()


def _fill_state(loop: Loop, count: int, adapter: int | None) -> ServeState:
    """Return the state of a loop with requests that have run a token in the first rows."""
    request = Request(id=0, prompt=[0], max_new_tokens=1, adapter=adapter, eos_token_ids=(0,))
    prompt_T, kind = np.zeros(1, np.int32), loop.state.kinds[0]
    active = ActiveRequest(request, 0, prompt_T, kind, _NOTHING_RAN, 1, num_run=1, tokens=[0])
    return loop.state._replace(active=dict.fromkeys(range(count), active))


def _compile_step(
    loop: Loop, count: int, width: int, adapter: int | None
) -> Generator[None, None, tuple[Microbatch, np.ndarray, jax.ShapeDtypeStruct]]:
    """Compile a step of `count` rows with so many tokens each, and the draw after it.

    Returns:
        The arguments of `_compile_draw`.
    """
    state = _fill_state(loop, count, adapter)
    runs = _make_runs(count, width, adapter)
    places, at = pack_microbatch(runs, state.cache.batch, invariant_rows=loop.invariant_rows)
    places = places.replace(edits=state.edits, page_RP=state.list_pages({}, len(places.token_RT)))
    out = compile_microbatch(loop.model, loop.params, state.cache, places)
    yield
    _compile_draw(loop, state, places, at, out)
    yield
    draft = state.draft
    if isinstance(draft.source, Model) and count == 1:
        assert draft.cache is not None and draft.params is not None
        end_B = np.zeros(state.cache.batch, np.int32)
        cut_rows.lower(draft.cache.tail, None, end_B).compile()
        runs = [run._replace(output_T=run.index_T < 0, adapter=None) for run in runs]
        drafted, _ = pack_microbatch(runs, state.cache.batch, invariant_rows=True)
        compile_microbatch(draft.source, draft.params, draft.cache, drafted)
        yield
    return places, at, out


def _make_runs(count: int, width: int, adapter: int | None) -> list[TokenRun]:
    """Return a text of `width` tokens in each of the first rows, of which the last is an output."""
    at_T = np.arange(width)
    run = TokenRun((), at_T, at_T, at_T, at_T, at_T == width - 1, width, adapter)
    return [run._replace(rows=(row,)) for row in range(count)]


def _compile_joined(loop: Loop, count: int, width: int) -> None:
    """Compile one pass for `count` rows that decode and `width` tokens of a prompt."""
    cache = loop.state.cache
    groups = [_make_runs(n, size, None) for n, size in ((1, width), (count, 1))]
    packed = pack_joined(groups, cache.batch)
    parts = [
        places.replace(page_RP=loop.state.list_pages({}, len(places.token_RT)))
        for places, _ in packed
    ]
    compile_joined(loop.model, loop.params, cache, parts)


def _compile_draw(
    loop: Loop, state: ServeState, places: Microbatch, at: np.ndarray, out: jax.ShapeDtypeStruct
) -> None:
    """Compile the draw after a step. at: The microbatch's row of each row. out: Its logits."""
    uses_KR = state.kind_mask(dict(enumerate(at)), out.shape[0])
    wanted = (top_width(loop.model), state.wants_top)
    draw_rows.lower(state.rows, uses_KR, out, places.row_R, *wanted).compile()


def _compile_burst(loop: Loop, count: int, adapter: int | None) -> Iterator[None]:
    """Compile the loop in which `count` rows decode."""
    state = _fill_state(loop, count, adapter)
    _, arguments = round_arguments(
        loop.model, loop.params, state, loop.burst, loop.burst, loop.invariant_rows
    )
    SERVED_ROUNDS.lower(*arguments).compile()
    yield
