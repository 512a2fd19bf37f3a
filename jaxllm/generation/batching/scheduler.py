"""Continuous batching: requests join and leave the batch between steps.

Each step runs one token of every decoding row and up to `chunk` prompt tokens. A row has its own
text, key, limits and sampler, so its tokens equal those of `generate` on that request alone. The
cache is written in place. A rejected request does not affect the others.
"""

import dataclasses
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import jax

from jaxllm.cache.kv import MAX_SLOTS, init_cache
from jaxllm.cache.prefix_cache import PrefixCache
from jaxllm.errors import CapacityError, ConfigError, SamplingError, as_request_error
from jaxllm.generation.batching.active import (
    ActiveRequest,
    ServeState,
    StepSamples,
    add_sampler,
    draw_rows,
    empty_rows,
    fill_request,
    free_row,
    pause_request,
    read_sampled,
    resume_request,
    round_arguments,
    top_width,
)
from jaxllm.generation.batching.compile_ahead import Loop, LoopQuery
from jaxllm.generation.batching.pages import open_cache
from jaxllm.generation.batching.prefix_store import PrefixStore, open_store
from jaxllm.generation.batching.prompt_pace import PromptPace
from jaxllm.generation.batching.requests import (
    Event,
    RejectedRequest,
    Request,
    StepStats,
    check_request,
)
from jaxllm.generation.loops.draft import (
    NO_DRAFT,
    Draft,
    DraftSource,
    PromptLookup,
    catch_up,
    check_draft,
    check_states,
)
from jaxllm.generation.loops.draft_pace import DraftPace
from jaxllm.generation.loops.finish import Finish
from jaxllm.generation.loops.joined_pass import (
    LEAST_ROOM,
    can_join,
    fit_part,
    pack_joined,
    run_joined,
)
from jaxllm.generation.loops.microbatch import (
    MAX_BATCHED_RUN,
    Sites,
    TokenRun,
    bucket_rows,
    pack_microbatch,
    run_microbatch,
    split_chunks,
    split_microbatches,
)
from jaxllm.generation.loops.rounds import SERVED_ROUNDS
from jaxllm.generation.loops.rows import draft_stats
from jaxllm.generation.sampling.stacked import fit_sampler
from jaxllm.models.inputs import check_model
from jaxllm.models.interventions import Apply
from jaxllm.models.invariance import has_invariant_rows
from jaxllm.models.packing import promise_packed
from jaxllm.models.site_inputs import check_edits, check_read
from jaxllm.models.sites import WEIGHT_SITES, split_name
from jaxllm.runtime.multihost import to_host
from jaxllm.runtime.validation import check_int, check_int_array
from jaxllm.steps import default_chunk
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params

MAX_BURST = 4096


def serve(
    model: Model,
    params: Params,
    requests: Iterable[Request | RejectedRequest | LoopQuery | None],
    *,
    rows: int = 8,
    capacity: int = 1024,
    slots: int | None = None,
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
        slots: Cache slots of all rows together; by default `rows * capacity`. With fewer, rows take
            pages of 256 as their texts grow. A request waits until there is room for its prompt. If
            the slots run out, the latest request pauses: its text runs again later, with the same
            result.
        chunk: Prompt tokens to run per step, over all rows, at most; by default
            `steps.default_chunk()`. While rows decode, a step runs as many as take as long as these
            rows' tokens.
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
        draft: As in `speculative_generate`, while all rows decode. It rests while the rows write
            faster without it. Tokens and log-probabilities have the same bits as without.
        draft_tokens: Maximum number of tokens to propose per row and pass.

    Raises:
        CapacityError: If a size is not a positive integer, `slots` is less than `capacity`, or the
            cache exceeds the memory.
        ConfigError: If a prefix cache is given for a model with segments, shared prefixes
            for one with recurrent layers, a draft for one without invariant rows, or too few slots
            for all rows of a sharded one.
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
    size = prefix_cache.chunk if isinstance(prefix_cache, PrefixCache) else 1
    pages, cache = open_cache(model, rows, capacity, slots, size)
    if not shared_prefixes:  # a token's slot is its position; shared ones have none in the row
        model = promise_packed(model, cache)
    invariant_rows = has_invariant_rows(model, params)
    store, cache = open_store(model, params, cache, prefix_cache, shared_prefixes, invariant_rows)
    chunk = max(chunk, store.multiple)
    drafting = _open_draft(draft, draft_tokens, model, params, rows, capacity)
    state = ServeState(cache, empty_rows(rows, capacity), (), {}, draft=drafting, pages=pages)
    source, more, pace = iter(requests), True, DraftPace()
    held_back, number = None, 0
    joins = invariant_rows and store.multiple == 1
    prompts = PromptPace(chunk, store.multiple, *([LEAST_ROOM] if joins else []))
    step, start = StepStats(0, 0, 0, 0, rows, 0, 0.0), time.perf_counter()
    while more or state.active or state.paused:
        state = _resume_requests(state)
        while more and state.free_rows and not state.paused:
            try:
                request = next(source) if held_back is None else held_back
            except StopIteration:
                more = False
                break
            held_back = None
            if request is None:
                break
            if isinstance(request, LoopQuery):
                for sampler in request.samplers:
                    with suppress(SamplingError):  # it is not for one row
                        kind, fitted = fit_sampler(sampler, model.config.vocab_size, capacity + 1)
                        state = add_sampler(state, kind, fitted)
                loop = Loop(model, params, state, chunk, burst, store.multiple, invariant_rows)
                request.reply(loop)
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
                admitted = _admit_request(model, state, request, number, capacity, store)
            except Exception as error:
                yield Event(request.id, None, None, None, as_request_error(error), step)
                continue
            if admitted is None:
                held_back = request
                break
            state, number = admitted, number + 1
        for row, active in [*state.active.items(), *state.paused.items()]:
            if _is_cancelled(active.request):
                state = free_row(state, row)
                yield active.make_event(Finish.CANCELLED, step)
        state = _reserve_slots(state, burst, store, invariant_rows)
        if not state.active:
            continue
        began, drafts = pace.clock(), pace.drafts and bool(drafting.width)
        decodes = bool(drafting.width) and all(x.can_burst for x in state.active.values())
        held = state.draft
        state = state._replace(draft=NO_DRAFT if decodes and not drafts else held)
        state, rounds = _plan_rounds(state, burst, chunk)
        decoding = sum(one.decodes for one in state.active.values())
        room = prompts.room(decoding, len(state.active) - decoding)
        if joins and decoding and 0 < room <= MAX_BATCHED_RUN:
            room = fit_part(room, min(bucket_rows(decoding), rows))
        runs = _token_runs(state.active, room, store.multiple)
        if rounds:
            state, steps = _run_rounds(model, params, state, burst, rounds, invariant_rows)
        else:
            state, steps = _run_step(model, params, state, runs, chunk, store, invariant_rows)
        seconds = pace.clock() - began
        if not (rounds and state.draft.width):
            ran = sum(run.index_T.size for run in runs)
            prompts.record(decoding, ran - decoding, seconds / max(len(steps), 1))
        if state.draft is NO_DRAFT:
            state = state._replace(draft=held)
        if decodes and (rounds or not drafts):
            count = max(len(steps) // (drafting.width + 1) if drafts else len(steps), 1)
            tokens = sum(map(len, steps)) / len(state.active)
            pace.record(count, tokens, seconds)
        for drawn in steps:
            if rounds:
                runs = [one.next_run(row, 1) for row, one in state.active.items() if row in drawn]
            if not runs:  # a row's `until` ended its text within the pass
                continue
            decoded = sum(state.active[run.rows[0]].decodes for run in runs)
            samples = [drawn[run.rows[0]] for run in runs if run.rows[0] in drawn]
            step = StepStats(
                index=step.index + 1,
                decode_tokens=decoded,
                prompt_tokens=sum(run.index_T.size for run in runs) - decoded,
                busy_rows=len(state.active),
                paused_rows=len(state.paused),
                rows=rows,
                generated_tokens=step.generated_tokens
                + sum(one.finish != Finish.NON_FINITE for one in samples),
                elapsed_seconds=time.perf_counter() - start,
                draft_stats=step.draft_stats.plus(*(one.draft_stats for one in samples)),
            )
            left, events, ended = dict(state.active), [], []
            for run in runs:
                row, one = run.rows[0], drawn.get(run.rows[0])
                left[row], finish = left[row].follow(run.index_T.size, one)
                if one is not None:
                    events.append(left[row].make_event(finish, step, one))
                if finish is not None:
                    store.add_answer(state.cache.tail, state.pages, row, left[row])
                    ended.append(row)
            state = state._replace(active=left)
            for row in ended:
                state = free_row(state, row)
            yield from events


def _open_draft(
    source: DraftSource | None,
    width: int,
    model: Model,
    params: Params,
    rows: int,
    capacity: int,
) -> Draft:
    """Return the draft of a loop with so many rows of so many slots.

    Raises:
        SamplingError: For no tokens to propose.
        ConfigError: If the texts would not be those without a draft, or exceed its positions.
    """
    if source is None:
        return NO_DRAFT
    check_draft(source)
    config, slots = model.config, min(capacity, model.config.position_limit)
    width = check_int("draft_tokens", width, 1, config.position_limit)
    if not has_invariant_rows(model, params):
        raise ConfigError(
            "draft needs a model that computes the same bits for any number of tokens at once"
            " (load(..., invariant=True) and the native kernels; docs/same_bits.md)"
        )
    if any(x.rope_type == "dynamic" for x in config.ropes) and (
        slots > config.max_position_embeddings
    ):
        raise ConfigError(
            "draft does not support dynamic RoPE, whose angles change with every token, beyond"
            f" position {config.max_position_embeddings}. Serve with a smaller capacity"
        )
    if isinstance(source, PromptLookup):
        check_states((config,), width)
        return Draft(source, width)
    draft_model, draft_params = source
    check_states((config, draft_model.config), width)
    draft_cache = init_cache(draft_model, rows, capacity)
    if draft_model.is_sharded:
        raise ConfigError("a draft model of serve cannot be sharded")
    if (limit := draft_model.config.position_limit) < slots:
        raise ConfigError(
            f"the draft has {limit} positions, fewer than the {slots} of a row. Serve with"
            f" capacity={limit}"
        )
    return Draft(draft_model, width, draft_params, draft_cache)


def _is_cancelled(request: Request) -> bool:
    return request.is_cancelled is not None and bool(request.is_cancelled())


def _admit_request(
    model: Model,
    state: ServeState,
    request: Request,
    number: int,
    capacity: int,
    store: PrefixStore,
) -> ServeState | None:
    """Put a request into the first free row, or raise the JaxllmError that rejects it.

    Returns:
        The state, or None if there are too few slots.
    """
    prompt_T, row = check_request(model, request, capacity), min(state.free_rows)
    if state.pages is not None:
        slots = prompt_T.size + min(request.max_new_tokens - 1, 1)  # the last token has none
        pages = state.pages.reserve(row, slots, spare=bool(state.active))
        if pages is None:
            return None
        state = state._replace(pages=pages)
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
    kind, sampler = fit_sampler(request.sampler, model.config.vocab_size, capacity + 1)
    state = add_sampler(state, kind, sampler)
    prefix = store.find(request, prompt_T, edits)
    active = ActiveRequest(
        request, number, prompt_T, kind, prefix, prompt_T.size, prefix.num_run, edits, read, steps
    )
    return fill_request(state, row, active, sampler)


def _resume_requests(state: ServeState) -> ServeState:
    """Return the state in which paused requests run again, the earliest first, if there is room."""
    for row, one in sorted(state.paused.items(), key=lambda item: item[1].number):
        assert state.pages is not None
        pages = state.pages.reserve(row, one.slots_with(1), spare=bool(state.active))
        if pages is None:
            break
        state = resume_request(state, row, pages)
    return state


def _reserve_slots(
    state: ServeState, burst: int, store: PrefixStore, invariant_rows: bool
) -> ServeState:
    """Return the state in which rows that decode have slots for their next tokens. If there are
    too few, the latest requests pause.
    """
    tokens = burst * (state.draft.width + 1)
    for row, one in list(state.active.items()):  # in the order of arrival
        while state.pages is not None and row in state.active and one.decodes:
            pages = state.pages.reserve(row, one.slots_with(tokens))
            if pages is not None:
                state = state._replace(pages=pages)
                break
            latest = [*state.active][-1]
            other = state.active[latest]
            alike = store.has_same_angles(other.prompt_T.size, other.text_size + 1)
            state = pause_request(state, latest, chunked=invariant_rows and alike)
    return state


def _plan_rounds(state: ServeState, burst: int, chunk: int) -> tuple[ServeState, int]:
    """Return how many rounds to run in one call; 0 for a step, if a row has a prompt to run or
    reads.

    A draft model first runs up to `chunk` tokens of the texts that it lacks.
    """
    active, draft = state.active, state.draft
    watched = any(one.request.until is not None for one in active.values())
    if not all(one.can_burst for one in active.values()) or (watched and not draft.width):
        return state, 0
    if not draft.width:
        return state, burst
    lengths = {row: (one.num_drafted, one.num_run - 1) for row, one in active.items()}
    draft, ran = catch_up(draft, state.rows.context.token_BL, lengths, chunk)
    active = {row: dataclasses.replace(one, num_drafted=ran[row]) for row, one in active.items()}
    lags = any(ran[row] < needed for row, (_, needed) in lengths.items())
    return state._replace(draft=draft, active=active), 0 if lags else 1 if watched else burst


def _run_rounds(
    model: Model, params: Params, state: ServeState, burst: int, rounds: int, invariant_rows: bool
) -> tuple[ServeState, list[StepSamples]]:
    """Run several rounds in one call, if all rows decode; stop when a row ends."""
    places, arguments = round_arguments(model, params, state, burst, rounds, invariant_rows)
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


def _run_step(
    model: Model,
    params: Params,
    state: ServeState,
    runs: list[TokenRun],
    chunk: int,
    store: PrefixStore,
    invariant_rows: bool,
) -> tuple[ServeState, list[StepSamples]]:
    """Run a token of each row that decodes, and prompt tokens; draw for rows without more.

    chunk: The most tokens that a microbatch has beside one for each row.
    """
    cache, rows, results = state.cache, state.rows, list[Any]()
    if store.multiple > 1:
        split = split_chunks(runs, store.multiple)
    else:
        alone = MAX_BATCHED_RUN if invariant_rows else MAX_SLOTS
        split = split_microbatches(runs, cache.batch + chunk, alone=alone)
    states = defaultdict[int, dict[int, tuple[Any, ...]]](dict)
    # Prompts first: the step ends when its draws do, so its time is that of all groups.
    groups = sorted(split, key=lambda group: -group[0].index_T.size)
    joined: list[jax.Array] = []
    joins = invariant_rows and not state.edits.edits and can_join(groups)
    if joins:
        packed = pack_joined(groups, cache.batch)
    else:
        packed = [pack_microbatch(x, cache.batch, invariant_rows=invariant_rows) for x in groups]
    for i, (group, (places, at)) in enumerate(zip(groups, packed, strict=True)):
        rows_at = {run.rows[0]: r for run, r in zip(group, at, strict=True)}
        page_RP = state.list_pages(rows_at, len(places.token_RT))
        packed[i] = (places.replace(page_RP=page_RP), at)
    if joins:
        joined, cache = run_joined(model, params, cache, [places for places, _ in packed])
    for i, (group, (places, at)) in enumerate(zip(groups, packed, strict=True)):
        sites: Sites = {}
        if joined:
            out = joined[i]
        else:
            places = places.replace(edits=state.edits)
            out, cache, sites = run_microbatch(model, params, cache, places)
        for run in group:
            (row, *_), prompt_T = run.rows, state.active[run.rows[0]].prompt_T
            if kept := store.keep_state(cache, run, prompt_T.size):
                states[row][int(run.position_T[-1]) + 1] = kept
        ended = {run.rows[0]: r for run, r in zip(group, at, strict=True) if run.output_T.any()}
        if ended:
            uses_KR = state.kind_mask(ended, out.shape[0])
            wanted = (top_width(model), state.wants_top)
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


def _token_runs(active: dict[int, ActiveRequest], chunk: int, multiple: int) -> list[TokenRun]:
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
