"""AWQ: scales channels so that important ones lose less when rounded.

Lin et al. 2024, arXiv 2306.00978.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.compress.channel_scaling import can_fold, fold_scale
from jaxllm.compress.input_stats import InputStats
from jaxllm.compress.layerwise import (
    LayerInputs,
    get_module,
    match_linears,
    replace_leaves,
    run_layerwise,
)
from jaxllm.compress.methods.rtn import round_to_nearest
from jaxllm.compress.recipe import (
    INTEGER_FORMAT,
    ModelState,
    RuleOptions,
    StepContext,
    StepSpec,
    parse_integer_format,
)
from jaxllm.models.family import LinearGroup
from jaxllm.weights.formats import to_dense
from jaxllm.weights.paths import Params, first_match
from jaxllm.weights.types.int_weight import IntFormat

RATIO_STEPS = 20  # exponents that the search tries: 0 to 19/20
SEARCH_TOKENS = 1 << 12  # calibration tokens that the search uses


class AwqOptions(RuleOptions, frozen=True):
    """clip: also clip ranges, except of linears that match the regex `keep`."""

    clip: bool = True
    keep: str = r".*(q_proj|k_proj|c_attn)"


def awq(context: StepContext[AwqOptions]) -> ModelState:
    """Quantize to integers, with channels scaled so that important ones lose less."""
    to, options = parse_integer_format(context.argument), context.options
    norm_offset = context.state.config.norm_weight_offset

    def change(layer: LayerInputs) -> Params:
        params = layer.params
        for site, chosen in match_linears(layer, options.on):
            stats = layer.input_stats(params, site)
            if len(chosen) == len(site.linears) and can_fold(params, site):
                best_I = search_scale(layer, params, site, stats, to)
                params, scale_I = fold_scale(params, site, best_I, norm_offset)
                stats = stats.scale(1 / scale_I)
            for linear in chosen:
                weight = to_dense(get_module(params, linear)["weight"])
                clip = options.clip and not first_match([(options.keep, True)], linear)
                leaf = round_to_nearest(weight, to, stats, clip=clip)
                params = replace_leaves(params, linear, weight=leaf)
        return params

    return run_layerwise(context, f"AWQ, {to.name}", change)


def search_scale(
    inputs: LayerInputs, params: Params, site: LinearGroup, stats: InputStats, target: IntFormat
) -> jax.Array:
    """Find the scale of each channel that minimizes the change of the site's output by rounding.

    Tries `mean|x|^r` for r = 0, 1/20, ... 19/20, normalized by `awq_scale`. The error is the mean
    square over a part of the calibration data.
    """
    rows = max(1, SEARCH_TOKENS // inputs.x_NTD.shape[1])
    weights = {linear: to_dense(get_module(params, linear)["weight"]) for linear in site.linears}
    layer = inputs.dense(params)  # dequantize once, not for each ratio
    exact = inputs.trace_entry(layer, site.output, rows)

    def output_error(scale_I: jax.Array) -> float:
        tried = layer
        for linear, weight_OI in weights.items():
            tried = replace_leaves(tried, linear, weight=_round_scaled(weight_OI, scale_I, target))
        off = inputs.trace_entry(tried, site.output, rows) - exact
        return float(np.mean(off.astype(np.float64) ** 2))

    ratios = [step / RATIO_STEPS for step in range(RATIO_STEPS)]
    return min((awq_scale(stats.mean_abs_I, ratio) for ratio in ratios), key=output_error)


def awq_scale(mean_abs_I: jax.Array, ratio: float) -> jax.Array:
    """Return `s = x^ratio`, divided by `sqrt(max(s) min(s))`."""
    scale_I = jnp.maximum(mean_abs_I**ratio, 1e-4)
    return scale_I / jnp.sqrt(scale_I.max() * scale_I.min())


@partial(jax.jit, static_argnums=2)
def _round_scaled(weight_OI: jax.Array, scale_I: jax.Array, target: IntFormat) -> jax.Array:
    """Round a weight with scaled columns, then undo the scale."""
    leaf = target.quantize(weight_OI.astype(jnp.float32) * scale_I[None])
    return (leaf.to_dense() / scale_I[None]).astype(weight_OI.dtype)


STEP = StepSpec(
    "quantize",
    "awq",
    awq,
    "integers; channels are scaled so that important ones lose less",
    INTEGER_FORMAT,
    AwqOptions,
)
