"""SmoothQuant: scales channels so that activations are easier to quantize.

Xiao et al. 2023, arXiv 2211.10438.
"""

import jax
import jax.numpy as jnp

from jaxllm.compress.channel_scaling import fold_scale
from jaxllm.compress.input_stats import InputStats
from jaxllm.compress.layerwise import LayerInputs, get_module, match_linears, run_layerwise
from jaxllm.compress.recipe import Fraction, ModelState, RuleOptions, StepContext, StepSpec
from jaxllm.weights.formats import Weight, to_dense
from jaxllm.weights.paths import Params


class SmoothQuantOptions(RuleOptions, frozen=True):
    """alpha: migration strength, from 0 (scale by weights only) to 1 (by activations only)."""

    alpha: Fraction = 0.5


def smoothquant(context: StepContext[SmoothQuantOptions]) -> ModelState:
    """Scale channels so that activations are easier to quantize; the outputs stay the same."""
    norm_offset = context.state.config.norm_weight_offset

    def change(layer: LayerInputs) -> Params:
        params = layer.params
        for site, chosen in match_linears(layer, context.options.on):
            follows_norm = site.source and get_module(params, site.source)["weight"].ndim == 1
            if follows_norm and len(chosen) == len(site.linears):
                stats = layer.input_stats(params, site)
                weights = [get_module(params, linear)["weight"] for linear in chosen]
                scale_I = smoothquant_scale(weights, stats, context.options.alpha)
                params, _ = fold_scale(params, site, scale_I, norm_offset)
        return params

    return run_layerwise(context, "SmoothQuant", change)


def smoothquant_scale(weights: list[Weight], stats: InputStats, alpha: float) -> jax.Array:
    """Return SmoothQuant's scale `[I]`: `max|x|^alpha / max|w|^(1 - alpha)`, w over all rows."""
    largest = [jnp.abs(to_dense(w, jnp.float32)).max(0) for w in weights]
    weight_I = jnp.maximum(jnp.stack(largest).max(0), 1e-5)
    scale_I = stats.peak_I**alpha / weight_I ** (1 - alpha)
    return jnp.maximum(scale_I, 1e-5)


STEP = StepSpec(
    "smooth",
    "smoothquant",
    smoothquant,
    "scale channels so that activations are easier to quantize",
    options=SmoothQuantOptions,
)
