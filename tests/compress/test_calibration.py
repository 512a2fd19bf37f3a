"""Calibration rows are chunks of the tokenized text, as in the papers' code."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxllm
from jaxllm.compress.calibration import (
    Calibration,
    from_samples,
    from_texts,
    from_tokens,
)
from jaxllm.data import chunking, wikitext
from jaxllm.data.chunking import ChunkSpec
from jaxllm.data.wikitext import read_wikitext
from jaxllm.errors import CapacityError, CheckpointError, ConfigError, TokenError
from jaxllm.text.tokenizer import Tokenizer

DEMO = Path(jaxllm.__file__).parent / "demo" / "llama"
SENTENCE = "Once upon a time there lived a quiet girl in a small cottage by the river"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The demo's tokenizer, which adds no begin-of-text token here."""
    return dataclasses.replace(Tokenizer.from_directory(DEMO), adds_bos=False)


@pytest.fixture(scope="module")
def lm(shallow: Any) -> jaxllm.LM:
    return jaxllm.load(shallow("llama"), dtype="float32")


def story(lines: int, seed: int = 0) -> str:
    rng = np.random.default_rng(seed)
    return "".join(" ".join(rng.permutation(SENTENCE.split())) + ".\n" for _ in range(lines))


def use_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make pieces so small that a page of text has several."""
    monkeypatch.setattr(chunking, "MAX_PIECE_BYTES", 2048)
    monkeypatch.setattr(chunking, "MIN_PIECE_BYTES", 512)


def find_row(row: np.ndarray, text: list[int]) -> list[int]:
    """Return the positions of a row in a text."""
    windows = np.lib.stride_tricks.sliding_window_view(np.array(text), len(row))
    return np.flatnonzero((windows == row).all(axis=1)).tolist()


def test_calibration_rows_tile_tokenized_text(tokenizer: Tokenizer) -> None:
    """Rows are consecutive pieces of the tokenized text; with bos each one starts with the
    begin-of-text token, and by default if the tokenizer adds it to texts.
    """
    texts = [story(4), story(3, seed=1)]
    ids = tokenizer.encode("\n\n".join(texts))
    made = from_texts(texts, tokenizer, ChunkSpec(width=16))
    assert made.token_NT.dtype == np.int32
    assert made.token_NT.ravel().tolist() == ids[: len(ids) // 16 * 16]
    assert from_texts(texts, tokenizer, ChunkSpec(width=16, rows=2)).token_NT.tolist() == [
        ids[:16],
        ids[16:32],
    ]
    adding = dataclasses.replace(tokenizer, adds_bos=True)
    for encoder, bos in ((tokenizer, True), (adding, None)):
        made = from_texts(texts, encoder, ChunkSpec(width=16, rows=2, bos=bos))
        assert made.token_NT.tolist() == [
            [tokenizer.bos_id, *ids[15 * n : 15 * n + 15]] for n in (0, 1)
        ]


def test_random_rows_are_substrings_of_text(tokenizer: Tokenizer) -> None:
    """Random rows are distinct substrings of the text, and the seed determines them."""
    text = story(60)
    ids = tokenizer.encode(text)
    made = from_texts(text, tokenizer, ChunkSpec(width=24, rows=12, seed=7))
    again = from_texts(text, tokenizer, ChunkSpec(width=24, rows=12, seed=7))
    other = from_texts(text, tokenizer, ChunkSpec(width=24, rows=12, seed=8))
    assert (made.digest, made.token_NT.tolist()) == (again.digest, again.token_NT.tolist())
    assert made.digest != other.digest
    assert len({tuple(row) for row in made.token_NT.tolist()}) == 12
    assert all(find_row(row, ids) for row in made.token_NT)


def test_random_rows_start_uniformly(tokenizer: Tokenizer) -> None:
    """Each possible start of a row is equally likely, also if the text consists of pieces."""
    ids = list(range(300, 330))
    source = [np.array(ids, np.int32)]
    rows = chunking.chunk_rows(source, 27, ChunkSpec(width=27, rows=400, seed=0))
    counts = np.bincount(rows[:, 0] - 300)
    assert len(counts) == 4
    assert np.abs(counts - 100).max() < 4 * np.sqrt(400 * 0.25 * 0.75)
    split = [np.array(ids[:10], np.int32), np.array(ids[10:], np.int32)]
    rows = chunking.chunk_rows(split, 27, ChunkSpec(width=27, rows=50, seed=0))
    assert sorted({int(row[0]) for row in rows}) == [300, 301, 302, 303]


def test_long_text_is_encoded_in_pieces(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long text is tokenized in pieces that end with lines, and only as many as the rows need."""
    text, encoded = story(200, seed=3), []
    ids = tokenizer.encode(text)
    use_small_pieces(monkeypatch)

    class Counting:
        bos_id, adds_bos = None, False

        def encode(self, piece: str) -> list[int]:
            encoded.append(piece)
            return tokenizer.encode(piece)

    counting: Any = Counting()
    made = from_texts(text, counting, ChunkSpec(width=30, rows=2))
    assert made.token_NT.ravel().tolist() == ids[:60]
    assert len("".join(encoded)) <= 2048  # only part of the text
    encoded.clear()
    every = from_texts(text, counting, ChunkSpec(width=30))
    assert "".join(encoded) == text
    assert all(piece.endswith("\n") for piece in encoded)
    assert abs(every.token_NT.size - len(ids)) < 30 + len(encoded)
    encoded.clear()
    drawn = from_texts(text, counting, ChunkSpec(width=30, rows=3, seed=1))
    assert len("".join(encoded)) < len(text) / 2
    joined = tokenizer.decode(ids)
    assert all(tokenizer.decode(row.tolist()).strip()[5:60] in joined for row in drawn.token_NT)


def test_pieces_end_at_lines_words_or_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces never split a UTF-8 character: together they are the text without its
    byte-order mark.
    """

    class Bytes:
        bos_id, adds_bos = None, False

        def encode(self, piece: str) -> list[int]:
            return list(piece.encode())

    use_small_pieces(monkeypatch)
    for text in (
        "é" * 3000,
        "\ufeff" + "word " * 2000,
        "x\n" * 3000,
        "\n" + "y" * 9000,
        "€a" * 4000,
    ):
        made = from_texts(text, Bytes(), ChunkSpec(width=7))  # type: ignore[arg-type]
        expected = text.removeprefix("\ufeff").encode()
        assert bytes(made.token_NT.ravel().tolist()) == expected[: len(expected) // 7 * 7]


WIKI = " \n = Robert = \n \n Robert is an <unk> actor . \n He was \n \n\n = End = \n"
# As in the Hub's Parquet: one row per line with its newline, "" for a blank line.
WIKI_ROWS = ["", " = Robert = \n", "", " Robert is an <unk> actor . \n", " He was \n", "", "",
             " = End = \n"]  # fmt: skip


def test_wikitext_raw_and_parquet_are_equal(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "wiki.test.raw").write_text(WIKI, encoding="utf-8")
    table = pyarrow.table({"number": list(range(len(WIKI_ROWS))), "text": WIKI_ROWS})
    pyarrow.parquet.write_table(table, tmp_path / "test.parquet", row_group_size=3)
    for name in ("wiki.test.raw", "test.parquet"):
        assert list(read_wikitext(tmp_path / name)) == WIKI_ROWS


def test_calibration_digest_depends_on_rows() -> None:
    """The digest depends on the rows only; the rows are a read-only copy."""
    made = from_tokens([[1, 2, 3], [4, 5, 6]])
    assert made.digest == from_tokens(np.array([[1, 2, 3], [4, 5, 6]], np.uint16)).digest
    assert made.digest != from_tokens([[1, 2], [3, 4], [5, 6]]).digest
    assert json.loads(json.dumps(made.to_dict())) == {
        "kind": "tokens", "rows": 2, "width": 3, "digest": made.digest
    }  # fmt: skip
    assert len(made) == 2
    with pytest.raises(ValueError, match="read-only"):
        made.token_NT[0, 0] = 9
    given = np.array([[1, 2]], np.int32)
    assert from_tokens(given).token_NT is not given
    given[0, 0] = 5  # the caller's array was copied


def test_samples_come_from_model_distribution(lm: jaxllm.LM) -> None:
    """Sampled rows follow the model: greedy samples are its argmax, random ones have high
    likelihood; the seed fixes them.
    """
    bos = lm.tokenizer.bos_id if lm.tokenizer else None
    assert bos is not None
    common: dict[str, Any] = {"bos_id": bos, "rows": 3, "seed": 4, "show_progress": False}
    made = from_samples(lm.model, lm.params, width=9, batch=2, bos=False, **common)
    kept = from_samples(lm.model, lm.params, width=10, batch=2, **common)
    assert made.token_NT.shape == (3, 9)
    np.testing.assert_array_equal(kept.token_NT[:, 1:], made.token_NT)
    assert (kept.token_NT[:, 0] == bos).all()
    assert len({tuple(row) for row in made.token_NT.tolist()}) == 3
    greedy = from_samples(lm.model, lm.params, width=10, batch=2, **common, top_k=1)
    assert json.loads(json.dumps(greedy.to_dict()))["top_k"] == 1
    each = np.concatenate([kept.token_NT, greedy.token_NT[:1]])
    logits_NTV = jaxllm.forward(lm.model, lm.params, None, each[:, :-1]).logits
    np.testing.assert_array_equal(logits_NTV[3].argmax(-1), greedy.token_NT[0, 1:])
    logprob_NTV = np.asarray(jax.nn.log_softmax(logits_NTV))
    token_logprob_NT = np.take_along_axis(logprob_NTV, each[:, 1:, None], axis=2)
    assert np.exp(token_logprob_NT[:3].mean()) > 10 / lm.config.vocab_size  # likely under the model
    with pytest.raises(CapacityError, match="got 5000 tokens"):
        from_samples(lm.model, lm.params, width=5000, **common)
    with pytest.raises(TokenError, match="begin-of-text"):
        from_samples(lm.model, lm.params, width=9, **{**common, "bos_id": 1 << 20})


def test_calibration_rows_are_checked_against_model(lm: jaxllm.LM) -> None:
    from_tokens([[1, 2, 3]]).check(lm.config)
    with pytest.raises(CapacityError, match="got 2000 tokens"):
        from_tokens(np.ones((1, 2000), np.int32)).check(lm.config)
    with pytest.raises(TokenError, match="outside the vocabulary"):
        from_tokens([[1, 1 << 20]]).check(lm.config)


def test_invalid_calibration_is_refused(tokenizer: Tokenizer) -> None:
    """Empty, missing, undecodable or too short sources and invalid chunk sizes raise errors."""
    text, cut = story(1), ChunkSpec(width=64)
    count = len(tokenizer.encode(text))
    wide, many = ChunkSpec(width=64, rows=1, seed=0), ChunkSpec(width=8, rows=9)
    for call, kind, message in (
        (lambda: from_texts([], tokenizer, cut), TokenError, "calibration text is empty"),
        (lambda: from_texts("", tokenizer, cut), TokenError, "is empty"),
        (lambda: from_texts(text, tokenizer, cut), TokenError, f"got {count} tokens, one row"),
        (lambda: from_texts(text, tokenizer, wide), TokenError, "one row"),
        (lambda: from_texts(text, tokenizer, many), TokenError, "9 rows of 8"),
        (lambda: from_texts("\ud800", tokenizer, cut), TokenError, "surrogate"),
        (lambda: from_texts(text, None, cut), TokenError, "needs a tokenizer"),
        (lambda: from_tokens([[1, 2], [3]]), TokenError, "ragged"),
        (lambda: from_tokens([]), TokenError, r"\[N, T\]"),
        (lambda: from_tokens([[0.5]]), TokenError, "integers"),
        (lambda: from_tokens([[-1]]), TokenError, "-1"),
        (lambda: ChunkSpec(width=0), ConfigError, "width"),
        (lambda: ChunkSpec(width=1, bos=True), ConfigError, "width"),
        (lambda: ChunkSpec(width=8, rows=0), ConfigError, "rows"),
        (lambda: ChunkSpec(width=8, seed=1), ConfigError, "number of rows"),
    ):  # fmt: skip
        with pytest.raises(kind, match=message):
            call()


def test_short_text_error_reports_its_length(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text in several pieces that is shorter than a row raises an error with its length in
    tokens.
    """
    text = story(60)
    use_small_pieces(monkeypatch)
    with pytest.raises(TokenError, match=r"got 1,\d\d\d tokens, one row of 9,000"):
        from_texts(text, tokenizer, ChunkSpec(width=9000, rows=2, seed=0))


def test_invalid_parquet_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damaged Parquet, wrong columns and a missing pyarrow raise errors."""
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1 not parquet")
    with pytest.raises(CheckpointError, match="cannot be read as parquet"):
        list(read_wikitext(path))
    for table, message in (
        ({"words": ["a"]}, "no column 'text': got words"),
        ({"text": [1, 2]}, "values that are not strings"),
        ({"text": ["a", None]}, "not strings"),
    ):
        pyarrow.parquet.write_table(pyarrow.table(table), path)
        with pytest.raises(CheckpointError, match=message):
            list(read_wikitext(path))

    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(wikitext, "import_module", missing)
    with pytest.raises(ConfigError, match=r"pip install 'jaxllm\[data\]'"):
        list(read_wikitext(path))


def test_calibration_is_one_pytree_leaf() -> None:
    made = Calibration(np.zeros((1, 2), np.int32), {})
    assert jax.tree.leaves(made) == [made]
