"""What a batch of tokens asks for, checked on the host before anything runs, and where it goes."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from jaxllm.cache.sequences import Positions
from jaxllm.config import ModelConfig
from jaxllm.decode.batching.places import TokenRun
from jaxllm.errors import CapacityError, TokenError
from jaxllm.inputs import as_array
from jaxllm.whole import check_ids, is_whole, whole_array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TokenBatch:
    """N tokens. All but one of the first two fields may be left out.

    tokens: ids `[N]`, or embeddings: vectors `[N, D]` that stand in for what the embedding table
    would give; never both. positions: of each, by default where its sequences go on. sequences:
    of each an id, or several that share all of their text; by default 0. wanted: whose outputs, a
    flag each, "all", or "last", that of the last token of the batch.
    """

    tokens: Any = None
    embeddings: Any = None
    positions: Any = None
    sequences: Sequence[int | Sequence[int]] | None = None
    wanted: Sequence[bool] | Literal["all", "last"] = "last"


def plan(config: ModelConfig, now: Positions, batch: TokenBatch) -> list[list[TokenRun]]:
    """What a batch makes of the sequences: stages of runs that do not depend on each other.

    Raises TokenError for a batch that is invalid, CapacityError for one without room.
    """
    token_N = _tokens(config, batch)
    sets = _sets(batch, token_N.size, now.own_BS.shape[0])
    position_N = _positions(config, now, batch, sets)
    output_N = _flags(batch, token_N.size)
    slot_N = _slots(now, sets)
    end = {row: position_N[i] + 1 for i, rows in enumerate(sets) for row in rows}

    def run(rows: tuple[int, ...], index_T: list[int]) -> TokenRun:
        token_T, position_T, slot_T, output_T = (
            x[index_T] for x in (token_N, position_N, slot_N, output_N)
        )
        length = int(end[rows[0]])
        return TokenRun(rows, np.array(index_T), token_T, position_T, slot_T, output_T, length)

    return [[run(*item) for item in stage.items()] for stage in _stages(sets)]


def _tokens(config: ModelConfig, batch: TokenBatch) -> np.ndarray:
    if (batch.tokens is None) == (batch.embeddings is None):
        raise TokenError("a batch has tokens or embeddings: one of them, never both")
    if batch.tokens is None:
        return np.zeros(len(batch.embeddings), np.int32)
    token_N = _whole("tokens", batch.tokens)
    if not token_N.size:
        raise TokenError("the batch is empty")
    check_ids(token_N, config.vocab_size, "the batch: ")
    return token_N


def _sets(batch: TokenBatch, count: int, rows: int) -> list[tuple[int, ...]]:
    """The sequences of each token, in order, each once."""
    given = [0] * count if batch.sequences is None else list(batch.sequences)
    if len(given) != count:
        raise TokenError(f"{len(given)} sequence ids for {count} tokens")
    sets = []
    for i, ids in enumerate(given):
        members = tuple(np.unique(_whole("sequence ids", [ids] if is_whole(ids) else ids)).tolist())
        if not members:
            raise TokenError(f"token {i} of the batch belongs to no sequence")
        if members[0] < 0 or members[-1] >= rows:
            raise TokenError(
                f"token {i} of the batch is of sequence {list(members)}; the state has 0 to"
                f" {rows - 1}"
            )
        sets.append(members)
    return sets


def _positions(
    config: ModelConfig, now: Positions, batch: TokenBatch, sets: list[tuple[int, ...]]
) -> np.ndarray:
    """Where each token stands; a sequence without tokens may begin anywhere.

    What several sequences are given together must find them with one text: `text` says of each
    which one it has, by the slots that they share and then by the batch's tokens.
    """
    given_N = None if batch.positions is None else _whole("positions", batch.positions)
    if given_N is not None and given_N.size != len(sets):
        raise TokenError(f"{given_N.size} positions for {len(sets)} tokens")
    next_B, limit = now.next_B.tolist(), config.position_limit
    text: list[Any] = [
        ("own", row) if (own_S >= 0).any() else shared_N.tobytes()
        for row, (own_S, shared_N) in enumerate(zip(*now, strict=True))
    ]
    positions = []
    for i, rows in enumerate(sets):
        first, expected = rows[0], next_B[rows[0]]
        apart = [row for row in rows if text[row] != text[first]]
        if apart:
            raise TokenError(
                f"token {i} of the batch belongs to sequences {list(rows)}, but {first} and"
                f" {apart[0]} have different texts"
            )
        position = expected if given_N is None else int(given_N[i])
        if expected and position != expected:
            raise TokenError(
                f"token {i} of the batch is at position {position}; sequence {first} goes on at"
                f" {expected}"
            )
        if not 0 <= position < limit:
            raise TokenError(
                f"token {i} of the batch is at position {position}; positions run from 0 to"
                f" {limit - 1}"
            )
        for row in rows:
            next_B[row], text[row] = position + 1, i
        positions.append(position)
    return np.array(positions, np.int32)


def _flags(batch: TokenBatch, count: int) -> np.ndarray:
    if isinstance(batch.wanted, str):
        if batch.wanted not in ("all", "last"):
            raise TokenError(f"wanted must be flags, 'all' or 'last', got {batch.wanted!r:.40}")
        return np.arange(count) >= (0 if batch.wanted == "all" else count - 1)
    output_N = np.asarray(as_array("wanted", batch.wanted))
    if output_N.shape != (count,) or output_N.dtype.kind not in "bi":
        raise TokenError(f"wanted must be {count} flags, one a token; got shape {output_N.shape}")
    return output_N.astype(bool)


def _slots(now: Positions, sets: list[tuple[int, ...]]) -> np.ndarray:
    """A slot for every token: the first that are empty, of its row or of the shared ones."""
    free = {row: np.flatnonzero(own_S < 0) for row, own_S in enumerate(now.own_BS)}
    free[-1] = np.flatnonzero(now.holders_N == 0)
    whose = np.array([rows[0] if len(rows) == 1 else -1 for rows in sets])
    slot_N = np.zeros(len(sets), np.int32)
    for row in np.unique(whose).tolist():
        mine = whose == row
        needed, there = int(mine.sum()), free[row].size
        if needed > there:
            name = f"sequence {row} has" if row >= 0 else "tokens of several sequences have"
            raise CapacityError(f"{needed} tokens do not fit: {name} {there} empty slots")
        slot_N[mine] = free[row][:needed]
    return slot_N


def _stages(sets: list[tuple[int, ...]]) -> list[dict[tuple[int, ...], list[int]]]:
    """The tokens by their sequences; sets that overlap and are not equal come one after another."""
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


def _whole(name: str, x: Any) -> np.ndarray:
    """Whole numbers, int64 `[N]`."""
    array = whole_array(name, x, TokenError)
    if array.ndim != 1:
        raise TokenError(f"{name} must be a list of whole numbers, got {x!r:.80}")
    return array.astype(np.int64)
