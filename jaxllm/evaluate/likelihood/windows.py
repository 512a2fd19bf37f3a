"""Evaluation protocols: a protocol splits a text into spans, and chooses which tokens are scored.

A token's log-probability is conditioned on the tokens on its left in its span, so the first token
of a span is never scored.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxllm.errors import ConfigError


class Span(NamedTuple):
    """Tokens `start:end` of document `document`, run as one row; those from `score_start` on are
    scored.

    `start < scored < end`, all indices into the document.
    """

    document: int
    start: int
    end: int
    score_start: int


def strided_spans(length: int, window: int, stride: int, document: int = 0) -> list[Span]:
    """Return windows of `window` tokens, `stride` apart; each token is scored in its first window.

    As in Hugging Face's guide "Perplexity of fixed-length models". With `stride == window` the
    windows do not overlap, and the first token of each is not scored. Raises ConfigError unless
    `2 <= window` and `1 <= stride <= window`.
    """
    _check_window(window)
    if not 1 <= stride <= window:
        raise ConfigError(f"stride must be from 1 to the window of {window}: got {stride}")
    spans, seen = [], 0
    for start in range(0, length, stride):
        end = min(start + window, length)
        scored = max(seen, start + 1)
        if scored < end:
            spans.append(Span(document, start, end, scored))
        seen = end
        if end == length:
            break
    return spans


def second_half_spans(length: int, window: int, stride: int = 0, document: int = 0) -> list[Span]:
    """Return consecutive full windows, of which the second half is scored; ignores `stride`.

    As llama.cpp's `llama-perplexity`: in a window of T tokens, those from T // 2 + 1 on are scored,
    and the remainder at the end of the text is dropped.
    """
    _check_window(window)
    starts = range(0, length - window + 1, window)
    return [Span(document, s, s + window, s + window // 2 + 1) for s in starts if window > 2]


def rolling_spans(length: int, window: int, stride: int = 0, document: int = 0) -> list[Span]:
    """Return windows that share one token, so every token but the first is scored once.

    As lm-evaluation-harness's `loglikelihood_rolling`, for a document that begins with its prefix
    token: the last span reaches back to be a full window. Ignores `stride`.
    """
    _check_window(window)
    spans, seen = [], 1
    while seen < length:
        end = min(seen + window - 1, length)
        spans.append(Span(document, max(0, end - window), end, seen))
        seen = end
    return spans


# Each takes (length, window, stride, document).
PROTOCOLS: Mapping[str, Callable[[int, int, int, int], list[Span]]] = {
    "strided": strided_spans,
    "second-half": second_half_spans,
    "rolling": rolling_spans,
}


def _check_window(window: int) -> None:
    if window < 2:
        raise ConfigError(f"window must have at least 2 tokens, one to predict from: got {window}")
