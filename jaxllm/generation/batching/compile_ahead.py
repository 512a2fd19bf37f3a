"""Compile the programs of a serving loop before requests need them, without running them."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
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
from jaxllm.generation.batching.admission import add_samplers
from jaxllm.generation.batching.prefix_store import Prefix
from jaxllm.generation.batching.programs import Family, Job, Programs
from jaxllm.generation.batching.requests import Request
from jaxllm.generation.batching.step import Loop
from jaxllm.generation.loops.draft import cut_rows
from jaxllm.generation.loops.joined_pass import compile_joined, fit_part, pack_joined
from jaxllm.generation.loops.microbatch import (
    Microbatch,
    TokenRun,
    bucket_rows,
    compile_microbatch,
    pack_microbatch,
    padded_width,
)
from jaxllm.generation.loops.rounds import SERVED_ROUNDS
from jaxllm.generation.sampling.sampler import Sampler
from jaxllm.generation.sampling.stacked import rare_sampler
from jaxllm.ops.target import is_accelerator
from jaxllm.weights.model import Model
from jaxllm.weights.types.lora import NO_ADAPTER

_NOTHING_RAN = Prefix(0, 0, None, [], 0, [], 0)


class LoopQuery(NamedTuple):
    """Takes the place of a request. The loop adds these kinds of samplers to its state, and calls
    `reply` with itself. Do not keep the state's arrays: the loop writes them in place.
    """

    samplers: Sequence[Sampler]
    reply: Callable[[Loop], Any]


def keep_shapes(loop: Loop) -> Loop:
    """Return the loop with the shapes of its state's arrays, and without requests."""

    def shape(x: jax.Array) -> jax.ShapeDtypeStruct:
        sharding = x.sharding if x.committed else None
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    state, draft = loop.state, loop.state.draft
    cache, rows, edits, *written = jax.tree.map(
        shape, (state.cache, state.rows, state.edits, draft.tail, draft.state)
    )
    bare = ServeState(cache, rows, state.kinds, {}, edits, pages=state.pages, form=state.form)
    return loop._replace(state=bare._replace(draft=draft.with_written(*written)))


def plan_usual(loop: Loop, adapters: bool) -> Programs:
    """Plan the programs of usual requests, for a thread that compiles them from now on
    (`compile_planned`): first those without which none runs, last those with rare options.

    adapters: whether requests choose theirs.
    """
    if not loop.state.kinds:  # no usual request is possible
        return loop.programs
    usual, programs = Family(loop.state.form, adapters), loop.programs
    rare_options = [rare_sampler(loop.model.config.vocab_size)]
    state = add_samplers(loop.state, rare_options, loop.model, programs)
    _plan(loop, usual)
    _plan(loop._replace(state=state), usual._replace(form=state.form))
    programs.hurry([usual])
    return programs


def plan_families(loop: Loop, families: Collection[Family]) -> None:
    """Plan the programs of families that requests wait for, before all others."""
    for family in families:
        if not loop.programs.is_planned(family):
            _plan(loop, family)
    loop.programs.hurry(families)


def _plan(loop: Loop, family: Family) -> None:
    usual = () if family.read else _usual_jobs(loop, family)  # few rows read
    chooses = loop.invariant_rows and loop.multiple == 1
    loop.programs.plan(keep_shapes(loop), _first_jobs(loop, family), usual, chooses=chooses)


def _first_jobs(loop: Loop, family: Family) -> list[Job]:
    """Return the programs without which no request of a family runs; all others can wait."""
    rows = loop.state.cache.batch
    decode = Job(family, "step", rows, 1)
    if family.read:  # they are read from rows that decode
        return [decode]
    fill, part = Job(Family(family.form), "fill"), Job(family, "step", 1, _list_widths(loop)[0])
    rounds = [Job(family, "rounds", rows, 1)] if loop.state.draft.width else []
    return [fill, part, decode, *rounds]


def _list_widths(loop: Loop) -> list[int]:
    """Return the widths of prompts' programs, the most useful first."""
    chunk = loop.multiple if loop.multiple > 1 else loop.chunk
    usual = (256, 1, 64, 512, 128, 1024, 2048) if is_accelerator() else (32, 1, 64, 16, 128, 8, 256)
    most = padded_width(min(chunk, loop.state.capacity))
    return [width for width in usual if width <= most]


def _usual_jobs(loop: Loop, family: Family) -> Iterator[Job]:
    """Yield the programs of usual requests in the order of their use."""
    rows, chunk = loop.state.cache.batch, loop.multiple if loop.multiple > 1 else loop.chunk
    joins = loop.invariant_rows and not family.adapters and not loop.state.edits.edits
    for count in sorted({min(bucket_rows(n + 1), rows) for n in range(rows)}):
        for width in _list_widths(loop) if count == 1 else (1, padded_width(2)):
            if width == 1 or count == 1 or loop.multiple == 1:
                yield Job(family, "step", count, width)
        for room in (8, 4, 16, 32) if joins else ():
            if room <= chunk:
                yield Job(family, "joined", count, fit_part(room, count))
        if loop.state.draft.width:
            yield Job(family, "rounds", count, 1)


def compile_planned(programs: Programs, waits: bool = False) -> Iterator[None]:
    """Compile the planned programs; yield after each. waits: for others, until the loop ends."""
    with programs.compiling():
        while (taken := programs.take(waits)) is not None:
            with suppress(Exception):  # the loop meets it, too, and reports it
                _compile(*taken)
            programs.add(taken[1])
            yield


def _compile(loop: Loop, job: Job) -> None:
    if job.kind == "fill":
        _compile_fill(loop)
    elif job.kind == "step":
        _compile_step(loop, job)
    elif job.kind == "joined":
        _compile_joined(loop, job.rows, job.width)
    else:
        _compile_rounds(loop, job)


def _compile_fill(loop: Loop) -> None:
    """Compile what puts a request into a row, for each kind of sampler, and chunks of prefixes."""
    state, size, number = loop.state, loop.prefix_chunk, np.int32(0)
    if size is not None and size <= state.capacity:
        cut = cut_chunk.lower(state.cache.tail, number, number, size)
        cut.compile()
        write_chunk.lower(state.cache.tail, cut.out_info, number, number).compile()
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


def _compile_step(loop: Loop, job: Job) -> None:
    """Compile a step of so many rows with so many tokens each, and the draw after it."""
    adapter, count = _any_adapter(job), job.rows
    state = _fill_state(loop, count, adapter)
    runs = [run._replace(read=job.family.read) for run in _make_runs(count, job.width, adapter)]
    places, at = pack_microbatch(
        runs, state.cache.batch, invariant_rows=loop.invariant_rows, size=count, width=job.width
    )
    places = places.replace(edits=state.edits, page_RP=state.list_pages({}, len(places.token_RT)))
    out = compile_microbatch(loop.model, loop.params, state.cache, places)
    _compile_draw(loop, state, places, at, out)
    draft = state.draft
    if isinstance(draft.source, Model) and count == 1:
        assert draft.cache is not None and draft.params is not None
        end_B = np.zeros(state.cache.batch, np.int32)
        cut_rows.lower(draft.cache.tail, None, end_B).compile()
        runs = [run._replace(output_T=run.index_T < 0, adapter=None) for run in runs]
        drafted, _ = pack_microbatch(runs, state.cache.batch, invariant_rows=True)
        compile_microbatch(draft.source, draft.params, draft.cache, drafted)


def _any_adapter(job: Job) -> int | None:
    return NO_ADAPTER if job.family.adapters else None


def _make_runs(count: int, width: int, adapter: int | None) -> list[TokenRun]:
    """Return a text of `width` tokens in each of the first rows, of which the last is an output."""
    at_T = np.arange(width)
    run = TokenRun((), at_T, at_T, at_T, at_T, at_T == width - 1, width, adapter)
    return [run._replace(rows=(row,)) for row in range(count)]


def _compile_joined(loop: Loop, count: int, width: int) -> None:
    """Compile one pass for `count` rows that decode and `width` tokens of a prompt."""
    state = _fill_state(loop, count, None)
    groups = [_make_runs(n, size, None) for n, size in ((1, width), (count, 1))]
    packed = pack_joined(groups, state.cache.batch, count, width)
    parts = [
        places.replace(page_RP=state.list_pages({}, len(places.token_RT))) for places, _ in packed
    ]
    outs = compile_joined(loop.model, loop.params, state.cache, parts)
    for places, (_, at), out in zip(parts, packed, outs, strict=True):
        _compile_draw(loop, state, places, at, out)


def _compile_draw(
    loop: Loop, state: ServeState, places: Microbatch, at: np.ndarray, out: jax.ShapeDtypeStruct
) -> None:
    """Compile the draw after a step. at: The microbatch's row of each row. out: Its logits."""
    uses_KR = state.kind_mask(dict(enumerate(at)), out.shape[0])
    wanted = (top_width(loop.model), state.wants_top)
    draw_rows.lower(state.rows, uses_KR, out, places.row_R, *wanted).compile()


def _compile_rounds(loop: Loop, job: Job) -> None:
    """Compile the loop in which so many rows decode with a draft."""
    state = _fill_state(loop, job.rows, _any_adapter(job))
    _, arguments = round_arguments(
        loop.model, loop.params, state, loop.burst, loop.burst, loop.invariant_rows
    )
    SERVED_ROUNDS.lower(*arguments).compile()
