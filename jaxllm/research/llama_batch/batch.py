"""Token batches in the style of llama.cpp's `llama_decode`: any tokens of any sequences.

Each token has a position, one or more sequences, and an output flag. An invalid batch is detected
before anything runs and reported as a `Status`, not as an exception; the state is then unchanged.

`plan.py` validates and plans on the host; `run.py` runs the microbatches.
"""

import dataclasses
from enum import IntEnum
from typing import Literal

import jax
import numpy as np

from jaxllm.cache.kv import KVCache
from jaxllm.errors import CacheMismatchError, CapacityError, ConfigError, TokenError
from jaxllm.generation.loops.microbatch import TokenRun, pack_microbatch, split_microbatches
from jaxllm.models.inputs import as_vectors
from jaxllm.ops.pooling import l2_normalize, pool
from jaxllm.research.llama_batch.plan import TokenBatch, plan_batch
from jaxllm.research.llama_batch.run import find_members, run_microbatch
from jaxllm.research.llama_batch.sequences import Positions, read_positions, with_positions
from jaxllm.runtime.multihost import to_host
from jaxllm.runtime.validation import check_int
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params

Pooling = Literal["none", "mean", "last", "cls"]
POOLINGS = ("none", "mean", "last", "cls")


class StatusCode(IntEnum):
    """Result codes, with the values of `llama_decode`."""

    INVALID = -1
    OK = 0
    NO_ROOM = 1


@dataclasses.dataclass(frozen=True)
class Status:
    """Result of `decode`; true if the code is OK.

    NO_ROOM: free slots or use a smaller batch, then retry. INVALID: the batch can never run. The
    message gives the expected and the actual value.
    """

    code: StatusCode
    message: str = ""

    def __bool__(self) -> bool:
        return self.code is StatusCode.OK


@dataclasses.dataclass(frozen=True, eq=False)
class Outputs:
    """Requested outputs on the host, in batch order.

    values: float32 logits `[M, V]`, or embeddings (last hidden states after the final norm)
    `[M, D]`. of: int `[M]`, the index in the batch of each output's token; with pooling, the id of
    its sequence.
    """

    values: np.ndarray
    indices: np.ndarray


def decode(
    model: Model,
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
    """Run a batch in microbatches of at most `n_ubatch` tokens; return status, outputs and state.

    Outputs depend neither on n_ubatch nor on the other sequences of the batch. Input embeddings are
    cast to the model's activation dtype; the cache stores -1 as their token ids.

    Args:
        state: Cache from `init_sequences`. It stays valid, at the cost of copying the segment that
            is written, unless donate is set. A batch that is not OK returns it unchanged.
        pooling: With "mean", "last" or "cls", return one embedding per sequence: the mean over its
            tokens in the batch, its last, or its first, regardless of output flags.
        normalize: Divide embeddings by their Euclidean norm.
        donate: Write to the state's buffers in place.

    Raises:
        ConfigError: For an unknown output or pooling.
        CacheMismatchError: For the cache of another model.
    """
    check_int("n_ubatch", n_ubatch, 1, error=ConfigError)
    if output not in ("logits", "embeddings") or pooling not in POOLINGS:
        raise ConfigError(f"output {output!r:.40}, pooling {pooling!r:.40} is not supported")
    if output == "logits" and (pooling != "none" or normalize):
        raise ConfigError("pooling and normalize require output='embeddings', got 'logits'")
    if state.config != model.config:
        raise CacheMismatchError("state belongs to another model. Make it from this model's config")
    positions = read_positions(state)
    try:
        vectors_ND = _check_vectors(model.config.hidden_size, batch)
        stages = plan_batch(model.config, positions, batch)
    except TokenError as error:
        return Status(StatusCode.INVALID, str(error)), None, state
    except CapacityError as error:
        return Status(StatusCode.NO_ROOM, str(error)), None, state
    if pooling != "none":
        stages = [[run._replace(output_T=run.output_T | True) for run in s] for s in stages]
    results: list[tuple[jax.Array, list[TokenRun], np.ndarray]] = []
    copied: set[bool] = set()  # segments copied by this call (shared or not) may be donated
    for runs in (group for stage in stages for group in split_microbatches(stage, n_ubatch)):
        places, at = pack_microbatch(runs, state.batch)
        member_RB = find_members(runs, at, (places.token_RT.shape[0], state.batch))
        shared = member_RB is not None
        out, state = run_microbatch(
            model,
            params,
            state,
            places,
            member_RB,
            vectors_PD=_scatter_vectors(vectors_ND, runs, at, places.token_RT.shape),
            output_kind="logits" if output == "logits" else "hidden",
            donate=donate or shared in copied,
        )
        copied.add(shared)
        results.append((out, runs, at))
    state = with_positions(state, _update_positions(positions, stages))
    outputs = _gather_outputs(results)
    if output == "embeddings":
        outputs = _pool_outputs(outputs, stages, pooling)
        if normalize:
            outputs = Outputs(l2_normalize(outputs.values), outputs.indices)
    return Status(StatusCode.OK), outputs, state


def _check_vectors(size: int, batch: TokenBatch) -> np.ndarray | None:
    """Return the input embeddings as float32, or None for a batch of token ids."""
    if batch.embeddings is None:
        return None
    vectors_ND = as_vectors(batch.embeddings, "N", size)
    if not np.isfinite(vectors_ND).all():
        raise TokenError("embeddings must be finite, got NaN or infinity")
    return vectors_ND


def _scatter_vectors(
    vectors_ND: np.ndarray | None, runs: list[TokenRun], at: np.ndarray, shape: tuple[int, ...]
) -> np.ndarray | None:
    """Return the vectors in a microbatch's layout, `[R * T, D]`, zero at padding."""
    if vectors_ND is None:
        return None
    placed_RTD = np.zeros((*shape, vectors_ND.shape[1]), np.float32)
    for r, run in zip(at, runs, strict=True):
        placed_RTD[r, : run.index_T.size] = vectors_ND[run.index_T]
    return placed_RTD.reshape(-1, vectors_ND.shape[1])


def _update_positions(current: Positions, groups: list[list[TokenRun]]) -> Positions:
    """Return the positions after the batch has run."""
    then = Positions(*(x.copy() for x in current))
    for run in (run for stage in groups for run in stage):
        if len(run.rows) == 1:
            then.own_BS[run.rows[0], run.slot_T] = run.position_T
        else:
            then.shared_BN[np.array(run.rows)[:, None], run.slot_T] = run.position_T[None]
    return then


def _gather_outputs(results: list[tuple[jax.Array, list[TokenRun], np.ndarray]]) -> Outputs:
    """Collect the flagged outputs of all microbatches, in batch order."""
    values, of = [], []
    for out, runs, at in results:
        if not any(run.output_T.any() for run in runs):
            continue
        out_RTX = to_host(out)
        for r, run in zip(at, runs, strict=True):
            column_M = np.flatnonzero(run.output_T)
            values.append(out_RTX[r, column_M if out_RTX.shape[1] > 1 else column_M * 0])
            of.append(run.index_T[column_M])
    if not of:
        return Outputs(np.zeros((0, results[0][0].shape[-1]), np.float32), np.zeros(0, np.int64))
    of_M = np.concatenate(of)
    order_M = np.argsort(of_M)
    return Outputs(np.concatenate(values)[order_M], of_M[order_M])


def _pool_outputs(outputs: Outputs, groups: list[list[TokenRun]], pooling: Pooling) -> Outputs:
    """Pool the outputs of each sequence's tokens in the batch into one embedding."""
    if pooling == "none":
        return outputs
    tokens: dict[int, list[int]] = {}
    for run in (run for stage in groups for run in stage):
        for row in run.rows:
            tokens.setdefault(row, []).extend(run.index_T.tolist())
    sequences = sorted(tokens)
    values = [
        pool(outputs.values[None, tokens[s]], np.ones((1, len(tokens[s])), bool), pooling)
        for s in sequences
    ]
    return Outputs(np.concatenate(values), np.array(sequences))
