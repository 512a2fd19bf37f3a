"""Continuous batching: requests join and leave the batch between steps.

Each step runs one token of every decoding row and up to `chunk` prompt tokens. A row has its own
text, key, limits and sampler, so its tokens equal those of `generate` on that request alone. The
cache is written in place. A rejected request does not affect the others.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jaxllm.cache.kv import MAX_SLOTS, init_cache
from jaxllm.cache.prefix_cache import PrefixCache
from jaxllm.errors import CapacityError, ConfigError, SamplingError, as_request_error
from jaxllm.generation.batching.active import (
    ServeState,
    empty_rows,
    free_row,
    pause_request,
    resume_request,
)
from jaxllm.generation.batching.admission import (
    Arrival,
    Held,
    add_samplers,
    admit_request,
    check_arrival,
    find_families,
    fit_form,
    release_held,
    reserve_prompt,
)
from jaxllm.generation.batching.compile_ahead import LoopQuery, plan_families
from jaxllm.generation.batching.pages import open_cache
from jaxllm.generation.batching.prefix_store import PrefixStore, open_store
from jaxllm.generation.batching.programs import Family, Programs
from jaxllm.generation.batching.prompt_pace import PromptPace
from jaxllm.generation.batching.requests import Event, RejectedRequest, Request, StepStats
from jaxllm.generation.batching.step import Loop, run_rounds, run_step, token_runs
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
from jaxllm.generation.loops.joined_pass import LEAST_ROOM, fit_part
from jaxllm.generation.loops.microbatch import MAX_BATCHED_RUN, bucket_rows
from jaxllm.models.inputs import check_model
from jaxllm.models.invariance import has_invariant_rows
from jaxllm.models.packing import promise_packed
from jaxllm.runtime.validation import check_int
from jaxllm.steps import default_chunk
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params

MAX_BURST = 4096
_HELD_SECONDS = 0.1  # between looks for requests while none runs and some wait for programs


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
    programs = Programs(rows)
    state = ServeState(cache, empty_rows(rows, capacity), (), {}, draft=drafting, pages=pages)
    loop = Loop(
        model=model,
        params=params,
        state=state,
        chunk=chunk,
        burst=burst,
        multiple=store.multiple,
        prefix_chunk=None if prefix_cache is None else prefix_cache.chunk,
        invariant_rows=invariant_rows,
        programs=programs,
    )
    source, more, pace = iter(requests), True, DraftPace()
    came, held, number = deque[Arrival](), list[Held](), 0
    joins = invariant_rows and store.multiple == 1
    prompts = PromptPace(chunk, store.multiple, *([LEAST_ROOM] if joins else []))
    step, start = StepStats(0, 0, 0, 0, rows, 0, 0.0), time.perf_counter()
    while more or came or held or state.active or state.paused:
        state = _resume_requests(state)
        came, held = release_held(came, held, programs)
        while state.free_rows and not state.paused:
            if not came:
                if not more or len(held) >= len(state.free_rows):
                    break
                try:
                    request = next(source)
                except StopIteration:
                    more = False
                    break
                if request is None:
                    break
                if isinstance(request, LoopQuery):
                    state = add_samplers(state, request.samplers, model, programs)
                    request.reply(loop._replace(state=state))
                    continue
                if isinstance(request, RejectedRequest):
                    yield Event(request.id, None, None, None, request.error, step)
                    continue
                if not isinstance(request, Request):
                    raise SamplingError(f"a request must be a jaxllm.Request, got {request!r:.60}")
                try:
                    came.append(check_arrival(model, request, capacity))
                except Exception as error:
                    yield Event(request.id, None, None, None, as_request_error(error), step)
                    continue
            arrival = came.popleft()
            if arrival.request.has_ended:
                yield Event(arrival.request.id, None, None, Finish.CANCELLED, None, step)
                continue
            row = min(state.free_rows)
            if (roomy := reserve_prompt(state, arrival, row)) is None:
                came.appendleft(arrival)  # later ones wait, too
                break
            try:
                fitted = fit_form(roomy, arrival, row, programs)
                families = find_families(fitted, arrival)
                if missing := programs.find_missing(families):
                    plan_families(loop._replace(state=fitted), missing)
                    held.append(Held(arrival, families))
                    continue
                state = admit_request(fitted, row, arrival, number, store)
            except Exception as error:
                yield Event(arrival.request.id, None, None, None, as_request_error(error), step)
                continue
            number += 1
        for row, active in [*state.active.items(), *state.paused.items()]:
            if active.request.has_ended:
                state = free_row(state, row)
                yield active.make_event(Finish.CANCELLED, step)
        state = _reserve_slots(state, burst, store, invariant_rows)
        if not state.active:
            if held:
                programs.wait(_HELD_SECONDS)
            continue
        began, drafts = pace.clock(), pace.drafts and bool(drafting.width)
        decodes = bool(drafting.width) and all(x.can_burst for x in state.active.values())
        kept = state.draft
        state = state._replace(draft=NO_DRAFT if decodes and not drafts else kept)
        state, rounds = _plan_rounds(state, burst, chunk)
        decoding = sum(one.decodes for one in state.active.values())
        room = prompts.room(decoding, len(state.active) - decoding)
        if joins and decoding and 0 < room <= MAX_BATCHED_RUN:
            room = fit_part(room, min(bucket_rows(decoding), rows))
            room = programs.fit_part(Family(state.form), room, decoding)
        runs = token_runs(state.active, room, store.multiple)
        if rounds:
            state, steps = run_rounds(loop._replace(state=state), rounds)
        else:
            state, steps = run_step(loop._replace(state=state), runs, store)
        seconds = pace.clock() - began
        if not (rounds and state.draft.width):
            ran = sum(run.index_T.size for run in runs)
            prompts.record(decoding, ran - decoding, seconds / max(len(steps), 1))
        if state.draft is NO_DRAFT:
            state = state._replace(draft=kept)
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
    programs.close()


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
