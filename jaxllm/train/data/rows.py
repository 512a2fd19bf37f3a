"""The arrays of a batch of training rows, and what any source of them is."""

from typing import Any, NamedTuple, Protocol

import numpy as np
from flax import struct

IGNORED = -100  # a label that does not count, as torch's cross-entropy has it

Ints = Any  # an array of numpy or JAX


class Rows(struct.PyTreeNode):
    """Rows of tokens and what follows each of them, int32 `[B, T]` each.

    token_BT: ids, 0 where there is padding. label_BT: the id that should follow the token of the
    same column (already shifted), `IGNORED` where it does not count. position_BT: from 0 in each
    document, -1 for padding. document_BT: numbers the documents of a row, -1 for padding; a token
    sees only those of its own document.
    """

    token_BT: Ints
    label_BT: Ints
    position_BT: Ints
    document_BT: Ints


class Example(NamedTuple):
    """A text to learn from. token_T: int32 ids. counts_T: bool, which of them are learned; the
    others (a prompt) are only read. The first one has nothing before it: it is never learned.
    """

    token_T: np.ndarray
    counts_T: np.ndarray


class Data(Protocol):
    """An endless sequence of batches, epoch after epoch: a value without a cursor.

    Resuming is to ask for the next batch. digest: of the data and its order. tokens: the labels
    that count in an epoch. len: the batches of an epoch.
    """

    @property
    def digest(self) -> str: ...

    @property
    def tokens(self) -> int: ...

    def __len__(self) -> int: ...

    def batch(self, number: int) -> Rows:
        """Batch `number` from 0, of numpy arrays; always the same one."""
        ...


def blank(rows: int, width: int) -> Rows:
    """Rows of padding alone."""
    shape = (rows, width)
    return Rows(
        np.zeros(shape, np.int32),
        np.full(shape, IGNORED, np.int32),
        np.full(shape, -1, np.int32),
        np.full(shape, -1, np.int32),
    )
