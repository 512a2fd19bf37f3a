"""Validation and planning of a token batch, on the host, before anything runs."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from jaxllm.config.model import ModelConfig
from jaxllm.errors import CapacityError, TokenError
from jaxllm.generation.loops.microbatch import TokenRun
from jaxllm.models.inputs import as_array
from jaxllm.research.llama_batch.sequences import Positions
from jaxllm.runtime.validation import check_int_array, check_token_ids, is_integer


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TokenBatch:
    """N tokens to run. Exactly one of `tokens` and `embeddings` is required.

    Attributes:
        tokens: Token ids `[N]`.
        embeddings: Vectors `[N, D]` in place of rows of the embedding table.
        positions: Position of each token; by default each sequence continues where it ended.
        sequences: One sequence id per token, or several that share all of their text; default 0.
        outputs: Which tokens need an output: one flag per token, "all", or "last" (the last token
            of the batch).
    """

    tokens: Any = None
    embeddings: Any = None
    positions: Any = None
    sequences: Sequence[int | Sequence[int]] | None = None
    outputs: Sequence[bool] | Literal["all", "last"] = "last"


def plan_batch(config: ModelConfig, current: Positions, batch: TokenBatch) -> list[list[TokenRun]]:
    """Split a batch into ordered groups; the token runs within a group are independent.

    current: positions that the cache holds.

    Raises:
        TokenError: If the batch is invalid.
        CapacityError: If it does not fit into the free slots.
    """
    token_N = _tokens(config, batch)
    sets = _sequence_sets(batch, token_N.size, current.own_BS.shape[0])
    position_N = _positions(config, current, batch, sets)
    output_N = _output_flags(batch, token_N.size)
    slot_N = _free_slots(current, sets)
    end = {row: position_N[i] + 1 for i, rows in enumerate(sets) for row in rows}

    def run(rows: tuple[int, ...], index_T: list[int]) -> TokenRun:
        token_T, position_T, slot_T, output_T = (
            x[index_T] for x in (token_N, position_N, slot_N, output_N)
        )
        length = int(end[rows[0]])
        return TokenRun(rows, np.array(index_T), token_T, position_T, slot_T, output_T, length)

    return [[run(*item) for item in stage.items()] for stage in _group_tokens(sets)]


def _tokens(config: ModelConfig, batch: TokenBatch) -> np.ndarray:
    if (batch.tokens is None) == (batch.embeddings is None):
        raise TokenError("a batch needs exactly one of tokens and embeddings, got both or none")
    if batch.tokens is None:
        return np.zeros(len(batch.embeddings), np.int32)
    token_N = _check_int_vector("tokens", batch.tokens)
    if not token_N.size:
        raise TokenError("the batch is empty")
    check_token_ids(token_N, config.vocab_size, "the batch: ")
    return token_N


def _sequence_sets(batch: TokenBatch, count: int, rows: int) -> list[tuple[int, ...]]:
    """Return the sorted, unique sequence ids of each token."""
    sequences = [0] * count if batch.sequences is None else list(batch.sequences)
    if len(sequences) != count:
        raise TokenError(f"sequences has length {len(sequences)}, expected {count}, one per token")
    sets = []
    for i, ids in enumerate(sequences):
        members = tuple(
            np.unique(_check_int_vector("sequence ids", [ids] if is_integer(ids) else ids)).tolist()
        )
        if not members:
            raise TokenError(f"token {i} of the batch has an empty list of sequence ids")
        if members[0] < 0 or members[-1] >= rows:
            raise TokenError(
                f"token {i} of the batch has sequence ids {list(members)}, expected 0 to {rows - 1}"
            )
        sets.append(members)
    return sets


def _positions(
    config: ModelConfig, current: Positions, batch: TokenBatch, sets: list[tuple[int, ...]]
) -> np.ndarray:
    """Return the position of each token; an empty sequence may start at any position.

    Sequences that receive a shared token must have the same text so far. `text` identifies each
    sequence's text: first by its shared slots, then by its last token in the batch.
    """
    given_N = None if batch.positions is None else _check_int_vector("positions", batch.positions)
    if given_N is not None and given_N.size != len(sets):
        raise TokenError(
            f"positions has length {given_N.size}, expected {len(sets)} (one per token)"
        )
    next_B, limit = current.next_B.tolist(), config.position_limit
    text: list[Any] = [
        ("own", row) if (own_S >= 0).any() else shared_N.tobytes()
        for row, (own_S, shared_N) in enumerate(zip(*current, strict=True))
    ]
    positions = []
    for i, rows in enumerate(sets):
        first, expected = rows[0], next_B[rows[0]]
        apart = [row for row in rows if text[row] != text[first]]
        if apart:
            raise TokenError(
                f"token {i} of the batch is shared by sequences {list(rows)}, but {first} and"
                f" {apart[0]} have different texts"
            )
        position = expected if given_N is None else int(given_N[i])
        if expected and position != expected:
            raise TokenError(
                f"token {i} of the batch has position {position}, expected {expected}, the next one"
                f" of sequence {first}"
            )
        if not 0 <= position < limit:
            raise TokenError(
                f"token {i} of the batch has position {position}, expected 0 to {limit - 1}"
            )
        for row in rows:
            next_B[row], text[row] = position + 1, i
        positions.append(position)
    return np.array(positions, np.int32)


def _output_flags(batch: TokenBatch, count: int) -> np.ndarray:
    if isinstance(batch.outputs, str):
        if batch.outputs not in ("all", "last"):
            raise TokenError(f"outputs must be flags, 'all' or 'last', got {batch.outputs!r:.40}")
        return np.arange(count) >= (0 if batch.outputs == "all" else count - 1)
    output_N = np.asarray(as_array("outputs", batch.outputs))
    if output_N.shape != (count,) or output_N.dtype.kind not in "bi":
        raise TokenError(
            f"outputs must be {count} flags, one per token, got shape {output_N.shape}"
        )
    return output_N.astype(bool)


def _free_slots(current: Positions, sets: list[tuple[int, ...]]) -> np.ndarray:
    """Assign each token the first empty slot of its row, or of the shared slots."""
    free = {row: np.flatnonzero(own_S < 0) for row, own_S in enumerate(current.own_BS)}
    free[-1] = np.flatnonzero(current.ref_count_N == 0)
    row_N = np.array([rows[0] if len(rows) == 1 else -1 for rows in sets])
    slot_N = np.zeros(len(sets), np.int32)
    for row in np.unique(row_N).tolist():
        in_row_N = row_N == row
        needed, empty = int(in_row_N.sum()), free[row].size
        if needed > empty:
            name = f"sequence {row} has" if row >= 0 else "shared tokens have"
            raise CapacityError(f"{needed} tokens do not fit: {name} {empty} empty slots")
        slot_N[in_row_N] = free[row][:needed]
    return slot_N


def _group_tokens(sets: list[tuple[int, ...]]) -> list[dict[tuple[int, ...], list[int]]]:
    """Group token indices by sequence set; sets that overlap without being equal run in order."""
    stages: list[dict[tuple[int, ...], list[int]]] = [{}]
    taken: set[int] = set()
    for i, rows in enumerate(sets):
        if rows not in stages[-1]:
            if not taken.isdisjoint(rows):
                stages.append({})
                taken = set()
            taken.update(rows)
        stages[-1].setdefault(rows, []).append(i)
    return stages


def _check_int_vector(name: str, x: Any) -> np.ndarray:
    """Return integers as int64 `[N]`."""
    array = check_int_array(name, x, TokenError)
    if array.ndim != 1:
        raise TokenError(f"{name} must be a list of whole numbers, got {x!r:.80}")
    return array.astype(np.int64)
