"""Static quantization of a linear's inputs: scale and zero point come from calibration data."""

from typing import Annotated, Any

import msgspec

from jaxllm.compress.layerwise import (
    LayerInputs,
    get_module,
    match_linears,
    replace_leaves,
    run_layerwise,
)
from jaxllm.compress.recipe import ModelState, RuleOptions, StepContext, StepSpec
from jaxllm.errors import ConfigError
from jaxllm.models.family import LinearGroup
from jaxllm.research.static_inputs.histograms import histogram
from jaxllm.research.static_inputs.observers import (
    QParams,
    QRange,
    check_finite,
    find_qparams,
    grid_search,
    min_max,
    observe,
)
from jaxllm.research.static_inputs.weight import (
    MAX_INPUT,
    MIN_INPUT,
    add_input_grid,
    supports_input_grid,
)
from jaxllm.weights.paths import Params
from jaxllm.weights.types.int_weight import IntWeight

QRANGE = QRange(MIN_INPUT, MAX_INPUT)
AVERAGING_CONSTANT = 0.01  # of moving averages, as in torch


class StaticInputOptions(RuleOptions, frozen=True):
    """Options of static input quantization.

    range: minmax (smallest to largest input), average (their moving averages), percentile, or the
    range that minimizes the squared error (histogram) or the error to the power 2.4 (grid).
    percent: share of inputs that percentile keeps. symmetric: zero point 0.
    """

    range: str = "minmax"
    percent: Annotated[float, msgspec.Meta(gt=0, le=100)] = 99.99
    symmetric: bool = False


RANGES = ("minmax", "average", "percentile", "histogram", "grid")


def static_inputs(context: StepContext[StaticInputOptions]) -> ModelState:
    """Round inputs of int8 weights to int8, with one scale and zero point per linear."""
    options = context.options

    def change(layer: LayerInputs) -> Params:
        params = layer.params
        for site, chosen in match_linears(layer, options.on):
            qparams = _find_qparams(layer, params, site, options)
            for linear in chosen:
                weight = get_module(params, linear)["weight"]
                if not (isinstance(weight, IntWeight) and supports_input_grid(weight.int_format)):
                    raise ConfigError(
                        f"{layer.path}.{linear} is not int8, which static inputs require: add"
                        " 'quantize: rtn int8' before this step"
                    )
                weight = add_input_grid(weight, qparams.scale, qparams.zero)
                params = replace_leaves(params, linear, weight=weight)
        return params

    return run_layerwise(context, f"input ranges, {options.range}", change)


def check_static(shapes: object, argument: str, options: StaticInputOptions) -> None:
    """Raise ConfigError for an unknown range."""
    if options.range not in RANGES:
        raise ConfigError(f"range must be one of {', '.join(RANGES)}: got {options.range!r:.40}")


def _find_qparams(
    layer: LayerInputs, params: Params, site: LinearGroup, options: StaticInputOptions
) -> QParams:
    """Find scale and zero point of a site's inputs. Raises NonFiniteError for NaN or infinity."""
    where = f"{layer.path}.{site.linears[0]}"
    observer: Any = min_max(AVERAGING_CONSTANT if options.range == "average" else None)
    if options.range in ("percentile", "histogram"):
        observer = histogram()
    seen = layer.fold(params, observe, site.input, observer)
    check_finite(seen, where)
    if options.range == "percentile":
        bounds = seen.percentile_range(options.percent)
    elif options.range == "histogram":
        bounds = seen.min_error_range(MAX_INPUT - MIN_INPUT + 1)
    else:
        bounds = seen.range()
    if options.range == "grid":
        errors = grid_search(bounds, QRANGE, symmetric=options.symmetric)
        bounds = layer.fold(params, observe, site.input, errors).range()
    return find_qparams(bounds, QRANGE, symmetric=options.symmetric)


STEP = StepSpec(
    "activations",
    "static",
    static_inputs,
    "round inputs of int8 weights to int8, with a calibrated scale",
    options=StaticInputOptions,
    check=check_static,
)
