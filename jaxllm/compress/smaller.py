"""Steps that leave fewer numbers: two thin factors for a matrix; fewer heads, channels, layers."""

import dataclasses
from typing import Annotated, Any

import jax.numpy as jnp
import msgspec
import numpy as np

from jaxllm.compress import influence, lowrank, salience, structure
from jaxllm.compress.layers import Linear, by_inputs
from jaxllm.compress.moments import Moments
from jaxllm.compress.recipe import Fraction, On, Options, Subject, Work
from jaxllm.compress.salience import SALIENCES
from jaxllm.compress.sparsity import share
from jaxllm.errors import ConfigError
from jaxllm.weights.formats import Weight, dense, format_of, parse
from jaxllm.weights.paths import first_match, map_leaves

Ends = Annotated[int, msgspec.Meta(ge=-1)]


class Factors(On, frozen=True):
    """format: of the factors; by default as the matrix is."""

    format: str = ""


class Scaled(Factors, frozen=True):
    """alpha: the power of an input's mean size that its column is times."""

    alpha: Fraction = 0.5


class Groups(Options, frozen=True):
    """by: what a group counts for: magnitude, inputs, first or second order of the loss."""

    by: str = "first"


class Layers(Options, frozen=True):
    """by: influence of single layers, or angle of a run. first, last: how many at either end stay;
    -1 as in the paper, 4 and 2 of 32.
    """

    by: str = "influence"
    first: Ends = -1
    last: Ends = -1


def svd(subject: Subject, argument: str, options: Factors, work: Work) -> Subject:
    """Two factors that are nearest to the weights."""

    def change(path: str, leaf: Weight) -> Weight:
        if leaf.ndim < 2 or not first_match([(options.on, True)], path):
            return leaf
        return _factored(leaf, argument, options, lowrank.plain(_array(leaf)))

    return dataclasses.replace(subject, params=map_leaves(change, subject.params))


def asvd(subject: Subject, argument: str, options: Scaled, work: Work) -> Subject:
    """Two factors that are nearest to the weights times the size of their inputs."""

    def prepare(moments: Moments, where: str) -> Linear:
        def change(path: str, weight: Weight) -> Weight:
            size_I = np.asarray(moments.mean_abs_I)
            found = lowrank.scaled(_array(weight), size_I, alpha=options.alpha)
            return _factored(weight, argument, options, found)

        return change

    return by_inputs(subject, options, work, f"ASVD, {argument} kept", prepare)


def svdllm(subject: Subject, argument: str, options: Factors, work: Work) -> Subject:
    """Two factors whose outputs are nearest."""
    raised: list[str] = []

    def prepare(moments: Moments, where: str) -> Linear:
        def change(path: str, weight: Weight) -> Weight:
            found = lowrank.whitened(_array(weight), np.asarray(moments.gram_II))
            if found.raised:
                raised.append(path)
            return _factored(weight, argument, options, found)

        return change

    made = by_inputs(subject, options, work, f"SVD-LLM, {argument} kept", prepare)
    if raised:
        work.say(
            f"{len(raised)} matrices, such as {raised[0]}, have inputs that depend on each other to"
            " the precision of float32: the diagonals of X^T X were raised"
        )
    return made


def heads(subject: Subject, argument: str, options: Groups, work: Work) -> Subject:
    """Cut key/value heads with the query heads that share them."""
    return _narrower(subject, "heads", argument, options, work)


def channels(subject: Subject, argument: str, options: Groups, work: Work) -> Subject:
    """Cut channels of the MLPs."""
    return _narrower(subject, "channels", argument, options, work)


def layers(subject: Subject, argument: str, options: Layers, work: Work) -> Subject:
    """Cut layers that change the stream least."""
    assert work.calibration is not None
    model, count, token_NT = subject.model, subject.config.num_hidden_layers, _rows(work)
    gone = structure.removed(count, amount(argument), "layers")
    papers = influence.kept_at_ends(count)
    first, last = (
        paper if own < 0 else own
        for own, paper in zip((options.first, options.last), papers, strict=True)
    )
    if options.by == "influence":
        measured = influence.block_influence(model, subject.params, token_NT)
        kept = influence.without_least(measured, gone, first, last)
    else:
        measured = influence.angular_distance(model, subject.params, token_NT, gone)
        kept = influence.without_run(measured, gone, first, last)
    work.say(f"layers {', '.join(str(i) for i in range(count) if i not in kept)} go")
    config, params = structure.cut_layers(subject.config, subject.params, kept)
    return dataclasses.replace(subject, config=config, params=params)


def amount(text: str) -> float | int:
    """How much of something goes: `25%` of it, or 2. Raises ConfigError."""
    return int(text) if text.isdigit() and int(text) > 0 else share(text)


def check_factors(shapes: Any, argument: str, options: Factors) -> None:
    """Raise ConfigError for a format that factors cannot have."""
    if options.format:
        parse(f"rank1/{options.format}")


def check_groups(shapes: Any, argument: str, options: Groups) -> None:
    """Raise ConfigError for a salience that there is not."""
    if options.by not in SALIENCES:
        raise ConfigError(f"by is one of {', '.join(SALIENCES)}, got {options.by!r:.40}")


def check_layers(shapes: Any, argument: str, options: Layers) -> None:
    """Raise ConfigError for a measure that there is not."""
    if options.by not in ("influence", "angle"):
        raise ConfigError(f"by is influence or angle, got {options.by!r:.40}")


def _factored(
    weight: Weight, argument: str, options: Factors, spectrum: lowrank.Spectrum
) -> Weight:
    rank = lowrank.rank_of_share(spectrum.shape, share(argument))
    return lowrank.as_factored(spectrum, rank, options.format or format_of(weight))


def _array(weight: Weight) -> np.ndarray:
    return np.asarray(dense(weight, jnp.float32))


def _narrower(
    subject: Subject, kind: structure.Kind, argument: str, options: Groups, work: Work
) -> Subject:
    total = structure.groups(subject.config, kind)
    gone = structure.removed(total, amount(argument), kind)
    structure.narrower(subject.config, kind, total - gone)  # refused before the work
    by: Any = options.by
    found = salience.salience(
        subject.model, subject.params, kind, by, _rows(work), show_progress=work.show_progress
    )
    kept = [layer.tolist() for layer in salience.least(found, gone)]
    config, params = structure.cut(subject.config, subject.params, kind, kept)
    return dataclasses.replace(subject, config=config, params=params)


def _rows(work: Work) -> np.ndarray:
    assert work.calibration is not None
    return work.calibration.token_NT
