"""The compiled programs of token batches: entries of a row's own slots, or shared by sequences."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm import steps
from jaxllm.cache.commit import commit_state
from jaxllm.cache.kv import EMPTY, KVCache, Segment, cast_delta
from jaxllm.generation.loops.finish import put_rows, take_rows
from jaxllm.generation.loops.microbatch import Microbatch, TokenRun
from jaxllm.ops.slot_update import write_slots
from jaxllm.ops.target import Program
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params

OutputKind = Literal["logits", "hidden"]


def run_microbatch(
    model: Model,
    params: Params,
    cache: KVCache,
    microbatch: Microbatch,
    member_RB: np.ndarray | None,
    *,
    vectors_PD: np.ndarray | None,
    output_kind: OutputKind,
    donate: bool,
) -> tuple[jax.Array, KVCache]:
    """Run a microbatch without any checks; return its output and the updated cache.

    The output is float32: logits `[R, 1 or T, V]` or last hidden states `[R, T, D]`.

    member_RB: Which sequences share the entries; None if each row writes its own slots. vectors_PD:
    Input embeddings for the P = R * T places, instead of token ids. donate: Write the cache in
    place.
    """
    pool, given = cache.frozen, (model, params, microbatch, vectors_PD, output_kind)
    if member_RB is None:
        out, tail, state = _RUN_OWN[donate](cache.tail, cache.state, pool, *given)
        return out, cache.replace(tail=tail, state=state)
    out, shared = _RUN_SHARED[donate](pool[0], cache.tail, member_RB, *given)
    return out, cache.replace(frozen=(shared,))


def find_members(runs: Sequence[TokenRun], at: np.ndarray, shape: tuple[int, int]) -> Any:
    """Return which sequences share the entries of each microbatch row, bool `[R, B]`; None if each
    row has one. at: The microbatch's row of each run.
    """
    if len(runs[0].rows) == 1:
        return None
    member_RB = np.zeros(shape, bool)
    for r, run in zip(at, runs, strict=True):
        member_RB[r, run.rows] = True
    return member_RB


def _run_own(
    tail: Segment, state: tuple[Any, ...], pool: tuple[Segment, ...], model: Model, params: Params,
    microbatch: Microbatch, vectors_PD: jax.Array | None, output_kind: OutputKind,
) -> tuple[jax.Array, Segment, tuple[Any, ...]]:  # fmt: skip
    row_R = microbatch.row_R
    given = (model, params, microbatch, vectors_PD, output_kind)
    out, delta, waits = _run_tokens((*pool, tail), take_rows(state, row_R), *given)
    after = commit_state(delta.state, delta.position_BS, waits)
    new = cast_delta(delta, tail)
    tail = write_slots(tail, new, microbatch.slot_RT, row_R, wait_for=waits)
    return out, tail, put_rows(state, row_R, after)


def _run_shared(
    pool: Segment, tail: Segment, member_RB: jax.Array, model: Model, params: Params,
    microbatch: Microbatch, vectors_PD: jax.Array | None, output_kind: OutputKind,
) -> tuple[jax.Array, Segment]:  # fmt: skip
    given = (model, params, microbatch, vectors_PD, output_kind)
    out, delta, _ = _run_tokens((pool, tail), (), *given)
    slot_P = microbatch.slot_RT.reshape(-1)
    new = cast_delta(delta, pool)
    position_RTB = jnp.where(
        member_RB[:, None, :], microbatch.position_RT[:, :, None], jnp.int32(EMPTY)
    )
    position_BP = position_RTB.reshape(slot_P.shape[0], -1).T
    one_row = jax.tree.map(lambda x: x.reshape(1, -1, *x.shape[2:]), new.replace(position_BS=None))
    written = write_slots(pool.replace(position_BS=None), one_row, slot_P[None])
    rows = pool.position_BS.shape[0]
    slot_BP = jnp.broadcast_to(slot_P, (rows, slot_P.shape[0]))
    return out, written.replace(position_BS=write_slots(pool.position_BS, position_BP, slot_BP))


def _run_tokens(
    segments: tuple[Segment, ...], state: tuple[Any, ...], model: Model, params: Params,
    microbatch: Microbatch, vectors_PD: jax.Array | None, output_kind: OutputKind,
) -> tuple[jax.Array, Any, tuple[jax.Array, ...]]:  # fmt: skip
    """Return the output, the delta, and what the cache's writes wait for."""
    token_RT = microbatch.token_RT
    vectors = None if vectors_PD is None else vectors_PD.reshape(*token_RT.shape, -1)
    trace, delta, _ = steps.run_model(
        model,
        params,
        segments,
        token_RT,
        microbatch.position_RT,
        length_B=microbatch.length_R,
        column_B=microbatch.column_R,
        embeddings_BTD=vectors,
        state=state,
        row_B=microbatch.row_R,
    )
    if vectors_PD is not None:  # a vector has no id
        delta = delta.replace(token_BS=jnp.full_like(delta.token_BS, -1))
    if output_kind == "hidden":
        return trace.hidden_states[-1].astype(jnp.float32), delta, trace.read_outputs
    return trace.logits, delta, trace.read_outputs


def _compile(step: Any, static: tuple[int, ...], donated: tuple[int, ...]) -> tuple[Any, Any]:
    """Return the jitted step without and with donation of what it writes."""
    program = partial(Program, static_argnums=static)
    return program(step), program(step, donate_argnums=donated)


_RUN_OWN = _compile(_run_own, (3, 7), (0, 1))
_RUN_SHARED = _compile(_run_shared, (3, 7), (0,))
