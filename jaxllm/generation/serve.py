"""`LM.serve`: continuous batching of requests with text and options, on top of `serve`."""

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxllm.cache.prefix_cache import PrefixCache
from jaxllm.errors import GrammarError, JaxllmError, NonFiniteError, SamplingError
from jaxllm.generation.batching.requests import Event, RejectedRequest, Request
from jaxllm.generation.batching.scheduler import serve
from jaxllm.generation.completion import (
    FINISH_REASONS,
    Completion,
    GenerationConfig,
    LanguageModel,
    StopTracker,
    TopLogprobs,
)
from jaxllm.generation.loops.finish import Finish
from jaxllm.runtime.validation import is_integer

Answer = tuple[Any, Completion | JaxllmError]
ReadPrompt = Callable[[Any, Mapping[str, Any]], tuple[list[int], GenerationConfig]]


@dataclasses.dataclass
class _ActiveRequest:
    """Running request: its text decoder, its text callback and its tokens so far.

    error: why it ends before its time.
    """

    tracker: StopTracker
    prompt_tokens: int
    seed: int
    on_text: Callable[[str], Any] | None = None
    error: JaxllmError | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    top_logprobs: list[TopLogprobs] = dataclasses.field(default_factory=list)

    def handle_event(self, event: Event) -> Completion | JaxllmError | None:
        """Apply an event; return the result if the request is finished, else None."""
        if event.token is not None and event.logprob is not None:
            self.tokens.append(event.token)
            self.logprobs.append(event.logprob)
        if event.top_logprobs is not None:
            self.top_logprobs.append(event.top_logprobs)
        if event.finish is None:
            return None
        if event.finish == Finish.NON_FINITE:
            return NonFiniteError("the model returned NaN or infinite logits")
        try:
            self.tracker.push_all(self.tokens)
        except GrammarError as error:
            self.error = error
        if self.error is not None:
            return self.error
        if self.on_text is not None and (rest := self.tracker.flush()):
            self.on_text(rest)
        return Completion(
            self.tracker.decode_all(self.tokens),
            self.tokens,
            self.logprobs,
            FINISH_REASONS[event.finish],
            self.prompt_tokens,
            top_logprobs=self.top_logprobs or None,
            seed=self.seed,
            cached_tokens=event.cached_tokens,
            grammar_complete=self.tracker.grammar_complete,
        )


def answer_requests(
    lm: LanguageModel,
    requests: Iterable[Mapping[str, Any] | None],
    read_prompt: ReadPrompt,
    *,
    rows: int,
    capacity: int,
    prefix_cache: PrefixCache | None = None,
) -> Iterator[Answer]:
    """Yield `(id, Completion or error)` of each request as it finishes; see `LM.serve`.

    read_prompt: returns the token ids and config of a prompt with options. Internally requests
    are numbered, so ids may be any values, even equal ones.
    """
    active: dict[Hashable, _ActiveRequest] = {}
    names: dict[Hashable, Any] = {}

    def open_requests() -> Iterator[Request | RejectedRequest | None]:
        if not isinstance(requests, Iterable):
            raise SamplingError(f"requests must be a list or an iterator, got {requests!r:.60}")
        default, numbers = _RequestIds(), itertools.count()
        for request in requests:
            if request is None:  # nothing waiting: not a request, so no number
                yield None
                continue
            number = next(numbers)
            names[number] = default.assign_id(request, number)
            try:
                row_request, active[number] = _open_request(lm, number, request, read_prompt)
                yield row_request
            except JaxllmError as error:
                yield RejectedRequest(number, error)

    sizes: Any = {"rows": rows, "capacity": capacity}
    for event in serve(lm.model, lm.params, open_requests(), **sizes, prefix_cache=prefix_cache):
        answer = event.error if event.error is not None else active[event.id].handle_event(event)
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
        if isinstance(request, Mapping) and request.get("id") is not None:
            if is_integer(request["id"]):
                self._taken.add(int(request["id"]))
            return request["id"]
        while self._next in self._taken:
            self._next += 1
        self._next += 1
        return self._next - 1


def _open_request(
    lm: LanguageModel, number: int, request: Any, read_prompt: ReadPrompt
) -> tuple[Request, _ActiveRequest]:
    if not isinstance(request, Mapping):
        raise SamplingError(
            f"a request is a mapping with a prompt and options, got {request!r:.60}"
        )
    options = {key: value for key, value in request.items() if key not in _REQUEST_KEYS}
    is_cancelled, on_text = request.get("is_cancelled"), request.get("on_text")
    if is_cancelled is not None and not callable(is_cancelled):
        raise SamplingError(
            f"is_cancelled must be a function without arguments, got {is_cancelled!r:.40}"
        )
    if on_text is not None and not callable(on_text):
        raise SamplingError(f"on_text must be a function of one text argument, got {on_text!r:.40}")
    ids, config = read_prompt(request.get("prompt"), options)
    tracker = StopTracker(lm.tokenizer, ids, config)
    seed = config.seed[0] if isinstance(config.seed, list) else config.seed
    active = _ActiveRequest(tracker, len(ids), seed, on_text)

    def check_stop(token: int) -> bool:
        try:
            piece = tracker.push(token)
        except GrammarError as error:  # of this row; the others continue
            active.error = error
            return True
        if piece and on_text is not None:
            on_text(piece)
        return tracker.stopped

    row_request = Request(
        id=number,
        prompt=ids,
        max_new_tokens=int(np.max(config.max_new_tokens)),
        sampler=config.sampler,
        seed=seed,
        eos_token_ids=config.eos_token_ids,
        until=check_stop if config.checks_every_token or on_text is not None else None,
        is_cancelled=is_cancelled,
        adapter=_adapter_index(lm, config),
        top_logprobs=config.top_logprobs,
        namespace=request.get("namespace", ""),
        public_prefix=request.get("public_prefix", 0),
    )
    return row_request, active


def _adapter_index(lm: LanguageModel, config: GenerationConfig) -> int | None:
    """Return the index of a request's adapter; None if the model has no adapters."""
    if isinstance(config.adapter, list):
        raise SamplingError(f"adapter of a request must be one name, got {config.adapter!r:.60}")
    index = lm.adapter_index(config.adapter)
    return index if lm.adapters else None


_REQUEST_KEYS = ("id", "prompt", "is_cancelled", "on_text", "namespace", "public_prefix")
