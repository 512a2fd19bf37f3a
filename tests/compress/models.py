"""Tiny models to compress, with every tensor random, a step to do it with, how two compare."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from flax import struct

from jaxllm.api import LM
from jaxllm.compress.recipe import Subject, Work
from jaxllm.weights.formats import as_leaf, format_of
from jaxllm.weights.leaves.leaf import Leaf
from jaxllm.weights.paths import flatten, map_leaves
from jaxllm.weights.precision import Precision, cast
from tests.twins import random_model


def tiny(family: str, precision: Precision | None = None, **changes: Any) -> LM:
    """Two layers, no tokenizer, no files."""
    model, params = random_model(family, precision=precision, **changes)
    params = params if precision is None else cast(params, precision)
    return LM(model.config, model, params, None, {}, Path("tiny"))


class Whole(Leaf, struct.PyTreeNode):
    """A weight composed of one other, of which it has all."""

    composed = True
    whole: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.whole.shape)


def halve(subject: Subject, argument: str, options: Any, work: Work) -> Subject:
    """Halves each layer by itself and asks the journal first, as steps do."""
    assert work.calibration is not None
    params = dict(subject.params)
    for name in [name for name in params if name.startswith("layers.")]:
        if (found := work.journal.get(name)) is None:
            work.say(name)
            found = map_leaves(lambda _, leaf: leaf * 0.5, params[name])
            work.journal.put(name, found)
        params[name] = found
    return dataclasses.replace(subject, params=params)


def same(ours: Any, theirs: Any) -> None:
    """The same leaves, bit for bit."""
    mine, others = dict(flatten(ours)), dict(flatten(theirs))
    assert mine.keys() == others.keys()
    for path, leaf in mine.items():
        assert format_of(leaf) == format_of(others[path]), path
        pieces, wanted = as_leaf(leaf).pieces(), as_leaf(others[path]).pieces()
        assert pieces.keys() == wanted.keys()
        for key, piece in pieces.items():
            np.testing.assert_array_equal(np.asarray(piece), np.asarray(wanted[key]), path)
