"""Steps that change the format of each matrix by itself, and of what it is multiplied with."""

import dataclasses

from jaxllm.compress.recipe import On, Options, Subject, Work
from jaxllm.weights.formats import Weight, as_format
from jaxllm.weights.paths import first_match, map_leaves
from jaxllm.weights.quantize import POSITIONS, quantize


class Everywhere(On, frozen=True):
    """on: a path rule, by default all matrices."""

    on: str = ".*"


def rtn(subject: Subject, argument: str, options: Everywhere, work: Work) -> Subject:
    """Round to nearest: each weight to the nearest number of its group's grid.

    For all matrices it is `quantize(params, argument)`, which leaves the table of tokens and the
    head at 8 bits where the rest has 4.
    """
    plain = options.on == Everywhere().on
    rules = argument if plain else [POSITIONS, (options.on, argument)]
    return dataclasses.replace(subject, params=quantize(subject.params, rules))


def store(subject: Subject, argument: str, options: On, work: Work) -> Subject:
    """The same numbers in another format, so far as it has them."""

    def change(path: str, leaf: Weight) -> Weight:
        chosen = leaf.ndim >= 2 and first_match([(options.on, True)], path)
        return as_format(leaf, argument) if chosen else leaf

    return dataclasses.replace(subject, params=map_leaves(change, subject.params))


def int8_inputs(subject: Subject, argument: str, options: Options, work: Work) -> Subject:
    """Inputs of integer weights are rounded to int8 as they come (dynamic quantization)."""
    precision = dataclasses.replace(subject.precision, int8_inputs=True)
    return dataclasses.replace(subject, precision=precision)
