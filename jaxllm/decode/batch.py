"""A batch of tokens as llama.cpp takes one: any tokens of any sequences, checked, then run.

A token says where it stands, to which sequences it belongs, and whether its output is wanted. What
is wrong with a batch is found before anything runs, and is returned as a `Status`, not raised: the
state is then the one that went in.

Below: what is asked for and what comes back; `decode`; the plan, on the host alone, with all its
checks; micro-batches and the programs that run them, on which `serve` stands too. Sequences are
independent of each other, so those with about as many tokens to run go together: a decoding row is
not padded to the width of somebody's prompt.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from enum import IntEnum
from functools import partial
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.cache.kv import EMPTY, KVCache, Segment, as_kept
from jaxllm.config import ModelConfig
from jaxllm.decode.sequences import Positions, positions_of, with_positions
from jaxllm.errors import CacheMismatchError, CapacityError, ConfigError, TokenError
from jaxllm.steps import run
from jaxllm.weights.paths import Params

Array = Any  # a jax or numpy array
Pooling = Literal["none", "mean", "last", "cls"]
POOLINGS = ("none", "mean", "last", "cls")
Wanted = Literal["logits", "hidden"]
NOWHERE = np.iinfo(np.int32).max  # a slot that no cache has: such a write is dropped


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


class Line(NamedTuple):
    """Tokens of one sequence, or of several that share all of their text, in their order.

    rows: the sequences. index_T: which tokens of the caller's these are. token_T, position_T;
    slot_T: where their entries go, in the row's own slots or, for several rows, the shared ones.
    output_T: whose outputs are wanted. length: of the whole text, with what is still to come.
    """

    rows: tuple[int, ...]
    index_T: np.ndarray
    token_T: np.ndarray
    position_T: np.ndarray
    slot_T: np.ndarray
    output_T: np.ndarray
    length: int

    def cut(self, tokens: slice) -> "Line":
        """Some of its tokens."""
        return self._replace(**{name: getattr(self, name)[tokens] for name in self._fields[1:6]})


class Places(struct.PyTreeNode):
    """A micro-batch on the device: R rows of T tokens; -1 as position and NOWHERE as slot is none.

    row_R: rows of the cache; None for all in order, which are then not gathered. column_R: the
    column whose outputs are wanted; None for all. member_RB: which sequences have the entries,
    None where each row writes its own slots.
    """

    row_R: Array | None
    token_RT: Array
    position_RT: Array
    slot_RT: Array
    length_R: Array
    column_R: Array | None
    member_RB: Array | None


class Code(IntEnum):
    """How a batch fared, in llama_decode's numbers."""

    INVALID = -1
    OK = 0
    NO_ROOM = 1


@dataclasses.dataclass(frozen=True)
class Status:
    """OK; NO_ROOM: try again after freeing slots or with a smaller batch; INVALID: never try again.

    True where it is OK. message: what was expected and what was got.
    """

    code: Code
    message: str = ""

    def __bool__(self) -> bool:
        return self.code is Code.OK


@dataclasses.dataclass(frozen=True, eq=False)
class Outputs:
    """What was wanted, float32, on the host, M rows in the order of the batch.

    values: logits `[M, V]`, or embeddings (the last hidden states, after the final norm) `[M, D]`.
    of: int `[M]`, the place in the batch whose output each is; with pooling the sequence.
    """

    values: np.ndarray
    of: np.ndarray


def decode(
    model: nn.Module,
    params: Params,
    state: KVCache,
    batch: TokenBatch,
    *,
    n_ubatch: int = 512,
    output: Literal["logits", "embeddings"] = "logits",
    pooling: Pooling = "none",
    normalize: bool = False,
    donate: bool = False,
) -> tuple[Status, Outputs | None, KVCache]:
    """Run a batch in micro-batches of at most `n_ubatch` tokens: status, outputs, state.

    state: as `init_sequences` makes it; it stays valid, at the cost of a copy of what is written
    to, unless `donate=True`. A batch that is not OK changes nothing and gives `state` back. Outputs
    do not depend on n_ubatch, nor on the other sequences in the batch.

    pooling: one embedding a sequence: the mean over its tokens in the batch, its last, or its first
    (cls), whatever is flagged. normalize: divide embeddings by their Euclidean norm.

    A tied model takes vectors in the number format of its table; the cache holds -1 as their ids.

    Raises ConfigError for options that are none, CacheMismatchError for a state that is not one.
    """
    if n_ubatch < 1:
        raise ConfigError(f"n_ubatch must be at least 1, got {n_ubatch}")
    if output not in ("logits", "embeddings") or pooling not in POOLINGS:
        raise ConfigError(f"no output {output!r:.40} with pooling {pooling!r:.40}")
    if output == "logits" and (pooling != "none" or normalize):
        raise ConfigError("logits are neither pooled nor normalized: ask for embeddings")
    if state.config != model.config:
        raise CacheMismatchError("the state is of another model: make it from this one's config")
    now = positions_of(state)
    try:
        vectors_ND = _vectors(model, params, batch)
        stages = plan(model.config, now, batch)
    except TokenError as error:
        return Status(Code.INVALID, str(error)), None, state
    except CapacityError as error:
        return Status(Code.NO_ROOM, str(error)), None, state
    if pooling != "none":
        stages = [[line._replace(output_T=line.output_T | True) for line in s] for s in stages]
    found: list[tuple[jax.Array, list[Line], np.ndarray]] = []
    ours: set[bool] = set()  # what this call made is its own to write to: own slots, or shared ones
    for lines in (group for stage in stages for group in micro_batches(stage, n_ubatch)):
        places, at = lay_out(lines, state.batch)
        shared = places.member_RB is not None
        out, state = advance(
            model,
            params,
            state,
            places,
            vectors_PD=_placed(vectors_ND, lines, at, places.token_RT.shape),
            wanted="logits" if output == "logits" else "hidden",
            donate=donate or shared in ours,
        )
        ours.add(shared)
        found.append((out, lines, at))
    state = with_positions(state, _written(now, stages))
    outputs = _outputs(found)
    if output == "embeddings":
        outputs = _pooled(outputs, stages, pooling)
        norm = np.linalg.norm(outputs.values, axis=-1, keepdims=True)
        if normalize:
            outputs = Outputs(outputs.values / np.where(norm == 0, 1, norm), outputs.of)
    return Status(Code.OK), outputs, state


def _vectors(model: nn.Module, params: Params, batch: TokenBatch) -> np.ndarray | None:
    """The embeddings as float32, or None for a batch of tokens."""
    if batch.embeddings is None:
        return None
    vectors_ND = _array("embeddings", batch.embeddings)
    size = model.config.hidden_size
    if vectors_ND.ndim != 2 or vectors_ND.shape[1] != size or not len(vectors_ND):
        raise TokenError(f"embeddings must be [N, {size}], N not zero; got {vectors_ND.shape}")
    if not jnp.issubdtype(vectors_ND.dtype, jnp.floating):
        raise TokenError(f"embeddings must be floats, got {vectors_ND.dtype}")
    vectors_ND = vectors_ND.astype(np.float32)
    if not np.isfinite(vectors_ND).all():
        raise TokenError("embeddings must be finite")
    table = params[table_of(params)]["weight"]
    if model.config.tie_word_embeddings and not isinstance(table, jax.Array):
        raise TokenError("a tied model takes embeddings only where its table is a plain array")
    return vectors_ND


def _placed(
    vectors_ND: np.ndarray | None, lines: list[Line], at: np.ndarray, shape: tuple[int, ...]
) -> np.ndarray | None:
    """The vectors at the places of a micro-batch, `[R * T, D]`."""
    if vectors_ND is None:
        return None
    placed_RTD = np.zeros((*shape, vectors_ND.shape[1]), np.float32)
    for r, line in zip(at, lines, strict=True):
        placed_RTD[r, : line.index_T.size] = vectors_ND[line.index_T]
    return placed_RTD.reshape(-1, vectors_ND.shape[1])


def _written(now: Positions, stages: list[list[Line]]) -> Positions:
    """The positions with those of the batch."""
    then = Positions(*(x.copy() for x in now))
    for line in (line for stage in stages for line in stage):
        if len(line.rows) == 1:
            then.own_BS[line.rows[0], line.slot_T] = line.position_T
        else:
            then.shared_BN[np.array(line.rows)[:, None], line.slot_T] = line.position_T[None]
    return then


def _outputs(found: list[tuple[jax.Array, list[Line], np.ndarray]]) -> Outputs:
    """The wanted outputs of all micro-batches, in the order of the batch."""
    values, of = [], []
    for out, lines, at in found:
        if not any(line.output_T.any() for line in lines):
            continue
        out_RTX = np.asarray(out)
        for r, line in zip(at, lines, strict=True):
            column_M = np.flatnonzero(line.output_T)
            values.append(out_RTX[r, column_M if out_RTX.shape[1] > 1 else column_M * 0])
            of.append(line.index_T[column_M])
    if not of:
        return Outputs(np.zeros((0, found[0][0].shape[-1]), np.float32), np.zeros(0, np.int64))
    of_M = np.concatenate(of)
    order_M = np.argsort(of_M)
    return Outputs(np.concatenate(values)[order_M], of_M[order_M])


def _pooled(outputs: Outputs, stages: list[list[Line]], pooling: Pooling) -> Outputs:
    """One embedding a sequence, of the tokens that it has in the batch."""
    if pooling == "none":
        return outputs
    tokens: dict[int, list[int]] = {}
    for line in (line for stage in stages for line in stage):
        for row in line.rows:
            tokens.setdefault(row, []).extend(line.index_T.tolist())
    pick = {"mean": slice(None), "last": slice(-1, None), "cls": slice(0, 1)}[pooling]
    sequences = sorted(tokens)
    values = [outputs.values[tokens[s][pick]].mean(axis=0) for s in sequences]
    return Outputs(np.stack(values), np.array(sequences))


def plan(config: ModelConfig, now: Positions, batch: TokenBatch) -> list[list[Line]]:
    """What a batch makes of the sequences: stages of lines that do not depend on each other.

    Raises TokenError for a batch that is invalid, CapacityError for one without room.
    """
    token_N = _tokens(config, batch)
    sets = _sets(batch, token_N.size, now.own_BS.shape[0])
    position_N = _positions(config, now, batch, sets)
    output_N = _flags(batch, token_N.size)
    slot_N = _slots(now, sets)
    end = {row: position_N[i] + 1 for i, rows in enumerate(sets) for row in rows}

    def line(rows: tuple[int, ...], index_T: list[int]) -> Line:
        token_T, position_T, slot_T, output_T = (
            x[index_T] for x in (token_N, position_N, slot_N, output_N)
        )
        length = int(end[rows[0]])
        return Line(rows, np.array(index_T), token_T, position_T, slot_T, output_T, length)

    return [[line(*item) for item in stage.items()] for stage in _stages(sets)]


def _tokens(config: ModelConfig, batch: TokenBatch) -> np.ndarray:
    if (batch.tokens is None) == (batch.embeddings is None):
        raise TokenError("a batch has tokens or embeddings: one of them, never both")
    if batch.tokens is None:
        return np.zeros(len(batch.embeddings), np.int32)
    token_N = _whole("tokens", batch.tokens)
    if not token_N.size:
        raise TokenError("the batch is empty")
    wrong = np.flatnonzero((token_N < 0) | (token_N >= config.vocab_size))
    if wrong.size:
        raise TokenError(
            f"token id {token_N[wrong[0]]} (token {wrong[0]} of the batch) is outside the"
            f" vocabulary of {config.vocab_size}"
        )
    return token_N


def _sets(batch: TokenBatch, count: int, rows: int) -> list[tuple[int, ...]]:
    """The sequences of each token, in order, each once."""
    given = [0] * count if batch.sequences is None else list(batch.sequences)
    if len(given) != count:
        raise TokenError(f"{len(given)} sequence ids for {count} tokens")
    sets = []
    for i, ids in enumerate(given):
        members = tuple(
            np.unique(_whole("sequence ids", np.atleast_1d(_array("sequence ids", ids)))).tolist()
        )
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
    output_N = _array("wanted", batch.wanted)
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
    array = _array(name, x)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise TokenError(f"{name} must be a list of whole numbers, got {x!r:.80}")
    return array.astype(np.int64)


def _array(name: str, x: Any) -> np.ndarray:
    try:
        return np.asarray(x)
    except ValueError:
        raise TokenError(f"{name} must be an array, got {x!r:.80}") from None


def micro_batches(lines: Sequence[Line], limit: int) -> Iterator[list[Line]]:
    """Lines cut and grouped so that no group has more than `limit` tokens, in as few widths as
    there are. A line's tokens keep their order; lines of one row and of several are not mixed.
    """
    queue = [line for line in lines if line.index_T.size]
    while queue:
        groups: dict[tuple[int, bool], list[Line]] = {}
        for line in queue:
            piece = line.cut(slice(0, limit))
            kind = (_width(piece.index_T.size), len(line.rows) > 1)
            groups.setdefault(kind, []).append(piece)
        for pieces in groups.values():
            yield from _bounded(pieces, limit)
        queue = [line.cut(slice(limit, None)) for line in queue if line.index_T.size > limit]


def _bounded(pieces: list[Line], limit: int) -> Iterator[list[Line]]:
    group: list[Line] = []
    for piece in pieces:
        if group and sum(p.index_T.size for p in group) + piece.index_T.size > limit:
            yield group
            group = []
        group.append(piece)
    yield group


def _width(tokens: int) -> int:
    """Columns for this many tokens: few widths, few programs."""
    return 1 if tokens == 1 else max(8, 1 << (tokens - 1).bit_length())


def lay_out(lines: Sequence[Line], rows: int) -> tuple[Places, np.ndarray]:
    """The places of a micro-batch in a cache of so many rows, and the row R of each line.

    Single tokens run in all rows at once, as a decode step does: to gather rows would cost a copy
    of them. Wider ones run in as many rows as they need.
    """
    width = _width(max(line.index_T.size for line in lines))
    few = 1 << (len(lines) - 1).bit_length()
    whole = width == 1 or few >= rows
    R = rows if whole else few
    at = np.array([line.rows[0] for line in lines]) if whole else np.arange(len(lines))
    row_R = np.zeros(R, np.int32)
    token_RT, position_RT = np.zeros((R, width), np.int32), np.full((R, width), EMPTY, np.int32)
    slot_RT = np.full((R, width), NOWHERE, np.int32)
    length_R, column_R = np.ones(R, np.int32), np.zeros(R, np.int32)
    member_RB = np.zeros((R, rows), bool)
    for r, line in zip(at, lines, strict=True):
        real = slice(0, line.index_T.size)
        row_R[r] = line.rows[0]
        token_RT[r, real], position_RT[r, real] = line.token_T, line.position_T
        slot_RT[r, real], length_R[r] = line.slot_T, line.length
        column_R[r] = np.argmax(line.output_T)
        member_RB[r, line.rows] = True
    several = any(np.count_nonzero(line.output_T) > 1 for line in lines)
    places = Places(
        None if whole else row_R,
        token_RT,
        position_RT,
        slot_RT,
        length_R,
        None if several else column_R,
        member_RB if len(lines[0].rows) > 1 else None,
    )
    return places, at


def advance(
    model: nn.Module,
    params: Params,
    cache: KVCache,
    places: Places,
    *,
    vectors_PD: Array | None = None,
    wanted: Wanted = "logits",
    donate: bool = False,
) -> tuple[jax.Array, KVCache]:
    """Run a micro-batch: float32 logits `[R, 1 or T, V]` or the last hidden states `[R, T, D]`, and
    the cache with its entries written. `cursor` and `next_position_B` are left to the caller.

    vectors_PD: what stands at the P = R * T places instead of token ids. donate: write in place.
    Nothing is checked.
    """
    pool = cache.frozen
    if places.member_RB is None:
        step = _OWN[donate]
        out, tail = step(cache.tail, pool, model, params, places, vectors_PD, wanted)
        return out, cache.replace(tail=tail)
    out, shared = _SHARED[donate](pool[0], cache.tail, model, params, places, vectors_PD, wanted)
    return out, cache.replace(frozen=(shared,))


def run_own(
    tail: Segment,
    pool: tuple[Segment, ...],
    model: nn.Module,
    params: Params,
    places: Places,
    vectors_PD: jax.Array | None,
    wanted: Wanted,
) -> tuple[jax.Array, Segment]:
    out, delta = _computed(model, params, (*pool, tail), places, vectors_PD, wanted)
    rows = jnp.arange(tail.position_BS.shape[0]) if places.row_R is None else places.row_R

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[rows[:, None], places.slot_RT].set(new, mode="drop")

    written: Segment = jax.tree.map(put, tail, as_kept(delta, tail))
    return out, written


def _shared(
    pool: Segment,
    tail: Segment,
    model: nn.Module,
    params: Params,
    places: Places,
    vectors_PD: jax.Array | None,
    wanted: Wanted,
) -> tuple[jax.Array, Segment]:
    out, delta = _computed(model, params, (pool, tail), places, vectors_PD, wanted)
    assert places.member_RB is not None
    slot_P = places.slot_RT.reshape(-1)

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[0, slot_P].set(new.reshape(-1, *new.shape[2:]), mode="drop")

    new = as_kept(delta, pool)
    position_RTB = jnp.where(
        places.member_RB[:, None, :], places.position_RT[:, :, None], jnp.int32(EMPTY)
    )
    position_BP = position_RTB.reshape(slot_P.shape[0], -1).T
    written: Segment = jax.tree.map(
        put, pool.replace(position_BS=None), new.replace(position_BS=None)
    )
    position_BN = pool.position_BS.at[:, slot_P].set(position_BP, mode="drop")
    return out, written.replace(position_BS=position_BN)


def _computed(
    model: nn.Module,
    params: Params,
    segments: tuple[Segment, ...],
    places: Places,
    vectors_PD: jax.Array | None,
    wanted: Wanted,
) -> tuple[jax.Array, Any]:
    rows = places.row_R
    if rows is not None:
        count = segments[-1].position_BS.shape[0]

        def of_rows(x: jax.Array) -> jax.Array:
            return x if x.shape[0] == 1 and count > 1 else jnp.take(x, rows, axis=0)

        segments = jax.tree.map(of_rows, segments)
    token_RT = places.token_RT
    if vectors_PD is not None:
        params, first = _with_vectors(model, params, vectors_PD)
        token_RT = first + jnp.arange(token_RT.size, dtype=jnp.int32).reshape(token_RT.shape)
    trace, delta, _ = run(
        model,
        params,
        segments,
        token_RT,
        places.position_RT,
        length_B=places.length_R,
        column_B=places.column_R if wanted == "logits" else None,
    )
    if vectors_PD is not None:  # a vector has no id
        delta = delta.replace(token_BS=jnp.full_like(delta.token_BS, -1))
    if wanted == "hidden":
        return trace.hidden_states[-1].astype(jnp.float32), delta
    return trace.logits[:, :, : model.config.vocab_size], delta


def table_of(params: Params) -> str:
    """The name of the embedding table in the parameters."""
    return "wte" if "wte" in params else "embed_tokens"


def _with_vectors(model: nn.Module, params: Params, vectors_PD: jax.Array) -> tuple[Params, int]:
    """Parameters in whose embedding table these vectors stand, and the id of the first.

    A tied table is the output matrix too: the vectors follow it, in its number format, and the
    logits of their ids are cut off. Otherwise they take its place as they are.
    """
    name = table_of(params)
    if not model.config.tie_word_embeddings:
        return {**params, name: {"weight": vectors_PD}}, 0
    table_VD = params[name]["weight"]
    both = jnp.concatenate([table_VD, vectors_PD.astype(table_VD.dtype)])
    return {**params, name: {"weight": both}}, table_VD.shape[0]


def _compiled(step: Any) -> tuple[Any, Any]:
    """The step compiled twice: leaving what it writes to alone, and writing into it."""
    static = partial(jax.jit, static_argnums=(2, 6))
    return static(step), static(step, donate_argnums=0)


_OWN = _compiled(run_own)
_SHARED = _compiled(_shared)
