"""The rows of a serving loop: the request that occupies each, and what its steps return."""

import dataclasses
from collections.abc import Hashable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jaxllm.cache.kv import KVCache
from jaxllm.generation.batching.batched_sampling import Drawn
from jaxllm.generation.batching.drafting import NO_DRAFT, Draft
from jaxllm.generation.batching.prefix_store import Prefix
from jaxllm.generation.batching.requests import MAX_TOP_LOGPROBS, Event, Request, StepStats
from jaxllm.generation.batching.slots import TokenRun
from jaxllm.generation.loops.finish import Finish
from jaxllm.generation.loops.speculative import NO_DRAFTS, DraftStats
from jaxllm.generation.sampling.sampler import Context, Sampler
from jaxllm.models.sites import NO_EDITS, Edits
from jaxllm.weights.model import Model

_TOP_WIDTHS = (0, 5, MAX_TOP_LOGPROBS)  # each compiles its own programs


class Sampled(NamedTuple):
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
class ActiveRequest:
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
        self, finish: Finish | None, step: StepStats, drawn: Sampled | None = None
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


StepSamples = dict[int, Sampled]  # the tokens of one step, by row


class ServeState(NamedTuple):
    """State of the serving loop. Samplers of one kind are stacked along a row axis, and so are
    edits.
    """

    cache: KVCache
    context: Context
    samplers: dict[Hashable, Sampler]
    active: dict[int, ActiveRequest]
    edits: Edits = NO_EDITS
    draft: Draft = NO_DRAFT


def top_width(model: Model, seats: dict[int, ActiveRequest]) -> int:
    """Return how many likeliest tokens to compute: the least width that all requests fit into."""
    needed = max(seat.request.top_logprobs for seat in seats.values())
    return min(next(n for n in _TOP_WIDTHS if n >= needed), model.config.vocab_size)


def read_sampled(drawn: Drawn, at: Any) -> Sampled:
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
    return Sampled(token, logprob, finite, top, stats)


def kind_mask(state: ServeState, at: dict[int, int], size: int) -> np.ndarray:
    """Return which rows use which kind of sampler, bool `[K, size]`. at: the place of each row."""
    kind_KR = np.zeros((len(state.samplers), size), bool)
    for row, r in at.items():
        kind_KR[list(state.samplers).index(state.active[row].kind), r] = True
    return kind_KR


def finish_reason(active: ActiveRequest) -> Finish | None:
    """Return why a request ends with its newest token, or None if it continues."""
    request = active.request
    if request.until is not None and request.until(active.tokens[-1]):
        return Finish.STOP
    if active.tokens[-1] in request.eos_token_ids:
        return Finish.EOS
    return Finish.LENGTH if active.num_generated >= request.max_new_tokens else None
