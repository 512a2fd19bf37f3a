"""Running the layers of a model one after the other."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import flax.linen as nn
import jax

from jaxllm.models.layers import NO_PARALLEL, AttentionContext, Layer
from jaxllm.ops import flash
from jaxllm.ops.documents import ATTENTION_NAME


class LayerRunner(Protocol):
    """Runs the layers in another way, e.g. pipelined; a frozen dataclass, since models store it."""

    def __call__(
        self, blocks: Sequence[nn.Module], x: jax.Array, context: AttentionContext, remat: bool
    ) -> tuple[tuple[Layer, ...], jax.Array]: ...


def run_blocks(
    blocks: Sequence[nn.Module],
    x: jax.Array,
    context: AttentionContext,
    remat: bool,
    runner: LayerRunner | None = None,
) -> tuple[tuple[Layer, ...], jax.Array]:
    """Run the layers; return what each computes, and the output of the last.

    remat: recompute activations in the backward pass instead of storing them, but not attention on
    an accelerator, which keeps its small results.
    """
    if runner is not None:
        return runner(blocks, x, context, remat)
    shared = None if remat or not _can_share(blocks, context) else _share_traces(context)
    layers, linked = list[Layer](), blocks[0].config.links_layers
    for block in blocks:
        if linked:
            earlier = tuple((y.attention.k, y.attention.v) for y in layers)
            context = context._replace(earlier=earlier)
        if remat:
            layers.append(_run_remat(block, x, context))
        elif shared is not None:
            run, arguments = shared
            layers.append(run(*arguments(block, context), x))
        else:
            layers.append(block(x, context))
        x = layers[-1].x
    return tuple(layers), x


def _can_share(blocks: Sequence[Any], context: AttentionContext) -> bool:
    """Return whether layers of one `ModelConfig.layer_signature` differ in nothing but arrays.

    Trees and invariant models promise the bits of other programs, so they are not shared.
    """
    precision = blocks[0].precision
    return (
        bool(context.segments)
        and not context.edits.edits
        and context.branches is None
        and context.hooks == NO_PARALLEL
        and not precision.overrides
        and not precision.invariant
    )


def _share_traces(full: AttentionContext) -> tuple[Callable[..., Layer], Callable[..., Any]]:
    """Return a function that runs a layer, tracing only the first of each kind, and its arguments.

    Tracing 22 layers one by one took half of the time that a new program takes. XLA inlines the
    layers, so that the program is the same.
    """

    @partial(jax.jit, static_argnums=0)
    def run(first: Any, params: Any, entries: Any, state: Any, further: Any, x: jax.Array) -> Layer:
        source, before = first.config.kv_source(first.layer), (None,) * first.layer
        unread = (None,) * source
        segments = tuple(
            s.replace(k=(*unread, k), v=(*unread, v))
            for s, (k, v) in zip(full.segments, entries, strict=True)
        )
        earlier, embeddings = further
        context = full._replace(
            segments=segments,
            state=state and (*before, state[0]),
            earlier=earlier and (*unread, earlier[0]),
            layer_embeddings=embeddings and (*before, embeddings[0]),
        )
        layer: Layer = first.apply({"params": params}, x, context)
        return layer

    firsts: dict[Any, Any] = {}

    def arguments(block: Any, context: AttentionContext) -> tuple[Any, ...]:
        kind = type(block), block.config.layer_signature(block.layer)
        first = firsts.setdefault(kind, block.clone(parent=None, name=None))
        source = block.config.kv_source(block.layer)
        entries = [(s.k[source], s.v[source]) for s in full.segments]
        earlier = (context.earlier[source],) if source != block.layer else ()
        embeddings = full.layer_embeddings and (full.layer_embeddings[block.layer],)
        state = full.state and (full.state[block.layer],)
        return first, block.variables["params"], entries, state, (earlier, embeddings)

    return run, arguments


def _run_remat(block: nn.Module, x: jax.Array, context: AttentionContext) -> Layer:
    again = nn.remat(lambda module, x: module(x, context), prevent_cse=True, policy=_is_attention)
    layer: Layer = again(block, x)
    return layer


def _is_attention(primitive: Any, *_: Any, **params: Any) -> bool:
    """Whether a primitive computes attention's heads or log-sum-exp."""
    named = params.get("name") == ATTENTION_NAME
    return named or primitive.name.startswith(flash.FORWARD)
