"""Rows of tokens cut out of a text that may be far longer than they are.

A text is looked at in pieces, each encoded by itself when a row needs it: the first rows of a file
of any size, or rows at random places in it, take as long as their own tokens.
"""

import dataclasses
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.errors import ConfigError, TokenError
from jaxllm.files import open_regular, regular_size
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.whole import whole

WHOLE = 1 << 21  # bytes of a text that are encoded in one piece
PART = 1 << 14  # bytes of a piece of a longer one, at least
TOKEN_BYTES = 16  # more than a token takes, for how much text is enough
MARK = b"\xef\xbb\xbf"  # a byte order mark is no text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """How rows are cut out of a text.

    width: T. rows: N; None for all that there are, None only without a seed. seed: None for rows
    side by side from the beginning, what is left at the end dropped; a number for N rows that each
    begin at a random token (as GPTQ draws them). bos: whether each row begins with the
    begin-of-text token, T - 1 tokens of text after it.

    Raises ConfigError for rows or tokens below one, or a seed without a number of rows.
    """

    width: int
    rows: int | None = None
    seed: int | None = None
    bos: bool = False

    def __post_init__(self) -> None:
        whole("width", self.width, 1 + self.bos, None, ConfigError)
        if self.rows is not None:
            whole("rows", self.rows, 1, None, ConfigError)
        if self.seed is not None:
            whole("seed", self.seed, 0, None, ConfigError)
            if self.rows is None:
                raise ConfigError("rows drawn by a seed need a number of rows")


class Pieces:
    """Token ids of a text, piece by piece; a piece is encoded when it is first asked for."""

    def __init__(self, ids: Sequence[np.ndarray]) -> None:
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, number: int) -> np.ndarray:
        return self._ids[number]

    def after(self, number: int) -> Iterator[np.ndarray]:
        """This piece and those after it."""
        return (self[n] for n in range(number, len(self)))


class Encoded(Pieces):
    """Pieces of UTF-8, each encoded by itself; a text of up to `WHOLE` bytes is one piece.

    Pieces end with a line. Where two meet, a token may differ from those of the whole text.
    """

    def __init__(self, content: Any, tokenizer: Tokenizer, cut: Cut) -> None:
        """content: bytes, or a file's as `mapped` gives them."""
        self._content, self._tokenizer = content, tokenizer
        start = len(MARK) if content[: len(MARK)] == MARK else 0
        self._ends = [start, *_ends(content, start, _piece(len(content), cut))]
        self._known: dict[int, np.ndarray] | None = None if cut.seed is None else {}

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, number: int) -> np.ndarray:
        if self._known is not None and number in self._known:
            return self._known[number]
        start, end = self._ends[number : number + 2]
        try:
            text = bytes(self._content[start:end]).decode()
        except UnicodeDecodeError as error:
            raise TokenError(f"the text is not UTF-8 (byte {start + error.start})") from None
        ids = np.array(self._tokenizer.encode(text), np.int32)
        if self._known is not None:
            self._known[number] = ids
        return ids


def cut_rows(pieces: Pieces, width: int, cut: Cut) -> np.ndarray:
    """Rows of `width` tokens, int32 `[N, width]`. Raises TokenError for too short a text."""
    return (_side_by_side if cut.seed is None else _drawn)(pieces, width, cut)


def _side_by_side(pieces: Pieces, width: int, cut: Cut) -> np.ndarray:
    wanted = None if cut.rows is None else cut.rows * width
    found, count = [], 0
    for ids in pieces.after(0):
        found.append(ids)
        count += len(ids)
        if wanted is not None and count >= wanted:
            break
    rows = count // width
    _check_long_enough(count, width, cut.rows if cut.rows is not None else 1)
    ids = np.concatenate(found)[: wanted if wanted is not None else rows * width]
    return ids.reshape(-1, width)


def _drawn(pieces: Pieces, width: int, cut: Cut) -> np.ndarray:
    """Each row from a random piece, at a random token, on into the next pieces where it is long.

    Of one piece this is a uniform draw among all places where a whole row is left.
    """
    assert cut.rows is not None
    rng, refused = np.random.default_rng(cut.seed), 0
    rows: list[np.ndarray] = []
    while len(rows) < cut.rows:
        if not len(pieces) or refused > 100 * cut.rows:  # a text of hardly a row
            pieces = Pieces([np.concatenate([np.zeros(0, np.int32), *pieces.after(0)])])
            _check_long_enough(len(pieces[0]), width, 1)
            refused = 0
        number = int(rng.integers(len(pieces)))
        starts = len(pieces[number])
        if number == len(pieces) - 1:
            starts -= width - 1
        start = int(rng.integers(starts)) if starts > 0 else 0
        found = _at_least(start + width, pieces, number)
        if starts > 0 and len(found) >= start + width:
            rows.append(found[start : start + width])
        else:  # near the end of the text
            refused = refused + 1 if len(pieces) > 1 else 101 * cut.rows
    return np.stack(rows)


def _at_least(count: int, pieces: Pieces, number: int) -> np.ndarray:
    """The tokens of a piece, and of as many after it as it takes; fewer at the end of the text."""
    found = [pieces[number]]
    while (count := count - len(found[-1])) > 0 and (number := number + 1) < len(pieces):
        found.append(pieces[number])
    return np.concatenate(found)


def _check_long_enough(count: int, width: int, rows: int) -> None:
    if not count:
        raise TokenError("there is no calibration text: it has no tokens")
    if count < width * rows:
        wanted = "one row" if rows == 1 else f"{rows:,} rows"
        raise TokenError(
            f"the calibration text has {count:,} tokens, {wanted} of {width:,} need"
            f" {width * rows:,}: give a longer text, or ask for fewer or shorter rows"
        )


def _piece(size: int, cut: Cut) -> int:
    """Bytes of a piece: room for all rows that lie side by side, for one where they are drawn."""
    if cut.seed is not None:
        return WHOLE if size <= WHOLE else max(cut.width * TOKEN_BYTES, PART)
    wanted = WHOLE if cut.rows is None else cut.rows * cut.width * TOKEN_BYTES
    return min(max(wanted, PART), WHOLE)


def _ends(content: Any, start: int, size: int) -> Iterator[int]:
    """Where pieces of about `size` bytes end: after a line, or else after a space or a character.

    The last is up to twice as long.
    """
    while len(content) - start > 2 * size:
        end = start + size
        for mark in (b"\n", b" "):
            if (found := content.rfind(mark, start, end)) >= 0:
                end = found + 1
                break
        else:
            while end > start + 1 and content[end] & 0xC0 == 0x80:  # within a character
                end -= 1
        yield (start := end)
    if start < len(content):
        yield len(content)


@contextmanager
def mapped(path: Path) -> Iterator[Any]:
    """The bytes of a file, where they lie. Raises CheckpointError for what is no regular file."""
    if not regular_size(path):
        yield b""
        return
    with (
        open_regular(path) as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        yield content
