"""Methods without calibration: round to nearest, changes of format, dynamic int8 inputs."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxllm.compress.matrices.clip import rounded
from jaxllm.compress.recipe import On, Options, Subject, Work
from jaxllm.weights.formats import Weight, as_format, as_leaf, dense, parse
from jaxllm.weights.leaves.integers import Integer
from jaxllm.weights.leaves.leaf import Leaf
from jaxllm.weights.paths import first_match, map_leaves
from jaxllm.weights.quantize import POSITIONS, ROUTER, Rules, format_at


class Everywhere(On, frozen=True):
    """on: as in `On`, by default all matrices. clip: clip each integer range to minimize the
    weights' squared error.
    """

    on: str = ".*"
    clip: bool = False


def rtn(subject: Subject, argument: str, options: Everywhere, work: Work) -> Subject:
    """Round each weight to the nearest value of its format.

    With the default rule this is `quantize(params, argument)`, which keeps embeddings and the LM
    head at 8 bits if the rest has 4.
    """
    plain = options.on == Everywhere().on
    rules: Rules = argument if plain else [POSITIONS, ROUTER, (options.on, argument)]

    def change(path: str, leaf: Weight) -> Weight:
        name = format_at(rules, path, leaf.ndim)
        if name is None:
            return leaf
        to = parse(name)
        if options.clip and isinstance(to, Integer) and not as_leaf(leaf).composed:
            wide = dense(leaf, jnp.float32)
            if wide.ndim == 2:
                return rounded(wide, to, clip=True)
            return jax.tree.map(lambda *x: jnp.stack(x), *(rounded(w, to, clip=True) for w in wide))
        return inside(leaf, name)

    return dataclasses.replace(subject, params=map_leaves(change, subject.params))


def store(subject: Subject, argument: str, options: On, work: Work) -> Subject:
    """Convert weights to another format; values may round."""

    def change(path: str, leaf: Weight) -> Weight:
        chosen = leaf.ndim >= 2 and first_match([(options.on, True)], path)
        return inside(leaf, argument) if chosen else leaf

    return dataclasses.replace(subject, params=map_leaves(change, subject.params))


def inside(weight: Weight, name: str) -> Weight:
    """Convert a weight to the format `name`; for one composed of others, convert those."""
    if not as_leaf(weight).composed or parse(name).name.count("/"):
        return as_format(weight, name)

    def change(part: Weight) -> Weight:
        return inside(part, name) if part.ndim >= 2 else part

    changed: Weight = jax.tree.map(
        change, weight, is_leaf=lambda x: isinstance(x, Leaf) and x is not weight
    )
    return changed


def int8_inputs(subject: Subject, argument: str, options: Options, work: Work) -> Subject:
    """Round inputs of integer weights to int8 at run time (dynamic quantization)."""
    precision = dataclasses.replace(subject.precision, int8_inputs=True)
    return dataclasses.replace(subject, precision=precision)
