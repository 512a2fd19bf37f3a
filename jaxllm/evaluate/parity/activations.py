"""Named activations: the intermediate results on the way to the logits.

Names are dotted paths, in the order of computation: `embed_tokens`, then for each layer
`layers.0.input_layernorm`, `.q`, `.k`, `.v`, `.heads`, `.attention`, `.post_attention_layernorm`,
`.mlp.down_proj.input`, `.mlp` and the layer's output `layers.0`, then `norm` and `logits`. GPT-2
has its own names (`models.FAMILIES`). The input of every linear is among them. An MoE layer has the
router scores, `.mlp.gate`, instead of the MLP's last input.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxllm.cache.kv import KVCache, Segment, check_usable
from jaxllm.config.model import ModelConfig
from jaxllm.errors import TokenError
from jaxllm.models import get_family
from jaxllm.models.family import Family
from jaxllm.models.inputs import check_model, check_shape, check_token_ranges
from jaxllm.models.layers import Trace
from jaxllm.ops.kv_quant import dequantize
from jaxllm.runtime.validation import check_int_array
from jaxllm.steps import run_model
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params

_SITES = ("attn_norm", "attn.rot_q", "attn.z", "mlp_norm", "mlp.post", "router", "mlp.output")


def activation_names(
    model_type: str, layers: int, has_experts: Callable[[int], bool] = lambda layer: False
) -> list[str]:
    """Return the names of all activations, in the order of computation.

    has_experts: returns whether a layer is MoE. Raises ConfigError for an unknown family.
    """
    f = get_family(model_type)
    within = [f.attention_norm] if f.attention_norm else []
    within += ["q", "k", "v", "heads", f.attention]
    within += [f.mlp_norm] if f.mlp_norm else []
    names = [f.embeddings]
    for i in range(layers):
        path, last = f"{f.layers}.{i}", f.router if has_experts(i) else f"{f.mlp_down}.input"
        names += [*(f"{path}.{part}" for part in (*within, last, "mlp")), path]
    return [*names, f.norm, "logits"]


def activations(
    model: Model,
    params: Params,
    cache: KVCache | None,
    tokens_BT: Any,
    *,
    positions_BT: Any = None,
) -> dict[str, jax.Array]:
    """Run tokens against a cache, and return every activation by name, in order of computation.

    Most activations are `[B, T, D]`; q (after RoPE) and heads (attention-weighted values, before
    the output projection) are `[B, T, N, H]`; k and v, as read back from the cache, are
    `[B, T, K, H]`; logits are `[B, T, V]` float32. Values at padding are meaningless.

    Args:
        tokens_BT: Token ids.
        positions_BT: int32, -1 for padding; by default each row continues where the cache ends.

    Raises:
        TokenError: For ids, positions or shapes that do not fit the model.
    """
    check_model(model, params)
    tokens_BT = check_int_array("tokens", tokens_BT, TokenError)
    if cache is not None:
        check_usable(cache)
    if positions_BT is None:
        check_shape(tokens_BT)
        start_B = np.zeros(len(tokens_BT), np.int32)
        start_B = start_B if cache is None else np.asarray(cache.next_position_B)
        positions_BT = start_B[:, None] + np.arange(np.shape(tokens_BT)[-1], dtype=np.int32)[None]
    token_BT, position_BT = check_tokens(model.config, tokens_BT, positions_BT)
    segments = () if cache is None else cache.segments
    trace = _trace(model, params, segments, token_BT, position_BT)
    routed = ["router" in layer.sites for layer in trace.layers]
    names = activation_names(model.config.model_type, len(routed), routed.__getitem__)
    family_row = get_family(model.config.model_type)
    return dict(zip(names, _trace_arrays(trace, family_row), strict=True))


def check_tokens(
    config: ModelConfig, tokens_BT: Any, positions_BT: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Return both as int32 `[B, T]`. Raises TokenError if shapes or values are invalid."""
    tokens = check_int_array("tokens", tokens_BT, TokenError)
    positions = check_int_array("positions", positions_BT, TokenError)
    if tokens.ndim != 2 or tokens.size == 0 or positions.shape != tokens.shape:
        raise TokenError(
            "tokens and positions must both be [B, T], with B, T >= 1: got shapes"
            f" {tokens.shape} and {positions.shape}"
        )
    check_token_ranges(config, tokens, positions)
    return tokens.astype(np.int32), positions.astype(np.int32)


@partial(jax.jit, static_argnums=0)
def _trace(
    model: Model,
    params: Params,
    segments: Sequence[Segment],
    token_BT: jax.Array,
    position_BT: jax.Array,
) -> Trace:
    segments = tuple(segments)
    return run_model(model, params, segments, token_BT, position_BT, read=_SITES)[0]


def _trace_arrays(trace: Trace, row: Family) -> Iterator[jax.Array]:
    """Yield the activations of a trace, in the order of `activation_names`."""
    yield trace.embeddings
    for layer in trace.layers:
        sites, attended = layer.sites, layer.attention
        yield from (sites["attn_norm"],) if row.attention_norm else ()
        yield from (sites["attn.rot_q"], dequantize(attended.k), dequantize(attended.v))
        yield from (sites["attn.z"], attended.x)
        yield from (sites["mlp_norm"],) if row.mlp_norm else ()
        yield sites["router" if "router" in sites else "mlp.post"]
        yield from (sites["mlp.output"], layer.x)
    yield from (trace.norm, trace.logits)
