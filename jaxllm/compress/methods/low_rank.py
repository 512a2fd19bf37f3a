"""Low-rank factorization of a model's matrices: SVD, ASVD, SVD-LLM."""

import dataclasses
import re
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxllm.compress.layers.input_stats import InputStats
from jaxllm.compress.layers.layerwise import LayerInputs, get_module, map_layers, replace_leaves
from jaxllm.compress.matrices import low_rank
from jaxllm.compress.matrices.low_rank import SVDResult
from jaxllm.compress.matrices.sparsity import parse_share
from jaxllm.compress.methods.layer_loop import match_linears, match_weights, run_layerwise
from jaxllm.compress.recipe import (
    Argument,
    Fraction,
    ModelState,
    RuleOptions,
    Shapes,
    StepContext,
    match_paths,
    shapes_by_path,
)
from jaxllm.errors import ConfigError
from jaxllm.runtime.progress import steps_bar
from jaxllm.weights.formats import Weight, parse_format, to_dense, weight_format
from jaxllm.weights.paths import Params, map_leaves

Decompose = Callable[[np.ndarray, InputStats], SVDResult]
Ranks = dict[str, int | None]  # by path; None keeps the matrix dense


class FactorOptions(RuleOptions, frozen=True):
    """format: of both factors; "" means that of the matrix. ranks: "even" chooses each matrix's
    rank separately, "spread" allocates ranks where they lower relative errors most.
    """

    format: str = ""
    ranks: Literal["even", "spread"] = "even"


class AsvdOptions(FactorOptions, frozen=True):
    """alpha: exponent of an input's size."""

    alpha: Fraction = 0.5


class RankBudget(NamedTuple):
    """How to choose a matrix's rank; one field is set.

    rank: the rank itself. kept: share of the matrix's elements that the factors have. energy: share
    of the squared singular values that they keep.
    """

    rank: int | None = None
    share: float | None = None
    energy: float | None = None

    def rank_for(self, spectrum: SVDResult) -> int:
        """Return the rank of one matrix."""
        if self.energy is not None:
            return low_rank.rank_of_energy(spectrum.sigma_R, self.energy)
        if self.share is not None:
            return low_rank.rank_of_share(spectrum.shape, self.share)
        assert self.rank is not None
        return self.rank


def parse_rank_budget(text: str) -> RankBudget:
    """Parse `64` (a rank), `80%` (of the elements), `energy:95%` (of the squared singular values).

    Raises ConfigError for anything else.
    """
    if re.fullmatch(r"[1-9]\d{0,6}", text):
        return RankBudget(rank=int(text))
    try:
        energy = text.removeprefix("energy:")
        return (
            RankBudget(share=parse_share(text))
            if energy == text
            else RankBudget(energy=parse_share(energy))
        )
    except ConfigError as error:
        raise ConfigError(
            f"size must be a rank such as 64, a share, or energy:95%: {error}"
        ) from None


SIZE = Argument("RANK|KEPT%|energy:KEPT%", parse_rank_budget)


def svd(
    state: ModelState, argument: str, options: FactorOptions, context: StepContext
) -> ModelState:
    """Replace matrices by the low-rank factors nearest to the weights."""
    leaves, wanted = (
        match_weights(state.params, options.on, "factor: svd"),
        parse_rank_budget(argument),
    )
    with steps_bar("SVD", len(leaves), context.show_progress) as done:

        def decompose(weight: Weight) -> SVDResult:
            found = low_rank.svd(_array(weight))
            done()
            return found

        ranks: Ranks | None = None
        if options.ranks == "spread":
            sigmas = {path: decompose(leaf).sigma_R for path, leaf in leaves.items()}
            ranks = _allocate_ranks(sigmas, shapes_by_path(state.params), wanted)

        def change(path: str, leaf: Weight) -> Weight:
            if path not in leaves:
                return leaf
            spectrum = decompose(leaf)
            rank = wanted.rank_for(spectrum) if ranks is None else ranks[path]
            return _factor_weight(path, leaf, spectrum, rank, options, context)

        return dataclasses.replace(state, params=map_leaves(change, state.params))


def asvd(
    state: ModelState, argument: str, options: AsvdOptions, context: StepContext
) -> ModelState:
    """Replace matrices by low-rank factors, weighting each column by its input's size (ASVD)."""

    def decompose(w_OI: np.ndarray, stats: InputStats) -> SVDResult:
        return low_rank.asvd(w_OI, np.asarray(stats.mean_abs_I), alpha=options.alpha)

    return _factor_by_inputs(state, argument, options, context, "ASVD", decompose)


def svdllm(
    state: ModelState, argument: str, options: FactorOptions, context: StepContext
) -> ModelState:
    """Replace matrices by the low-rank factors with the nearest outputs (SVD-LLM)."""

    def decompose(w_OI: np.ndarray, stats: InputStats) -> SVDResult:
        return low_rank.svd_llm(w_OI, np.asarray(stats.gram_II))

    return _factor_by_inputs(state, argument, options, context, "SVD-LLM", decompose)


def check_factors(shapes: Shapes, argument: str, options: FactorOptions) -> None:
    """Raise ConfigError for a rank above a matrix's own, a share too small for rank 1, ranks=spread
    without a share, and an unknown format.
    """
    wanted = parse_rank_budget(argument)
    if options.ranks == "spread" and wanted.share is None:
        raise ConfigError("ranks=spread requires a share KEPT%, such as 80%")
    if options.format:
        parse_format(f"rank1/{options.format}")
    for path in match_paths(shapes, options.on, argument):
        shape = shapes[path]
        if len(shape) != 2:
            raise ConfigError(f"{path} is a stack of matrices {shape}: exclude it with on=")
        if wanted.rank is not None and wanted.rank > min(shape):
            raise ConfigError(
                f"{path} {shape}: rank {wanted.rank} is above the maximum {min(shape)}"
            )
        if wanted.share is not None:
            low_rank.rank_of_share((shape[0], shape[1]), wanted.share)


def _factor_by_inputs(
    state: ModelState,
    argument: str,
    options: FactorOptions,
    context: StepContext,
    name: str,
    decompose: Decompose,
) -> ModelState:
    wanted, ranks = parse_rank_budget(argument), None
    if options.ranks == "spread":
        ranks = _allocate_by_inputs(state, wanted, options, context, name, decompose)

    def change(layer: LayerInputs) -> Params:
        params = layer.params
        for site, linears in match_linears(layer, options.on):
            moments = layer.input_stats(params, site)
            for linear in linears:
                path, weight = f"{layer.path}.{linear}.weight", get_module(params, linear)["weight"]
                spectrum = decompose(_array(weight), moments)
                rank = wanted.rank_for(spectrum) if ranks is None else ranks[path]
                leaf = _factor_weight(path, weight, spectrum, rank, options, context)
                params = replace_leaves(params, linear, weight=leaf)
        return params

    return run_layerwise(state, context, name, change)


def _allocate_by_inputs(
    state: ModelState,
    rank_budget: RankBudget,
    options: FactorOptions,
    context: StepContext,
    name: str,
    decompose: Decompose,
) -> Ranks:
    """Allocate ranks, with inputs computed by the unchanged model."""
    assert context.calibration is not None
    sigmas: dict[str, np.ndarray] = {}

    def record_spectra(layer: LayerInputs) -> Params:
        for site, linears in match_linears(layer, options.on):
            moments = layer.input_stats(layer.params, site)
            for linear in linears:
                w_OI = _array(get_module(layer.params, linear)["weight"])
                sigmas[f"{layer.path}.{linear}.weight"] = decompose(w_OI, moments).sigma_R
        return layer.params

    token_NT, show = context.calibration.token_NT, context.show_progress
    map_layers(
        state.model,
        state.params,
        token_NT,
        record_spectra,
        name=f"{name}: ranks",
        show_progress=show,
    )
    return _allocate_ranks(sigmas, shapes_by_path(state.params), rank_budget)


def _allocate_ranks(
    sigmas: dict[str, np.ndarray], shapes: Shapes, rank_budget: RankBudget
) -> Ranks:
    mine = {path: (shapes[path][0], shapes[path][1]) for path in sigmas}
    assert rank_budget.share is not None
    budget = int(rank_budget.share * sum(rows * columns for rows, columns in mine.values()))
    return low_rank.allocate_ranks(sigmas, mine, budget)


def _factor_weight(
    path: str,
    weight: Weight,
    spectrum: SVDResult,
    rank: int | None,
    options: FactorOptions,
    context: StepContext,
) -> Weight:
    """Return the factors; or the weight itself, with a log line, if they would not be smaller."""
    if rank is None:
        return weight
    if not low_rank.saves_numbers(spectrum.shape, rank):
        context.log(f"{path}: rank {rank} of {spectrum.shape} saves nothing, kept dense")
        return weight
    return low_rank.as_factored(spectrum, rank, options.format or weight_format(weight))


def _array(weight: Weight) -> np.ndarray:
    return np.asarray(to_dense(weight, jnp.float32))
