"""The layerwise loop of a step with resume, and the matrices that a rule matches."""

import dataclasses
from collections.abc import Callable

from jaxllm import models
from jaxllm.compress.layers.layerwise import LayerInputs, get_module, map_layers
from jaxllm.compress.recipe import ModelState, StepContext, match_paths, shapes_by_path
from jaxllm.errors import ConfigError
from jaxllm.models.family import LinearGroup
from jaxllm.weights.formats import Weight, as_weight
from jaxllm.weights.paths import Params, first_match, flatten


def run_layerwise(
    state: ModelState, context: StepContext, name: str, change: Callable[[LayerInputs], Params]
) -> ModelState:
    """Change each layer once, and save it in the journal as soon as it is finished."""
    assert context.calibration is not None

    def change_and_save(layer: LayerInputs) -> Params:
        made = change(layer)
        context.journal.put(f"layer{layer.number}", made)
        return made

    params = map_layers(
        state.model,
        state.params,
        context.calibration.token_NT,
        change_and_save,
        name=name,
        load_finished=lambda number: context.journal.get(f"layer{number}"),
        show_progress=context.show_progress,
    )
    return dataclasses.replace(state, params=params)


def match_linears(layer: LayerInputs, rule: str) -> list[tuple[LinearGroup, list[str]]]:
    """Return each site with its linears that match a rule, in the order they run; no routers.

    Raises ConfigError as `check_unwrapped` does, and for a matching matrix whose inputs are
    unknown.
    """
    found = []
    known = {linear for site in layer.sites for linear in site.linears}
    router = models.get_family(layer.model.config.model_type).router
    for path, leaf in flatten(layer.params):
        linear, named = path.removesuffix(".weight"), f"{layer.path}.{path}"
        if leaf.ndim != 2 or linear == router or not first_match([(rule, True)], named):
            continue
        if linear not in known:
            raise ConfigError(
                f"{named} has unknown inputs, which this step needs: exclude it with on="
            )
    for site in layer.sites:
        paths = {linear: f"{layer.path}.{linear}.weight" for linear in site.linears}
        linears = [linear for linear, path in paths.items() if first_match([(rule, True)], path)]
        for linear in linears:
            check_unwrapped(paths[linear], get_module(layer.params, linear)["weight"])
        found += [(site, linears)] if linears else []
    return found


def match_weights(params: Params, rule: str, where: str) -> dict[str, Weight]:
    """Return the matrices that match a rule. Raises ConfigError for none, or as
    `check_unwrapped`.
    """
    leaves = dict(flatten(params))
    found = {path: leaves[path] for path in match_paths(shapes_by_path(params), rule, where)}
    for path, leaf in found.items():
        check_unwrapped(path, leaf)
    return found


def check_unwrapped(path: str, weight: Weight) -> None:
    """Raise ConfigError for a weight composed of others: changing it would make it dense."""
    leaf = as_weight(weight)
    if leaf.is_composite:
        raise ConfigError(
            f"{path} is {leaf.format}, expected a single matrix: put this step before the one that"
            " changed it"
        )
