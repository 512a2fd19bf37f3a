"""The arrays of a batch of training rows, and the protocol of their sources."""

from typing import Any, NamedTuple, Protocol

import numpy as np
from flax import struct

IGNORED = -100  # a label that does not count, as in torch's cross-entropy

Ints = Any  # a numpy or JAX array of integers


class Rows(struct.PyTreeNode):
    """Rows of tokens and their labels, int32 `[B, T]` each.

    Attributes:
        token_BT: ids, 0 for padding.
        label_BT: the next token's id (already shifted), `IGNORED` if it does not count.
        position_BT: from 0 in each document, -1 for padding.
        document_BT: number of the document in its row, -1 for padding. Documents do not attend to
            each other.
    """

    token_BT: Ints
    label_BT: Ints
    position_BT: Ints
    document_BT: Ints


class Example(NamedTuple):
    """A text to learn from: int32 ids, and a bool mask of the tokens to learn.

    The others (a prompt) are context. The first token has no context, so it is never learned.
    """

    token_T: np.ndarray
    loss_mask_T: np.ndarray


class Data(Protocol):
    """An endless sequence of batches, epoch after epoch, without a cursor: any batch can be read.

    digest: of the data and its order. tokens: labels that count in an epoch. len: batches per
    epoch.
    """

    @property
    def digest(self) -> str: ...

    @property
    def tokens(self) -> int: ...

    def __len__(self) -> int: ...

    def batch(self, number: int) -> Rows:
        """Return batch `number`, from 0, as numpy arrays; always the same one."""
        ...


def blank_rows(rows: int, width: int) -> Rows:
    """Return rows of padding."""
    shape = (rows, width)
    return Rows(
        np.zeros(shape, np.int32),
        np.full(shape, IGNORED, np.int32),
        np.full(shape, -1, np.int32),
        np.full(shape, -1, np.int32),
    )
