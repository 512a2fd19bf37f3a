"""Inputs and outputs of continuous batching: requests, and events with their tokens."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np

from jaxllm.errors import CapacityError, JaxllmError, SamplingError, TokenError
from jaxllm.generation.loops.draft import NO_DRAFTS, DraftStats
from jaxllm.generation.loops.finish import Finish, pad_eos_ids
from jaxllm.generation.sampling.sampler import GREEDY, Sampler
from jaxllm.models.inputs import check_longrope_limit, warn_dynamic_ntk
from jaxllm.runtime.validation import check_int, check_int_array, check_token_ids
from jaxllm.steps import EditMap
from jaxllm.weights.model import Model

MAX_TOP_LOGPROBS = 20


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Request:
    """A prompt to continue, with its own sampler, seed and limits.

    Attributes:
        id: Chosen by the caller; copied into the request's events.
        prompt: Token ids.
        sampler: A sampler for one row, as from `make_sampler`; greedy by default.
        eos_token_ids: Any of these ends the text.
        until: Called with each new token; a true result stops the request after it.
        is_cancelled: Called between steps, for example `threading.Event().is_set`. A true result
            frees the row; the request's last event is then CANCELLED.
        adapter: Index of a LoRA adapter if the parameters hold several, -1 for none. Set it for all
            requests or for none.
        top_logprobs: Number of likeliest tokens to report per step, at most `MAX_TOP_LOGPROBS`.
        namespace: Requests of different namespaces share no entries of a prefix cache. For a
            service, derive it from the caller's key: shared entries show in response times.
        edits: As for `prefill`, of the prompt and the new tokens. Functions, and edits of
            attention's scores and weights, are refused. Requests with the same sites and kinds of
            edits share a program.
        read: Sites to read, as for `forward`, except attention's scores and weights. While a
            request reads, all rows decode step by step.
        read_steps: The steps to read. Step i runs the i-th new token, from 0, and step -1 the
            prompt's last token. None: all from 0.
    """

    id: Hashable
    prompt: Sequence[int] | np.ndarray
    max_new_tokens: int
    sampler: Sampler = GREEDY
    seed: int = 0
    eos_token_ids: Sequence[int] = ()
    until: Callable[[int], bool] | None = None
    is_cancelled: Callable[[], bool] | None = None
    adapter: int | None = None
    top_logprobs: int = 0
    namespace: str = ""
    edits: EditMap | None = None
    read: Sequence[str] = ()
    read_steps: Sequence[int] | None = None

    @property
    def has_ended(self) -> bool:
        """Whether it is cancelled."""
        return self.is_cancelled is not None and bool(self.is_cancelled())


@dataclasses.dataclass(frozen=True)
class RejectedRequest:
    """A request that failed validation; takes its place among the requests and yields its error."""

    id: Hashable
    error: JaxllmError


@dataclasses.dataclass(frozen=True)
class StepStats:
    """Statistics of the step that produced an event.

    Attributes:
        index: Step number; 1 is the first, and 0 precedes any step. A step is one token of some
            rows, also where a draft lets one pass of the model yield several.
        decode_tokens: Rows that ran a generated token in this step.
        prompt_tokens: Prompt tokens that ran in this step.
        busy_rows: Rows with a request that runs.
        paused_rows: Rows that wait for cache slots.
        rows: Total rows.
        generated_tokens: Tokens generated since the loop started.
        elapsed_seconds: Time since the loop started.
        draft_stats: Of all rows, since the loop started.
    """

    index: int
    decode_tokens: int
    prompt_tokens: int
    busy_rows: int
    rows: int
    generated_tokens: int
    elapsed_seconds: float
    draft_stats: DraftStats = NO_DRAFTS
    paused_rows: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second since the loop started."""
        return self.generated_tokens / self.elapsed_seconds if self.elapsed_seconds > 0 else 0.0


@dataclasses.dataclass(frozen=True)
class Event:
    """A new token of a request, the end of the request, or both.

    Attributes:
        id: The request's id.
        token: The new token, or None.
        logprob: Its log-probability under the model, before any processor.
        finish: Finish reason, or None while the request is running. NON_FINITE and CANCELLED come
            without a token.
        error: Why the request was rejected, or None. No part of a rejected request ran.
        step: Statistics of the step.
        top_logprobs: The likeliest tokens of the step and their log-probabilities, if requested.
        cached_tokens: Prompt tokens that came from the prefix cache.
        sites: Activations of the step that predicted the token: NumPy arrays by site, of one row
            and one token.
        draft_stats: Of the request so far.
    """

    id: Hashable
    token: int | None
    logprob: float | None
    finish: Finish | None
    error: JaxllmError | None
    step: StepStats
    top_logprobs: list[tuple[int, float]] | None = None
    cached_tokens: int = 0
    sites: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    draft_stats: DraftStats = NO_DRAFTS


def check_request(model: Model, request: Request, capacity: int) -> np.ndarray:
    """Validate a request; return its prompt as int32."""
    prompt_T = check_int_array("a prompt", request.prompt, TokenError)
    if prompt_T.ndim != 1 or not prompt_T.size:
        raise TokenError(f"a prompt must be a list of token ids, got {request.prompt!r:.60}")
    pad_eos_ids(request.eos_token_ids)
    if not isinstance(request.sampler, Sampler):
        raise SamplingError(f"sampler must be a Sampler, got {request.sampler!r:.60}")
    new = check_int("max_new_tokens", request.max_new_tokens, 1)
    check_token_ids(prompt_T, model.config.vocab_size, "the prompt: ")
    widest = min(MAX_TOP_LOGPROBS, model.config.vocab_size)
    check_int("top_logprobs", request.top_logprobs, 0, widest)
    if not isinstance(request.namespace, str):
        raise SamplingError(f"namespace must be a text, got {request.namespace!r:.60}")
    needed = prompt_T.size + new - 1  # the last token never runs
    check_longrope_limit(prompt_T.size, needed, model.config)
    warn_dynamic_ntk(prompt_T.size, needed, model.config)
    limit = min(capacity, model.config.position_limit)
    if needed > limit:
        raise CapacityError(
            f"{needed} tokens of prompt and continuation do not fit into {limit} slots or positions"
        )
    return prompt_T.astype(np.int32)
