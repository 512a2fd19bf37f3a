"""`LM.serve`: continuous batching of requests with text and options, on top of `serve`.

A request is prepared (its text encoded, its grammar compiled) in the caller's thread if it wishes.
"""

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxllm.errors import JaxllmError, NonFiniteError, SamplingError, as_request_error
from jaxllm.generation.batching.compile_ahead import LoopQuery
from jaxllm.generation.batching.requests import Event, RejectedRequest, Request
from jaxllm.generation.batching.scheduler import serve
from jaxllm.generation.completion import (
    FINISH_REASONS,
    Completion,
    GenerationConfig,
    LanguageModel,
    StopTracker,
    StreamChunk,
    TopLogprobs,
)
from jaxllm.generation.loops.draft import PromptLookup, check_draft_vocabulary
from jaxllm.generation.loops.finish import Finish
from jaxllm.generation.loops.generate import join_steps
from jaxllm.models.invariance import make_invariant
from jaxllm.runtime.validation import is_integer

Answer = tuple[Any, Completion | JaxllmError]
ReadPrompt = Callable[[Any, Mapping[str, Any]], tuple[list[int], GenerationConfig]]


@dataclasses.dataclass(frozen=True)
class PreparedRequest:
    """A checked request: its prompt as token ids and its options resolved (`LM.prepare_request`).

    on_chunk: called with a `StreamChunk` for each token. is_cancelled: called between steps.
    namespace, read, read_steps: as in `Request`.
    """

    id: Any
    prompt: list[int]
    config: GenerationConfig
    on_chunk: Callable[[StreamChunk], Any] | None = None
    is_cancelled: Callable[[], bool] | None = None
    namespace: str = ""
    read: Sequence[str] = ()
    read_steps: Sequence[int] | None = None

    @property
    def seed(self) -> int:
        """The seed of its row."""
        seed = self.config.seed
        return seed[0] if isinstance(seed, list) else seed


@dataclasses.dataclass
class _ActiveRequest:
    """Running request: its text decoder and its tokens so far.

    piece: the text that the newest token completed. error: why it ends before its time; what its
    text, criteria, grammar or callbacks raise ends it alone.
    """

    request: PreparedRequest
    tracker: StopTracker
    piece: str = ""
    error: JaxllmError | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    top_logprobs: list[TopLogprobs] = dataclasses.field(default_factory=list)
    sites: list[Mapping[str, Any]] = dataclasses.field(default_factory=list)

    def check_stop(self, token: int) -> bool:
        """Add the newest token to the text; return whether the text ends."""
        try:
            self.piece = self.tracker.push(token)
        except Exception as error:
            self.error = as_request_error(error)
            return True
        return self.tracker.stopped

    def handle_event(self, event: Event) -> Completion | JaxllmError | None:
        """Apply an event; return the result if the request is finished, else None."""
        if event.token is not None and event.logprob is not None:
            self.tokens.append(event.token)
            self.logprobs.append(event.logprob)
        if event.top_logprobs is not None:
            self.top_logprobs.append(event.top_logprobs)
        if event.sites:
            self.sites.append(event.sites)
        if event.finish == Finish.NON_FINITE:
            return NonFiniteError("the model returned NaN or infinite logits")
        finish = None if event.finish is None else FINISH_REASONS[event.finish]
        try:
            if finish is not None and self.error is None:
                self.tracker.push_all(self.tokens)
            if self.error is None and self.request.on_chunk is not None and event.token is not None:
                self.request.on_chunk(self._make_chunk(event, finish))
            if finish is not None and self.error is None:
                return self._make_completion(event, finish)
        except Exception as error:
            self.error = as_request_error(error)
        return None if finish is None else self.error

    def is_cancelled(self) -> bool:
        """Whether the row ends before the next step."""
        asked = self.request.is_cancelled
        try:
            return self.error is not None or (asked is not None and bool(asked()))
        except Exception as error:
            self.error = as_request_error(error)
            return True

    def _make_completion(self, event: Event, finish: str) -> Completion:
        return Completion(
            self.tracker.decode_all(self.tokens),
            self.tokens,
            self.logprobs,
            finish,
            len(self.request.prompt),
            top_logprobs=self.top_logprobs or None,
            seed=self.request.seed,
            grammar_complete=self.tracker.grammar_complete,
            cached_tokens=event.cached_tokens,
            sites=join_steps(self.sites),
        )

    def _make_chunk(self, event: Event, finish: str | None) -> StreamChunk:
        assert event.token is not None and event.logprob is not None
        piece, self.piece = self.piece, ""
        return StreamChunk(
            piece + (self.tracker.flush() if finish else ""),
            event.token,
            event.logprob,
            finish,
            event.step.tokens_per_second,
            None,
            event.top_logprobs,
            self.request.seed,
            self.tracker.grammar_complete,
            event.sites,
        )


def answer_requests(
    lm: LanguageModel,
    requests: Iterable[Mapping[str, Any] | PreparedRequest | LoopQuery | None],
    read_prompt: ReadPrompt,
    *,
    rows: int,
    capacity: int,
    draft: LanguageModel | PromptLookup | None = None,
    **options: Any,
) -> Iterator[Answer]:
    """Yield `(id, Completion or error)` of each request as it finishes; see `LM.serve`.

    read_prompt: returns the token ids and config of a prompt with options. options: of
    `jaxllm.serve`. Internally requests are numbered, so ids may be any values, even equal ones.
    """
    active: dict[Hashable, _ActiveRequest] = {}
    names: dict[Hashable, Any] = {}

    def open_requests() -> Iterator[Request | RejectedRequest | LoopQuery | None]:
        if not isinstance(requests, Iterable):
            raise SamplingError(f"requests must be a list or an iterator, got {requests!r:.60}")
        default, numbers = _RequestIds(), itertools.count()
        for request in requests:
            if request is None or isinstance(request, LoopQuery):  # no request, so no number
                yield request
                continue
            number = next(numbers)
            names[number] = default.assign_id(request, number)
            try:
                if not isinstance(request, PreparedRequest):
                    request = prepare_request(request, read_prompt)
                row_request, active[number] = _open_request(lm, number, request)
                yield row_request
            except Exception as error:
                yield RejectedRequest(number, as_request_error(error))

    options |= {"rows": rows, "capacity": capacity}
    if isinstance(draft, LanguageModel):
        check_draft_vocabulary(lm, draft)
    options |= {"draft": (draft.model, draft.params) if isinstance(draft, LanguageModel) else draft}
    speculates = draft is not None
    for event in serve(make_invariant(lm.model), lm.params, open_requests(), **options):
        answer = event.error if event.error is not None else active[event.id].handle_event(event)
        if speculates and isinstance(answer, Completion):
            answer = dataclasses.replace(answer, draft_stats=event.draft_stats)
        if answer is not None:
            active.pop(event.id, None)
            yield names.pop(event.id), answer


class _RequestIds:
    """Ids of requests: the caller's, else the request's number, else the next unused number."""

    def __init__(self) -> None:
        self._next = 0
        self._taken: set[int] = set()

    def assign_id(self, request: Any, number: int) -> Any:
        """Return the id under which to answer this request."""
        self._next = max(self._next, number)
        self._taken = {taken for taken in self._taken if taken >= self._next}
        given = request.get("id") if isinstance(request, Mapping) else getattr(request, "id", None)
        if given is not None:
            if is_integer(given):
                self._taken.add(int(given))
            return given
        while self._next in self._taken:
            self._next += 1
        self._next += 1
        return self._next - 1


def prepare_request(request: Any, read_prompt: ReadPrompt) -> PreparedRequest:
    """Return a checked request; see `LM.prepare_request`."""
    if not isinstance(request, Mapping):
        raise SamplingError(
            f"a request is a mapping with a prompt and options, got {request!r:.60}"
        )
    options = {key: value for key, value in request.items() if key not in _REQUEST_KEYS}
    is_cancelled, on_chunk = request.get("is_cancelled"), request.get("on_chunk")
    if is_cancelled is not None and not callable(is_cancelled):
        raise SamplingError(
            f"is_cancelled must be a function without arguments, got {is_cancelled!r:.40}"
        )
    if on_chunk is not None and not callable(on_chunk):
        raise SamplingError(f"on_chunk must be a function of one chunk, got {on_chunk!r:.40}")
    ids, config = read_prompt(request.get("prompt"), options)
    if isinstance(config.adapter, list):
        raise SamplingError(f"adapter of a request must be one name, got {config.adapter!r:.60}")
    others = {key: request[key] for key in _COPIED_KEYS if key in request}
    return PreparedRequest(request.get("id"), ids, config, on_chunk, is_cancelled, **others)


def _open_request(
    lm: LanguageModel, number: int, request: PreparedRequest
) -> tuple[Request, _ActiveRequest]:
    config = request.config
    active = _ActiveRequest(request, StopTracker(lm.tokenizer, request.prompt, config))
    needs_text = config.checks_every_token or request.on_chunk is not None
    adapter: Any = config.adapter  # `prepare_request` rejects a list
    index = lm.adapter_index(adapter)
    row_request = Request(
        id=number,
        prompt=request.prompt,
        max_new_tokens=int(np.max(config.max_new_tokens)),
        sampler=config.sampler,
        seed=request.seed,
        eos_token_ids=config.eos_token_ids,
        until=active.check_stop if needs_text else None,
        is_cancelled=active.is_cancelled,
        adapter=index if lm.adapters else None,
        top_logprobs=config.top_logprobs,
        edits=config.edits,
        **{key: getattr(request, key) for key in _COPIED_KEYS},
    )
    return row_request, active


_COPIED_KEYS = ("namespace", "read", "read_steps")
_REQUEST_KEYS = ("id", "prompt", "is_cancelled", "on_chunk", *_COPIED_KEYS)
