"""Log-likelihoods of continuations and of whole documents, as lm-evaluation-harness defines them.

Requests are sorted by length, longest first, so that batches have few different shapes.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxllm.errors import CapacityError, TokenError
from jaxllm.evaluate.likelihood.data import Loader
from jaxllm.evaluate.likelihood.score import check_loader, score
from jaxllm.evaluate.likelihood.windows import Span, rolling_spans
from jaxllm.runtime.progress import steps_bar
from jaxllm.runtime.validation import as_token_array
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params

ContextAndContinuation = tuple[Sequence[int], Sequence[int]]


class Likelihood(NamedTuple):
    """The log-probability of some tokens, and whether greedy decoding generates all of them."""

    logprob: float
    greedy: bool


def continuation_likelihoods(
    model: Model,
    params: Params,
    pairs: Sequence[ContextAndContinuation],
    *,
    max_length: int,
    batch: int = 8,
    show_progress: bool | None = None,
) -> Iterator[tuple[int, Likelihood]]:
    """Yield `(index of the pair, Likelihood)` of each continuation given its context.

    Pairs are yielded as they are computed, not in the given order.

    Args:
        pairs: Token ids of context and continuation, each with at least one token.
        max_length: Maximum number of input tokens; longer ones are truncated on the left.

    Raises:
        TokenError: For an empty context or continuation, or ids outside the vocabulary.
        CapacityError: For a continuation longer than `max_length`, or a `max_length` beyond the
            model's context.
    """
    documents, spans = [], []
    for number, (context, continuation) in enumerate(pairs):
        if not len(context) or not len(continuation):
            raise TokenError(f"pair {number}: context and continuation must not be empty")
        if len(continuation) > max_length:
            raise CapacityError(
                f"pair {number}: continuation is too long: got {len(continuation)} tokens, expected"
                f" at most {max_length}"
            )
        parts = [as_token_array(f"pair {number}", part) for part in (context, continuation)]
        ids = np.concatenate(parts)[-(max_length + 1) :]
        documents.append(ids)
        spans.append(Span(number, 0, len(ids), len(ids) - len(continuation)))
    return _score_spans(model, params, documents, spans, max_length, batch, show_progress)


def document_logprobs(
    model: Model,
    params: Params,
    documents: Sequence[Sequence[int]],
    *,
    max_length: int,
    batch: int = 8,
    show_progress: bool | None = None,
) -> list[float]:
    """Return the log-probability of each document, in windows of `max_length` tokens.

    documents: token ids; the first is a prefix token, which is conditioned on but not scored. Every
    other token is scored once (`windows.rolling_spans`). Raises as
    `continuation_likelihoods`.
    """
    arrays = [as_token_array(f"document {number}", ids) for number, ids in enumerate(documents)]
    spans = [
        s for n, ids in enumerate(arrays) for s in rolling_spans(len(ids), max_length + 1, 0, n)
    ]
    total_D = np.zeros(len(arrays))
    each = _score_spans(model, params, arrays, spans, max_length, batch, show_progress)
    for number, likelihood in each:
        total_D[spans[number].document] += likelihood.logprob
    return total_D.tolist()


def _score_spans(
    model: Model,
    params: Params,
    documents: list[np.ndarray],
    spans: list[Span],
    max_length: int,
    batch: int,
    show_progress: bool | None,
) -> Iterator[tuple[int, Likelihood]]:
    loader = Loader(
        documents=documents,
        spans=spans,
        batch=batch,
        width=max_length + 1,
        by_length=True,
    )
    check_loader(model, loader)

    def run() -> Iterator[tuple[int, Likelihood]]:
        with steps_bar("likelihoods", len(loader), show_progress) as done:
            for rows in loader.batches():
                logprob_BT, greedy_BT = score(model, params, rows)
                logprob_B = logprob_BT.sum(axis=1, dtype=np.float64)
                greedy_B = (greedy_BT == rows.scored_BT).all(axis=1)
                for b in np.flatnonzero(rows.span_B >= 0):
                    yield int(rows.span_B[b]), Likelihood(float(logprob_B[b]), bool(greedy_B[b]))
                done()

    return run()
