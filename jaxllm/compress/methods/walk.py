"""The layerwise loop of a step with resume, and the matrices that a rule matches."""

import dataclasses
from collections.abc import Callable

from jaxllm import models
from jaxllm.compress.layers.stream import Stage, at, each_layer
from jaxllm.compress.recipe import Subject, Work, matched, shapes_of
from jaxllm.errors import ConfigError
from jaxllm.models.family import Site
from jaxllm.weights.formats import Weight, as_leaf
from jaxllm.weights.paths import Params, first_match, flatten


def layer_by_layer(
    subject: Subject, work: Work, name: str, change: Callable[[Stage], Params]
) -> Subject:
    """Change each layer once, and save it in the journal as soon as it is finished."""
    assert work.calibration is not None

    def kept(stage: Stage) -> Params:
        made = change(stage)
        work.journal.put(f"layer{stage.number}", made)
        return made

    params = each_layer(
        subject.model,
        subject.params,
        work.calibration.token_NT,
        kept,
        name=name,
        done=lambda number: work.journal.get(f"layer{number}"),
        show_progress=work.show_progress,
    )
    return dataclasses.replace(subject, params=params)


def chosen_of(stage: Stage, rule: str) -> list[tuple[Site, list[str]]]:
    """Return each site with its linears that match a rule, in the order they run; no routers.

    Raises ConfigError as `check_single` does, and for a matching matrix whose inputs are unknown.
    """
    found = []
    known = {linear for site in stage.sites for linear in site.linears}
    router = models.family(stage.model.config.model_type).router
    for path, leaf in flatten(stage.params):
        linear, named = path.removesuffix(".weight"), f"{stage.path}.{path}"
        if leaf.ndim != 2 or linear == router or not first_match([(rule, True)], named):
            continue
        if linear not in known:
            raise ConfigError(
                f"{named} has unknown inputs, which this step needs: exclude it with on="
            )
    for site in stage.sites:
        paths = {linear: f"{stage.path}.{linear}.weight" for linear in site.linears}
        linears = [linear for linear, path in paths.items() if first_match([(rule, True)], path)]
        for linear in linears:
            check_single(paths[linear], at(stage.params, linear)["weight"])
        found += [(site, linears)] if linears else []
    return found


def single(params: Params, rule: str, where: str) -> dict[str, Weight]:
    """Return the matrices that match a rule. Raises ConfigError for none, or as `check_single`."""
    leaves = dict(flatten(params))
    found = {path: leaves[path] for path in matched(shapes_of(params), rule, where)}
    for path, leaf in found.items():
        check_single(path, leaf)
    return found


def check_single(path: str, weight: Weight) -> None:
    """Raise ConfigError for a weight composed of others: changing it would make it dense."""
    leaf = as_leaf(weight)
    if leaf.composed:
        raise ConfigError(
            f"{path} is {leaf.format}, expected a single matrix: put this step before the one that"
            " changed it"
        )
