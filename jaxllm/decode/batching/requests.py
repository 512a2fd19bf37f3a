"""What continuous batching is asked, and what it says: requests, and events of their tokens."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from jaxllm.decode.loops.text import Finish
from jaxllm.decode.sampling.sampler import GREEDY, Sampler
from jaxllm.errors import JaxllmError


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Request:
    """A prompt to continue, with limits of its own.

    id: the caller's, events carry it. prompt: token ids. sampler: of one row, as `make_sampler`
    gives it; greedy by default. eos_token_ids: any of them ends it. until: told each token, says
    whether to stop after it. cancelled: asked between steps whether nobody waits for it any more
    (`threading.Event().is_set`, say); its row is then free, and its last event is CANCELLED.
    adapter: the number of the one that it takes, where the parameters hold several (-1 for none):
    of all requests, or of no one.
    """

    id: Hashable
    prompt: Sequence[int] | np.ndarray
    max_new_tokens: int
    sampler: Sampler = GREEDY
    seed: int = 0
    eos_token_ids: Sequence[int] = ()
    until: Callable[[int], bool] | None = None
    cancelled: Callable[[], bool] | None = None
    adapter: int | None = None


@dataclasses.dataclass(frozen=True)
class Refusal:
    """What stands among the requests for one that was refused on the way: its error is told in its
    turn."""

    id: Hashable
    error: JaxllmError


@dataclasses.dataclass(frozen=True)
class Step:
    """What the loop did when an event came about.

    index: from 0. decoded: rows that were given a token of their own continuation to run; prompt:
    tokens of prompts that were run. busy: rows taken, of `rows`. generated: tokens since the loop
    began, in `seconds`.
    """

    index: int
    decoded: int
    prompt: int
    busy: int
    rows: int
    generated: int
    seconds: float

    @property
    def occupancy(self) -> float:
        """Which part of the rows was taken."""
        return self.busy / self.rows

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a second since the loop began."""
        return self.generated / self.seconds if self.seconds > 0 else 0.0


@dataclasses.dataclass(frozen=True)
class Event:
    """A token of a request, the end of it, or both.

    token, logprob: under the model, before any sampler; None where there is none. finish: None
    while it goes on; NON_FINITE and CANCELLED come without a token. error: why it was refused;
    nothing of it ran.
    """

    id: Hashable
    token: int | None
    logprob: float | None
    finish: Finish | None
    error: JaxllmError | None
    step: Step
