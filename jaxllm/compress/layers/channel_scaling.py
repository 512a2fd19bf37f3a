"""Channel scales, folded out of the module that produces a linear's input and into its weights.

The model computes the same function; only the rounding errors of quantization change. SmoothQuant
(Xiao et al. 2023, arXiv 2211.10438) makes activations easier to quantize, AWQ (Lin et al. 2024,
arXiv 2306.00978) protects the weights of important channels.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.compress.layers.input_stats import InputStats
from jaxllm.compress.layers.layerwise import LayerInputs, get_module, replace_leaves
from jaxllm.models.family import LinearGroup
from jaxllm.weights.formats import Weight, to_dense
from jaxllm.weights.paths import Params
from jaxllm.weights.types.base import WeightBase
from jaxllm.weights.types.int_weight import IntFormat, IntWeight

RATIO_STEPS = 20  # exponents that AWQ's search tries: 0 to 19/20
SEARCH_TOKENS = 1 << 12  # calibration tokens that the search uses


def can_fold(params: Params, site: LinearGroup) -> bool:
    """Return whether a scale of the site's input can be folded into the module that produces it.

    Values that several query heads share cannot be scaled for each head.
    """
    if site.source is None:
        return False
    made = get_module(params, site.source)["weight"]
    return made.ndim == 1 or made.shape[0] >= get_module(params, site.linears[0])["weight"].shape[1]


def fold_scale(params: Params, site: LinearGroup, scale_I: jax.Array) -> tuple[Params, jax.Array]:
    """Divide the site's inputs by a scale per channel, and multiply its weights by it.

    Returns the layer's new parameters and the effective scale, which differs slightly from
    `scale_I` if a norm's weights are stored in 16 bits.
    """
    assert site.source is not None
    source = get_module(params, site.source)
    if source["weight"].ndim == 1:
        before_I = source["weight"].astype(jnp.float32)
        after_I = to_dense(_divide_rows(source["weight"], scale_I), jnp.float32)
        scale_I = jnp.where(after_I == 0, scale_I, before_I / jnp.where(after_I == 0, 1.0, after_I))
        scale_I = jnp.where(before_I == 0, 1.0, scale_I)
    params = replace_leaves(
        params, site.source, **{k: _divide_rows(x, scale_I) for k, x in source.items()}
    )
    for linear in site.linears:
        weight = get_module(params, linear)["weight"]
        wide = to_dense(weight, jnp.float32) * scale_I[None]
        params = replace_leaves(params, linear, weight=wide.astype(_array_format(weight)))
    return params, scale_I


def smoothquant_scale(weights: list[Weight], stats: InputStats, alpha: float) -> jax.Array:
    """Return SmoothQuant's scale `[I]`: `max|x|^alpha / max|w|^(1 - alpha)`, w over all rows."""
    largest = [jnp.abs(to_dense(w, jnp.float32)).max(0) for w in weights]
    weight_I = jnp.maximum(jnp.stack(largest).max(0), 1e-5)
    scale_I = stats.peak_I**alpha / weight_I ** (1 - alpha)
    return jnp.maximum(scale_I, 1e-5)


class ScaleSearch(NamedTuple):
    """AWQ's result.

    scale_I: scale of each channel. ratio: exponent of the mean magnitude. loss: mean squared error
    of the site's output. plain: that error without a scale.
    """

    scale_I: jax.Array
    ratio: float
    loss: float
    unscaled_loss: float


def search_scale(
    inputs: LayerInputs, params: Params, site: LinearGroup, stats: InputStats, target: IntFormat
) -> ScaleSearch:
    """Find the scale that minimizes the change of the site's output due to rounded weights.

    Tries `mean|x|^r` for r = 0, 1/20, ... 19/20, normalized by `awq_scale`. The error is the mean
    square over a part of the calibration data.
    """
    rows = max(1, SEARCH_TOKENS // inputs.x_NTD.shape[1])
    weights = {linear: to_dense(get_module(params, linear)["weight"]) for linear in site.linears}
    layer = inputs.dense(params)  # dequantize once, not for each ratio
    wanted = inputs.trace_entry(layer, site.output, rows)
    best: ScaleSearch | None = None
    for step in range(RATIO_STEPS):
        scale_I = awq_scale(stats.mean_abs_I, step / RATIO_STEPS)
        tried = layer
        for linear, weight_OI in weights.items():
            tried = replace_leaves(tried, linear, weight=_round_scaled(weight_OI, scale_I, target))
        off = inputs.trace_entry(tried, site.output, rows) - wanted
        loss = float(np.mean(off.astype(np.float64) ** 2))
        if best is None or loss < best.loss:
            best = ScaleSearch(
                scale_I, step / RATIO_STEPS, loss, best.unscaled_loss if best else loss
            )
    assert best is not None
    return best


def awq_scale(mean_abs_I: jax.Array, ratio: float) -> jax.Array:
    """Return `s = x^ratio`, divided by `sqrt(max(s) min(s))`."""
    scale_I = jnp.maximum(mean_abs_I**ratio, 1e-4)
    return scale_I / jnp.sqrt(scale_I.max() * scale_I.min())


@partial(jax.jit, static_argnums=2)
def _round_scaled(weight_OI: jax.Array, scale_I: jax.Array, target: IntFormat) -> jax.Array:
    """Round a weight with scaled columns, then undo the scale."""
    leaf = target.quantize(weight_OI.astype(jnp.float32) * scale_I[None])
    return (leaf.to_dense() / scale_I[None]).astype(weight_OI.dtype)


def _divide_rows(leaf: Weight, scale_I: jax.Array) -> Weight:
    """Divide a vector's elements, or a matrix's last rows, by a scale each."""
    scale = jnp.pad(scale_I, (leaf.shape[0] - scale_I.shape[0], 0), constant_values=1.0)
    if isinstance(leaf, IntWeight):  # scaling a row does not change how it rounds
        divided = leaf.scale.astype(jnp.float32) / scale[:, None]
        return leaf.replace(scale=divided.astype(leaf.scale.dtype))
    by = scale if leaf.ndim == 1 else scale[:, None]
    return (to_dense(leaf, jnp.float32) / by).astype(_array_format(leaf))


def _array_format(weight: Weight) -> str:
    """Return the dtype in which to store a weight after changing it."""
    return str(to_dense(weight).dtype) if isinstance(weight, WeightBase) else str(weight.dtype)
