"""A step that changes a model layer by layer, and keeps each as soon as it is done."""

import dataclasses
from collections.abc import Callable

from jaxllm.compress.layers.stream import Stage, at, each_layer
from jaxllm.compress.recipe import Subject, Work
from jaxllm.errors import ConfigError
from jaxllm.models.family import Site
from jaxllm.weights.formats import as_leaf
from jaxllm.weights.paths import Params, first_match


def layer_by_layer(
    subject: Subject, work: Work, name: str, change: Callable[[Stage], Params]
) -> Subject:
    """Each layer changed once, and kept in the journal as soon as it is."""
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


def chosen_of(stage: Stage, site: Site, rule: str) -> list[str]:
    """The site's linears that a path rule names.

    Raises ConfigError for one that is made of others: the step would multiply it out.
    """
    paths = {linear: f"{stage.path}.{linear}.weight" for linear in site.linears}
    chosen = [linear for linear, path in paths.items() if first_match([(rule, True)], path)]
    for linear in chosen:
        leaf = as_leaf(at(stage.params, linear)["weight"])
        if leaf.composed:
            raise ConfigError(
                f"{paths[linear]} is {leaf.format}: this step is for single matrices, so it comes"
                " before what makes others of them"
            )
    return chosen
