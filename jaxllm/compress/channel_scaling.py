"""Channel scales, folded out of the module that produces a linear's input and into its weights.

The model computes the same function; only the rounding errors of quantization change. SmoothQuant
and AWQ choose the scales.
"""

import jax
import jax.numpy as jnp

from jaxllm.compress.layerwise import get_module, replace_leaves
from jaxllm.models.family import LinearGroup
from jaxllm.weights.formats import Weight, to_dense
from jaxllm.weights.paths import Params
from jaxllm.weights.types.base import WeightBase
from jaxllm.weights.types.int_weight import IntWeight


def can_fold(params: Params, site: LinearGroup) -> bool:
    """Return whether a scale of the site's input can be folded into the module that produces it.

    Values that several query heads share cannot be scaled for each head. Formats other than arrays
    and integers cannot either: their rows have no scale.
    """
    if site.source is None:
        return False
    source = get_module(params, site.source)["weight"]
    if isinstance(source, WeightBase) and not isinstance(source, IntWeight):
        return False
    return (
        source.ndim == 1
        or source.shape[0] >= get_module(params, site.linears[0])["weight"].shape[1]
    )


def fold_scale(
    params: Params, site: LinearGroup, scale_I: jax.Array, norm_offset: float
) -> tuple[Params, jax.Array]:
    """Divide the site's inputs by a scale per channel, and multiply its weights by it.

    Args:
        norm_offset: The offset that the model adds to the weights of norms.

    Returns:
        The layer's new parameters, and the effective scale, which differs slightly from `scale_I`
        if a norm's weights are stored in 16 bits.
    """
    assert site.source is not None
    source, norm = get_module(params, site.source), Params()
    if source["weight"].ndim == 1:
        old_I = source["weight"]
        before_I = old_I.astype(jnp.float32) + norm_offset
        new_I = (before_I / scale_I - norm_offset).astype(old_I.dtype)
        after_I = new_I.astype(jnp.float32) + norm_offset
        is_zero_I = (before_I == 0) | (after_I == 0)
        scale_I = jnp.where(is_zero_I, 1.0, before_I / jnp.where(is_zero_I, 1.0, after_I))
        norm = {"weight": jnp.where(is_zero_I, old_I, new_I)}
    divided = {name: _divide_rows(x, scale_I) for name, x in source.items()} | norm
    params = replace_leaves(params, site.source, **divided)
    for linear in site.linears:
        weight = get_module(params, linear)["weight"]
        wide = to_dense(weight, jnp.float32) * scale_I[None]
        params = replace_leaves(params, linear, weight=wide.astype(_array_format(weight)))
    return params, scale_I


def _divide_rows(leaf: Weight, scale_I: jax.Array) -> Weight:
    """Divide a vector's elements, or a matrix's last rows, by a scale each."""
    scale = jnp.pad(scale_I, (leaf.shape[0] - len(scale_I), 0), constant_values=1.0)
    if isinstance(leaf, IntWeight):  # scaling a row does not change how it rounds
        rows = ("scale", "offset", "second_scale")
        scaled = {name: x for name in rows if (x := getattr(leaf, name)) is not None}
        return leaf.replace(**{name: _divide_rows(x, scale_I) for name, x in scaled.items()})
    by = scale if leaf.ndim == 1 else scale[:, None]
    assert isinstance(leaf, jax.Array)
    return (leaf.astype(jnp.float32) / by).astype(leaf.dtype)


def _array_format(weight: Weight) -> str:
    """Return the dtype in which to store a weight after changing it."""
    return str(to_dense(weight).dtype) if isinstance(weight, WeightBase) else str(weight.dtype)
