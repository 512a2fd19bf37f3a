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

from jaxllm.compress.layers.moments import Moments
from jaxllm.compress.layers.stream import Stage, at, put
from jaxllm.models.family import Site
from jaxllm.weights.formats import Weight, dense
from jaxllm.weights.leaves.integers import Integer, QTensor
from jaxllm.weights.leaves.leaf import Leaf
from jaxllm.weights.paths import Params

RATIOS = 20  # exponents that AWQ's search tries: 0 to 19/20
TOKENS = 1 << 12  # calibration tokens that the search uses


def foldable(params: Params, site: Site) -> bool:
    """Return whether a scale of the site's input can be folded into the module that produces it.

    Values that several query heads share cannot be scaled for each head.
    """
    if site.source is None:
        return False
    made = at(params, site.source)["weight"]
    return made.ndim == 1 or made.shape[0] >= at(params, site.linears[0])["weight"].shape[1]


def fold(params: Params, site: Site, scale_I: jax.Array) -> tuple[Params, jax.Array]:
    """Divide the site's inputs by a scale per channel, and multiply its weights by it.

    Returns the layer's new parameters and the effective scale, which differs slightly from
    `scale_I` if a norm's weights are stored in 16 bits.
    """
    assert site.source is not None
    source = at(params, site.source)
    if source["weight"].ndim == 1:
        before_I = source["weight"].astype(jnp.float32)
        after_I = dense(_divided(source["weight"], scale_I), jnp.float32)
        scale_I = jnp.where(after_I == 0, scale_I, before_I / jnp.where(after_I == 0, 1.0, after_I))
        scale_I = jnp.where(before_I == 0, 1.0, scale_I)
    params = put(params, site.source, **{k: _divided(x, scale_I) for k, x in source.items()})
    for linear in site.linears:
        weight = at(params, linear)["weight"]
        wide = dense(weight, jnp.float32) * scale_I[None]
        params = put(params, linear, weight=wide.astype(_kept(weight)))
    return params, scale_I


def smoothing(weights: list[Weight], moments: Moments, alpha: float) -> jax.Array:
    """Return SmoothQuant's scale `[I]`: `max|x|^alpha / max|w|^(1 - alpha)`, w over all rows."""
    largest = [jnp.abs(dense(w, jnp.float32)).max(0) for w in weights]
    weight_I = jnp.maximum(jnp.stack(largest).max(0), 1e-5)
    scale_I = moments.peak_I**alpha / weight_I ** (1 - alpha)
    return jnp.maximum(scale_I, 1e-5)


class Searched(NamedTuple):
    """AWQ's result.

    scale_I: scale of each channel. ratio: exponent of the mean magnitude. loss: mean squared error
    of the site's output. plain: that error without a scale.
    """

    scale_I: jax.Array
    ratio: float
    loss: float
    plain: float


def search(stage: Stage, params: Params, site: Site, moments: Moments, to: Integer) -> Searched:
    """Find the scale that minimizes the change of the site's output due to rounded weights.

    Tries `mean|x|^r` for r = 0, 1/20, ... 19/20, normalized by `candidate`. The error is the mean
    square over a part of the calibration data.
    """
    rows = max(1, TOKENS // stage.x_NTD.shape[1])
    weights = {linear: dense(at(params, linear)["weight"]) for linear in site.linears}
    layer = stage.dense(params)  # dequantize once, not for each ratio
    wanted = stage.entries(layer, site.output, rows)
    best: Searched | None = None
    for step in range(RATIOS):
        scale_I = candidate(moments.mean_abs_I, step / RATIOS)
        tried = layer
        for linear, weight_OI in weights.items():
            tried = put(tried, linear, weight=_as_rounded(weight_OI, scale_I, to))
        off = stage.entries(tried, site.output, rows) - wanted
        loss = float(np.mean(off.astype(np.float64) ** 2))
        if best is None or loss < best.loss:
            best = Searched(scale_I, step / RATIOS, loss, best.plain if best else loss)
    assert best is not None
    return best


def candidate(mean_abs_I: jax.Array, ratio: float) -> jax.Array:
    """Return `s = x^ratio`, divided by `sqrt(max(s) min(s))`."""
    scale_I = jnp.maximum(mean_abs_I**ratio, 1e-4)
    return scale_I / jnp.sqrt(scale_I.max() * scale_I.min())


@partial(jax.jit, static_argnums=2)
def _as_rounded(weight_OI: jax.Array, scale_I: jax.Array, to: Integer) -> jax.Array:
    """Round a weight with scaled columns, then undo the scale."""
    leaf = to.make(weight_OI.astype(jnp.float32) * scale_I[None])
    return (leaf.dense() / scale_I[None]).astype(weight_OI.dtype)


def _divided(leaf: Weight, scale_I: jax.Array) -> Weight:
    """Divide a vector's elements, or a matrix's last rows, by a scale each."""
    scale = jnp.pad(scale_I, (leaf.shape[0] - scale_I.shape[0], 0), constant_values=1.0)
    if isinstance(leaf, QTensor):  # scaling a row does not change how it rounds
        divided = leaf.scale.astype(jnp.float32) / scale[:, None]
        return leaf.replace(scale=divided.astype(leaf.scale.dtype))
    by = scale if leaf.ndim == 1 else scale[:, None]
    return (dense(leaf, jnp.float32) / by).astype(_kept(leaf))


def _kept(weight: Weight) -> str:
    """Return the dtype in which to store a weight after changing it."""
    return str(dense(weight).dtype) if isinstance(weight, Leaf) else str(weight.dtype)
