"""The compiled steps behind `jaxllm.steps`, which has checked their input.

All passes of a model over tokens call `run_model`, also those of other compiled loops.
"""

from collections.abc import Collection, Iterator
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct

from jaxllm.cache.commit import apply_delta, to_cache_slots
from jaxllm.cache.kv import Delta, KVCache, Segment, TreeDelta, constrain_cache
from jaxllm.cache.tree import Branches, append_nodes, branches_of
from jaxllm.errors import ConfigError
from jaxllm.models.layers import NO_PARALLEL, ParallelHooks, Trace
from jaxllm.models.sites import NO_EDITS, Edits, sites_to_record
from jaxllm.ops import native
from jaxllm.ops.compile_cache import CachedJit
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params

Segments = tuple[Segment, ...]
MassMode = bool | Literal["layers"]  # none, summed over layers, or per layer


class Output(struct.PyTreeNode):
    """Result of `forward`. Fields after `delta` are None unless requested.

    Attributes:
        logits: float32 `[B, T, V]`.
        delta: the new keys and values, for `commit`.
        hidden_states: the embeddings, then the output of each block (the last after the final
            norm), `[B, T, D]` each.
        attention_mass: the attention weight received by each cache slot and then each new token,
            float32 `[B, S + T]` or `[layers, B, S + T]`.
        attention_weights: the softmax weights, float32 `[layers, B, N, T, S + T]`.
        sites: the arrays that were read, by the full names of their sites.
    """

    logits: jax.Array
    delta: Delta
    hidden_states: tuple[jax.Array, ...] | None = None
    attention_mass: jax.Array | None = None
    attention_weights: jax.Array | None = None
    sites: dict[str, jax.Array] = struct.field(default_factory=dict)


class StepOutput(struct.PyTreeNode):
    """Result of `decode_step` and `prefill`; `logits, cache = decode_step(...)` takes it apart.

    Attributes:
        logits: float32 `[B, V]`.
        cache: the cache with the new tokens.
        attention_mass: the attention weight received by each slot of `cache`, float32 `[B, S]` or
            `[layers, B, S]`; None unless requested.
        sites: the arrays that were read, by the full names of their sites.
    """

    logits: jax.Array
    cache: KVCache
    attention_mass: jax.Array | None = None
    sites: dict[str, jax.Array] = struct.field(default_factory=dict)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.logits, self.cache))


def run_model(
    model: Model,
    params: Params,
    segments: Segments,
    token_BT: jax.Array,
    position_BT: jax.Array,
    *,
    length_B: jax.Array | None = None,
    column_B: jax.Array | None = None,
    attention_mass: MassMode = False,
    embeddings_BTD: jax.Array | None = None,
    state: tuple[Any, ...] = (),
    document_BT: jax.Array | None = None,
    row_B: jax.Array | None = None,
    branches: Branches | None = None,
    edits: Edits = NO_EDITS,
    read: Collection[str] = (),
    hooks: ParallelHooks = NO_PARALLEL,
) -> tuple[Trace, Delta, jax.Array | None]:
    """Apply the model to checked input; return its trace, the delta and the attention mass.

    All steps, compiled or not, call this function.

    Args:
        length_B: the length of the whole text if these tokens are one chunk of it.
        column_B: compute the logits of this column of each row; by default of all.
        state: `KVCache.state`.
        document_BT: the document that each token belongs to; documents do not attend to each other.
        row_B: the row of the segments that each row of tokens reads; by default its own.
        branches: the nodes of a tree that each row of one token attends to.
        edits: checked (`site_inputs.check_edits`).
        read: the names of sites, without layer numbers, that every layer records.
        hooks: how attention finds the keys of these tokens, if they are not its rows.
    """
    if segments and not state and model.config.has_state:
        raise ConfigError("this model's layers keep a state, which this operation does not support")
    token_BT = jnp.where(position_BT >= 0, token_BT, 0)
    if length_B is None:
        length_B = position_BT.max(axis=1) + 1
    extra: dict[str, Any] = {"state": state} if state else {}
    extra |= {} if document_BT is None else {"document_BT": document_BT}
    extra |= {} if row_B is None else {"row_B": row_B}
    extra |= {} if branches is None else {"branches": branches}
    extra |= {"edits": edits} if edits.edits else {}
    extra |= {"read": frozenset(read)} if read else {}
    extra |= {} if hooks == NO_PARALLEL else {"hooks": hooks}
    with native.use_one_path(model.precision.invariant):
        trace = model.apply(
            {"params": params},
            token_BT,
            position_BT,
            length_B,
            segments,
            column_B,
            attention_mass=attention_mass is not False,
            embeddings_BTD=embeddings_BTD,
            **extra,
        )
    assert isinstance(trace, Trace)
    patched_BT = jnp.zeros_like(token_BT, bool)
    delta = Delta(trace.k, trace.v, position_BT, token_BT, patched_BT, trace.state)
    mass = None
    if trace.attention_mass is not None:
        mass = jnp.stack(trace.attention_mass)
        mass = mass.sum(axis=0) if attention_mass is True else mass
    return trace, delta, mass


def run_and_commit(
    model: Model,
    params: Params,
    frozen: Segments,
    tail: KVCache,
    token_BT: jax.Array,
    position_BT: jax.Array,
    names: tuple[str, ...] = (),
    **options: Any,
) -> StepOutput:
    """Run tokens and commit them; return all logits `[B, T, V]` and the new tail.

    tail: the cache without its frozen segments. names: of the sites to read, in full. options:
    further arguments of `run_model`.
    """
    options |= {"read": sites_to_record(names), "state": tail.state}
    run = run_model(model, params, (*frozen, tail.tail), token_BT, position_BT, **options)
    return _commit_pass(model, tail, *run, names)


def _commit_pass(
    model: Model,
    tail: KVCache,
    trace: Trace,
    delta: Delta,
    mass: jax.Array | None,
    names: tuple[str, ...],
) -> StepOutput:
    """Commit what `run_model` computed."""
    # The write must wait for the last layer's read, which no later layer orders before it.
    after = trace.read_outputs
    after = after if mass is None or not after else (*after, mass)
    mass = None if mass is None else to_cache_slots(mass, tail, delta.position_BS.shape[1])
    cache = constrain_cache(apply_delta(tail, delta, after), model)
    return StepOutput(trace.logits, cache, mass, trace.read_sites(names))


@partial(jax.jit, static_argnums=(0, 7, 8, 9, 10))
def run_forward(
    model: Model,
    params: Params,
    segments: Segments,
    state: tuple[Any, ...],
    token_BT: jax.Array,
    position_BT: jax.Array,
    edits: Edits,
    hidden_states: bool,
    attention_mass: MassMode,
    names: tuple[str, ...],
    weights: tuple[str, ...],
) -> Output:
    trace, delta, mass = run_model(
        model, params, segments, token_BT, position_BT, attention_mass=attention_mass,
        state=state, edits=edits, read=sites_to_record((*names, *weights)),
    )  # fmt: skip
    hidden = trace.hidden_states if hidden_states else None
    stacked = jnp.stack([*trace.read_sites(weights).values()]) if weights else None
    return Output(trace.logits, delta, hidden, mass, stacked, trace.read_sites(names))


@partial(jax.jit, static_argnums=(0, 10, 11, 12))
def run_tree(
    model: Model,
    params: Params,
    segments: Segments,
    state: tuple[Any, ...],
    tree: TreeDelta | None,
    token_BM: jax.Array,
    first: jax.Array,
    path_BMP: jax.Array,
    position_BM: jax.Array,
    edits: Edits,
    slots: int,
    hidden_states: bool,
    names: tuple[str, ...],
) -> Output:
    """Run each node as a row of one token; the delta has `slots` slots for all nodes."""
    B, M = token_BM.shape
    trace, delta, _ = run_model(
        model, params, segments, token_BM.reshape(-1, 1), position_BM.reshape(-1, 1),
        row_B=jnp.repeat(jnp.arange(B, dtype=jnp.int32), M) if segments and B > 1 else None,
        branches=branches_of(path_BMP, position_BM, first, tree), edits=edits, state=state,
        read=sites_to_record(names),
    )  # fmt: skip

    def by_row(x: jax.Array) -> jax.Array:
        return x.reshape(B, M, *x.shape[2:])

    hidden = tuple(map(by_row, trace.hidden_states)) if hidden_states else None
    sites = {name: by_row(x) for name, x in trace.read_sites(names).items()}
    nodes: Delta = jax.tree.map(by_row, delta.replace(state=())).replace(state=delta.state)
    if tree is not None:
        waits = tuple(map(by_row, trace.read_outputs))
        nodes = append_nodes(tree, nodes, first, slots, waits)
    return Output(by_row(trace.logits), nodes, hidden, sites=sites)


def _decode_step(
    tail: KVCache,
    frozen: Segments,
    model: Model,
    params: Params,
    token_BT: jax.Array,
    position_BT: jax.Array,
    edits: Edits,
    attention_mass: MassMode,
    names: tuple[str, ...],
) -> StepOutput:
    out = run_and_commit(
        model, params, frozen, tail, token_BT, position_BT, names,
        attention_mass=attention_mass, edits=edits,
    )  # fmt: skip
    return out.replace(logits=out.logits[:, 0])


def _prefill(
    tail: KVCache,
    frozen: Segments,
    model: Model,
    params: Params,
    token_BC: jax.Array,
    position_BC: jax.Array,
    length_B: jax.Array,
    edits: Edits,
    attention_mass: MassMode,
    names: tuple[str, ...],
) -> StepOutput:
    """Run one pass of a prompt, of which length_B is the whole length."""
    column_1C = jnp.arange(token_BC.shape[1], dtype=jnp.int32)[None]
    last_B = jnp.argmax(jnp.where(position_BC >= 0, column_1C, -1), axis=1)
    run = run_model(
        model, params, (*frozen, tail.tail), token_BC, position_BC, length_B=length_B,
        column_B=last_B, attention_mass=attention_mass, state=tail.state, edits=edits,
        read=sites_to_record(names),
    )  # fmt: skip
    out = _commit_pass(model, tail, *run, names)
    return out.replace(logits=out.logits[:, 0])


def _compile_step(step: Any, static_argnums: tuple[int, ...]) -> tuple[Any, Any]:
    """Return the step as two programs: one that copies its cache, one that donates it."""
    return CachedJit(step, static_argnums=static_argnums), CachedJit(
        step, static_argnums=static_argnums, donate_argnums=0
    )


DECODE_STEP = _compile_step(_decode_step, (2, 7, 8))
PREFILL = CachedJit(_prefill, static_argnums=(2, 8, 9), donate_argnums=0)
