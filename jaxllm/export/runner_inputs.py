"""Parse a runner's inputs into arrays: text, token ids or embeddings, and a mask."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxllm.config.model import ModelConfig
from jaxllm.errors import TokenError
from jaxllm.models.inputs import as_vectors, check_shape
from jaxllm.ops.padding import pad_rows
from jaxllm.runtime.validation import check_token_ids
from jaxllm.text.tokenizer import Tokenizer


class RunnerInput(NamedTuple):
    """Token ids int32 `[B, L]`, or embeddings float32 `[B, L, D]` instead.

    mask_BL: bool, True for real tokens; padding has id 0.
    """

    token_BL: np.ndarray
    vector_BLD: np.ndarray | None
    mask_BL: np.ndarray

    @property
    def batch(self) -> int:
        return self.mask_BL.shape[0]

    @property
    def length(self) -> int:
        return self.mask_BL.shape[1]


def read_input(
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    padding: str,
    text: str | Sequence[str] | None,
    tokens: Any,
    embeddings: Any,
    mask: Any,
) -> RunnerInput:
    """Validate an input, and pad rows of unequal lengths on one side. Raises TokenError."""
    named = {"text": text, "tokens": tokens, "embeddings": embeddings}
    names = [name for name, value in named.items() if value is not None]
    if len(names) != 1:
        got = " and ".join(names) or "none"
        raise TokenError(f"expected exactly one of text, tokens and embeddings; got {got}")
    if embeddings is not None:
        vector_BLD = as_vectors(embeddings, "B, T", config.hidden_size)
        mask_BL = _check_mask(mask, vector_BLD.shape[:2])
        return RunnerInput(
            np.zeros(mask_BL.shape, np.int32), _zero_padding(vector_BLD, mask_BL), mask_BL
        )
    rows = _encode_text(tokenizer, text) if text is not None else tokens
    if text is not None or _is_ragged(rows):
        if mask is not None:
            raise TokenError("mask requires an array [B, T], not text or rows of unequal lengths")
        token_BL, mask_BL = _pad_ids(rows, padding)
    else:
        token_BL = _check_id_array(rows)
        mask_BL = _check_mask(mask, token_BL.shape)
    check_token_ids(token_BL, config.vocab_size, real_X=mask_BL)
    return RunnerInput(np.where(mask_BL, token_BL, 0).astype(np.int32), None, mask_BL)


def _encode_text(tokenizer: Tokenizer | None, text: str | Sequence[str]) -> list[list[int]]:
    if tokenizer is None:
        raise TokenError("text requires a tokenizer. Pass one to the runner, or pass token ids")
    texts = [text] if isinstance(text, str) else list(text)
    return [tokenizer.encode(t, bos=tokenizer.adds_bos) for t in texts]


def _is_ragged(rows: Any) -> bool:
    """Return whether these are lists of unequal lengths."""
    if isinstance(rows, jax.Array | np.ndarray) or not isinstance(rows, Sequence):
        return False
    return len({np.shape(row) for row in rows}) > 1


def _pad_ids(rows: Sequence[Any], padding: str) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of ids as one array, padded on one side, and its mask."""
    lists = [
        _check_id_array([row])[0] if len(row) else _raise_empty_row(r) for r, row in enumerate(rows)
    ]
    if not lists:
        raise TokenError("the input has no rows")
    left, there = padding == "left", [[1] * len(ids) for ids in lists]
    # int64, because ids have not been checked against the vocabulary yet.
    return pad_rows(lists, left=left, dtype=np.int64), pad_rows(there, left=left, dtype=bool)


def _raise_empty_row(row: int) -> np.ndarray:
    raise TokenError(f"row {row} has no tokens")


def _check_id_array(tokens: Any) -> np.ndarray:
    token_BL = np.asarray(tokens)
    check_shape(token_BL)
    if token_BL.dtype.kind not in "iu":
        raise TokenError(f"tokens must be integers, got {token_BL.dtype}")
    return token_BL


def _zero_padding(vector_BLD: np.ndarray, mask_BL: np.ndarray) -> np.ndarray:
    """Set padding to zero; raise TokenError unless all other vectors are finite."""
    vector_BLD = np.where(mask_BL[:, :, None], vector_BLD, np.float32(0))
    if not np.isfinite(vector_BLD).all():
        row, column = np.argwhere(~np.isfinite(vector_BLD).all(axis=2))[0]
        raise TokenError(f"embeddings must be finite, but row {row}, column {column} is not")
    return vector_BLD


def _check_mask(mask: Any, shape: tuple[int, ...]) -> np.ndarray:
    if mask is None:
        return np.ones(shape, bool)
    mask_BL = np.asarray(mask)
    if mask_BL.shape != shape:
        raise TokenError(f"mask must have the input's shape {shape}, got {mask_BL.shape}")
    if not ((mask_BL == 0) | (mask_BL == 1)).all():
        raise TokenError("mask must be 1 for real tokens and 0 for padding, got other values")
    return mask_BL.astype(bool)
