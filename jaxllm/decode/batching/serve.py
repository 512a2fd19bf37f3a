"""Continuous batching: requests join and leave the batch between steps.

Each step runs one token of every decoding row and up to `chunk` prompt tokens. A row has its own
text, key, limits and sampler, so its tokens equal those of `generate` on that request alone. The
cache is written in place. A rejected request does not affect the others.
"""

import dataclasses
import time
from collections.abc import Hashable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.kv import EMPTY, MOST_SLOTS, KVCache, init_cache
from jaxllm.decode.batching.burst import several_tokens
from jaxllm.decode.batching.draws import draw, fitted
from jaxllm.decode.batching.places import (
    TokenRun,
    advance,
    lay_out,
    microbatches,
)
from jaxllm.decode.batching.requests import Event, Refusal, Request, Step
from jaxllm.decode.loops.text import NO_TOKEN, Finish, padded_eos
from jaxllm.decode.sampling.sampler import Context, Sampler, row_keys
from jaxllm.distributed import fetched
from jaxllm.errors import CapacityError, JaxllmError, SamplingError, TokenError
from jaxllm.inputs import check_border, check_model, warn_of_stretch
from jaxllm.shapes import pad_rows
from jaxllm.weights.leaves.adapted import NONE
from jaxllm.weights.paths import Params
from jaxllm.whole import check_ids, whole, whole_array

MOST_BURST = 4096
_KINDS = 8  # unused kinds of samplers are dropped once there are this many kinds


@dataclasses.dataclass(frozen=True)
class _Seat:
    """A request that occupies a row.

    ran: tokens that have run. newest: the last generated token. count: tokens generated.
    """

    request: Request
    prompt_T: np.ndarray
    kind: Hashable
    ran: int = 0
    newest: int = NO_TOKEN
    count: int = 0

    def next_run(self, row: int, room: int) -> TokenRun:
        """Return the next tokens to run: up to `room` prompt tokens, or the newest token."""
        stop = min(self.ran + room, self.prompt_T.size)
        if self.ran < self.prompt_T.size:
            token_T, length = self.prompt_T[self.ran : stop], self.prompt_T.size
        else:
            token_T, length = np.array([self.newest]), self.ran + 1
        position_T = np.arange(self.ran, self.ran + token_T.size)
        output_T = position_T == length - 1
        at, adapter = position_T, self.request.adapter
        return TokenRun((row,), at, token_T, at, at, output_T, length, adapter)


class _Drawn(NamedTuple):
    """A row's next token; invalid if its logits were not finite."""

    token: int
    logprob: float
    finite: bool


_Draws = dict[int, _Drawn]  # the tokens of one step, by row


class _Loop(NamedTuple):
    """State of the serving loop. Samplers of one kind are stacked along a row axis."""

    cache: KVCache
    context: Context
    samplers: dict[Hashable, Sampler]
    seats: dict[int, _Seat]


def serve(
    model: nn.Module,
    params: Params,
    requests: Iterable[Request | Refusal | None],
    *,
    rows: int = 8,
    capacity: int = 1024,
    chunk: int = 256,
    burst: int = 16,
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
            token immediately.

    Raises:
        CapacityError: If a size is not a positive integer, or the cache exceeds the memory.
    """
    check_model(model, params)
    chunk = whole("chunk", chunk, 1, MOST_SLOTS, CapacityError)
    burst = whole("burst", burst, 1, MOST_BURST, CapacityError)
    rows = whole("rows", rows, 1, MOST_SLOTS, CapacityError)
    capacity = whole("capacity", capacity, 1, MOST_SLOTS, CapacityError)
    if not isinstance(requests, Iterable):
        raise SamplingError(f"requests must be iterable, got {requests!r:.60}")
    cache = init_cache(model, rows, capacity)
    now = _Loop(cache, _no_text(rows, capacity), {}, {})
    source, more = iter(requests), True
    step, start = Step(0, 0, 0, 0, rows, 0, 0.0), time.perf_counter()
    while more or now.seats:
        while more and len(now.seats) < rows:
            try:
                request = next(source)
            except StopIteration:
                more = False
                break
            if request is None:
                break
            if isinstance(request, Refusal):
                yield Event(request.id, None, None, None, request.error, step)
                continue
            if not isinstance(request, Request):
                raise SamplingError(f"a request must be a jaxllm.Request, got {request!r:.60}")
            if _is_cancelled(request):
                yield Event(request.id, None, None, Finish.CANCELLED, None, step)
                continue
            try:
                now = _joined(model, now, request, capacity)
            except JaxllmError as error:
                yield Event(request.id, None, None, None, error, step)
        for row, seat in list(now.seats.items()):
            if _is_cancelled(seat.request):
                seats = {other: kept for other, kept in now.seats.items() if other != row}
                now = now._replace(seats=seats)
                yield Event(seat.request.id, None, None, Finish.CANCELLED, None, step)
        if not now.seats:
            continue
        if all(seat.count and seat.request.until is None for seat in now.seats.values()):
            now, steps = _decoded(model, params, now, burst)
        else:
            now, steps = _stepped(model, params, now, _token_runs(now.seats, chunk), chunk)
        for drawn in steps:
            runs = _token_runs(now.seats, chunk)
            decoded = sum(now.seats[run.rows[0]].count > 0 for run in runs)
            step = Step(
                index=step.index + 1,
                decoded=decoded,
                prompt=sum(run.index_T.size for run in runs) - decoded,
                busy=len(now.seats),
                rows=rows,
                generated=step.generated + sum(one.finite for one in drawn.values()),
                seconds=time.perf_counter() - start,
            )
            now, events = _told(now, runs, drawn, step)
            yield from events


def _is_cancelled(request: Request) -> bool:
    return request.cancelled is not None and bool(request.cancelled())


def _joined(model: nn.Module, now: _Loop, request: Request, capacity: int) -> _Loop:
    """Put a request into the first free row, or raise the JaxllmError that rejects it."""
    rows = now.cache.batch
    prompt_T = _checked(model, request, capacity)
    key = row_keys(request.seed, 1)[0]
    places = now.context.token_BL.shape[1]
    kind, sampler = fitted(request.sampler, model.config.vocab_size, places)
    row = min(set(range(rows)) - set(now.seats))
    token_L = pad_rows([prompt_T], width=places, fill=NO_TOKEN)[0]
    stacked = now.samplers[kind] if kind in now.samplers else _stacked(sampler, rows)
    position_BS, context, stacked = _seated(
        now.cache.tail.position_BS,
        now.context,
        stacked,
        np.int32(row),
        (token_L, np.int32(prompt_T.size), key),
        sampler,
    )
    return now._replace(
        cache=now.cache.replace(tail=now.cache.tail.replace(position_BS=position_BS)),
        context=context,
        samplers=_sorted({**_wanted(now), kind: stacked}),
        seats={**now.seats, row: _Seat(request, prompt_T, kind)},
    )


def _stepped(
    model: nn.Module, params: Params, now: _Loop, runs: list[TokenRun], chunk: int
) -> tuple[_Loop, list[_Draws]]:
    """Run the token runs; draw a token for each row whose text has run to its end."""
    cache, context, seats, rows = now.cache, now.context, now.seats, now.cache.batch
    samplers, found = tuple(now.samplers.values()), []
    for group in microbatches(runs, rows + chunk):
        places, at = lay_out(group, rows)
        out, cache = advance(model, params, cache, places, donate=True)
        take = {run.rows[0]: r for run, r in zip(group, at, strict=True) if run.output_T.any()}
        if take:
            take_B = np.zeros(rows, np.int32)
            take_B[list(take)] = list(take.values())
            kind_KB = _kinds(now, take)
            result, context, samplers = draw(context, samplers, kind_KB, out, take_B)
            found.append((take, result))
    drawn: _Draws = {}
    for take, result in found:  # read only after everything has been dispatched
        arrays = fetched(result)
        drawn.update({row: _Drawn(*(x[row].item() for x in arrays)) for row in take})
    held = dict(zip(now.samplers, samplers, strict=True))
    return _Loop(cache, context, held, seats), [drawn]


def _decoded(
    model: nn.Module, params: Params, now: _Loop, burst: int
) -> tuple[_Loop, list[_Draws]]:
    """Run several steps in one call, if all rows decode; stop when a row ends."""
    rows, seats = now.cache.batch, now.seats
    widest = max(len(seat.request.eos_token_ids) for seat in seats.values())
    newest_B = np.zeros(rows, np.int32)
    eos_BE = np.full((rows, padded_eos(range(widest)).size), NO_TOKEN, np.int32)
    for row, seat in seats.items():
        ids = padded_eos(seat.request.eos_token_ids)
        newest_B[row], eos_BE[row, : ids.size] = seat.newest, ids
    left = min(seat.request.max_new_tokens - seat.count for seat in seats.values())
    done, results, tail, context, samplers = several_tokens(
        now.cache.tail,
        now.context,
        tuple(now.samplers.values()),
        model,
        params,
        _kinds(now, seats),
        newest_B,
        eos_BE,
        burst,
        np.int32(min(burst, left)),
        _adapters(now),
    )
    count, arrays = fetched((done, results))
    steps = [
        {row: _Drawn(*(x[i, row].item() for x in arrays)) for row in seats} for i in range(count)
    ]
    held = dict(zip(now.samplers, samplers, strict=True))
    return _Loop(now.cache.replace(tail=tail), context, held, seats), steps


def _adapters(now: _Loop) -> np.ndarray | None:
    """Return each row's adapter index, or None if no request sets one."""
    asked = {row: seat.request.adapter for row, seat in now.seats.items()}
    if all(number is None for number in asked.values()):
        return None
    adapter_B = np.full(now.cache.batch, NONE, np.int32)
    for row, number in asked.items():
        adapter_B[row] = NONE if number is None else number
    return adapter_B


def _kinds(now: _Loop, rows: Iterable[int]) -> np.ndarray:
    """Return which of these rows use which kind of sampler, bool `[K, B]`."""
    kind_KB = np.zeros((len(now.samplers), now.cache.batch), bool)
    for row in rows:
        kind_KB[list(now.samplers).index(now.seats[row].kind), row] = True
    return kind_KB


def _told(now: _Loop, runs: list[TokenRun], drawn: _Draws, step: Step) -> tuple[_Loop, list[Event]]:
    """Return the state without the rows that ended, and an event for each token."""
    seats, events = dict(now.seats), []
    for run in runs:
        row, seat = run.rows[0], seats[run.rows[0]]
        seat = seats[row] = dataclasses.replace(seat, ran=seat.ran + run.index_T.size)
        if row not in drawn:
            continue
        token, logprob, finite = drawn[row]
        if not finite:
            del seats[row]
            events.append(Event(seat.request.id, None, None, Finish.NON_FINITE, None, step))
            continue
        seats[row] = seat = dataclasses.replace(seat, newest=token, count=seat.count + 1)
        finish = _finish(seat)
        if finish is not None:
            del seats[row]
        events.append(Event(seat.request.id, token, logprob, finish, None, step))
    return now._replace(seats=seats), events


def _finish(seat: _Seat) -> Finish | None:
    """Return why a request ends with its newest token, or None if it continues."""
    request = seat.request
    if request.until is not None and request.until(seat.newest):
        return Finish.STOP
    if seat.newest in request.eos_token_ids:
        return Finish.EOS
    return Finish.LENGTH if seat.count >= request.max_new_tokens else None


def _token_runs(seats: dict[int, _Seat], chunk: int) -> list[TokenRun]:
    """Return one token of every decoding row, and `chunk` prompt tokens in order of arrival."""
    runs = []
    for row, seat in seats.items():
        run = seat.next_run(row, chunk)
        if not seat.count:
            chunk -= run.index_T.size
        runs.append(run)
    return [run for run in runs if run.index_T.size]


def _checked(model: nn.Module, request: Request, capacity: int) -> np.ndarray:
    """Validate a request; return its prompt as int32."""
    prompt_T = whole_array("a prompt", request.prompt, TokenError)
    if prompt_T.ndim != 1 or not prompt_T.size:
        raise TokenError(f"a prompt must be a list of token ids, got {request.prompt!r:.60}")
    padded_eos(request.eos_token_ids)
    if not isinstance(request.sampler, Sampler):
        raise SamplingError(f"sampler must be a Sampler, got {request.sampler!r:.60}")
    new = whole("max_new_tokens", request.max_new_tokens, 1)
    check_ids(prompt_T, model.config.vocab_size, "the prompt: ")
    needed = prompt_T.size + new - 1  # the last token never runs
    check_border(prompt_T.size, needed, model.config)
    warn_of_stretch(prompt_T.size, needed, model.config)
    limit = min(capacity, model.config.position_limit)
    if needed > limit:
        raise CapacityError(
            f"{needed} tokens of prompt and continuation do not fit into {limit} slots or positions"
        )
    return prompt_T.astype(np.int32)


def _no_text(rows: int, capacity: int) -> Context:
    zeros_B = np.zeros(rows, np.int32)
    token_BL = np.full((rows, capacity + 1), NO_TOKEN, np.int32)
    token_BL, prompt_B, length_B = jax.device_put((token_BL, zeros_B, zeros_B.copy()))
    return Context(token_BL, prompt_B, length_B, row_keys(0, rows))


def _wanted(now: _Loop) -> dict[Hashable, Sampler]:
    """Drop unused samplers once there are many kinds: each set of kinds compiles a program."""
    held = {seat.kind for seat in now.seats.values()}
    few = len(now.samplers) < _KINDS
    return {kind: stacked for kind, stacked in now.samplers.items() if few or kind in held}


def _sorted(samplers: dict[Hashable, Sampler]) -> dict[Hashable, Sampler]:
    """Sort sampler kinds, so that the order of arrival does not compile another program."""
    return {kind: samplers[kind] for kind in sorted(samplers, key=str)}


def _stacked(sampler: Sampler, rows: int) -> Sampler:
    stacked: Sampler = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape)), sampler)
    return stacked


@partial(jax.jit, donate_argnums=(0, 1, 2))
def _seated(
    position_BS: jax.Array,
    context: Context,
    stacked: Sampler,
    row: jax.Array,
    text: tuple[jax.Array, jax.Array, jax.Array],
    sampler: Sampler,
) -> tuple[jax.Array, Context, Sampler]:
    """Clear a row of the cache and give it a new text and sampler."""
    token_L, length, key = text
    own = Context(token_L, length, length, key)
    context, stacked = jax.tree.map(
        lambda old, new: old.at[row].set(new), (context, stacked), (own, sampler)
    )
    return position_BS.at[row].set(EMPTY), context, stacked
