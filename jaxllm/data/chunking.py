"""Cuts a text of any length into rows of tokens.

A text is split into pieces, and a piece is encoded only when a row needs it: the cost of a few rows
from a large file, at its beginning or at random places, depends on the rows alone.
"""

import dataclasses
import functools
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.errors import ConfigError, TokenError
from jaxllm.files import open_regular, regular_size
from jaxllm.runtime.validation import check_int
from jaxllm.text.tokenizer import Tokenizer

MAX_PIECE_BYTES = 1 << 21  # largest text in bytes that is encoded in one piece
MIN_PIECE_BYTES = 1 << 14  # smallest piece of a longer text, in bytes
TOKEN_BYTES = 16  # upper estimate of bytes per token
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # byte order mark, skipped


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkSpec:
    """How to cut rows out of a text.

    Attributes:
        width: T, tokens per row.
        rows: N; None for as many as fit, which requires seed=None.
        seed: None for consecutive rows from the beginning, dropping the remainder; a number for N
            rows that each begin at a random token (as GPTQ draws them).
        bos: Whether each row is the begin-of-text token and T - 1 tokens of text; None: if the
            tokenizer adds it to texts.

    Raises:
        ConfigError: For rows or tokens below one, or a seed without a number of rows.
    """

    width: int
    rows: int | None = None
    seed: int | None = None
    bos: bool | None = None

    def __post_init__(self) -> None:
        check_int("width", self.width, 1 + bool(self.bos), None, ConfigError)
        if self.rows is not None:
            check_int("rows", self.rows, 1, None, ConfigError)
        if self.seed is not None:
            check_int("seed", self.seed, 0, None, ConfigError)
            if self.rows is None:
                raise ConfigError("rows is None with a seed: pass the number of rows to draw")


Pieces = Sequence[np.ndarray]  # token ids of a text, piece by piece


class EncodedPieces(Pieces):
    """Pieces of UTF-8 text, each encoded separately on access; up to `MAX_PIECE_BYTES` bytes are
    one piece.

    Pieces end at the end of a line if possible. At a boundary, tokens may differ from those of the
    whole text.
    """

    def __init__(self, content: Any, tokenizer: Tokenizer, spec: ChunkSpec) -> None:
        """content: bytes, or a mapped file from `map_file`."""
        self._content, self._tokenizer = content, tokenizer
        start = len(BYTE_ORDER_MARK) if content[: len(BYTE_ORDER_MARK)] == BYTE_ORDER_MARK else 0
        self._ends = [start, *_piece_ends(content, start, _piece_bytes(len(content), spec))]
        self._read = self._encode if spec.seed is None else functools.cache(self._encode)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, number: Any) -> Any:
        return self._read(number)

    def __iter__(self) -> Iterator[np.ndarray]:
        return map(self._read, range(len(self)))

    def _encode(self, number: int) -> np.ndarray:
        start, end = self._ends[number : number + 2]
        try:
            text = bytes(self._content[start:end]).decode()
        except UnicodeDecodeError as error:
            raise TokenError(f"the text is not UTF-8 (byte {start + error.start})") from None
        return np.array(self._tokenizer.encode(text), np.int32)


def chunk_rows(pieces: Pieces, width: int, spec: ChunkSpec) -> np.ndarray:
    """Cut rows, int32 `[N, width]`. Raises TokenError if the text is too short."""
    return (_consecutive_rows if spec.seed is None else _random_rows)(pieces, width, spec)


def _consecutive_rows(pieces: Pieces, width: int, spec: ChunkSpec) -> np.ndarray:
    parts, count = [], 0
    for ids in pieces:
        parts.append(ids)
        count += len(ids)
        if spec.rows is not None and count >= spec.rows * width:
            break
    _check_long_enough(count, width, spec.rows or 1, spec)
    rows = spec.rows or count // width
    return np.concatenate(parts)[: rows * width].reshape(-1, width)


def _random_rows(pieces: Pieces, width: int, spec: ChunkSpec) -> np.ndarray:
    """Draw each row from a random token of a random piece; it may continue into the next pieces.

    With a single piece the draw is uniform over all positions where a whole row fits.
    """
    assert spec.rows is not None
    rng, refused = np.random.default_rng(spec.seed), 0
    rows: list[np.ndarray] = []
    while len(rows) < spec.rows:
        if not len(pieces) or refused > 100 * spec.rows:  # the text is hardly longer than a row
            pieces = [np.concatenate([np.zeros(0, np.int32), *pieces])]
            _check_long_enough(len(pieces[0]), width, 1, spec)
            refused = 0
        number = int(rng.integers(len(pieces)))
        starts = len(pieces[number])
        if number == len(pieces) - 1:
            starts -= width - 1
        start = int(rng.integers(starts)) if starts > 0 else 0
        ids = _join_pieces(start + width, pieces, number)
        if starts > 0 and len(ids) >= start + width:
            rows.append(ids[start : start + width])
        else:  # too close to the end of the text
            refused = refused + 1 if len(pieces) > 1 else 101 * spec.rows
    return np.stack(rows)


def _join_pieces(count: int, pieces: Pieces, number: int) -> np.ndarray:
    """Join pieces from `number` on until they have `count` tokens, or the text ends."""
    parts = [pieces[number]]
    while (count := count - len(parts[-1])) > 0 and (number := number + 1) < len(pieces):
        parts.append(pieces[number])
    return np.concatenate(parts)


def _check_long_enough(count: int, width: int, rows: int, spec: ChunkSpec) -> None:
    if not count:
        raise TokenError("calibration text is empty: it has no tokens")
    if count < width * rows:
        wanted = "one row" if rows == 1 else f"{rows:,} rows"
        raise TokenError(
            f"calibration text is too short: got {count:,} tokens, {wanted} of {spec.width:,} need"
            f" {width * rows:,}. Use a longer text, or fewer or shorter rows"
        )


def _piece_bytes(size: int, spec: ChunkSpec) -> int:
    """Return the piece size in bytes: enough for all consecutive rows, or for one random row."""
    if spec.seed is None:
        wanted = MAX_PIECE_BYTES if spec.rows is None else spec.rows * spec.width * TOKEN_BYTES
        return min(max(wanted, MIN_PIECE_BYTES), MAX_PIECE_BYTES)
    if size <= MAX_PIECE_BYTES:
        return MAX_PIECE_BYTES
    return max(spec.width * TOKEN_BYTES, MIN_PIECE_BYTES)


def _piece_ends(content: Any, start: int, size: int) -> Iterator[int]:
    """Yield the ends of pieces of about `size` bytes: after a line, else a space, else a character.

    The last piece is up to twice as long.
    """
    while len(content) - start > 2 * size:
        end = start + size
        for mark in (b"\n", b" "):
            if (at := content.rfind(mark, start, end)) >= 0:
                end = at + 1
                break
        else:
            while end > start + 1 and content[end] & 0xC0 == 0x80:  # inside a UTF-8 character
                end -= 1
        yield (start := end)
    if start < len(content):
        yield len(content)


@contextmanager
def map_file(path: Path) -> Iterator[Any]:
    """Memory-map a file's bytes. Raises CheckpointError unless it is a regular file."""
    if not regular_size(path):
        yield b""
        return
    with (
        open_regular(path) as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        yield content
