"""One call of a serving loop's programs: a step, or rounds in which all rows decode."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

from jaxllm.cache.kv import MAX_SLOTS
from jaxllm.generation.batching.active import (
    ActiveRequest,
    ServeState,
    StepSamples,
    draw_rows,
    read_sampled,
    round_arguments,
    top_width,
)
from jaxllm.generation.batching.prefix_store import PrefixStore
from jaxllm.generation.batching.programs import Family, Group, Programs
from jaxllm.generation.loops.joined_pass import pack_joined, run_joined
from jaxllm.generation.loops.microbatch import (
    MAX_BATCHED_RUN,
    Sites,
    TokenRun,
    pack_microbatch,
    run_microbatch,
    split_chunks,
    split_microbatches,
)
from jaxllm.generation.loops.rounds import SERVED_ROUNDS
from jaxllm.generation.loops.rows import draft_stats
from jaxllm.runtime.multihost import to_host
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params


class Loop(NamedTuple):
    """A serving loop: its model, its state, and the arguments of `serve`.

    chunk: the most prompt tokens of a step. multiple: the first ones are a multiple of it
    (`PrefixStore`). prefix_chunk: of the prefix cache, if there is one. invariant_rows: whether
    shapes do not change bits. programs: those that are compiled.
    """

    model: Model
    params: Params
    state: ServeState
    chunk: int
    burst: int
    multiple: int
    prefix_chunk: int | None
    invariant_rows: bool
    programs: Programs


def run_rounds(loop: Loop, rounds: int) -> tuple[ServeState, list[StepSamples]]:
    """Run several rounds in one call, if all rows decode; stop when a row ends."""
    state = loop.state
    size = None
    if state.draft.width:
        adapters = any(one.request.adapter is not None for one in state.active.values())
        family = Family(state.form, adapters)
        size = loop.programs.fit_rows(family, "rounds", len(state.active))
    places, arguments = round_arguments(
        loop.model, loop.params, state, loop.burst, rounds, loop.invariant_rows, size
    )
    tails, rows, _, *results = SERVED_ROUNDS(*arguments)
    count, drawn = to_host(results)
    stats = draft_stats(drawn) if state.draft.width else None
    steps = [
        {
            row: read_sampled(
                drawn,
                (i, j, r),
                state.active[row].request.top_logprobs,
                None if stats is None else stats[i, j, r],
            )
            for row, r in places.items()
            if drawn.valid_B[i, j, r]
        }
        for i in range(count)
        for j in range(state.draft.width + 1)
    ]
    cache = state.cache.replace(tail=tails.target, state=tails.states[0])
    draft = state.draft.with_written(tails.draft, tails.states[1])
    return state._replace(cache=cache, rows=rows, draft=draft), steps


def run_step(
    loop: Loop, runs: list[TokenRun], store: PrefixStore
) -> tuple[ServeState, list[StepSamples]]:
    """Run a token of each row that decodes, and prompt tokens; draw for rows without more."""
    state, invariant_rows = loop.state, loop.invariant_rows
    cache, rows, results = state.cache, state.rows, list[Any]()
    split: Iterable[list[TokenRun]]
    if store.multiple > 1:
        split = split_chunks(runs, store.multiple)
    else:
        alone = MAX_BATCHED_RUN if invariant_rows else MAX_SLOTS
        split = split_microbatches(runs, cache.batch + loop.chunk, alone=alone)
    states = defaultdict[int, dict[int, tuple[Any, ...]]](dict)
    # Prompts first: the step ends when its draws do, so its time is that of all groups.
    groups, joins = loop.programs.fit_groups(
        state.form,
        sorted(split, key=lambda group: -group[0].index_T.size),
        joins=invariant_rows and not state.edits.edits,
    )
    joined: list[jax.Array] = []
    if joins:
        part, single = groups
        packed = pack_joined([part.runs, single.runs], cache.batch, single.rows, part.width)
    else:
        packed = [_pack(group, cache.batch, invariant_rows) for group in groups]
    for i, (group, (places, at)) in enumerate(zip(groups, packed, strict=True)):
        rows_at = {run.rows[0]: r for run, r in zip(group.runs, at, strict=True)}
        page_RP = state.list_pages(rows_at, len(places.token_RT))
        packed[i] = (places.replace(page_RP=page_RP), at)
    if joins:
        joined, cache = run_joined(loop.model, loop.params, cache, [places for places, _ in packed])
    for i, (group, (places, at)) in enumerate(zip(groups, packed, strict=True)):
        sites: Sites = {}
        if joined:
            out = joined[i]
        else:
            places = places.replace(edits=state.edits)
            out, cache, sites = run_microbatch(loop.model, loop.params, cache, places)
        for run in group.runs:
            (row, *_), prompt_T = run.rows, state.active[run.rows[0]].prompt_T
            if kept := store.keep_state(cache, run, prompt_T.size):
                states[row][int(run.position_T[-1]) + 1] = kept
        ended = {
            run.rows[0]: r for run, r in zip(group.runs, at, strict=True) if run.output_T.any()
        }
        if ended:
            uses_KR = state.kind_mask(ended, out.shape[0])
            wanted = (top_width(loop.model), state.wants_top)
            rows, drawn = draw_rows(rows, uses_KR, out, places.row_R, *wanted)
            results.append((ended, drawn, sites))
    samples: StepSamples = {}
    for ended, *arrays in results:  # read only after everything has been dispatched
        drawn, found = to_host(arrays)
        for row, r in ended.items():
            read = {name: x[[r]] for name, x in found.items()}
            count = state.active[row].request.top_logprobs
            samples[row] = read_sampled(drawn, r, count)._replace(sites=read)
    for run in runs:
        active = state.active[run.rows[0]]
        ran = range(active.num_run, active.num_run + run.index_T.size)
        row = run.rows[0]
        store.add(cache.tail, state.pages, row, active.prefix, ran, states[row])
    return state._replace(cache=cache, rows=rows), [samples]


def _pack(group: Group, rows: int, invariant_rows: bool) -> tuple[Any, Any]:
    return pack_microbatch(
        group.runs, rows, invariant_rows=invariant_rows, size=group.rows, width=group.width
    )


def token_runs(active: dict[int, ActiveRequest], chunk: int, multiple: int) -> list[TokenRun]:
    """Return one token of every decoding row, and `chunk` prompt tokens in order of arrival.

    multiple: as in `ActiveRequest.next_run`.
    """
    runs = []
    for row, one in active.items():
        run = one.next_run(row, chunk, multiple)
        if not one.decodes:
            chunk -= run.index_T.size
        runs.append(run)
    return [run for run in runs if run.index_T.size]
