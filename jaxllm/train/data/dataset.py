"""Examples in batches of rows: shuffled by a seed, and resumable at any batch without a cursor.

Rows are packed once; each epoch has them in another order.
"""

import dataclasses
import hashlib
from bisect import bisect_left, insort
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from jaxllm.config.model import ModelConfig
from jaxllm.errors import CapacityError, ConfigError, TokenError
from jaxllm.runtime.validation import check_int, check_token_ids
from jaxllm.train.data.examples import Examples
from jaxllm.train.data.rows import IGNORED, Rows, blank_rows


class _Pieces(NamedTuple):
    """Parts of examples that fit a row: tokens from start to end of `Examples.token_N`.

    Attributes:
        head_P: a token that replaces the first one, -1 for none.
        num_shortened, num_dropped: number of examples that lost some of their tokens, and all.
    """

    start_P: np.ndarray
    end_P: np.ndarray
    head_P: np.ndarray
    num_shortened: int
    num_dropped: int


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """Examples as `Data`, in rows of `width` columns and batches of `batch_size` rows.

    A piece of L tokens takes L - 1 columns: its last token is only a label. The last batch of an
    epoch is padded with empty rows.

    Attributes:
        seed: of the packing and of the order of the rows, which differs in each epoch.
        pack: whether pieces share rows; they do not attend to each other.

    Raises:
        ConfigError: For sizes below 1.
        TokenError: If there is nothing to learn.
    """

    examples: Examples
    width: int
    batch_size: int = 1
    seed: int = 0
    pack: bool = True

    def __post_init__(self) -> None:
        check_int("row width", self.width, 1, None, ConfigError)
        check_int("batch size", self.batch_size, 1, None, ConfigError)
        check_int("seed", self.seed, 0, None, ConfigError)
        if not len(self._pieces.start_P):
            learned = "no token is marked to be learned"
            if self.examples.loss_mask_N is None or self.examples.loss_mask_N.any():
                learned = f"in rows of {self.width} columns no example has a token left to learn"
            raise TokenError(
                f"there is nothing to train on in {len(self.examples)} examples: {learned}"
            )

    def __len__(self) -> int:
        return -(-len(self._rows) // self.batch_size)

    @cached_property
    def tokens(self) -> int:
        """The number of labels that count in an epoch."""
        counts_N, (start_P, end_P, *_) = self.examples.loss_mask_N, self._pieces
        if counts_N is None:
            return int((end_P - start_P - 1).sum())
        return sum(int(counts_N[s + 1 : e].sum()) for s, e in zip(start_P, end_P, strict=True))

    @cached_property
    def digest(self) -> str:
        """A hash of the batches, whatever files the examples came from."""
        examples = self.examples
        settings = (self.width, self.batch_size, self.seed, self.pack, examples.long, examples.bos)
        sha = hashlib.sha256(repr(settings).encode())
        for array in (examples.token_N, examples.loss_mask_N, examples.begin_E):
            if array is not None:
                sha.update(array.data)
        return sha.hexdigest()[:16]

    @property
    def facts(self) -> dict[str, Any]:
        """Counts for a report: examples, rows, tokens, how full rows are, what was cut."""
        columns = int((self._pieces.end_P - self._pieces.start_P - 1).sum())
        return {
            **self.examples.source,
            "examples": len(self.examples),
            "rows": len(self._rows),
            "width": self.width,
            "tokens": self.tokens,
            "filled": columns / (len(self._rows) * self.width),
            "cut": self._pieces.num_shortened,
            "dropped": self._pieces.num_dropped,
            "digest": self.digest,
        }

    @property
    def summary(self) -> str:
        facts = self.facts
        return (
            f"{facts['examples']:,} examples in {facts['rows']:,} rows of {self.width}"
            f" ({facts['filled']:.0%} filled), {self.tokens:,} target tokens"
        )

    @property
    def has_one_document(self) -> bool:
        """Whether no row has more than one."""
        return all(len(row) <= 1 for row in self._rows)

    def check(self, config: ModelConfig) -> None:
        """Raise CapacityError for rows longer than the context, TokenError for ids outside the
        vocabulary, ConfigError for packed rows if the model has a state.
        """
        if config.has_state and any(len(row) > 1 for row in self._rows):
            raise ConfigError(
                "this model keeps a state of a whole row, so documents cannot share rows: use"
                " --no-pack"
            )
        if self.width > config.context_length:
            raise CapacityError(
                f"training rows of {self.width} columns exceed the model's context of"
                f" {config.context_length}: use shorter rows"
            )
        check_token_ids(self.examples.token_N, config.vocab_size, "training data: ")

    def batch(self, number: int) -> Rows:
        """Return batch `number`, from 0, of an endless sequence of epochs; always the same one."""
        epoch, within = divmod(check_int("batch", number, 0, None, ConfigError), len(self))
        order_R = shuffle_rows(len(self._rows), self.seed, epoch)
        rows = blank_rows(self.batch_size, self.width)
        chosen = order_R[within * self.batch_size : (within + 1) * self.batch_size]
        for row, at in enumerate(chosen):
            column = 0
            for document, piece in enumerate(self._rows[at]):
                column = self._write_piece(rows, row, column, document, piece)
        return rows

    def _write_piece(self, rows: Rows, row: int, column: int, document: int, piece: int) -> int:
        """Write a piece into a row at a column; return the column after it."""
        start, end = self._pieces.start_P[piece], self._pieces.end_P[piece]
        token_L, counts_N = self.examples.token_N[start:end], self.examples.loss_mask_N
        here = (row, slice(column, column + len(token_L) - 1))
        rows.token_BT[here] = token_L[:-1]
        if self._pieces.head_P[piece] >= 0:
            rows.token_BT[row, column] = self._pieces.head_P[piece]
        labels = token_L[1:]
        if counts_N is not None:
            labels = np.where(counts_N[start + 1 : end], labels, IGNORED)
        rows.label_BT[here] = labels
        rows.position_BT[here] = np.arange(len(labels), dtype=np.int32)
        rows.document_BT[here] = document
        return column + len(labels)

    @cached_property
    def _pieces(self) -> _Pieces:
        return _cut_pieces(self.examples, self.width)

    @cached_property
    def _rows(self) -> list[np.ndarray]:
        length_P = self._pieces.end_P - self._pieces.start_P - 1
        if self.pack:
            return best_fit(length_P, self.width, self.seed)
        return list(np.arange(len(length_P))[:, None])


@lru_cache(maxsize=8)
def shuffle_rows(rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(rows)


def _cut_pieces(examples: Examples, width: int) -> _Pieces:
    """Cut examples into pieces of at most `width` + 1 tokens, each with something to learn."""
    pieces: list[tuple[int, int, int]] = []
    num_shortened = num_dropped = 0
    counts_N = examples.loss_mask_N
    for number, (start, end) in enumerate(pairwise(examples.begin_E.tolist())):
        parts = [(start, end, -1)]
        if end - start > width + 1:
            parts = _shorten(examples, number, width)
            num_shortened += examples.long != "split"
        parts = [p for p in parts if p[1] - p[0] > 1]
        if counts_N is not None:
            parts = [p for p in parts if counts_N[p[0] + 1 : p[1]].any()]
        num_dropped += not parts
        pieces += parts
    table = np.array(pieces, np.int64).reshape(-1, 3)
    return _Pieces(table[:, 0], table[:, 1], table[:, 2], num_shortened, num_dropped)


def _shorten(examples: Examples, number: int, width: int) -> list[tuple[int, int, int]]:
    """Return the pieces of an example that is longer than a row."""
    start, end = examples.begin_E[number : number + 2].tolist()
    if examples.long == "split":  # a piece's last token, only a label there, starts the next piece
        head = examples.leading_bos(start)
        return [(at, min(at + width + 1, end), head) for at in range(start, end - 1, width)]
    if examples.long == "right":
        return [(start, start + width + 1, -1)]
    counts_L = examples[number].loss_mask_T
    learned = int(np.argmax(counts_L[1:])) + 1 if counts_L[1:].any() else 1
    begin = min(end - width - 1, start + learned - 1)
    head = -1 if examples.bos is None or begin == start else examples.bos
    return [(begin, min(begin + width + 1, end), head)]


def best_fit(length_P: np.ndarray, width: int, seed: int) -> list[np.ndarray]:
    """Pack pieces into rows of at most `width` columns; each row is an array of piece numbers.

    Best-fit decreasing, as in Ding et al. 2024 (arXiv 2404.10830): the longest pieces come first,
    equal ones in random order; each goes to the row that it fills best. Time: `P log(width)`.

    Args:
        length_P: columns of each piece, from 1 to `width`.
        seed: of the order of equal pieces.
    """
    drawn_P = np.random.default_rng(seed).permutation(len(length_P))
    order_P = drawn_P[np.argsort(-length_P[drawn_P], kind="stable")]
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # rows by their number of free columns
    rooms: list[int] = []  # the keys of `with_room`, sorted
    for piece in order_P.tolist():
        length = int(length_P[piece])
        at = bisect_left(rooms, length)
        if at == len(rooms):
            row, left = len(rows), width - length
            rows.append([])
        else:
            left = rooms[at]
            row = with_room[left].pop()
            if not with_room[left]:
                del with_room[left], rooms[at]
            left -= length
        rows[row].append(piece)
        if left:
            if left not in with_room:
                with_room[left] = []
                insort(rooms, left)
            with_room[left].append(row)
    return [np.array(row, np.int64) for row in rows]
