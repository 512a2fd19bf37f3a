"""Tiny random models to compress, a test step, and exact comparison of parameters."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from flax import struct

from jaxllm.compress.recipe import ModelState, StepContext
from jaxllm.lm import LM
from jaxllm.weights.formats import as_weight, weight_format
from jaxllm.weights.paths import flatten, map_leaves
from jaxllm.weights.precision import Precision, cast
from jaxllm.weights.types.base import WeightBase
from tests.tiny_models import random_model


def tiny(family: str, precision: Precision | None = None, **changes: Any) -> LM:
    """Return a model with two layers, without tokenizer or files."""
    model, params = random_model(family, precision=precision, **changes)
    params = params if precision is None else cast(params, precision)
    return LM(model.config, model, params, None, {}, Path("tiny"))


class WrappedWeight(WeightBase, struct.PyTreeNode):
    """A composite weight that consists of one other weight."""

    is_composite = True
    inner: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.inner.shape)


def halve(work: StepContext[Any]) -> ModelState:
    """Halve each layer separately, reusing the journal's layers, as real steps do."""
    assert work.calibration is not None
    params = dict(work.state.params)
    for name in [name for name in params if name.startswith("layers.")]:
        if (found := work.store.get(name)) is None:
            work.log(name)
            found = map_leaves(lambda _, leaf: leaf * 0.5, params[name])
            work.store.put(name, found)
        params[name] = found
    return dataclasses.replace(work.state, params=params)


def same(ours: Any, theirs: Any) -> None:
    """Assert that two trees have equal leaves, bit for bit."""
    mine, others = dict(flatten(ours)), dict(flatten(theirs))
    assert mine.keys() == others.keys()
    for path, leaf in mine.items():
        assert weight_format(leaf) == weight_format(others[path]), path
        pieces, wanted = as_weight(leaf).arrays(), as_weight(others[path]).arrays()
        assert pieces.keys() == wanted.keys()
        for key, piece in pieces.items():
            np.testing.assert_array_equal(np.asarray(piece), np.asarray(wanted[key]), path)
