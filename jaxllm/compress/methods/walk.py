"""A step that changes a model layer by layer, and keeps each as soon as it is done."""

import dataclasses
from collections.abc import Callable

from jaxllm.compress.layers.stream import Stage, each_layer
from jaxllm.compress.recipe import Subject, Work
from jaxllm.weights.paths import Params


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
