"""Calibration data: rows of token ids of equal length, and their source.

`check` validates them against a model's configuration; `data.chunking` cuts a text into rows.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from jaxllm.config.model import ModelConfig
from jaxllm.data.chunking import ChunkSpec, EncodedPieces, Pieces, chunk_rows
from jaxllm.errors import CapacityError, ConfigError, TokenError
from jaxllm.generation.loops.generate import generate
from jaxllm.generation.sampling.options import make_sampler
from jaxllm.generation.sampling.sampler import row_keys
from jaxllm.runtime.progress import steps_bar
from jaxllm.runtime.validation import check_int, check_int_array, check_token_ids
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params

SEPARATOR = "\n\n"  # between texts, and between the rows of WikiText


@dataclasses.dataclass(frozen=True, eq=False)
class Calibration:
    """Calibration rows. token_NT: int32 ids. source: where they came from, as JSON-able values."""

    token_NT: np.ndarray
    source: Mapping[str, Any]

    def __post_init__(self) -> None:
        self.token_NT.setflags(write=False)

    def __len__(self) -> int:
        return len(self.token_NT)

    @property
    def width(self) -> int:
        """T, the number of tokens in a row."""
        return int(self.token_NT.shape[1])

    @cached_property
    def digest(self) -> str:
        """A hash of the rows, whatever their source."""
        sha = hashlib.sha256(repr(self.token_NT.shape).encode())
        sha.update(self.token_NT.astype("<i4").tobytes())
        return sha.hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able description for reports and files."""
        rows, width = self.token_NT.shape
        return {"rows": rows, "width": width, "digest": self.digest, **self.source}

    def check(self, config: ModelConfig) -> None:
        """Raise CapacityError for rows longer than the context, TokenError for ids outside the
        vocabulary.
        """
        if self.width > config.context_length:
            raise CapacityError(
                f"calibration rows are too long: got {self.width} tokens, expected at most the"
                f" model's context of {config.context_length}"
            )
        check_token_ids(self.token_NT, config.vocab_size, "calibration: ")


def from_texts(
    texts: str | Iterable[str], tokenizer: Tokenizer | None, spec: ChunkSpec
) -> Calibration:
    """Cut rows from a text, or from several joined by blank lines.

    Raises TokenError if the text is shorter than a row, or the model has no tokenizer.
    """
    if tokenizer is None:
        raise TokenError(
            "calibration text needs a tokenizer, but the model has none: pass token ids"
        )
    texts = [texts] if isinstance(texts, str) else list(texts)
    try:
        content = SEPARATOR.join(texts).encode()
    except UnicodeEncodeError as error:
        raise TokenError(f"calibration text has a lone surrogate ({error.reason})") from None
    bos = tokenizer.adds_bos if spec.bos is None else spec.bos
    if bos and tokenizer.bos_id is None:
        raise TokenError("calibration rows need a begin-of-text token, but the tokenizer has none")
    begin = [tokenizer.bos_id] if bos else []
    token_NT = chunk_rows_after(begin, EncodedPieces(content, tokenizer, spec), spec)
    source = {
        "kind": "texts",
        "documents": len(texts),
        "bytes": len(content),
        "seed": spec.seed,
        "bos": bos,
    }
    return Calibration(token_NT, source)


def chunk_rows_after(begin: Sequence[int | None], pieces: Pieces, spec: ChunkSpec) -> np.ndarray:
    """Cut rows that each begin with the tokens `begin`. Raises TokenError as `chunk_rows` does."""
    text_NT = chunk_rows(pieces, spec.width - len(begin), spec)
    begin_NB = np.tile(np.array(begin, np.int32), (len(text_NT), 1))
    return np.concatenate([begin_NB, text_NT], axis=1)


def from_tokens(rows: Any, source: Mapping[str, Any] | None = None) -> Calibration:
    """Return rows of token ids `[N, T]` as calibration data.

    Raises:
        TokenError: For rows of unequal lengths, no rows, or anything but token ids.
    """
    token_NT = check_int_array("calibration rows", rows, TokenError)
    if token_NT.ndim != 2 or not token_NT.size:
        raise TokenError(
            f"calibration rows have shape {token_NT.shape}, expected [N, T], N, T >= 1"
        )
    check_token_ids(token_NT, 1 << 31, "calibration: ")
    return Calibration(token_NT.astype(np.int32), dict(source or {"kind": "tokens"}))


def from_samples(
    model: Model,
    params: Params,
    *,
    bos_id: int,
    rows: int,
    width: int,
    seed: int,
    bos: bool = True,
    batch: int = 8,
    show_progress: bool | None = None,
    **sampling: Any,
) -> Calibration:
    """Sample rows from the model itself, each after a begin-of-text token: no data needed.

    As in LLM-QAT (arXiv 2305.17888, section 2.1). Rows do not stop at end-of-text tokens.

    Args:
        bos_id: Token to start from.
        rows: N, the number of rows.
        width: T, the number of tokens in a row.
        seed: Random seed.
        bos: Whether rows include the begin-of-text token, as the model's texts do if its tokenizer
            adds one.
        batch: Rows at a time; it changes the result only through the rounding of sums.
        sampling: Options of `make_sampler` (temperature, top_k, ...); by default tokens are drawn
            from the model's own distribution.

    Raises:
        CapacityError: If rows are longer than the context.
        ConfigError: If a number is too small, or a sampling option is invalid.
    """
    for name, number, least in (("rows", rows, 1), ("width", width, 1 + bos), ("batch", batch, 1)):
        check_int(name, number, least, None, ConfigError)
    check_token_ids(np.array([bos_id]), model.config.vocab_size, "the begin-of-text token: ")
    new = width - bos
    source = {"kind": "samples", "seed": seed, "bos": bos, **sampling}
    blank = Calibration(np.zeros((1, width), np.int32), source)
    blank.check(model.config)
    batch = min(batch, rows)
    key_N = row_keys(seed, -(-rows // batch) * batch)
    sampler, parts = make_sampler(vocab_size=model.config.vocab_size, **sampling), []
    begin_B1 = np.full((batch, 1), bos_id, np.int32)
    with steps_bar("samples", len(key_N) // batch, show_progress) as done:
        for start in range(0, len(key_N), batch):
            key_B = key_N[start : start + batch]
            sample = generate(
                model, params, begin_B1, max_new_tokens=new, sampler=sampler, seed=key_B
            )
            parts.append(np.asarray(sample.token_BT))
            done()
    token_NT = np.concatenate(parts)[:rows]
    begin_N1 = np.full((rows, int(bos)), bos_id, np.int32)
    return from_tokens(np.concatenate([begin_N1, token_NT], axis=1), source)
