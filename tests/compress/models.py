"""Tiny models to compress, with every tensor random, and how two are compared."""

from pathlib import Path
from typing import Any

import numpy as np
from flax import struct

from jaxllm.api import LM
from jaxllm.weights.formats import as_leaf, format_of
from jaxllm.weights.leaves.leaf import Leaf
from jaxllm.weights.paths import flatten
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
