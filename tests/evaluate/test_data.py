"""Spans, batches and loaders: each token is scored once, padding never."""

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.errors import CheckpointError, ConfigError, TokenError
from jaxllm.evaluate.likelihood.data import (
    PROTOCOLS,
    Loader,
    Span,
    loader,
    read_documents,
    rolling_spans,
    second_half_spans,
    strided_spans,
)

DOCUMENTS = [list(range(100 * n, 100 * n + length)) for n, length in enumerate((7, 1, 12, 3, 20))]


def test_strided_spans_score_each_token_with_longest_context() -> None:
    """Each token but the first is scored once, in the window that gives it the most context;
    without overlap, each window's first token is not scored.
    """
    for length, window, stride in itertools.product(range(14), (2, 3, 5, 8), range(1, 9)):
        if stride > window:
            continue
        spans = strided_spans(length, window, stride)
        counted = [t for s in spans for t in range(s.score_start, s.end)]
        firsts = set(range(0, length, window)) if stride == window else {0}
        assert counted == [t for t in range(length) if t not in firsts]
        for span in spans:
            assert span.start % stride == 0
            assert span.end == min(span.start + window, length)
            # No earlier window of this stride contains the token.
            assert all(span.start == 0 or t >= span.start - stride + window or stride == window
                       for t in range(span.score_start, span.end))  # fmt: skip


def test_second_half_spans_equal_llama_perplexity() -> None:
    """In each chunk of n_ctx tokens, logits n_ctx / 2 to n_ctx - 2 score the next token; an
    incomplete last chunk is dropped.
    """
    for length, window in itertools.product((0, 5, 16, 17, 31, 48), (2, 3, 4, 5, 16)):
        expected = [
            start + logit + 1
            for start in range(0, length // window * window, window)
            for logit in range(window // 2, window - 1)
        ]
        spans = second_half_spans(length, window)
        assert [t for s in spans for t in range(s.score_start, s.end)] == expected
        assert all(s.end - s.start == window for s in spans)


def test_rolling_spans_equal_lm_eval_documentation() -> None:
    """Spans equal lm-evaluation-harness's example: ten tokens, context 4, a prefix token."""
    text = ["BOS", *range(10)]
    seen = [
        (text[s.start : s.end - 1], text[s.score_start : s.end])
        for s in rolling_spans(len(text), 4 + 1)
    ]
    assert seen == [
        (["BOS", 0, 1, 2], [0, 1, 2, 3]),
        ([3, 4, 5, 6], [4, 5, 6, 7]),
        ([5, 6, 7, 8], [8, 9]),
    ]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("by_length", [False, True])
def test_batches_contain_each_span_once_with_padding(protocol: str, by_length: bool) -> None:
    """Each span appears in one batch row with its tokens, positions and scored mask; padding has
    token 0, position -1 and no score.
    """
    made = loader(DOCUMENTS, window=6, batch=4, protocol=protocol, by_length=by_length)
    seen = []
    for batch in made.batches():
        assert batch.token_BT.shape[0] == 4
        assert batch.token_BT.shape[1] == 6
        for b, number in enumerate(batch.span_B):
            length = batch.length_B[b]
            assert (batch.token_BT[b, length:] == 0).all()
            assert not batch.scored_BT[b, length:].any()
            assert batch.position_BT[b].tolist() == [*range(length)] + [-1] * (6 - length)
            if number < 0:
                assert length == 0
                continue
            span = made.spans[number]
            ids = DOCUMENTS[span.document]
            assert batch.token_BT[b, :length].tolist() == ids[span.start : span.end]
            assert (
                batch.token_BT[b][batch.scored_BT[b]].tolist() == ids[span.score_start : span.end]
            )
            seen.append(int(number))
    assert sorted(seen) == list(range(len(made.spans)))
    assert len(made) == -(-len(made.spans) // 4)


def test_bucketed_batch_width_is_smallest_bucket() -> None:
    """Widths are a power of two plus one, from 9 up to the loader's own width."""
    documents = [list(range(length)) for length in (3, 9, 10, 17, 18, 33, 40)]
    made = loader(documents, window=41, batch=1, by_length=True)
    widths = [batch.token_BT.shape[1] for batch in made.batches()]
    assert widths == [41, 33, 33, 17, 17, 9, 9]


def test_bos_replaces_first_token_of_each_window() -> None:
    """With bos, each window starts with that token instead of its first, and does not score it."""
    made = loader(DOCUMENTS, window=5, stride=3, batch=3, bos=9999)
    for batch in made.batches():
        assert (batch.token_BT[batch.length_B > 0, 0] == 9999).all()
        assert not batch.scored_BT[:, 0].any()


def test_order_is_given_or_by_length() -> None:
    """The spans come in their order, or the longest first; each call yields the same batches."""
    settings: dict[str, Any] = {"window": 6, "batch": 2}

    def order(made: Loader) -> list[int]:
        return [int(n) for batch in made.batches() for n in batch.span_B if n >= 0]

    made = loader(DOCUMENTS, **settings)
    assert order(made) == order(made) == list(range(len(made.spans)))
    sizes = [span.end - span.start for span in made.spans]
    expected = sorted(range(len(sizes)), key=lambda n: -sizes[n])
    assert order(loader(DOCUMENTS, by_length=True, **settings)) == expected


def test_digest_depends_on_data_and_settings() -> None:
    changed = [[*DOCUMENTS[0][:-1], 5], *DOCUMENTS[1:]]
    others = (
        loader(DOCUMENTS, window=4, batch=3),
        loader(changed, window=4, batch=3),
        loader(DOCUMENTS, window=5, batch=3),
        loader(DOCUMENTS, window=4, batch=2),
        loader(DOCUMENTS, window=4, batch=3, by_length=True),
    )
    assert len({other.digest for other in others}) == len(others)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 1}, "window must have at least 2 tokens"),
        ({"window": 4, "stride": 5}, "stride must be from 1 to the window of 4: got 5"),
        ({"window": 4, "stride": 0}, "stride must be"),
        ({"window": 4, "protocol": "best"}, "protocol must be one of strided"),
        ({"window": 4, "batch": 0}, "batch must be at least 1"),
        ({"window": 4, "limit": 0}, "limit must be at least 1"),
    ],
)
def test_loader_refuses_bad_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loader(DOCUMENTS, **options)


def test_loader_refuses_bad_documents() -> None:
    """Documents with nothing to score, invalid token ids and invalid spans raise errors."""
    with pytest.raises(TokenError, match="nothing to score: got 1 tokens in 2 documents"):
        loader([[3], []], window=4)
    for bad in ([[1.5, 2.0]], [[[1, 2]]], [[-1, 2]], [[1 << 31, 2]]):
        with pytest.raises(TokenError, match="document 0"):
            loader(bad, window=4)  # type: ignore[arg-type]
    ids = np.arange(5, dtype=np.int32)
    for span in (Span(0, 0, 6, 1), Span(0, 2, 5, 2), Span(0, 0, 5, 1)):
        with pytest.raises(ConfigError, match="Span"):
            Loader(documents=[ids], spans=[span], batch=1, width=4)


def test_read_documents_parses_json_lines(tmp_path: Path) -> None:
    """JSON lines give texts or token ids; each malformed line raises a TokenError that names it."""
    file = tmp_path / "documents.jsonl"
    file.write_text('{"text": "One day"}\n\n{"text": "", "id": 3}\n', encoding="utf-8")
    assert read_documents(file) == ["One day", ""]
    file.write_text('{"tokens": [1, 2]}\n{"tokens": []}\n', encoding="utf-8")
    assert read_documents(file) == [[1, 2], []]
    for content, message in {
        "{": "line 1 is not valid JSON",
        '{"tokens": [' + "9" * 5000 + "]}": "line 1 is not valid JSON (an integer has 5,000 digits",
        "[" * 100_000: "line 1 is not valid JSON (nested too deeply",
        '{"tokens": [1, -1]}': "line 1: tokens[1] must be a whole number >= 0, got -1",
        '{"text": 5}': "line 1: text must be a string or null, got 5",
        '{"text": "a"}\n"b"': "line 2: must be an object, got 'b'",
        '{"text": "a"}\n{}': 'line 2 is invalid: expected an object with "text" or "tokens"',
        '{"text": "a"}\n{"tokens": [1]}': "all with",
        "\n": "expected documents, all with",
    }.items():
        file.write_text(content, encoding="utf-8")
        with pytest.raises(TokenError, match=re.escape(message)):
            read_documents(file)
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_documents(tmp_path)
