"""Low-rank factorization of a model's matrices: SVD, ASVD, SVD-LLM."""

import dataclasses
import re
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxllm.compress.layers.moments import Moments
from jaxllm.compress.layers.stream import Stage, at, each_layer, put
from jaxllm.compress.matrices import lowrank
from jaxllm.compress.matrices.lowrank import Spectrum
from jaxllm.compress.matrices.sparsity import share
from jaxllm.compress.methods.walk import chosen_of, layer_by_layer, single
from jaxllm.compress.recipe import (
    Argument,
    Fraction,
    On,
    Shapes,
    Subject,
    Work,
    matched,
    shapes_of,
)
from jaxllm.errors import ConfigError
from jaxllm.progress import steps_bar
from jaxllm.weights.formats import Weight, dense, format_of, parse
from jaxllm.weights.paths import Params, map_leaves

Decompose = Callable[[np.ndarray, Moments], Spectrum]
Ranks = dict[str, int | None]  # by path; None keeps the matrix dense


class Factor(On, frozen=True):
    """format: of both factors; "" means that of the matrix. ranks: "even" chooses each matrix's
    rank separately, "spread" allocates ranks where they lower relative errors most.
    """

    format: str = ""
    ranks: Literal["even", "spread"] = "even"


class Asvd(Factor, frozen=True):
    """alpha: exponent of an input's size."""

    alpha: Fraction = 0.5


class Size(NamedTuple):
    """How to choose a matrix's rank; one field is set.

    rank: the rank itself. kept: share of the matrix's elements that the factors have. energy: share
    of the squared singular values that they keep.
    """

    rank: int | None = None
    kept: float | None = None
    energy: float | None = None

    def of(self, spectrum: Spectrum) -> int:
        """Return the rank of one matrix."""
        if self.energy is not None:
            return lowrank.rank_of_energy(spectrum.sigma_R, self.energy)
        if self.kept is not None:
            return lowrank.rank_of_share(spectrum.shape, self.kept)
        assert self.rank is not None
        return self.rank


def size(text: str) -> Size:
    """Parse `64` (a rank), `80%` (of the elements), `energy:95%` (of the squared singular values).

    Raises ConfigError for anything else.
    """
    if re.fullmatch(r"[1-9]\d{0,6}", text):
        return Size(rank=int(text))
    try:
        energy = text.removeprefix("energy:")
        return Size(kept=share(text)) if energy == text else Size(energy=share(energy))
    except ConfigError as error:
        raise ConfigError(
            f"size must be a rank such as 64, a share, or energy:95%: {error}"
        ) from None


SIZE = Argument("RANK|KEPT%|energy:KEPT%", size)


def svd(subject: Subject, argument: str, options: Factor, work: Work) -> Subject:
    """Replace matrices by the low-rank factors nearest to the weights."""
    leaves, wanted = single(subject.params, options.on, "factor: svd"), size(argument)
    with steps_bar("SVD", len(leaves), work.show_progress) as done:

        def decomposed(weight: Weight) -> Spectrum:
            found = lowrank.plain(_array(weight))
            done()
            return found

        ranks: Ranks | None = None
        if options.ranks == "spread":
            sigmas = {path: decomposed(leaf).sigma_R for path, leaf in leaves.items()}
            ranks = _spread(sigmas, shapes_of(subject.params), wanted)

        def change(path: str, leaf: Weight) -> Weight:
            if path not in leaves:
                return leaf
            spectrum = decomposed(leaf)
            rank = wanted.of(spectrum) if ranks is None else ranks[path]
            return _factored(path, leaf, spectrum, rank, options, work)

        return dataclasses.replace(subject, params=map_leaves(change, subject.params))


def asvd(subject: Subject, argument: str, options: Asvd, work: Work) -> Subject:
    """Replace matrices by low-rank factors, weighting each column by its input's size (ASVD)."""

    def decompose(w_OI: np.ndarray, moments: Moments) -> Spectrum:
        return lowrank.scaled(w_OI, np.asarray(moments.mean_abs_I), alpha=options.alpha)

    return _by_inputs(subject, argument, options, work, "ASVD", decompose)


def svdllm(subject: Subject, argument: str, options: Factor, work: Work) -> Subject:
    """Replace matrices by the low-rank factors with the nearest outputs (SVD-LLM)."""

    def decompose(w_OI: np.ndarray, moments: Moments) -> Spectrum:
        return lowrank.whitened(w_OI, np.asarray(moments.gram_II))

    return _by_inputs(subject, argument, options, work, "SVD-LLM", decompose)


def check(shapes: Shapes, argument: str, options: Factor) -> None:
    """Raise ConfigError for a rank above a matrix's own, a share too small for rank 1, ranks=spread
    without a share, and an unknown format.
    """
    wanted = size(argument)
    if options.ranks == "spread" and wanted.kept is None:
        raise ConfigError("ranks=spread requires a share KEPT%, such as 80%")
    if options.format:
        parse(f"rank1/{options.format}")
    for path in matched(shapes, options.on, argument):
        shape = shapes[path]
        if len(shape) != 2:
            raise ConfigError(f"{path} is a stack of matrices {shape}: exclude it with on=")
        if wanted.rank is not None and wanted.rank > min(shape):
            raise ConfigError(
                f"{path} {shape}: rank {wanted.rank} is above the maximum {min(shape)}"
            )
        if wanted.kept is not None:
            lowrank.rank_of_share((shape[0], shape[1]), wanted.kept)


def _by_inputs(
    subject: Subject, argument: str, options: Factor, work: Work, name: str, decompose: Decompose
) -> Subject:
    wanted, ranks = size(argument), None
    if options.ranks == "spread":
        ranks = _spread_by_inputs(subject, wanted, options, work, name, decompose)

    def change(stage: Stage) -> Params:
        params = stage.params
        for site, linears in chosen_of(stage, options.on):
            moments = stage.moments(params, site)
            for linear in linears:
                path, weight = f"{stage.path}.{linear}.weight", at(params, linear)["weight"]
                spectrum = decompose(_array(weight), moments)
                rank = wanted.of(spectrum) if ranks is None else ranks[path]
                leaf = _factored(path, weight, spectrum, rank, options, work)
                params = put(params, linear, weight=leaf)
        return params

    return layer_by_layer(subject, work, name, change)


def _spread_by_inputs(
    subject: Subject, wanted: Size, options: Factor, work: Work, name: str, decompose: Decompose
) -> Ranks:
    """Allocate ranks, with inputs computed by the unchanged model."""
    assert work.calibration is not None
    sigmas: dict[str, np.ndarray] = {}

    def look(stage: Stage) -> Params:
        for site, linears in chosen_of(stage, options.on):
            moments = stage.moments(stage.params, site)
            for linear in linears:
                w_OI = _array(at(stage.params, linear)["weight"])
                sigmas[f"{stage.path}.{linear}.weight"] = decompose(w_OI, moments).sigma_R
        return stage.params

    token_NT, show = work.calibration.token_NT, work.show_progress
    each_layer(
        subject.model, subject.params, token_NT, look, name=f"{name}: ranks", show_progress=show
    )
    return _spread(sigmas, shapes_of(subject.params), wanted)


def _spread(sigmas: dict[str, np.ndarray], shapes: Shapes, wanted: Size) -> Ranks:
    mine = {path: (shapes[path][0], shapes[path][1]) for path in sigmas}
    assert wanted.kept is not None
    budget = int(wanted.kept * sum(rows * columns for rows, columns in mine.values()))
    return lowrank.share_ranks(sigmas, mine, budget)


def _factored(
    path: str, weight: Weight, spectrum: Spectrum, rank: int | None, options: Factor, work: Work
) -> Weight:
    """Return the factors; or the weight itself, with a log line, if they would not be smaller."""
    if rank is None:
        return weight
    if not lowrank.gains(spectrum.shape, rank):
        work.say(f"{path}: rank {rank} of {spectrum.shape} saves nothing, kept dense")
        return weight
    return lowrank.as_factored(spectrum, rank, options.format or format_of(weight))


def _array(weight: Weight) -> np.ndarray:
    return np.asarray(dense(weight, jnp.float32))
