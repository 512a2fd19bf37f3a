"""The rows of a serving loop: the request that occupies each, and what its steps return."""

import dataclasses
from collections.abc import Hashable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.kv import EMPTY, KVCache
from jaxllm.generation.batching.pages import PageTable, free_pages
from jaxllm.generation.batching.prefix_store import Prefix, read_prefix
from jaxllm.generation.batching.requests import MAX_TOP_LOGPROBS, Event, Request, StepStats
from jaxllm.generation.loops.draft import NO_DRAFT, NO_DRAFTS, Draft, DraftStats
from jaxllm.generation.loops.finish import NO_TOKEN, Finish, pad_eos_ids, put_rows, take_rows
from jaxllm.generation.loops.microbatch import TokenRun, bucket_rows, row_adapters
from jaxllm.generation.loops.rounds import LoopInputs, LoopPlan, Tails
from jaxllm.generation.loops.rows import Drawn, RowState, draw, live_rows
from jaxllm.generation.sampling.sampler import Context, row_keys
from jaxllm.generation.sampling.stacked import RowSampler, stack_sampler
from jaxllm.models.sites import NO_EDITS, Edits
from jaxllm.ops.padding import pad_rows
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params

_MAX_KINDS = 8  # unused kinds of samplers are dropped once there are this many kinds


class Sampled(NamedTuple):
    """A row's next token.

    finish: why the row ends with it, apart from `until`; NON_FINITE: there is no token. top: the
    likeliest tokens. draft_stats: what its column adds to them; None outside of rounds. sites: what
    was read, of one row.
    """

    token: int
    logprob: float
    finish: Finish
    top: list[tuple[int, float]]
    draft_stats: DraftStats | None = None
    sites: Mapping[str, np.ndarray] = MappingProxyType({})


StepSamples = dict[int, Sampled]  # the tokens of one step, by row


@dataclasses.dataclass(frozen=True)
class ActiveRequest:
    """A request that occupies a row.

    Attributes:
        number: In the order of arrival.
        kind: Of its sampler (`fit_sampler`).
        prefix: Tokens that had run before.
        num_chunked: The text's first tokens that run in chunks: the prompt's, and after a pause
            others too.
        num_run: Tokens that have run.
        edits, read, read_steps: Checked, for one row.
        num_drafted: Tokens that have run in the draft model, and belong to the text.
        tokens: The new ones, a list that later states of the request share.
    """

    request: Request
    number: int
    prompt_T: np.ndarray
    kind: Hashable
    prefix: Prefix
    num_chunked: int
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
        """The prompt and the new tokens but the last."""
        return np.concatenate([self.prompt_T, np.array(self.tokens[:-1], np.int32)])

    @property
    def text_size(self) -> int:
        """Number of tokens of `text_T`."""
        return self.prompt_T.size + max(self.num_generated - 1, 0)

    def slots_with(self, tokens: int) -> int:
        """Number of slots for its text and up to `tokens` more; its last token has none."""
        most = self.prompt_T.size + self.request.max_new_tokens - 1
        return min(self.text_size + tokens, most)

    @property
    def decodes(self) -> bool:
        """Whether only its newest token has not run."""
        return self.num_generated > 0 and self.num_run == self.text_size

    @property
    def can_burst(self) -> bool:
        """Whether its next steps may run in one call: it has no prompt left and reads nothing."""
        steps, step = self.read_steps, self.num_generated - 1
        done_reading = not self.read or (steps is not None and max(steps, default=-1) < step)
        return self.decodes and done_reading

    def next_run(self, row: int, room: int, multiple: int = 1) -> TokenRun:
        """Return the next tokens to run: up to `room` of those in chunks, or one.

        multiple: of the chunked tokens that have run, unless all of them have.
        """
        stop, size = min(self.num_run + room, self.num_chunked), self.prompt_T.size
        if stop < self.num_chunked:
            stop -= stop % multiple
        if self.num_run < self.num_chunked:
            text = self.prompt_T if self.num_chunked == size else self.text_T
            token_T, length = text[self.num_run : stop], self.num_chunked
        else:
            token_T, length = np.array([self.tokens[self.num_run - size]]), self.num_run + 1
        position_T = np.arange(self.num_run, self.num_run + token_T.size)
        output_T = position_T == self.text_size - (not self.num_generated)
        at, adapter = position_T, self.request.adapter
        step, chosen = self.num_generated - 1, self.read_steps
        read = self.read if (step >= 0 if chosen is None else step in chosen) else ()
        return TokenRun((row,), at, token_T, at, at, output_T, length, adapter, read)

    def follow(self, ran: int, drawn: Sampled | None) -> tuple["ActiveRequest", Finish | None]:
        """Return the request after `ran` more tokens and the one drawn, and why it ends, if so."""
        changes: dict[str, Any] = {"num_run": self.num_run + ran}
        if drawn is None or drawn.finish == Finish.NON_FINITE:
            active = dataclasses.replace(self, **changes)
            return active, None if drawn is None else drawn.finish
        if drawn.draft_stats is not None:
            changes["num_drafted"] = self.num_drafted + 1
            changes["draft_stats"] = self.draft_stats.plus(drawn.draft_stats)
        self.tokens.append(drawn.token)
        until = self.request.until
        stops = until is not None and until(drawn.token)
        finish = Finish.STOP if stops else drawn.finish
        active = dataclasses.replace(self, **changes)
        return active, None if finish == Finish.RUNNING else finish

    def make_event(
        self, finish: Finish | None, step: StepStats, drawn: Sampled | None = None
    ) -> Event:
        """Return an event of the request, without a token if none was drawn."""
        if drawn is not None and drawn.finish == Finish.NON_FINITE:
            drawn = None
        token, logprob, top = (drawn.token, drawn.logprob, drawn.top) if drawn else (None, None, [])
        return Event(
            self.request.id,
            token,
            logprob,
            finish,
            None,
            step,
            top_logprobs=top or None,
            cached_tokens=self.prefix.num_run,
            sites=drawn.sites if drawn else {},
            draft_stats=self.draft_stats,
        )


class ServeState(NamedTuple):
    """State of the serving loop.

    Attributes:
        kinds: Those of the rows' samplers, in order.
        active: The requests that run, by row.
        edits: Stacked along a row axis.
        pages: The slots of rows, if these share them.
        paused: Requests without slots; they keep their rows.
        form: Number of what its programs depend on besides shapes (`Programs.number`).
    """

    cache: KVCache
    rows: RowState
    kinds: tuple[Hashable, ...]
    active: dict[int, ActiveRequest]
    edits: Edits = NO_EDITS
    draft: Draft = NO_DRAFT
    pages: PageTable | None = None
    paused: Mapping[int, ActiveRequest] = MappingProxyType({})
    form: int = 0

    @property
    def capacity(self) -> int:
        """Number of tokens that a row can hold."""
        return self.rows.context.token_BL.shape[1] - 1

    @property
    def free_rows(self) -> set[int]:
        """Rows without a request."""
        return set(range(self.cache.batch)) - {*self.active, *self.paused}

    def list_pages(self, places: Mapping[int, int], size: int) -> np.ndarray | None:
        """Return the `page_RP` of a program with `size` rows. places: of each row."""
        return None if self.pages is None else self.pages.list_pages(places, size)

    def kind_mask(self, places: dict[int, int], size: int) -> np.ndarray:
        """Return which rows use which kind of sampler, bool `[K, size]`. places: of each row."""
        uses_KR = np.zeros((len(self.kinds), size), bool)
        for row, r in places.items():
            uses_KR[self.kinds.index(self.active[row].kind), r] = True
        return uses_KR

    @property
    def wants_top(self) -> np.bool_:
        """Whether a request wants the likeliest tokens."""
        return np.bool_(any(one.request.top_logprobs for one in self.active.values()))


def top_width(model: Model) -> int:
    """Return how many likeliest tokens a program returns, if it finds any."""
    return min(MAX_TOP_LOGPROBS, model.config.vocab_size)


def read_sampled(drawn: Drawn, at: Any, count: int, stats: Any = None) -> Sampled:
    """Return a row's token from host arrays. at: its row, or its round, column and row.

    count: of likeliest tokens. stats: of this column, if it is one of a round.
    """
    top = []
    if count:
        pair = (drawn.top_token_BN[at][:count], drawn.top_logprob_BN[at][:count])
        top = list(zip(*(x.tolist() for x in pair), strict=True))
    stats = None if stats is None else DraftStats(*stats.tolist())
    token, logprob = drawn.token_B[at].item(), drawn.logprob_B[at].item()
    return Sampled(token, logprob, Finish(drawn.finish_B[at].item()), top, stats)


def empty_rows(rows: int, capacity: int) -> RowState:
    """Return the state of empty rows; a text may have one token more than its cache."""
    zeros_B = np.zeros(rows, np.int32)
    arrays = (
        np.full((rows, capacity + 1), NO_TOKEN, np.int32),
        *(zeros_B.copy() for _ in range(4)),
        np.tile(pad_eos_ids(()), (rows, 1)),
        np.zeros(rows, bool),
    )
    token_BL, prompt_B, length_B, *rest = jax.device_put(arrays)
    return RowState(Context(token_BL, prompt_B, length_B, row_keys(0, rows)), (), *rest)


def add_sampler(state: ServeState, kind: Hashable, sampler: RowSampler) -> ServeState:
    """Return the state with one more kind of sampler, if it is new. Each set of kinds compiles
    programs: so unused ones are dropped once there are many, and their order is not that of
    arrival.
    """
    if kind in state.kinds:
        return state
    held = dict(zip(state.kinds, state.rows.samplers, strict=True))
    held[kind] = stack_sampler(sampler, state.rows.finish_B.shape[0])
    if len(state.kinds) >= _MAX_KINDS:
        used = {kind, *(one.kind for one in state.active.values())}
        held = {name: stacked for name, stacked in held.items() if name in used}
    kinds = tuple(sorted(held, key=str))
    samplers = tuple(held[name] for name in kinds)
    return state._replace(kinds=kinds, rows=state.rows.replace(samplers=samplers))


def fill_request(
    state: ServeState, row: int, active: ActiveRequest, sampler: RowSampler
) -> ServeState:
    """Return the state in which a free row has this request and an empty cache.

    Its pages are reserved, and empty; the state has its form (`fit_form`).
    """
    eos_E, rows = pad_eos_ids(active.request.eos_token_ids), state.rows
    width = rows.eos_BE.shape[1]
    eos_E = np.pad(eos_E, (0, width - eos_E.size), constant_values=NO_TOKEN)
    at = state.kinds.index(active.kind)
    position_BS, states, rows, stacked = fill_row(
        state.cache.tail.position_BS,
        (state.cache.state, state.draft.state),
        rows.replace(samplers=()),
        rows.samplers[at],
        np.int32(row if state.pages is None else state.pages.total),
        np.int32(row),
        one_row(rows, active.prompt_T, active.request.max_new_tokens, active.request.seed, eos_E),
        sampler,
    )
    samplers = (*state.rows.samplers[:at], stacked, *state.rows.samplers[at + 1 :])
    tail = state.cache.tail.replace(position_BS=position_BS)
    cache = state.cache.replace(tail=tail, state=states[0])
    return state._replace(
        cache=read_prefix(cache, state.pages, row, active.prefix),
        rows=rows.replace(samplers=samplers),
        draft=state.draft.with_written(state.draft.tail, states[1]),
        active={**state.active, row: active},
    )


def free_row(state: ServeState, row: int) -> ServeState:
    """Return the state without a row's request."""
    active, paused = dict(state.active), dict(state.paused)
    active.pop(row, None)
    paused.pop(row, None)
    return _free_slots(state._replace(active=active, paused=paused), row)


def _free_slots(state: ServeState, row: int) -> ServeState:
    if state.pages is None:
        return state
    pages, cache = free_pages(state.pages, state.cache, row)
    return state._replace(pages=pages, cache=cache)


def pause_request(state: ServeState, row: int, chunked: bool) -> ServeState:
    """Return the state in which a row's text has lost its slots: it runs again later.

    chunked: whether tokens after the prompt have the same bits in chunks.
    """
    active = dict(state.active)
    one = active.pop(row)
    size = one.text_size if chunked else one.prompt_T.size
    paused = {**state.paused, row: dataclasses.replace(one, num_run=0, num_chunked=size)}
    return _free_slots(state._replace(active=active, paused=paused), row)


def resume_request(state: ServeState, row: int, pages: PageTable) -> ServeState:
    """Return the state in which a paused row's text runs again, in pages reserved for it."""
    paused = dict(state.paused)
    one = paused.pop(row)
    one = dataclasses.replace(one, num_run=one.prefix.num_run)
    active = sorted([*state.active.items(), (row, one)], key=lambda item: item[1].number)
    cache = state.cache.replace(state=_clear_state(state.cache.state, np.int32(row)))
    cache = read_prefix(cache, pages, row, one.prefix)
    return state._replace(cache=cache, pages=pages, active=dict(active), paused=paused)


@partial(jax.jit, donate_argnums=0)
def _clear_state(state: Any, row: jax.Array) -> Any:
    return jax.tree.map(lambda x: x.at[row].set(0), state)


def one_row(
    rows: RowState, prompt_T: np.ndarray, new: int, seed: int, eos_E: np.ndarray
) -> RowState:
    """Return what `fill_row` puts into a row, without its sampler."""
    width, length = rows.context.token_BL.shape[1], np.int32(prompt_T.size)
    token_L = pad_rows([prompt_T], width=width, fill=NO_TOKEN)[0]
    context = Context(token_L, length, length, row_keys(seed, 1)[0])  # type: ignore[arg-type]
    return RowState(context, (), np.int32(Finish.RUNNING), length + np.int32(new), eos_E, np.False_)  # type: ignore[arg-type]


@partial(jax.jit, donate_argnums=(0, 1, 2, 3))
def fill_row(
    position_BS: jax.Array,
    states: Any,
    rows: RowState,
    stacked: RowSampler,
    slot_row: jax.Array,
    row: jax.Array,
    filled: RowState,
    sampler: RowSampler,
) -> tuple[jax.Array, Any, RowState, RowSampler]:
    """Clear a row of the caches and give it a new text and sampler. slot_row: Of the positions."""
    states = jax.tree.map(lambda x: x.at[row].set(0), states)
    rows, stacked = jax.tree.map(
        lambda old, new: old.at[row].set(new), (rows, stacked), (filled, sampler)
    )
    return position_BS.at[slot_row].set(EMPTY, mode="drop"), states, rows, stacked


@partial(jax.jit, static_argnums=4, donate_argnums=0)
def draw_rows(
    rows: RowState,
    uses_KR: jax.Array,
    out_R1V: jax.Array,
    row_R: jax.Array | None,
    top: int,
    wants_top: jax.Array,
) -> tuple[RowState, Drawn]:
    """Draw from a microbatch's logits `[R, 1, V]`, for rows `row_R`."""
    some, logits_RV = take_rows(rows, row_R), out_R1V[:, 0]
    finite_R = jnp.isfinite(logits_RV).all(axis=1)
    live_R = live_rows(some, uses_KR)
    some, drawn, _ = draw(some, uses_KR, live_R, logits_RV, finite_R, top=top, wants_top=wants_top)
    return put_rows(rows, row_R, some), drawn


def round_arguments(
    model: Model,
    params: Params,
    state: ServeState,
    burst: int,
    rounds: int,
    invariant_rows: bool,
    size: int | None = None,
) -> tuple[dict[int, int], tuple[Any, ...]]:
    """Return the place of each row, and the arguments of `rounds.SERVED_ROUNDS`.

    size: of the program in rows; by default the usual one.
    """
    rows, active, draft = state.cache.batch, state.active, state.draft
    R = size or (min(bucket_rows(len(active)), rows) if invariant_rows else rows)
    row_R = None
    if rows > R:
        row_R = np.full(R, rows, np.int32)
        row_R[: len(active)] = list(active)
    places = {row: row if row_R is None else r for r, row in enumerate(active)}
    adapters = {places[row]: one.request.adapter for row, one in active.items()}
    plan = LoopPlan(model, burst, draft.source, draft.width, top=top_width(model))
    inputs = LoopInputs(
        params, draft.params, state.cache.frozen, state.edits, state.kind_mask(places, R), row_R,
        row_adapters(adapters, R), state.list_pages(places, R), wants_top=state.wants_top,
    )  # fmt: skip
    tails = Tails(state.cache.tail, draft.tail, (state.cache.state, draft.state))
    counts = (np.int32(rounds), np.int32(len(active)))
    return places, (plan, inputs, tails, state.rows, *counts)
