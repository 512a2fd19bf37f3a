"""Model steps: pure functions from (params, cache, tokens) to (logits, new keys and values).

`forward` reads a cache and `commit` extends one; `decode_step` (one token) and `prefill` (a prompt
in chunks) combine the two. Invalid input raises here, on the host, before anything is dispatched;
inside `jit` the same functions run unchecked.
"""

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.cache.growth import apply_delta, check_fits, to_cache_slots
from jaxllm.cache.kv import (
    Delta,
    KVCache,
    Segment,
    TreeDelta,
    check_usable,
    constrain_cache,
    merge_labels,
)
from jaxllm.cache.tree import Branches, append_nodes, branches_of, plan_growth
from jaxllm.config.model import ModelConfig
from jaxllm.errors import ConfigError, TokenError
from jaxllm.models.inputs import (
    Array,
    array_namespace,
    as_array,
    check_cache,
    check_inputs,
    check_model,
    check_shape,
    is_concrete,
    next_positions,
)
from jaxllm.models.layers import Trace
from jaxllm.models.site_inputs import (
    check_edits,
    check_read,
    find_sites,
    fingerprint,
    label_cache,
)
from jaxllm.models.sites import NO_EDITS, WEIGHT_SITES, Edits, sites_to_record
from jaxllm.ops import native
from jaxllm.ops.compile_cache import CachedJit
from jaxllm.ops.padding import next_power_of_two
from jaxllm.runtime.validation import check_int
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params

Segments = tuple[Segment, ...]
MassMode = bool | Literal["layers"]  # none, summed over layers, or per layer
EditMap = Mapping[str, Any]  # from sites to edits or functions, or lists of them


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


def forward(
    model: Model,
    params: Params,
    cache: KVCache | None,
    tokens_BT: Array,
    *,
    positions_BT: Array | None = None,
    hidden_states: bool = False,
    attention_mass: MassMode = False,
    attention_weights: bool = False,
    read: Sequence[str] = (),
    edits: EditMap | None = None,
    parents: Array | None = None,
    tree: Delta | None = None,
) -> Output:
    """Run tokens against a cache without modifying or copying it.

    Optional outputs are computed only if requested.

    With `parents`, the tokens are the nodes of a tree. A node sees the cache and its ancestors, as
    if its path were run alone. `commit(cache, out.delta, node)` writes a path.

    Args:
        cache: None for an empty context.
        tokens_BT: integer ids `[B, T]`.
        positions_BT: absolute positions, with -1 for padding, which may stand anywhere; by default
            each row continues at the end of the cache.
        hidden_states: also return the hidden states.
        attention_mass: True also returns each slot's softmax weights summed over queries, heads and
            layers (a row sums to T x heads x layers); "layers" returns a sum per layer. It reads
            the keys a second time.
        attention_weights: also return the softmax weights of every head and query: layers x B x N x
            T x (S + T) numbers, for inspecting short texts. Excludes `attention_mass`.
        read: names of the sites to return, such as "blocks.3.attn.pattern" or
            "blocks.*.resid_post"; docs/inside.md lists them.
        edits: changes of the arrays at sites (`jaxllm.inside`), by site name.
        parents: `[B, T]`, the number of each node's parent, -1 for a child of the cache's last
            token. Parents come before their children. T is padded to a power of two. Excludes
            positions, attention's outputs and sites, and edits that differ between tokens.
        tree: the delta of earlier nodes on this cache, which the new nodes' numbers continue. The
            result's delta holds all of them.

    Raises:
        TokenError: for ids outside the vocabulary, positions out of range, or wrong shapes; for
            parents that do not come before their children.
        CacheMismatchError: for a cache of another model, batch size, or of other edits; for a tree
            that continues another cache.
        ConfigError: for unknown sites, and edits that do not fit them; for a tree on several
            devices, or in a model with long-context attention.
    """
    check_model(model, params, any_head=True)
    _check_mass(attention_mass)
    if attention_weights and attention_mass is not False:
        raise ConfigError(
            "attention_mass is the sum of attention_weights. Request only one of them"
        )
    if parents is not None or tree is not None:
        if positions_BT is not None or attention_mass is not False or attention_weights:
            raise ConfigError(
                "a tree's positions follow from its parents, and it returns no attention_mass and"
                " no attention_weights"
            )
        why = "a tree cannot read {}. Run its path with forward"
        asked = (bool(hidden_states), check_read(model, read, WEIGHT_SITES, why), edits)
        return _forward_tree(model, params, cache, tokens_BT, parents, tree, *asked)
    tokens_BT, positions_BT = check_inputs(model, cache, tokens_BT, positions_BT)
    (B, T), slots = tokens_BT.shape, 0 if cache is None else cache.slots
    names = check_read(model, read)
    checked = check_edits(model, edits, B, T, slots + T)
    made_with_B = fingerprint(checked, B)
    if cache is not None:
        made_with_B = merge_labels(cache.edits_B, made_with_B)
    weights = find_sites(model.config, "blocks.*.attn.pattern") if attention_weights else ()
    past = (cache.segments, cache.memory) if cache is not None else ((), ())
    out: Output = _forward(
        model, params, *past, tokens_BT, positions_BT, checked,
        bool(hidden_states), attention_mass, names, weights,
    )  # fmt: skip
    delta = out.delta.replace(edits_B=made_with_B)
    return out.replace(delta=delta, sites={name: out.sites[name] for name in names})


def _forward_tree(
    model: Model,
    params: Params,
    cache: KVCache | None,
    tokens_BN: Array,
    parents_BN: Array | None,
    tree: Any,
    hidden_states: bool,
    names: tuple[str, ...],
    edits: EditMap | None,
) -> Output:
    """Run new nodes of a tree; see `forward`."""
    config = model.config
    if model.is_sharded or any(map(config.long_attention, range(config.num_hidden_layers))):
        raise ConfigError(
            "trees need a model on one device, without long-context attention. Run the branches as"
            " rows: jaxllm.cache.fork"
        )
    if parents_BN is None:
        raise TokenError("tree= needs parents=, the number of each new node's parent")
    tokens_BN = as_array("tokens", tokens_BN)
    B, N = shape = check_shape(tokens_BN)
    if cache is not None:
        check_usable(cache)
        check_cache(config, cache, B)
    growth = plan_growth(cache, parents_BN, tree, shape)
    check_inputs(model, cache, tokens_BN, growth.position_BM[:, :N])
    checked = check_edits(model, edits, 1, 1, None)
    made_with_B = fingerprint(checked, B)
    for before in (x for x in (cache, tree) if x is not None):
        made_with_B = merge_labels(before.edits_B, made_with_B)
    M = growth.position_BM.shape[1]
    tokens_BM = array_namespace(tokens_BN).pad(tokens_BN, ((0, 0), (0, M - N)))
    grown = None if tree is None else tree.replace(edits_B=None)
    out: Output = _grow_tree(
        model, params, () if cache is None else cache.segments, grown, tokens_BM.astype(np.int32),
        growth.first, growth.path_BMP, growth.position_BM, checked, growth.parent_BS.shape[1],
        hidden_states, names,
    )  # fmt: skip
    sites = {name: out.sites[name] for name in names}
    if M > N:
        out = out.replace(logits=out.logits[:, :N])
        sites = {name: x[:, :N] for name, x in sites.items()}
        if hidden_states:
            out = out.replace(hidden_states=tuple(x[:, :N] for x in out.hidden_states or ()))
    new = out.delta
    delta = TreeDelta(
        new.k, new.v, new.position_BS, new.token_BS, new.patched_BS, (), made_with_B,
        growth.parent_BS, growth.size, growth.start_B,
    )  # fmt: skip
    return out.replace(delta=delta, sites=sites)


def decode_step(
    model: Model,
    params: Params,
    cache: KVCache,
    token_B: Array,
    *,
    attention_mass: MassMode = False,
    read: Sequence[str] = (),
    edits: EditMap | None = None,
    donate: bool = False,
) -> StepOutput:
    """Run and commit one token per row.

    `cache` stays valid, at the cost of a copy of its tail, unless `donate=True`. attention_mass,
    read, edits: as for `forward`.

    Raises what `forward` raises, and CapacityError if the cache is full.
    """
    check_model(model, params, any_head=True)
    check_usable(cache)
    token_B = as_array("tokens", token_B)
    if token_B.ndim != 1:
        raise TokenError(f"decode_step takes one token per row, [B], got shape {token_B.shape}")
    _check_mass(attention_mass)
    tokens_BT, positions_BT = check_inputs(model, cache, token_B[:, None], None)
    check_fits(cache, positions_BT)
    names = check_read(model, read)
    checked = check_edits(model, edits, cache.batch, 1, cache.slots + 1)
    cache = label_cache(cache, checked)
    return _run_compiled(
        _DECODE_STEP, cache, donate, model, params, tokens_BT, positions_BT, checked,
        attention_mass, names,
    )  # fmt: skip


def prefill(
    model: Model,
    params: Params,
    cache: KVCache,
    tokens_BT: Array,
    *,
    lengths_B: Array | None = None,
    positions_BT: Array | None = None,
    chunk: int = 256,
    attention_mass: MassMode = False,
    read: Sequence[str] = (),
    edits: EditMap | None = None,
    donate: bool = False,
) -> StepOutput:
    """Run and commit a prompt in chunks; the logits are those of each row's last token.

    Every row needs at least one real token. Prompts shorter than a chunk are padded to a power of
    two, so that few programs are compiled. `cache` stays valid, at the cost of a copy of its tail,
    unless `donate=True`.

    Args:
        lengths_B: the number of real tokens per row; the rest is padding on the right.
        positions_BT: instead of `lengths_B`, positions `[B, T]` with -1 for padding anywhere.
        chunk: tokens per chunk.
        attention_mass: as for `decode_step`, summed over the prompt.
        read: as for `forward`, of the whole prompt; neither "logits" nor attention's scores and
            weights, whose slots change between chunks.
        edits: as for `forward`; their values may differ between tokens only by `positions`.

    Raises what `forward` raises, and CapacityError if the prompt does not fit.
    """
    cache, args = _prefill_arguments(
        model, params, cache, tokens_BT, lengths_B, positions_BT, chunk, attention_mass, read, edits
    )
    out = _run_compiled(_PREFILL, cache, donate, *args)
    T = np.shape(tokens_BT)[1]
    return out.replace(sites={name: x[:, :T] for name, x in out.sites.items()})


def prepare_prefill(
    model: Model,
    params: Params,
    cache: KVCache,
    tokens_BT: Array,
    *,
    lengths_B: Array | None = None,
    chunk: int = 256,
    attention_mass: MassMode = False,
    edits: EditMap | None = None,
    donate: bool = False,
) -> None:
    """Load or compile, in another thread, the program of `prefill` with the same arguments.

    Raises what `prefill` raises.
    """
    with warnings.catch_warnings():  # `prefill` itself warns
        warnings.simplefilter("ignore")
        cache, args = _prefill_arguments(
            model, params, cache, tokens_BT, lengths_B, None, chunk, attention_mass, (), edits
        )
    _PREFILL[donate].prepare(cache.replace(frozen=()), cache.frozen, *args)


def _prefill_arguments(
    model: Model,
    params: Params,
    cache: KVCache,
    tokens_BT: Array,
    lengths_B: Array | None,
    positions_BT: Array | None,
    chunk: int,
    attention_mass: MassMode,
    read: Sequence[str],
    edits: EditMap | None,
) -> tuple[KVCache, tuple[Any, ...]]:
    """Check and pad the arguments of `prefill`; return the cache and those after it."""
    check_model(model, params, any_head=True)
    _check_mass(attention_mass)
    check_usable(cache)
    chunk = check_int("chunk", chunk, 1, error=TokenError)
    tokens_BT = as_array("tokens", tokens_BT)
    if lengths_B is not None:
        if positions_BT is not None:
            raise TokenError("give lengths_B or positions_BT, not both")
        positions_BT = next_positions(cache, check_shape(tokens_BT), lengths_B)
    tokens_BT, positions_BT = check_inputs(model, cache, tokens_BT, positions_BT)
    check_fits(cache, positions_BT)
    if is_concrete(positions_BT) and (np.asarray(positions_BT).max(axis=1) < 0).any():
        raise TokenError("prefill: every row needs at least one real token")
    refused = ("logits", *WEIGHT_SITES)
    names = check_read(model, read, refused, "prefill cannot read {}. Use forward")
    checked = check_edits(model, edits, cache.batch, 1, None)
    T = tokens_BT.shape[1]
    width = chunk if chunk <= T else min(chunk, next_power_of_two(T, 8))
    padding = ((0, 0), (0, -T % width))
    tokens_BT = array_namespace(tokens_BT).pad(tokens_BT, padding)
    positions_BT = array_namespace(positions_BT).pad(positions_BT, padding, constant_values=-1)
    args = (model, params, tokens_BT, positions_BT, checked, attention_mass, width, names)
    return label_cache(cache, checked), args


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
    memory: tuple[Any, ...] = (),
    document_BT: jax.Array | None = None,
    row_B: jax.Array | None = None,
    branches: Branches | None = None,
    edits: Edits = NO_EDITS,
    read: Collection[str] = (),
) -> tuple[Trace, Delta, jax.Array | None]:
    """Apply the model to checked input; return its trace, the delta and the attention mass.

    All steps, compiled or not, call this function.

    Args:
        length_B: the length of the whole text if these tokens are one chunk of it.
        column_B: the column of each row whose logits to compute; by default all.
        memory: the cache's memory, for models that have one.
        document_BT: the document that each token belongs to; documents do not attend to each other.
        row_B: the row of the segments that each row of tokens reads; by default its own.
        branches: the nodes of a tree that each row of one token attends to.
        edits: checked (`site_inputs.check_edits`).
        read: the sites that every layer's trace has, without layers.
    """
    if segments and not memory and any(map(model.config.memory_shape, range(len(segments[0].k)))):
        raise ConfigError(
            "this model's layers keep a memory, which this operation does not support"
        )
    token_BT = jnp.where(position_BT >= 0, token_BT, 0)
    if length_B is None:
        length_B = position_BT.max(axis=1) + 1
    extra: dict[str, Any] = {"memory": memory} if memory else {}
    extra |= {} if document_BT is None else {"document_BT": document_BT}
    extra |= {} if row_B is None else {"row_B": row_B}
    extra |= {} if branches is None else {"branches": branches}
    extra |= {"edits": edits} if edits.edits else {}
    extra |= {"read": frozenset(read)} if read else {}
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
    delta = Delta(trace.k, trace.v, position_BT, token_BT, patched_BT, trace.memory)
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
    segments = (*frozen, tail.tail)
    options["read"] = sites_to_record(names)
    trace, delta, mass = run_model(
        model, params, segments, token_BT, position_BT, memory=tail.memory, **options
    )
    # The write must wait for the last layer's read, which no later layer orders before it.
    after = trace.read_outputs
    after = after if mass is None or not after else (*after, mass)
    mass = None if mass is None else to_cache_slots(mass, tail, token_BT.shape[1])
    cache = constrain_cache(apply_delta(tail, delta, after), model)
    return StepOutput(trace.logits, cache, mass, trace.read_sites(names))


@partial(jax.jit, static_argnums=(0, 7, 8, 9, 10))
def _forward(
    model: Model,
    params: Params,
    segments: Segments,
    memory: tuple[Any, ...],
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
        memory=memory, edits=edits, read=sites_to_record((*names, *weights)),
    )  # fmt: skip
    hidden = trace.hidden_states if hidden_states else None
    stacked = jnp.stack([*trace.read_sites(weights).values()]) if weights else None
    return Output(trace.logits, delta, hidden, mass, stacked, trace.read_sites(names))


@partial(jax.jit, static_argnums=(0, 9, 10, 11))
def _grow_tree(
    model: Model,
    params: Params,
    segments: Segments,
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
        branches=branches_of(path_BMP, position_BM, first, tree), edits=edits,
        read=sites_to_record(names),
    )  # fmt: skip

    def by_row(x: jax.Array) -> jax.Array:
        return x.reshape(B, M, *x.shape[2:])

    hidden = tuple(map(by_row, trace.hidden_states)) if hidden_states else None
    sites = {name: by_row(x) for name, x in trace.read_sites(names).items()}
    nodes: Delta = jax.tree.map(by_row, delta)
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
    token_BT: jax.Array,
    position_BT: jax.Array,
    edits: Edits,
    attention_mass: MassMode,
    width: int,
    names: tuple[str, ...],
) -> StepOutput:
    B = token_BT.shape[0]
    length_B = position_BT.max(axis=1) + 1

    def run_chunk(
        carry: StepOutput, chunk: tuple[jax.Array, jax.Array]
    ) -> tuple[StepOutput, dict[str, jax.Array]]:
        token_BC, position_BC = chunk
        real_BC = position_BC >= 0
        last_B = jnp.argmax(jnp.where(real_BC, jnp.arange(width), -1), axis=1)
        out = run_and_commit(
            model,
            params,
            frozen,
            carry.cache,
            token_BC,
            position_BC,
            names,
            length_B=length_B,
            column_B=last_B,
            attention_mass=attention_mass,
            edits=edits,
        )
        logits_BV = jnp.where(real_BC.any(axis=1)[:, None], out.logits[:, 0], carry.logits)
        mass = jax.tree.map(jnp.add, carry.attention_mass, out.attention_mass)
        return StepOutput(logits_BV, out.cache, mass), out.sites

    def split_chunks(x_BT: jax.Array) -> jax.Array:
        return jnp.moveaxis(x_BT.reshape(B, -1, width), 1, 0)

    def join_chunks(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 1).reshape(B, token_BT.shape[1], *x.shape[3:])

    logits_BV = jnp.zeros((B, model.config.vocab_size), jnp.float32)
    start = StepOutput(logits_BV, tail, _zero_mass(model.config, tail, frozen, attention_mass))
    chunks = (split_chunks(token_BT), split_chunks(position_BT))
    out, sites = jax.lax.scan(run_chunk, start, chunks)
    return out.replace(sites={name: join_chunks(x) for name, x in sites.items()})


def _zero_mass(
    config: ModelConfig, tail: KVCache, frozen: Segments, attention_mass: MassMode
) -> jax.Array | None:
    """Return zeros to accumulate the mass of all slots in; None if it is not requested."""
    if attention_mass is False:
        return None
    layers = (config.num_hidden_layers,) if attention_mass == "layers" else ()
    slots = sum(s.position_BS.shape[1] for s in (*frozen, tail.tail))
    return jnp.zeros((*layers, tail.batch, slots), jnp.float32)


def _compile_step(step: Any, static_argnums: tuple[int, ...]) -> tuple[Any, Any]:
    """Return the step as two programs: one that copies its cache, one that donates it."""
    return CachedJit(step, static_argnums=static_argnums), CachedJit(
        step, static_argnums=static_argnums, donate_argnums=0
    )


_DECODE_STEP = _compile_step(_decode_step, (2, 7, 8))
_PREFILL = _compile_step(_prefill, (2, 7, 8, 9))


def _run_compiled(
    compiled: tuple[Any, Any], cache: KVCache, donate: bool, *args: Any
) -> StepOutput:
    """Call a compiled step on the tail. Frozen segments are inputs only, so they are not copied.

    args: the last are the names of the sites to read.
    """
    out: StepOutput = compiled[donate](cache.replace(frozen=()), cache.frozen, *args)
    sites = {name: out.sites[name] for name in args[-1]}
    return out.replace(cache=out.cache.replace(frozen=cache.frozen), sites=sites)


def _check_mass(attention_mass: MassMode) -> None:
    if attention_mass not in (False, True, "layers"):
        raise ConfigError(
            f"attention_mass must be False, True or 'layers', got {attention_mass!r:.40}"
        )
