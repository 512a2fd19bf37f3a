"""`LM.serve`: continuous batching of requests with text and options, on top of `serve`."""

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxllm.complete import FINISH_REASONS, Completion, Ending, Parts, reader_of
from jaxllm.decode.batching.requests import Event, Refusal, Request
from jaxllm.decode.batching.serve import serve
from jaxllm.decode.loops.text import Finish
from jaxllm.errors import JaxllmError, NonFiniteError, SamplingError
from jaxllm.settings import Settings
from jaxllm.whole import is_whole

Answer = tuple[Any, Completion | JaxllmError]
Read = Callable[[Any, Mapping[str, Any]], tuple[list[int], Settings]]


@dataclasses.dataclass
class _Open:
    """Running request: its text decoder, its text callback and its tokens so far."""

    reader: Ending
    prompt_tokens: int
    seed: int
    heard: Callable[[str], Any] | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)

    def answer(self, event: Event) -> Completion | JaxllmError | None:
        """Apply an event; return the result if the request is finished, else None."""
        if event.token is not None and event.logprob is not None:
            self.tokens.append(event.token)
            self.logprobs.append(event.logprob)
        if event.finish is None:
            return None
        if event.finish == Finish.NON_FINITE:
            return NonFiniteError("the model returned NaN or infinite logits")
        if self.heard is not None and (rest := self.reader.flush()):
            self.heard(rest)
        return Completion(
            self.reader.whole(self.tokens),
            self.tokens,
            self.logprobs,
            FINISH_REASONS[event.finish],
            self.prompt_tokens,
            seed=self.seed,
        )


def answers(
    lm: Parts,
    requests: Iterable[Mapping[str, Any] | None],
    read: Read,
    *,
    rows: int,
    capacity: int,
) -> Iterator[Answer]:
    """Yield `(id, Completion or error)` of each request as it finishes; see `LM.serve`.

    read: returns the token ids and settings of a prompt with options. Internally requests are
    numbered, so ids may be any values, even equal ones.
    """
    open_: dict[Hashable, _Open] = {}
    names: dict[Hashable, Any] = {}

    def opened() -> Iterator[Request | Refusal | None]:
        if not isinstance(requests, Iterable):
            raise SamplingError(f"requests must be a list or an iterator, got {requests!r:.60}")
        default, numbers = _Numbers(), itertools.count()
        for request in requests:
            if request is None:  # nothing waiting: not a request, so no number
                yield None
                continue
            number = next(numbers)
            names[number] = default.name_of(request, number)
            try:
                made, open_[number] = _opened(lm, number, request, read)
                yield made
            except JaxllmError as error:
                yield Refusal(number, error)

    for event in serve(lm.model, lm.params, opened(), rows=rows, capacity=capacity):
        answer = event.error if event.error is not None else open_[event.id].answer(event)
        if answer is not None:
            open_.pop(event.id, None)
            yield names.pop(event.id), answer


class _Numbers:
    """Ids of requests: the caller's, else the request's number, else the next unused number."""

    def __init__(self) -> None:
        self._next = 0
        self._taken: set[int] = set()

    def name_of(self, request: Any, number: int) -> Any:
        """Return the id under which to answer this request."""
        self._next = max(self._next, number)
        self._taken = {taken for taken in self._taken if taken >= self._next}
        if isinstance(request, Mapping) and request.get("id") is not None:
            if is_whole(request["id"]):
                self._taken.add(int(request["id"]))
            return request["id"]
        while self._next in self._taken:
            self._next += 1
        self._next += 1
        return self._next - 1


def _opened(lm: Parts, number: int, request: Any, read: Read) -> tuple[Request, _Open]:
    if not isinstance(request, Mapping):
        raise SamplingError(
            f"a request is a mapping with a prompt and options, got {request!r:.60}"
        )
    options = {key: value for key, value in request.items() if key not in _OWN}
    cancelled, heard = request.get("cancelled"), request.get("heard")
    if cancelled is not None and not callable(cancelled):
        raise SamplingError(
            f"cancelled must be a function without arguments, got {cancelled!r:.40}"
        )
    if heard is not None and not callable(heard):
        raise SamplingError(f"heard must be a function of one text argument, got {heard!r:.40}")
    ids, settings = read(request.get("prompt"), options)
    reader = reader_of(lm, ids, settings)

    def stops(token: int) -> bool:
        piece = reader.push(token)
        if piece and heard is not None:
            heard(piece)
        return reader.stopped

    seed = settings.seed[0] if isinstance(settings.seed, list) else settings.seed
    made = Request(
        id=number,
        prompt=ids,
        max_new_tokens=int(np.max(settings.max_new_tokens)),
        sampler=settings.sampler,
        seed=seed,
        eos_token_ids=settings.eos_token_ids,
        until=stops if settings.asks_after_each_token or heard is not None else None,
        cancelled=cancelled,
        adapter=_adapter(lm, settings),
    )
    return made, _Open(reader, len(ids), seed, heard)


def _adapter(lm: Parts, settings: Settings) -> int | None:
    """Return the index of a request's adapter; None if the model has no adapters."""
    asked = settings.adapter
    if isinstance(asked, list):
        raise SamplingError(f"adapter of a request must be one name, got {asked!r:.60}")
    number = lm.number(asked)
    return number if lm.adapters else None


_OWN = ("id", "prompt", "cancelled", "heard")
