"""Rows of two documents and padding, of a shape that all tests of distillation share."""

from functools import partial
from typing import Any

import jax
import numpy as np

from jaxllm.train.data.rows import IGNORED, Rows
from jaxllm.train.objective import run
from tests.twins import tokens

B, T = 2, 7


def rows_of(seed: int = 0) -> Rows:
    """Two documents in the first row, padding in the second."""
    token = tokens(B, T + 1, seed)
    label, position = token[:, 1:].copy(), np.tile(np.arange(T), (B, 1))
    document = np.zeros((B, T), int)
    position[0, 4:], document[0, 4:] = np.arange(3), 1
    position[1, 5:], document[1, 5:], label[1, 5:], label[0, :2] = -1, -1, IGNORED, IGNORED
    return Rows(*(x.astype(np.int32) for x in (token[:, :-1], label, position, document)))


@partial(jax.jit, static_argnums=0)
def ask(model: Any, params: Any, rows: Rows) -> jax.Array:
    """The logits of rows."""
    plain = Rows(rows.token_BT, rows.label_BT, rows.position_BT, rows.document_BT)
    return run(model, params, plain).logits
