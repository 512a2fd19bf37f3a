"""What a model computes on the way to its logits, by name.

A stage is a dotted path, in the order of computation: `embed_tokens`, then for each layer
`layers.0.input_layernorm`, `.q`, `.k`, `.v`, `.heads`, `.attention`, `.post_attention_layernorm`,
`.mlp.down_proj.input`, `.mlp` and the layer's own output `layers.0`, then `norm` and `logits`.
GPT-2 has its own names (`models.FAMILIES`). The input of every linear is among them. A layer of
experts has the router's scores, `.mlp.gate`, in place of the MLP's last input.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from jaxllm.cache.kv import KVCache, Segment, check_usable
from jaxllm.config import ModelConfig
from jaxllm.errors import TokenError
from jaxllm.inputs import check_model, check_values, shape_of
from jaxllm.models import family
from jaxllm.models.family import Family
from jaxllm.models.layers import Trace
from jaxllm.ops.entries import dense
from jaxllm.steps import run
from jaxllm.weights.paths import Params
from jaxllm.whole import whole_array


def stage_names(
    model_type: str, layers: int, routed: Callable[[int], bool] = lambda layer: False
) -> list[str]:
    """Every stage's name, in the order of computation. routed: whether a layer is of experts.

    Raises ConfigError for no such family.
    """
    f = family(model_type)
    within = [f.attention_norm] if f.attention_norm else []
    within += ["q", "k", "v", "heads", f.attention]
    within += [f.mlp_norm] if f.mlp_norm else []
    found = [f.embeddings]
    for i in range(layers):
        path, last = f"{f.layers}.{i}", f.router if routed(i) else f"{f.mlp_down}.input"
        found += [*(f"{path}.{part}" for part in (*within, last, "mlp")), path]
    return [*found, f.norm, "logits"]


def stages(
    model: nn.Module,
    params: Params,
    cache: KVCache | None,
    tokens_BT: Any,
    *,
    positions_BT: Any = None,
) -> dict[str, jax.Array]:
    """Every stage of running tokens against a cache, by name, in the order of computation.

    tokens_BT: ids `[B, T]`. positions_BT: int32 `[B, T]`, -1 for padding; by default each row goes
    on from where the cache ends. Most stages are `[B, T, D]`; q (after rotation) and heads (the
    weighted sums of values, before the output projection) are `[B, T, N, H]`, k and v `[B, T, K,
    H]` as the cache gives them back, logits `[B, T, V]` float32. Numbers at padding mean nothing.

    Raises TokenError for ids, positions or shapes that do not fit the model.
    """
    check_model(model, params)
    tokens_BT = whole_array("tokens", tokens_BT, TokenError)
    if cache is not None:
        check_usable(cache)
    if positions_BT is None:
        shape_of(tokens_BT)
        start_B = np.zeros(len(tokens_BT), np.int32)
        start_B = start_B if cache is None else np.asarray(cache.next_position_B)
        positions_BT = start_B[:, None] + np.arange(np.shape(tokens_BT)[-1], dtype=np.int32)[None]
    token_BT, position_BT = check_tokens(model.config, tokens_BT, positions_BT)
    segments = () if cache is None else cache.segments
    trace = _trace(model, params, segments, token_BT, position_BT)
    routed = [layer.router is not None for layer in trace.layers]
    names = stage_names(model.config.model_type, len(routed), routed.__getitem__)
    family_row = family(model.config.model_type)
    return dict(zip(names, _arrays(trace, family_row), strict=True))


def check_tokens(
    config: ModelConfig, tokens_BT: Any, positions_BT: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Both as int32 `[B, T]`; raises TokenError for what does not fit each other or the model."""
    tokens = whole_array("tokens", tokens_BT, TokenError)
    positions = whole_array("positions", positions_BT, TokenError)
    if tokens.ndim != 2 or tokens.size == 0 or positions.shape != tokens.shape:
        raise TokenError(
            "tokens and positions must both be [B, T], neither of them zero; got shapes"
            f" {tokens.shape} and {positions.shape}"
        )
    check_values(config, tokens, positions)
    return tokens.astype(np.int32), positions.astype(np.int32)


@partial(jax.jit, static_argnums=0)
def _trace(
    model: nn.Module,
    params: Params,
    segments: Sequence[Segment],
    token_BT: jax.Array,
    position_BT: jax.Array,
) -> Trace:
    return run(model, params, tuple(segments), token_BT, position_BT)[0]


def _arrays(trace: Trace, row: Family) -> Iterator[jax.Array]:
    """The trace's stages, in the order of `stage_names`."""
    yield trace.embeddings
    for layer in trace.layers:
        q, k, v, heads, x, *_ = layer.attention
        yield from (layer.attention_norm,) if row.attention_norm else ()
        yield from (q, dense(k), dense(v), heads, x)
        yield from (layer.mlp_norm,) if row.mlp_norm else ()
        yield from (x for x in (layer.router, layer.mlp_hidden) if x is not None)  # one of them
        yield from (layer.mlp, layer.x)
    yield from (trace.norm, trace.logits)
