"""Scales of channels, taken out of what makes a linear's input and put into its weights.

What the model computes stays as it was: only what is hard to round changes places. SmoothQuant
(Xiao et al. 2023, arXiv 2211.10438) evens out activations, AWQ (Lin et al. 2024, arXiv 2306.00978)
protects the weights of channels that matter.
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

RATIOS = 20  # of AWQ's search, from 0 to 19/20
TOKENS = 1 << 12  # that its search runs


def foldable(params: Params, site: Site) -> bool:
    """Whether a scale of the site's input can be taken out of what makes it.

    Values that several query heads share cannot be scaled for each of them.
    """
    if site.source is None:
        return False
    made = at(params, site.source)["weight"]
    return made.ndim == 1 or made.shape[0] >= at(params, site.linears[0])["weight"].shape[1]


def fold(params: Params, site: Site, scale_I: jax.Array) -> tuple[Params, jax.Array]:
    """The layer with the site's inputs divided by a scale of each channel, its weights multiplied.

    Returns the scale too: where a norm's weights are stored in 16 bits, it is the one that it then
    really has.
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
    """SmoothQuant's scale `[I]`: `max|x|^alpha / max|w|^(1 - alpha)`, the latter over all rows."""
    largest = [jnp.abs(dense(w, jnp.float32)).max(0) for w in weights]
    weight_I = jnp.maximum(jnp.stack(largest).max(0), 1e-5)
    scale_I = moments.peak_I**alpha / weight_I ** (1 - alpha)
    return jnp.maximum(scale_I, 1e-5)


class Searched(NamedTuple):
    """AWQ's choice: a scale of each channel, from this power of its mean magnitude. loss: of the
    part's output, and with no scale at all."""

    scale_I: jax.Array
    ratio: float
    loss: float
    plain: float


def search(stage: Stage, params: Params, site: Site, moments: Moments, to: Integer) -> Searched:
    """The scale with which the site's rounded weights change the part's output least.

    Of `mean|x|^r` for r = 0, 1/20, ... 19/20, evened out to a geometric middle of 1. The error is
    the mean square over a part of the calibration text.
    """
    rows = max(1, TOKENS // stage.x_NTD.shape[1])
    weights = {linear: dense(at(params, linear)["weight"]) for linear in site.linears}
    layer = stage.dense(params)  # once, not for each ratio
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
    """`x^ratio`, divided by the root of its largest times its least."""
    scale_I = jnp.maximum(mean_abs_I**ratio, 1e-4)
    return scale_I / jnp.sqrt(scale_I.max() * scale_I.min())


@partial(jax.jit, static_argnums=2)
def _as_rounded(weight_OI: jax.Array, scale_I: jax.Array, to: Integer) -> jax.Array:
    """What the weight becomes where it is rounded with its columns scaled."""
    leaf = to.make(weight_OI.astype(jnp.float32) * scale_I[None])
    return (leaf.dense() / scale_I[None]).astype(weight_OI.dtype)


def _divided(leaf: Weight, scale_I: jax.Array) -> Weight:
    """A vector, or a matrix's rows, the last of which these are, divided by a scale each."""
    scale = jnp.pad(scale_I, (leaf.shape[0] - scale_I.shape[0], 0), constant_values=1.0)
    if isinstance(leaf, QTensor):  # rounding a row is the same whatever the row is times
        divided = leaf.scale.astype(jnp.float32) / scale[:, None]
        return leaf.replace(scale=divided.astype(leaf.scale.dtype))
    by = scale if leaf.ndim == 1 else scale[:, None]
    return (dense(leaf, jnp.float32) / by).astype(_kept(leaf))


def _kept(weight: Weight) -> str:
    """The format of the numbers of a weight that is changed."""
    return str(dense(weight).dtype) if isinstance(weight, Leaf) else str(weight.dtype)
