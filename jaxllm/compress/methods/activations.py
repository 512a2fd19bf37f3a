"""Static quantization of a linear's inputs: scale and zero point come from calibration data."""

from typing import Annotated

import msgspec

from jaxllm.compress.layers.stream import Stage, at, put
from jaxllm.compress.methods.walk import chosen_of, layer_by_layer
from jaxllm.compress.observe import observers
from jaxllm.compress.observe.histograms import histogram
from jaxllm.compress.observe.observers import observe
from jaxllm.compress.observe.ranges import TENSOR, Levels, Parameters, Range, parameters
from jaxllm.compress.recipe import On, Subject, Work
from jaxllm.errors import ConfigError
from jaxllm.models.family import Site
from jaxllm.weights.formats import parse
from jaxllm.weights.leaves.integers import QTensor
from jaxllm.weights.leaves.static import LEAST, MOST, Static, fits
from jaxllm.weights.paths import Params

LEVELS = Levels(LEAST, MOST)


class StaticInputs(On, frozen=True):
    """Options of static input quantization.

    range: minmax (smallest to largest input), average (their moving averages), percentile, or the
    range that minimizes the squared error (histogram) or the error to the power 2.4 (grid).
    percent: share of inputs that percentile keeps. symmetric: zero point 0.
    """

    range: str = "minmax"
    percent: Annotated[float, msgspec.Meta(gt=0, le=100)] = 99.99
    symmetric: bool = False


RANGES = ("minmax", "average", "percentile", "histogram", "grid")


def static(subject: Subject, argument: str, options: StaticInputs, work: Work) -> Subject:
    """Round inputs of int8 weights to int8, with one scale and zero point per linear."""

    def change(stage: Stage) -> Params:
        params = stage.params
        for site, chosen in chosen_of(stage, options.on):
            found = _grid(stage, params, site, options)
            for linear in chosen:
                weight = at(params, linear)["weight"]
                if not isinstance(weight, QTensor) or not fits(parse(weight.format)):
                    raise ConfigError(
                        f"{stage.path}.{linear} is not int8, which static inputs require: add"
                        " 'quantize: rtn int8' before this step"
                    )
                params = put(params, linear, weight=Static.of(weight, found.scale, found.zero))
        return params

    return layer_by_layer(subject, work, f"input ranges, {options.range}", change)


def check_static(shapes: object, argument: str, options: StaticInputs) -> None:
    """Raise ConfigError for an unknown range."""
    if options.range not in RANGES:
        raise ConfigError(f"range must be one of {', '.join(RANGES)}: got {options.range!r:.40}")


def _grid(stage: Stage, params: Params, site: Site, options: StaticInputs) -> Parameters:
    """Find scale and zero point of a site's inputs. Raises NonFiniteError for NaN or infinity."""
    where = f"{stage.path}.{site.linears[0]}"
    if options.range in ("percentile", "histogram"):
        counted = stage.fold(params, observe, site.input, histogram())
        observers.check(counted, where)
        percentile = options.range == "percentile"
        found: Range = (
            counted.percentile(options.percent)
            if percentile
            else counted.least_error(MOST - LEAST + 1)
        )
        return parameters(found, LEVELS, symmetric=options.symmetric)
    averaged = options.range == "average"
    first = observers.moving_average(()) if averaged else observers.min_max((), TENSOR)
    seen = stage.fold(params, observe, site.input, first)
    observers.check(seen, where)
    found = seen.range()
    if options.range == "grid":
        errors = observers.grid(found, LEVELS, symmetric=options.symmetric)
        found = stage.fold(params, observe, site.input, errors).range()
    return parameters(found, LEVELS, symmetric=options.symmetric)
