"""Model steps: pure functions from (params, cache, tokens) to (logits, new keys and values).

`forward` reads a cache and `commit` extends one; `decode_step` (one token) and `prefill` (a prompt
in chunks) combine the two. Invalid input raises here, on the host, before anything is dispatched;
inside `jit` the same functions run unchecked.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.commit import check_fits
from jaxllm.cache.kv import Delta, KVCache, TreeDelta, check_usable, merge_labels
from jaxllm.cache.tree import plan_tree
from jaxllm.errors import CapacityError, ConfigError, TokenError
from jaxllm.models.compiled_steps import (
    DECODE_STEP,
    PREFILL,
    MassMode as MassMode,
    Output as Output,
    Segments as Segments,
    StepOutput as StepOutput,
    run_and_commit as run_and_commit,
    run_forward,
    run_model as run_model,
    run_tree,
)
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
from jaxllm.models.packing import promise_packed, warn_without_cudnn
from jaxllm.models.site_inputs import (
    check_edits,
    check_read,
    find_sites,
    fingerprint,
    label_cache,
)
from jaxllm.models.sites import NO_EDITS, WEIGHT_SITES, Edits
from jaxllm.ops.recurrent import CHUNK
from jaxllm.ops.target import is_accelerator
from jaxllm.runtime.validation import check_int
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params

# A prompt runs in passes of the first width of which two suffice, else of `chunk` tokens.
PASS_WIDTHS, ACCELERATOR_WIDTHS = (16, 64), (64, 512)

EditMap = Mapping[str, Any]  # from sites to edits or functions, or lists of them


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
            that continues a cache of another length. The cache's tokens are not compared: give a
            tree the cache that it grew on.
        ConfigError: for unknown sites, and edits that do not fit them; for a tree on several
            devices, or in a model with long-context attention.
    """
    check_model(model, params, any_head=True)
    check_mass(attention_mass)
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
    past = (cache.segments, cache.state) if cache is not None else ((), ())
    out: Output = run_forward(
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
    kind = config.attention
    if model.is_sharded or (kind is not None and not kind.runs_trees):
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
    plan = plan_tree(cache, parents_BN, tree, shape)
    if config.has_state and plan.path_BMP.shape[2] > CHUNK:
        raise CapacityError(
            f"paths of a tree have at most {CHUNK} nodes in a model with recurrent layers. Commit a"
            " part of the path first"
        )
    check_inputs(model, cache, tokens_BN, plan.position_BM[:, :N], is_tree=True)
    checked = check_edits(model, edits, B, 1, None)
    made_with_B = fingerprint(checked, B)
    for before in (x for x in (cache, tree) if x is not None):
        made_with_B = merge_labels(before.edits_B, made_with_B)
    M = plan.position_BM.shape[1]
    tokens_BM = array_namespace(tokens_BN).pad(tokens_BN, ((0, 0), (0, M - N)))
    grown = None if tree is None else tree.replace(edits_B=None)
    by_node = jax.tree.map(  # each node is a row
        lambda x: x if x.shape[0] == 1 else array_namespace(x).repeat(x, M, axis=0), checked
    )
    out: Output = run_tree(
        model, params, () if cache is None else cache.segments,
        () if cache is None else cache.state, grown, tokens_BM.astype(np.int32), plan.first,
        plan.path_BMP, plan.position_BM, by_node, plan.parent_BS.shape[1], hidden_states, names,
    )  # fmt: skip
    sites = {name: out.sites[name] for name in names}
    if M > N:
        out = out.replace(logits=out.logits[:, :N])
        sites = {name: x[:, :N] for name, x in sites.items()}
        if hidden_states:
            out = out.replace(hidden_states=tuple(x[:, :N] for x in out.hidden_states or ()))
    new = out.delta
    delta = TreeDelta(
        new.k, new.v, new.position_BS, new.token_BS, new.patched_BS, new.state, made_with_B,
        plan.parent_BS, plan.size, plan.start_B,
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
    check_mass(attention_mass)
    tokens_BT, positions_BT = check_inputs(model, cache, token_B[:, None], None)
    check_fits(cache, positions_BT)
    names = check_read(model, read)
    checked = check_edits(model, edits, cache.batch, 1, cache.slots + 1)
    cache = label_cache(cache, checked)
    model = promise_packed(model, cache)
    frozen = cache.frozen  # an input only, so it is not copied
    out: StepOutput = DECODE_STEP[donate](
        cache.replace(frozen=()), frozen, model, params, tokens_BT, positions_BT, checked,
        attention_mass, names,
    )  # fmt: skip
    sites = {name: out.sites[name] for name in names}
    return out.replace(cache=out.cache.replace(frozen=frozen), sites=sites)


def default_chunk() -> int:
    """Return how many tokens of a prompt run at once by default: 256, or 2,048 on an accelerator.

    With fewer rows, an accelerator's products take as long as reading the weights.
    """
    return 2048 if is_accelerator() else 256


def prefill(
    model: Model,
    params: Params,
    cache: KVCache,
    tokens_BT: Array,
    *,
    lengths_B: Array | None = None,
    positions_BT: Array | None = None,
    chunk: int | None = None,
    attention_mass: MassMode = False,
    read: Sequence[str] = (),
    edits: EditMap | None = None,
    donate: bool = False,
) -> StepOutput:
    """Run and commit a prompt in chunks; the logits are those of each row's last token.

    Every row needs at least one real token. A prompt runs in passes of one of three widths (16, 64
    or `chunk` tokens; on an accelerator 64, 512 or `chunk`), the last one padded: so prompts of all
    lengths share three programs. `cache` stays valid, at the cost of a copy of its tail, unless
    `donate=True`.

    Args:
        lengths_B: the number of real tokens per row; the rest is padding on the right.
        positions_BT: instead of `lengths_B`, positions `[B, T]` with -1 for padding anywhere.
        chunk: tokens per chunk; by default `default_chunk()`.
        attention_mass: as for `decode_step`, summed over the prompt.
        read: as for `forward`, of the whole prompt; neither "logits" nor attention's scores and
            weights, whose slots change between chunks.
        edits: as for `forward`; their values may differ between tokens only by `positions`.

    Raises what `forward` raises, and CapacityError if the prompt does not fit.
    """
    check_model(model, params, any_head=True)
    check_mass(attention_mass)
    check_usable(cache)
    chunk = default_chunk() if chunk is None else check_int("chunk", chunk, 1, error=TokenError)
    tokens_BT = as_array("tokens", tokens_BT)
    if positions_BT is None:
        model = promise_packed(model, cache)
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
    passes = plan_passes(
        model, params, label_cache(cache, checked), tokens_BT, positions_BT, chunk, checked,
        attention_mass, names,
    )  # fmt: skip
    return run_passes(passes, donate=donate)


def prefill_checked(
    model: Model,
    params: Params,
    cache: KVCache,
    tokens_BT: np.ndarray,
    lengths_B: np.ndarray | None = None,
    *,
    chunk: int | None = None,
    donate: bool = False,
) -> StepOutput:
    """Run `prefill` on input that has been checked: int32 `[B, T]`, with room in the cache."""
    positions_BT = next_positions(cache, tokens_BT.shape, lengths_B)
    chunk = default_chunk() if chunk is None else chunk
    model = promise_packed(model, cache)
    passes = plan_passes(model, params, cache, tokens_BT, positions_BT, chunk)
    return run_passes(passes, donate=donate)


class PromptPasses(NamedTuple):
    """A checked prompt: the cache that it continues, the arguments of each pass, its tokens."""

    cache: KVCache
    arguments: list[tuple[Any, ...]]
    tokens: int

    def prepare(self) -> None:
        """Load or compile the program of the passes in another thread."""
        PREFILL.prepare(self.cache.replace(frozen=()), self.cache.frozen, *self.arguments[0])


def plan_passes(
    model: Model,
    params: Params,
    cache: KVCache,
    tokens_BT: Any,
    positions_BT: Any,
    chunk: int,
    edits: Edits = NO_EDITS,
    attention_mass: MassMode = False,
    names: tuple[str, ...] = (),
) -> PromptPasses:
    """Split a checked prompt, int32 `[B, T]`, into passes of at most `chunk` tokens."""
    T, length_B = tokens_BT.shape[1], positions_BT.max(axis=1) + 1
    warn_without_cudnn(model.config, cache.dtype, T)
    widths = ACCELERATOR_WIDTHS if is_accelerator() else PASS_WIDTHS
    width = next((w for w in widths if w < chunk and 2 * w >= T), chunk)
    padding = ((0, 0), (0, -T % width))
    tokens_BT = array_namespace(tokens_BT).pad(tokens_BT, padding)
    positions_BT = array_namespace(positions_BT).pad(positions_BT, padding, constant_values=-1)
    arguments = []
    for start in range(0, T, width):
        token_BC, position_BC = (x[:, start : start + width] for x in (tokens_BT, positions_BT))
        arguments.append(
            (model, params, token_BC, position_BC, length_B, edits, attention_mass, names)
        )
    return PromptPasses(cache, arguments, T)


def run_passes(passes: PromptPasses, *, donate: bool) -> StepOutput:
    """Run the passes of a prompt; return what `prefill` returns."""
    cache, outs = passes.cache, list[StepOutput]()
    if not donate:  # the passes overwrite it
        cache = jax.tree.map(jnp.copy, cache.replace(frozen=())).replace(frozen=cache.frozen)
    frozen, names = cache.frozen, passes.arguments[0][-1]
    for args in passes.arguments:  # frozen segments are inputs only, so they are not copied
        outs.append(PREFILL(cache.replace(frozen=()), frozen, *args))
        cache = outs[-1].cache
    whole = outs[0]
    for out, (_, _, _, position_BC, *_) in zip(outs[1:], passes.arguments[1:], strict=True):
        logits_BV = out.logits
        if not (is_concrete(position_BC) and (np.asarray(position_BC) >= 0).any(axis=1).all()):
            real_B1 = (position_BC >= 0).any(axis=1)[:, None]
            logits_BV = jnp.where(real_B1, logits_BV, whole.logits)
        mass = jax.tree.map(jnp.add, whole.attention_mass, out.attention_mass)
        whole = StepOutput(logits_BV, out.cache, mass)
    sites = {
        name: jnp.concatenate([out.sites[name] for out in outs], axis=1)[:, : passes.tokens]
        for name in names
    }
    return whole.replace(cache=cache.replace(frozen=frozen), sites=sites)


def check_mass(attention_mass: MassMode) -> None:
    """Raise ConfigError for anything but a mode of the attention mass."""
    if attention_mass not in (False, True, "layers"):
        raise ConfigError(
            f"attention_mass must be False, True or 'layers', got {attention_mass!r:.40}"
        )
