"""Continuous batching: requests join and leave the batch between steps.

Each step runs one token of every decoding row and up to `chunk` prompt tokens. A row has its own
text, key, limits and sampler, so its tokens equal those of `generate` on that request alone. The
cache is written in place. A rejected request does not affect the others.
"""

import dataclasses
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jaxllm.cache.kv import MAX_SLOTS, KVCache, init_cache
from jaxllm.cache.prefix_cache import PrefixCache
from jaxllm.errors import CapacityError, JaxllmError, SamplingError
from jaxllm.generation.batching.batched_sampling import (
    Drawn,
    draw,
    empty_context,
    fill_row,
    fit_sampler,
    stack_sampler,
)
from jaxllm.generation.batching.drafting import NO_DRAFT, Draft, DraftSource, catch_up, open_draft
from jaxllm.generation.batching.multi_step import decode_burst
from jaxllm.generation.batching.prefix_store import Prefix, PrefixStore, open_store, read_prefix
from jaxllm.generation.batching.requests import (
    MAX_TOP_LOGPROBS,
    Event,
    RejectedRequest,
    Request,
    StepStats,
    check_request,
)
from jaxllm.generation.batching.slots import (
    TokenRun,
    bucket_rows,
    pack_microbatch,
    row_adapters,
    run_microbatch,
    split_chunks,
    split_microbatches,
)
from jaxllm.generation.loops.finish import NO_TOKEN, Finish, pad_eos_ids
from jaxllm.generation.loops.speculative import NO_DRAFTS, DraftStats
from jaxllm.generation.sampling.sampler import Context, Sampler, row_keys
from jaxllm.models.edits import Apply
from jaxllm.models.inputs import check_model
from jaxllm.models.invariance import has_invariant_rows
from jaxllm.models.site_inputs import check_edits, check_read, stack_rows
from jaxllm.models.sites import NO_EDITS, WEIGHT_SITES, Edits
from jaxllm.ops.padding import pad_rows
from jaxllm.runtime.multihost import to_host
from jaxllm.runtime.validation import check_int, check_int_array
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params

MAX_BURST = 4096
_TOP_WIDTHS = (0, 5, MAX_TOP_LOGPROBS)  # each compiles its own programs
_ALONE = 32  # longer runs fill the processor alone, and need no programs for several rows
_MAX_KINDS = 8  # unused kinds of samplers are dropped once there are this many kinds


class _Sampled(NamedTuple):
    """A row's next token; invalid if its logits were not finite.

    top: the likeliest tokens. draft_stats: what its column adds to them; None outside of bursts.
    sites: what was read, of one row.
    """

    token: int
    logprob: float
    finite: bool
    top: list[tuple[int, float]]
    draft_stats: DraftStats | None = None
    sites: Mapping[str, np.ndarray] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class _ActiveRequest:
    """A request that occupies a row.

    prefix: what had run before. num_run: tokens that have run. edits: checked, for one row. read,
    read_steps: likewise. num_drafted: tokens that have run in the draft model, and belong to the
    text. tokens: the new ones, a list that later states of the request share.
    """

    request: Request
    prompt_T: np.ndarray
    kind: Hashable
    prefix: Prefix
    num_run: int = 0
    edits: Edits = NO_EDITS
    read: tuple[str, ...] = ()
    read_steps: frozenset[int] | None = None
    num_drafted: int = 0
    draft_stats: DraftStats = NO_DRAFTS
    tokens: list[int] = dataclasses.field(default_factory=list)

    @property
    def num_generated(self) -> int:
        """Number of new tokens."""
        return len(self.tokens)

    @property
    def text_T(self) -> np.ndarray:
        """The prompt and the new tokens that have run: all but the last."""
        return np.concatenate([self.prompt_T, np.array(self.tokens[:-1], np.int32)])

    @property
    def can_burst(self) -> bool:
        """Whether its next steps may run in one call: it has no prompt left and reads nothing."""
        steps, step = self.read_steps, self.num_generated - 1
        done_reading = not self.read or (steps is not None and max(steps, default=-1) < step)
        return self.num_generated > 0 and done_reading

    def next_run(self, row: int, room: int, multiple: int = 1) -> TokenRun:
        """Return the next tokens to run: up to `room` prompt tokens, or the newest token.

        multiple: of the prompt's first tokens that have run, unless all of them have.
        """
        stop = min(self.num_run + room, self.prompt_T.size)
        if stop < self.prompt_T.size:
            stop -= stop % multiple
        if self.num_run < self.prompt_T.size:
            token_T, length = self.prompt_T[self.num_run : stop], self.prompt_T.size
        else:
            token_T, length = np.array([self.tokens[-1]]), self.num_run + 1
        position_T = np.arange(self.num_run, self.num_run + token_T.size)
        output_T = position_T == length - 1
        at, adapter = position_T, self.request.adapter
        step, chosen = self.num_generated - 1, self.read_steps
        read = self.read if (step >= 0 if chosen is None else step in chosen) else ()
        return TokenRun((row,), at, token_T, at, at, output_T, length, adapter, read)

    def make_event(
        self, finish: Finish | None, step: StepStats, drawn: _Sampled | None = None
    ) -> Event:
        """Return an event of the request, without a token if none was drawn."""
        token, logprob, top = (drawn.token, drawn.logprob, drawn.top) if drawn else (None, None, [])
        count = self.request.top_logprobs
        return Event(
            self.request.id,
            token,
            logprob,
            finish,
            None,
            step,
            top_logprobs=top[:count] if count and drawn else None,
            cached_tokens=self.prefix.num_run,
            sites=drawn.sites if drawn else {},
            draft_stats=self.draft_stats,
        )


_StepSamples = dict[int, _Sampled]  # the tokens of one step, by row


class _ServeState(NamedTuple):
    """State of the serving loop. Samplers of one kind are stacked along a row axis, and so are
    edits.
    """

    cache: KVCache
    context: Context
    samplers: dict[Hashable, Sampler]
    active: dict[int, _ActiveRequest]
    edits: Edits = NO_EDITS
    draft: Draft = NO_DRAFT


def serve(
    model: Model,
    params: Params,
    requests: Iterable[Request | RejectedRequest | None],
    *,
    rows: int = 8,
    capacity: int = 1024,
    chunk: int = 256,
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
        chunk: Prompt tokens to run per step, over all rows.
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
            pass of the model yields those that it would have drawn. Tokens and log-probabilities
            have the same bits as without.
        draft_tokens: Maximum number of tokens to propose per row and pass.

    Raises:
        CapacityError: If a size is not a positive integer, or the cache exceeds the memory.
        ConfigError: If a prefix cache or shared prefix is given for a model with a memory
            (Infini-attention), or a draft for a model without invariant rows.
        SamplingError: For a draft with another vocabulary.
    """
    check_model(model, params)
    chunk = check_int("chunk", chunk, 1, MAX_SLOTS, CapacityError)
    burst = check_int("burst", burst, 1, MAX_BURST, CapacityError)
    rows = check_int("rows", rows, 1, MAX_SLOTS, CapacityError)
    capacity = check_int("capacity", capacity, 1, MAX_SLOTS, CapacityError)
    if not isinstance(requests, Iterable):
        raise SamplingError(f"requests must be iterable, got {requests!r:.60}")
    cache = init_cache(model, rows, capacity)
    few_rows = has_invariant_rows(model, params)
    store, cache = open_store(model, params, cache, prefix_cache, shared_prefixes, few_rows)
    chunk = max(chunk, store.multiple)
    its = open_draft(draft, draft_tokens, model, params, cache)
    now = _ServeState(cache, empty_context(rows, capacity), {}, {}, draft=its)
    source, more = iter(requests), True
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
            except JaxllmError as error:
                yield Event(request.id, None, None, None, error, step)
        for row, seat in list(now.active.items()):
            if _is_cancelled(seat.request):
                seats = {other: kept for other, kept in now.active.items() if other != row}
                now = now._replace(active=seats)
                yield seat.make_event(Finish.CANCELLED, step)
        if not now.active:
            continue
        now, rounds = _plan_rounds(now, burst, chunk)
        if rounds:
            now, steps = _run_burst(model, params, now, burst, rounds, few_rows)
        else:
            runs = _token_runs(now.active, chunk, store.multiple)
            if store.multiple > 1:
                groups = split_chunks(runs, store.multiple)
            else:
                alone = _ALONE if few_rows else MAX_SLOTS
                groups = split_microbatches(runs, rows + chunk, alone=alone)
            now, steps = _run_step(model, params, now, groups, few_rows)
            for run in runs:
                seat = now.active[run.rows[0]]
                ran = range(seat.num_run, seat.num_run + run.index_T.size)
                store.add(now.cache.tail, run.rows[0], seat.prefix, ran)
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
    model: Model, state: _ServeState, request: Request, capacity: int, store: PrefixStore
) -> _ServeState:
    """Put a request into the first free row, or raise the JaxllmError that rejects it."""
    rows = state.cache.batch
    prompt_T = check_request(model, request, capacity)
    edits = check_edits(model, request.edits, 1, 1, None)
    if any(isinstance(edit, Apply) for edit in edits.edits):
        raise SamplingError("edits of a request cannot be functions: use Add, Set, Scale, ...")
    why = "a request of serve cannot read {}. Use forward"
    read = check_read(model, request.read, WEIGHT_SITES, why)
    steps: frozenset[int] | None = None
    if request.read_steps is not None:
        given = check_int_array("read_steps", request.read_steps, SamplingError)
        steps = frozenset(given.ravel().tolist())
    key = row_keys(request.seed, 1)[0]
    places = state.context.token_BL.shape[1]
    kind, sampler = fit_sampler(request.sampler, model.config.vocab_size, places)
    row = min(set(range(rows)) - set(state.active))
    token_L = pad_rows([prompt_T], width=places, fill=NO_TOKEN)[0]
    stacked = state.samplers[kind] if kind in state.samplers else stack_sampler(sampler, rows)
    position_BS, context, stacked = fill_row(
        state.cache.tail.position_BS,
        state.context,
        stacked,
        np.int32(row),
        (token_L, np.int32(prompt_T.size), key),
        sampler,
    )
    cache = state.cache.replace(tail=state.cache.tail.replace(position_BS=position_BS))
    prefix = store.find(request, prompt_T, edits)
    seat = _ActiveRequest(
        request, prompt_T, kind, prefix, prefix.num_run, edits=edits, read=read, read_steps=steps
    )
    active = {**state.active, row: seat}
    edited = {r: seat.edits for r, seat in active.items() if seat.edits.edits}
    return state._replace(
        cache=read_prefix(cache, row, prefix),
        context=context,
        samplers=_add_sampler(state, kind, stacked),
        active=active,
        edits=stack_rows(edited, rows),
    )


def _run_step(
    model: Model,
    params: Params,
    state: _ServeState,
    groups: Iterable[list[TokenRun]],
    few_rows: bool,
) -> tuple[_ServeState, list[_StepSamples]]:
    """Run groups of token runs; draw a token for each row that has run its last token."""
    cache, context, seats, rows = state.cache, state.context, state.active, state.cache.batch
    samplers, results, top = tuple(state.samplers.values()), [], _top_width(model, seats)
    for group in groups:
        places, at = pack_microbatch(group, rows, few_rows=few_rows)
        places = places.replace(edits=state.edits)
        out, cache, sites = run_microbatch(model, params, cache, places, donate=True)
        ended = {run.rows[0]: r for run, r in zip(group, at, strict=True) if run.output_T.any()}
        if ended:
            kind_KR = _kind_mask(state, ended, out.shape[0])
            result, context, samplers = draw(context, samplers, kind_KR, out, places.row_R, top)
            results.append((ended, result, sites))
    drawn: _StepSamples = {}
    for ended, *found in results:  # read only after everything has been dispatched
        arrays, sites = to_host(found)
        for row, r in ended.items():
            read = {name: x[[r]] for name, x in sites.items()}
            drawn[row] = _read_sampled(arrays, r)._replace(sites=read)
    held = dict(zip(state.samplers, samplers, strict=True))
    return state._replace(cache=cache, context=context, samplers=held), [drawn]


def _plan_rounds(state: _ServeState, burst: int, chunk: int) -> tuple[_ServeState, int]:
    """Return how many rounds to run in one call; 0 for a step, if a row has a prompt to run or
    reads.

    A draft model first runs up to `chunk` tokens of the texts that it lacks.
    """
    seats, draft = state.active, state.draft
    watched = any(seat.request.until is not None for seat in seats.values())
    if not all(seat.can_burst for seat in seats.values()) or (watched and not draft.width):
        return state, 0
    lengths = {row: (seat.num_drafted, seat.num_run - 1) for row, seat in seats.items()}
    draft, ran = catch_up(draft, state.context.token_BL, lengths, chunk, _ALONE)
    seats = {row: dataclasses.replace(seat, num_drafted=ran[row]) for row, seat in seats.items()}
    lags = any(ran[row] < needed for row, (_, needed) in lengths.items())
    return state._replace(draft=draft, active=seats), 0 if lags else 1 if watched else burst


def _run_burst(
    model: Model, params: Params, state: _ServeState, burst: int, rounds: int, few_rows: bool
) -> tuple[_ServeState, list[_StepSamples]]:
    """Run several steps in one call, if all rows decode; stop when a row ends."""
    rows, seats, draft = state.cache.batch, state.active, state.draft
    R = min(bucket_rows(len(seats)), rows) if few_rows else rows
    row_R = None
    if rows > R:
        row_R = np.full(R, rows, np.int32)
        row_R[: len(seats)] = list(seats)
    at = {row: row if row_R is None else r for r, row in enumerate(seats)}
    widest = max(len(seat.request.eos_token_ids) for seat in seats.values())
    limit_R = np.zeros(R, np.int32)
    eos_RE = np.full((R, pad_eos_ids(range(widest)).size), NO_TOKEN, np.int32)
    for row, seat in seats.items():
        ids = pad_eos_ids(seat.request.eos_token_ids)
        limit_R[at[row]] = seat.prompt_T.size + seat.request.max_new_tokens
        eos_RE[at[row], : ids.size] = ids
    done, results, tails, context, samplers = decode_burst(
        (state.cache.tail, draft.tail),
        state.context,
        tuple(state.samplers.values()),
        (model, draft.source),
        (params, draft.params),
        state.cache.frozen,
        row_R,
        _kind_mask(state, at, R),
        limit_R,
        eos_RE,
        burst,
        draft.width,
        np.int32(rounds),
        row_adapters({at[row]: seat.request.adapter for row, seat in seats.items()}, R),
        _top_width(model, seats),
        state.edits,
    )
    count, arrays = to_host((done, results))
    steps = [
        {row: _read_sampled(arrays, (i, j, r)) for row, r in at.items() if arrays.valid_B[i, j, r]}
        for i in range(count)
        for j in range(draft.width + 1)
    ]
    return state._replace(
        cache=state.cache.replace(tail=tails[0]),
        context=context,
        samplers=dict(zip(state.samplers, samplers, strict=True)),
        draft=draft.with_tail(tails[1]),
    ), steps


def _top_width(model: Model, seats: dict[int, _ActiveRequest]) -> int:
    """Return how many likeliest tokens to compute: the least width that all requests fit into."""
    needed = max(seat.request.top_logprobs for seat in seats.values())
    return min(next(n for n in _TOP_WIDTHS if n >= needed), model.config.vocab_size)


def _read_sampled(drawn: Drawn, at: Any) -> _Sampled:
    """Return a row's token from host arrays. at: its row, or its round, column and row."""
    token, logprob, finite = (x[at].item() for x in drawn[:3])
    top, stats = [], None
    if drawn.top_token_BN is not None:
        pair = (drawn.top_token_BN[at].tolist(), drawn.top_logprob_BN[at].tolist())
        top = list(zip(*pair, strict=True))
    if drawn.draft_B is not None:
        i, column, r = at
        proposed = int((drawn.draft_B[i, :, r] >= 0).sum()) if column == 0 else 0
        accepted = finite and drawn.draft_B[at] == token
        stats = DraftStats(proposed, int(accepted), int(proposed > 0))
    return _Sampled(token, logprob, finite, top, stats)


def _kind_mask(state: _ServeState, at: dict[int, int], size: int) -> np.ndarray:
    """Return which rows use which kind of sampler, bool `[K, size]`. at: the place of each row."""
    kind_KR = np.zeros((len(state.samplers), size), bool)
    for row, r in at.items():
        kind_KR[list(state.samplers).index(state.active[row].kind), r] = True
    return kind_KR


def _make_events(
    state: _ServeState, runs: list[TokenRun], samples: _StepSamples, step: StepStats
) -> tuple[_ServeState, list[Event]]:
    """Return the state without the rows that ended, and an event for each token."""
    seats, events = dict(state.active), []
    for run in runs:
        row, seat = run.rows[0], seats[run.rows[0]]
        seat = seats[row] = dataclasses.replace(seat, num_run=seat.num_run + run.index_T.size)
        if row not in samples:
            continue
        if not samples[row].finite:
            del seats[row]
            events.append(seat.make_event(Finish.NON_FINITE, step))
            continue
        stats = samples[row].draft_stats
        seat.tokens.append(samples[row].token)
        seats[row] = seat = dataclasses.replace(
            seat,
            num_drafted=seat.num_drafted + (stats is not None),
            draft_stats=seat.draft_stats.plus(stats),
        )
        finish = _finish_reason(seat)
        if finish is not None:
            del seats[row]
        events.append(seat.make_event(finish, step, samples[row]))
    return state._replace(active=seats), events


def _finish_reason(active: _ActiveRequest) -> Finish | None:
    """Return why a request ends with its newest token, or None if it continues."""
    request = active.request
    if request.until is not None and request.until(active.tokens[-1]):
        return Finish.STOP
    if active.tokens[-1] in request.eos_token_ids:
        return Finish.EOS
    return Finish.LENGTH if active.num_generated >= request.max_new_tokens else None


def _token_runs(active: dict[int, _ActiveRequest], chunk: int, multiple: int) -> list[TokenRun]:
    """Return one token of every decoding row, and `chunk` prompt tokens in order of arrival.

    multiple: as in `_ActiveRequest.next_run`.
    """
    runs = []
    for row, seat in active.items():
        run = seat.next_run(row, chunk, multiple)
        if not seat.num_generated:
            chunk -= run.index_T.size
        runs.append(run)
    return [run for run in runs if run.index_T.size]


def _add_sampler(state: _ServeState, kind: Hashable, stacked: Sampler) -> dict[Hashable, Sampler]:
    """Return the samplers by kind with one more. Each set and order of kinds compiles a program:
    so unused ones are dropped once there are many, and the order is not that of arrival.
    """
    samplers = {**state.samplers, kind: stacked}
    if len(state.samplers) >= _MAX_KINDS:
        used = {kind, *(seat.kind for seat in state.active.values())}
        samplers = {name: sampler for name, sampler in samplers.items() if name in used}
    return {name: samplers[name] for name in sorted(samplers, key=str)}
