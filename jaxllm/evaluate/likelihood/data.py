"""Loader of documents and token streams in batches, and the protocols that split them into spans.

A loader is a value without a cursor: each call of `batches` yields the same batches. A protocol
chooses which tokens are scored. A token's log-probability is conditioned on the tokens on its left
in its span, so the first token of a span is never scored.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from jaxllm.errors import ConfigError, TokenError
from jaxllm.files import read_json_lines
from jaxllm.ops.padding import next_power_of_two, pad_rows
from jaxllm.runtime.schema import as_schema
from jaxllm.runtime.validation import as_token_array


class Span(NamedTuple):
    """Tokens `start:end` of document `document`, run as one row; those from `score_start` on are
    scored.

    `start < scored < end`, all indices into the document.
    """

    document: int
    start: int
    end: int
    score_start: int


class Batch(NamedTuple):
    """Rows of tokens, padded on the right.

    token_BT: int32 ids, 0 for padding. length_B: int32, 0 for an empty row that fills the batch.
    scored_BT: bool, whether the token is scored, that is, whether its log-probability given the
    tokens on its left in the row counts; False for padding. span_B: int32, index of the row's span
    in the loader, -1 for none.
    """

    token_BT: np.ndarray
    length_B: np.ndarray
    scored_BT: np.ndarray
    span_B: np.ndarray

    @property
    def position_BT(self) -> np.ndarray:
        """Positions from 0 in each row, -1 for padding, int32 `[B, T]`, as `forward` expects."""
        column_T = np.arange(self.token_BT.shape[1], dtype=np.int32)[None]
        return np.where(column_T < self.length_B[:, None], column_T, np.int32(-1))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Loader:
    """Spans of documents in batches of `[batch, width]` tokens.

    documents: token ids, int32 each; a continuous stream is one document. spans: the rows.
    bos: if given, replaces the first token of every span. by_length: take the longest
    spans first, and pad a batch only to its longest row, rounded up to a power of two plus one (at
    most `width`), instead of to `width`: less padding, but a few more programs to compile.
    """

    documents: Sequence[np.ndarray]
    spans: Sequence[Span]
    batch: int
    width: int
    bos: int | None = None
    by_length: bool = False

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ConfigError(f"batch must be at least 1, got {self.batch}")
        for span in self.spans:
            if (
                not 0
                <= span.start
                < span.score_start
                < span.end
                <= len(self.documents[span.document])
            ):
                raise ConfigError(
                    f"{span} is invalid: expected start < scored < end within its document"
                )
            if span.end - span.start > self.width:
                raise ConfigError(f"{span} is too long: expected at most {self.width} tokens")

    def __len__(self) -> int:
        """Return the number of batches."""
        return -(-len(self.spans) // self.batch)

    @property
    def tokens(self) -> int:
        """Number of scored tokens."""
        return sum(span.end - span.score_start for span in self.spans)

    @cached_property
    def digest(self) -> str:
        """Hash of the data and its order."""
        order = "length" if self.by_length else "given"
        settings = [list(map(int, s)) for s in self.spans], self.batch, self.bos, order
        sha = hashlib.sha256(json.dumps(settings).encode())
        for document in self.documents:
            sha.update(len(document).to_bytes(8, "little") + document.astype("<i4").tobytes())
        return sha.hexdigest()[:16]

    def batches(self) -> Iterator[Batch]:
        """Yield the batches."""
        order = np.arange(len(self.spans))
        if self.by_length:
            order = np.argsort([s.start - s.end for s in self.spans], kind="stable")
        for row in range(0, len(order), self.batch):
            yield self._assemble(order[row : row + self.batch])

    def _assemble(self, rows: np.ndarray) -> Batch:
        width = self.width
        if self.by_length:
            inputs = max(self.spans[row].end - self.spans[row].start for row in rows) - 1
            width = min(width, next_power_of_two(inputs, 8) + 1)
        spans = [self.spans[row] for row in rows]
        blank: list[list[int]] = [[]] * (self.batch - len(rows))
        texts = [self.documents[span.document][span.start : span.end] for span in spans]
        scored = [np.arange(span.start, span.end) >= span.score_start for span in spans]
        token_BT = pad_rows(texts + blank, width=width)
        if self.bos is not None:
            token_BT[: len(rows), 0] = self.bos
        return Batch(
            token_BT,
            pad_rows([[len(text) for text in texts]], width=self.batch)[0],
            pad_rows(scored + blank, width=width, dtype=bool),
            pad_rows([rows], width=self.batch, fill=-1)[0],
        )


def loader(
    documents: Sequence[Sequence[int]],
    *,
    window: int,
    stride: int | None = None,
    protocol: str = "strided",
    batch: int = 1,
    limit: int | None = None,
    **options: Any,
) -> Loader:
    """Return a loader that applies a protocol to each document separately.

    Args:
        documents: Token ids; a continuous stream is one document.
        window: Tokens per row.
        stride: Distance of windows in tokens; by default the window.
        protocol: A name in `PROTOCOLS`.
        batch: Rows per batch; reduced to the number of rows.
        limit: Use only the first `limit` windows.
        options: Other fields of `Loader`.

    Raises:
        ConfigError: For an invalid window, stride, protocol or batch.
        TokenError: If no token can be scored, or documents are not lists of ids.
    """
    if protocol not in PROTOCOLS:
        raise ConfigError(f"protocol must be one of {', '.join(PROTOCOLS)}, got {protocol!r}")
    if limit is not None and limit < 1:
        raise ConfigError(f"limit must be at least 1 window, got {limit}")
    if not isinstance(documents, Iterable):
        raise TokenError(f"documents must be a list of documents, got {documents!r:.60}")
    arrays = [as_token_array(f"document {number}", ids) for number, ids in enumerate(documents)]
    stride = window if stride is None else stride
    spans = [
        span
        for number, ids in enumerate(arrays)
        for span in PROTOCOLS[protocol](len(ids), window, stride, number)
    ][:limit]
    if not spans:
        raise TokenError(
            f"nothing to score: got {sum(map(len, arrays))} tokens in {len(arrays)} documents, and"
            f" the protocol {protocol!r} with windows of {window} scores none of them"
        )
    rows = min(batch, len(spans))
    return Loader(documents=arrays, spans=spans, batch=rows, width=window, **options)


class _DocumentLine(msgspec.Struct):
    """A line of a documents file, with exactly one of the two fields."""

    text: str | None = None
    tokens: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]] | None = None


def read_documents(path: Path) -> list[str] | list[list[int]]:
    """Read a JSON-lines file of documents: objects all with "text", or all with "tokens" (ids).

    Blank lines and other keys are ignored. Raises CheckpointError for an unreadable file,
    TokenError for an invalid line.
    """
    documents: list[Any] = []
    for where, value in read_json_lines(path, TokenError):
        row: _DocumentLine = as_schema(value, _DocumentLine, where, TokenError)
        if (row.text is None) == (row.tokens is None):
            raise TokenError(f'{where} is invalid: expected an object with "text" or "tokens"')
        documents.append(row.text if row.tokens is None else row.tokens)
    if not documents or len({type(document) for document in documents}) > 1:
        raise TokenError(
            f'{path} is invalid: expected documents, all with "text" or all with "tokens"'
        )
    return documents


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
