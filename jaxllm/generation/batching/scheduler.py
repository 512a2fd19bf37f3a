"""Continuous batching: requests join and leave the batch between steps.

Each step runs one token of every decoding row and up to `chunk` prompt tokens. A row has its own
text, key, limits and sampler, so its tokens equal those of `generate` on that request alone. The
cache is written in place. A rejected request does not affect the others.
"""

import dataclasses
import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from jaxllm.cache.kv import MAX_SLOTS, init_cache
from jaxllm.cache.prefix_cache import PrefixCache
from jaxllm.errors import CapacityError, SamplingError, as_request_error
from jaxllm.generation.batching.batched_sampling import (
    draw,
    empty_context,
    fill_row,
    fit_sampler,
    stack_sampler,
)
from jaxllm.generation.batching.compile_ahead import Loop, LoopQuery
from jaxllm.generation.batching.drafting import NO_DRAFT, DraftSource, open_draft
from jaxllm.generation.batching.multi_step import plan_rounds, run_burst
from jaxllm.generation.batching.prefix_store import PrefixStore, open_store, read_prefix
from jaxllm.generation.batching.requests import (
    Event,
    RejectedRequest,
    Request,
    StepStats,
    check_request,
)
from jaxllm.generation.batching.seats import (
    ActiveRequest,
    ServeState,
    StepSamples,
    finish_reason,
    kind_mask,
    read_sampled,
    top_width,
)
from jaxllm.generation.batching.slots import (
    ALONE,
    TokenRun,
    pack_microbatch,
    run_microbatch,
    split_chunks,
    split_microbatches,
)
from jaxllm.generation.loops.draft_pace import DraftPace
from jaxllm.generation.loops.finish import NO_TOKEN, Finish
from jaxllm.generation.sampling.sampler import Sampler, row_keys
from jaxllm.models.edits import Apply
from jaxllm.models.inputs import check_model
from jaxllm.models.invariance import has_invariant_rows
from jaxllm.models.packing import promise_packed
from jaxllm.models.site_inputs import check_edits, check_read, stack_rows
from jaxllm.models.sites import WEIGHT_SITES, split_name
from jaxllm.ops.padding import pad_rows
from jaxllm.runtime.multihost import to_host
from jaxllm.runtime.validation import check_int, check_int_array
from jaxllm.steps import default_chunk
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params

MAX_BURST = 4096
_MAX_KINDS = 8  # unused kinds of samplers are dropped once there are this many kinds


def serve(
    model: Model,
    params: Params,
    requests: Iterable[Request | RejectedRequest | LoopQuery | None],
    *,
    rows: int = 8,
    capacity: int = 1024,
    chunk: int | None = None,
    burst: int = 16,
    prefix_cache: PrefixCache | None = None,
    shared_prefixes: Sequence[Any] = (),
    draft: DraftSource | None = None,
    draft_tokens: int = 4,
) -> Iterator[Event]:
    """Generate for a stream of requests with continuous batching; yield events with new tokens.

    Events carry the request ids unchanged, so requests that run at the same time need distinct
    ids. An invalid request (no tokens, an id outside the vocabulary, too long, a bad seed) yields
    an event with an error. A request whose logits are not finite ends with NON_FINITE. The others
    continue in both cases.

    Args:
        requests: Read only when a row is free. None means that no request is available now; the
            iterator is asked again after the next step, or at once if all rows are free, in which
            case it may block.
        rows: Number of requests that run at once.
        capacity: Cache slots per row.
        chunk: Prompt tokens to run per step, over all rows; by default `steps.default_chunk()`.
        burst: Maximum number of steps in one call of the compiled loop. It applies if all rows
            decode and none has an `until`; the loop also stops when a row ends. 1 yields each
            token immediately, or each pass's.
        prefix_cache: Holds prompt chunks, which later requests do not run again. Tokens and
            log-probabilities have the same bits whether chunks are found or not, and whatever else
            runs. Unless the model has invariant rows (`has_invariant_rows`), each prompt then runs
            alone in chunks of `prefix_cache.chunk` tokens.
        shared_prefixes: Texts (token ids) that many prompts begin with, such as a system message.
            They run once, and all rows read their keys and values in place. A prompt uses as many
            tokens of one as it begins with, unless the request has an adapter or edits.
        draft: As in `speculative_generate`: where all rows decode, each proposes tokens, and one
            pass of the model yields those that it would have drawn. It rests while the rows write
            faster without it. Tokens and log-probabilities have the same bits as without.
        draft_tokens: Maximum number of tokens to propose per row and pass.

    Raises:
        CapacityError: If a size is not a positive integer, or the cache exceeds the memory.
        ConfigError: If a prefix cache or shared prefix is given for a model with a memory
            (Infini-attention), or a draft for a model without invariant rows.
        SamplingError: For something else as a draft.
    """
    check_model(model, params)
    chunk = default_chunk() if chunk is None else chunk
    chunk = check_int("chunk", chunk, 1, MAX_SLOTS, CapacityError)
    burst = check_int("burst", burst, 1, MAX_BURST, CapacityError)
    rows = check_int("rows", rows, 1, MAX_SLOTS, CapacityError)
    capacity = check_int("capacity", capacity, 1, MAX_SLOTS, CapacityError)
    if not isinstance(requests, Iterable):
        raise SamplingError(f"requests must be iterable, got {requests!r:.60}")
    cache = init_cache(model, rows, capacity)
    if not shared_prefixes:  # a token's slot is its position; shared ones have none in the row
        model = promise_packed(model, cache)
    few_rows = has_invariant_rows(model, params)
    store, cache = open_store(model, params, cache, prefix_cache, shared_prefixes, few_rows)
    chunk = max(chunk, store.multiple)
    its = open_draft(draft, draft_tokens, model, params, cache)
    now = ServeState(cache, empty_context(rows, capacity), {}, {}, draft=its)
    source, more, pace = iter(requests), True, DraftPace()
    step, start = StepStats(0, 0, 0, 0, rows, 0, 0.0), time.perf_counter()
    while more or now.active:
        while more and len(now.active) < rows:
            try:
                request = next(source)
            except StopIteration:
                more = False
                break
            if request is None:
                break
            if isinstance(request, LoopQuery):
                for sampler in request.samplers:
                    with suppress(SamplingError):  # it is not for one row
                        kind, fitted = fit_sampler(sampler, model.config.vocab_size, capacity + 1)
                        now = _add_sampler(now, kind, fitted)
                request.reply(Loop(model, params, now, chunk, burst, store.multiple, few_rows))
                continue
            if isinstance(request, RejectedRequest):
                yield Event(request.id, None, None, None, request.error, step)
                continue
            if not isinstance(request, Request):
                raise SamplingError(f"a request must be a jaxllm.Request, got {request!r:.60}")
            if _is_cancelled(request):
                yield Event(request.id, None, None, Finish.CANCELLED, None, step)
                continue
            try:
                now = _admit_request(model, now, request, capacity, store)
            except Exception as error:
                yield Event(request.id, None, None, None, as_request_error(error), step)
        for row, seat in list(now.active.items()):
            if _is_cancelled(seat.request):
                seats = {other: kept for other, kept in now.active.items() if other != row}
                now = now._replace(active=seats)
                yield seat.make_event(Finish.CANCELLED, step)
        if not now.active:
            continue
        held, began = now.draft, pace.clock()
        decodes = bool(held.width) and all(seat.can_burst for seat in now.active.values())
        if decodes and not pace.drafts:
            now = now._replace(draft=NO_DRAFT)
        now, rounds = plan_rounds(now, burst, chunk)
        if rounds:
            now, steps = run_burst(model, params, now, burst, rounds, few_rows)
        else:
            runs = _token_runs(now.active, chunk, store.multiple)
            if store.multiple > 1:
                groups = split_chunks(runs, store.multiple)
            else:
                alone = ALONE if few_rows else MAX_SLOTS
                groups = split_microbatches(runs, rows + chunk, alone=alone)
            now, steps = _run_step(model, params, now, groups, few_rows)
            for run in runs:
                seat = now.active[run.rows[0]]
                ran = range(seat.num_run, seat.num_run + run.index_T.size)
                store.add(now.cache.tail, run.rows[0], seat.prefix, ran)
        if now.draft is NO_DRAFT:
            now = now._replace(draft=held)
        if decodes and (rounds or not pace.drafts):
            count = max(len(steps) // (its.width + 1) if pace.drafts else len(steps), 1)
            tokens = sum(map(len, steps)) / len(now.active)
            pace.record(count, tokens, pace.clock() - began)
        for drawn in steps:
            runs = [
                run
                for run in _token_runs(now.active, chunk, store.multiple)
                if run.rows[0] in drawn or not now.active[run.rows[0]].num_generated
            ]
            if not runs:  # a row's `until` ended its text within the pass
                continue
            decoded = sum(now.active[run.rows[0]].num_generated > 0 for run in runs)
            found = [drawn[run.rows[0]] for run in runs if run.rows[0] in drawn]
            step = StepStats(
                index=step.index + 1,
                decode_tokens=decoded,
                prompt_tokens=sum(run.index_T.size for run in runs) - decoded,
                busy_rows=len(now.active),
                rows=rows,
                generated_tokens=step.generated_tokens + sum(one.finite for one in found),
                elapsed_seconds=time.perf_counter() - start,
                draft_stats=step.draft_stats.plus(*(one.draft_stats for one in found)),
            )
            before = now.active
            now, events = _make_events(now, runs, drawn, step)
            for row in before.keys() - now.active.keys():
                seat = before[row]
                size = seat.prompt_T.size
                store.add_answer(now.cache.tail, row, seat.prefix, seat.text_T, size)
            yield from events


def _is_cancelled(request: Request) -> bool:
    return request.is_cancelled is not None and bool(request.is_cancelled())


def _admit_request(
    model: Model, state: ServeState, request: Request, capacity: int, store: PrefixStore
) -> ServeState:
    """Put a request into the first free row, or raise the JaxllmError that rejects it."""
    rows = state.cache.batch
    prompt_T = check_request(model, request, capacity)
    edits = check_edits(model, request.edits, 1, 1, None)
    if any(isinstance(edit, Apply) for edit in edits.edits):
        raise SamplingError("edits of a request cannot be functions: use Add, Set, Scale, ...")
    weights = [x for names in edits.sites for x in names if split_name(x)[1] in WEIGHT_SITES]
    if weights:  # every row would then run without the attention kernel, with other bits
        raise SamplingError(
            f"a request of serve cannot edit {weights[0]}, which would change the bits of other"
            " requests. Use generate"
        )
    why = "a request of serve cannot read {}. Use forward"
    read = check_read(model, request.read, WEIGHT_SITES, why)
    steps: frozenset[int] | None = None
    if request.read_steps is not None:
        given = check_int_array("read_steps", request.read_steps, SamplingError)
        steps = frozenset(given.ravel().tolist())
    key = row_keys(request.seed, 1)[0]
    places = state.context.token_BL.shape[1]
    kind, sampler = fit_sampler(request.sampler, model.config.vocab_size, places)
    state = _add_sampler(state, kind, sampler)
    row = min(set(range(rows)) - set(state.active))
    token_L = pad_rows([prompt_T], width=places, fill=NO_TOKEN)[0]
    position_BS, context, stacked = fill_row(
        state.cache.tail.position_BS,
        state.context,
        state.samplers[kind],
        np.int32(row),
        (token_L, np.int32(prompt_T.size), key),
        sampler,
    )
    cache = state.cache.replace(tail=state.cache.tail.replace(position_BS=position_BS))
    prefix = store.find(request, prompt_T, edits)
    seat = ActiveRequest(
        request, prompt_T, kind, prefix, prefix.num_run, edits=edits, read=read, read_steps=steps
    )
    active = {**state.active, row: seat}
    edited = {r: seat.edits for r, seat in active.items() if seat.edits.edits}
    return state._replace(
        cache=read_prefix(cache, row, prefix),
        context=context,
        samplers={**state.samplers, kind: stacked},
        active=active,
        edits=stack_rows(edited, rows),
    )


def _run_step(
    model: Model,
    params: Params,
    state: ServeState,
    groups: Iterable[list[TokenRun]],
    few_rows: bool,
) -> tuple[ServeState, list[StepSamples]]:
    """Run groups of token runs; draw a token for each row that has run its last token."""
    cache, context, seats, rows = state.cache, state.context, state.active, state.cache.batch
    samplers, results, top = tuple(state.samplers.values()), [], top_width(model, seats)
    for group in groups:
        places, at = pack_microbatch(group, rows, few_rows=few_rows)
        places = places.replace(edits=state.edits)
        out, cache, sites = run_microbatch(model, params, cache, places, donate=True)
        ended = {run.rows[0]: r for run, r in zip(group, at, strict=True) if run.output_T.any()}
        if ended:
            kind_KR = kind_mask(state, ended, out.shape[0])
            result, context, samplers = draw(context, samplers, kind_KR, out, places.row_R, top)
            results.append((ended, result, sites))
    drawn: StepSamples = {}
    for ended, *found in results:  # read only after everything has been dispatched
        arrays, sites = to_host(found)
        for row, r in ended.items():
            read = {name: x[[r]] for name, x in sites.items()}
            drawn[row] = read_sampled(arrays, r)._replace(sites=read)
    held = dict(zip(state.samplers, samplers, strict=True))
    return state._replace(cache=cache, context=context, samplers=held), [drawn]


def _make_events(
    state: ServeState, runs: list[TokenRun], samples: StepSamples, step: StepStats
) -> tuple[ServeState, list[Event]]:
    """Return the state without the rows that ended, and an event for each token."""
    seats, events = dict(state.active), []
    for run in runs:
        row, seat = run.rows[0], seats[run.rows[0]]
        drawn, ran = samples.get(row), seat.num_run + run.index_T.size
        if drawn is not None and not drawn.finite:
            del seats[row]
            events.append(seat.make_event(Finish.NON_FINITE, step))
            continue
        changes: dict[str, Any] = {"num_run": ran}
        if drawn is not None and drawn.draft_stats is not None:
            changes["num_drafted"] = seat.num_drafted + 1
            changes["draft_stats"] = seat.draft_stats.plus(drawn.draft_stats)
        seats[row] = seat = dataclasses.replace(seat, **changes)
        if drawn is None:
            continue
        seat.tokens.append(drawn.token)
        finish = finish_reason(seat)
        if finish is not None:
            del seats[row]
        events.append(seat.make_event(finish, step, drawn))
    return state._replace(active=seats), events


def _token_runs(active: dict[int, ActiveRequest], chunk: int, multiple: int) -> list[TokenRun]:
    """Return one token of every decoding row, and `chunk` prompt tokens in order of arrival.

    multiple: as in `ActiveRequest.next_run`.
    """
    runs = []
    for row, seat in active.items():
        run = seat.next_run(row, chunk, multiple)
        if not seat.num_generated:
            chunk -= run.index_T.size
        runs.append(run)
    return [run for run in runs if run.index_T.size]


def _add_sampler(state: ServeState, kind: Hashable, sampler: Sampler) -> ServeState:
    """Return the state with one more kind of sampler, if it is new. Each set and order of kinds
    compiles a program: so unused ones are dropped once there are many, and the order is not that
    of arrival.
    """
    held = {kind: stack_sampler(sampler, state.cache.batch), **state.samplers}
    if len(state.samplers) >= _MAX_KINDS:
        used = {kind, *(seat.kind for seat in state.active.values())}
        held = {name: stacked for name, stacked in held.items() if name in used}
    return state._replace(samplers={name: held[name] for name in sorted(held, key=str)})
