"""Low-rank factorization: SVD, ASVD and SVD-LLM.

Functions of one matrix and of statistics of its inputs X `[tokens, I]`, in float64 on the host. The
methods minimize different errors: `svd` the error of the weights, `asvd` that error scaled by the
size of the inputs, `svdllm` the error of the outputs. On the models in BENCHMARKS.md, `svdllm`
loses the least quality and the other two are about equal; int4 loses less than any of them, in
fewer bytes.

Each is a projection, `W_k = U_k U_k^T W`, on the principal directions U of `W M W^T`. M is the
identity, the diagonal of the inputs' squared sizes, or their Gram matrix X^T X (then U are the
principal directions of the outputs). This equals the papers' `svd(W S) inv(S)` with `S S^T = M`,
but S is neither computed nor inverted, so M may be singular.
"""

import dataclasses
import heapq
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxllm.compress.input_stats import InputStats
from jaxllm.compress.layerwise import (
    LayerInputs,
    get_module,
    map_layers,
    match_linears,
    match_weights,
)
from jaxllm.compress.recipe import (
    Argument,
    Fraction,
    ModelState,
    RuleOptions,
    Shapes,
    StepContext,
    StepSpec,
    match_paths,
    shapes_by_path,
)
from jaxllm.compress.weight_loop import ChangeWeight, change_by_inputs
from jaxllm.errors import ConfigError
from jaxllm.research.low_rank.weight import LowRankFormat, LowRankWeight
from jaxllm.research.pruning.sparsity import parse_share
from jaxllm.runtime.progress import steps_bar
from jaxllm.weights.formats import Weight, parse_format, to_dense, weight_format
from jaxllm.weights.paths import Params, map_leaves

Ranks = dict[str, int | None]  # by path; None keeps the matrix dense


class RankBudget(NamedTuple):
    """How to choose a matrix's rank; one field is set.

    rank: the rank itself. share: share of the matrix's elements that the factors have. energy:
    share of the squared singular values that they keep.
    """

    rank: int | None = None
    share: float | None = None
    energy: float | None = None

    def rank_for(self, sigma_R: np.ndarray, shape: tuple[int, int]) -> int:
        """Return the rank of one matrix."""
        if self.energy is not None:
            return rank_of_energy(sigma_R, self.energy)
        if self.share is not None:
            return rank_of_share(shape, self.share)
        assert self.rank is not None
        return self.rank

    def allocate(self, sigmas: Mapping[str, np.ndarray], shapes: Shapes) -> Ranks:
        """Allocate the share of all matrices' elements with `allocate_ranks`."""
        assert self.share is not None
        matrices = {path: (shapes[path][0], shapes[path][1]) for path in sigmas}
        elements = sum(rows * columns for rows, columns in matrices.values())
        return allocate_ranks(sigmas, matrices, int(self.share * elements))


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


def saves_numbers(shape: tuple[int, int], rank: int) -> bool:
    """Return whether two factors of this rank have fewer elements than the matrix `[O, I]`."""
    return rank * (shape[0] + shape[1]) < shape[0] * shape[1]


def rank_of_energy(sigma_R: np.ndarray, energy: float) -> int:
    """Return the smallest rank that keeps a fraction `energy` of the squared singular values.

    The factors may have more elements than the matrix (see `saves_numbers`).
    """
    if not 0 < energy <= 1:
        raise ConfigError(f"energy out of range: got {energy}, expected above 0 and at most 1")
    kept_R = np.cumsum(sigma_R**2)
    # The sums round, so energy 1 means the last of them.
    return int(np.searchsorted(kept_R, energy * kept_R[-1] * (1 - 1e-15))) + 1


def rank_of_share(shape: tuple[int, int], share: float) -> int:
    """Return the largest rank at which the factors have at most this share of the elements.

    Raises ConfigError if the share is not between 0 and 1, or too small for rank 1.
    """
    if not 0 < share < 1:
        raise ConfigError(f"share to keep out of range: got {share}, expected between 0 and 1")
    if rank := int(shape[0] * shape[1] * share / (shape[0] + shape[1])):
        return rank
    raise ConfigError(f"share {share} is too small: rank 1 of a matrix {shape} needs more")


def allocate_ranks(
    sigmas: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, int]], budget: int
) -> Ranks:
    """Allocate ranks to a model's matrices so that together they have at most `budget` elements.

    Greedy: every matrix starts at rank 1. The next rank goes where it lowers the relative squared
    error most per element, so all outputs count equally, however large they are. If one more rank
    would save nothing, a matrix stays dense (None) and costs its own size.

    Args:
        sigmas: Singular values of each matrix, the largest first.
        shapes: `[O, I]` of each matrix.
        budget: Number of elements.

    Raises:
        ConfigError: If the budget does not cover rank 1 of all matrices.
    """
    ranks: Ranks = dict.fromkeys(sigmas, 1)
    left = budget - sum(map(sum, shapes.values()))
    if left < 0:
        raise ConfigError(f"budget of {budget} elements is {-left} short of rank 1 for all")
    steps = {name: _rank_steps(sigmas[name], shapes[name]) for name in sigmas}
    waiting = [(*step, name) for name in sigmas if (step := next(steps[name], None))]
    heapq.heapify(waiting)
    while waiting:
        _, cost, rank, name = heapq.heappop(waiting)
        if cost > left:
            continue  # this drops the matrix's later ranks too
        left -= cost
        ranks[name] = rank or None
        if step := next(steps[name], None):
            heapq.heappush(waiting, (*step, name))
    return ranks


def _rank_steps(sigma_R: np.ndarray, shape: tuple[int, int]) -> Iterator[tuple[float, int, int]]:
    """Yield (negative gain per element, cost, rank) from rank 2 up; rank 0 is the dense matrix."""
    energy_R = sigma_R**2 / max((sigma_R**2).sum(), np.finfo(np.float64).tiny)
    cost, rank = sum(shape), 1
    while saves_numbers(shape, rank + 1):
        yield -energy_R[rank] / cost, cost, rank + 1
        rank += 1
    if (left := shape[0] * shape[1] - rank * cost) > 0:
        yield -energy_R[rank:].sum() / left, left, 0


RANK_BUDGET = Argument("RANK|KEPT%|energy:KEPT%", parse_rank_budget)


Decompose = Callable[[np.ndarray, InputStats, Any], "SVDResult"]  # the last: the options


class SVDResult(NamedTuple):
    """A decomposed matrix: `weight = left_OR @ right_RI`, where R is the shorter side.

    left_OR: orthonormal columns, the most important first. sigma_R: singular values of `W S` (see
    the module); values below 1e-8 times the largest are noise.
    """

    left_OR: np.ndarray
    sigma_R: np.ndarray
    right_RI: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the matrix, `[O, I]`."""
        return self.left_OR.shape[0], self.right_RI.shape[1]


class FactorOptions(RuleOptions, frozen=True):
    """format: of both factors; "" means that of the matrix. ranks: "even" chooses each matrix's
    rank separately, "spread" allocates ranks where they lower relative errors most.
    """

    format: str = ""
    ranks: Literal["even", "spread"] = "even"


class AsvdOptions(FactorOptions, frozen=True):
    """alpha: exponent of an input's size."""

    alpha: Fraction = 0.5


def svd(context: StepContext[FactorOptions]) -> ModelState:
    """Replace matrices by the low-rank factors nearest to the weights."""
    state, options = context.state, context.options
    leaves = match_weights(state.params, options.on, "factor: svd")
    budget = parse_rank_budget(context.argument)
    with steps_bar("SVD", len(leaves), context.show_progress) as done:

        def decompose(weight: Weight) -> SVDResult:
            spectrum = decompose_svd(_array(weight))
            done()
            return spectrum

        ranks: Ranks | None = None
        if options.ranks == "spread":
            sigmas = {path: decompose(leaf).sigma_R for path, leaf in leaves.items()}
            ranks = budget.allocate(sigmas, shapes_by_path(state.params))

        def change(path: str, leaf: Weight) -> Weight:
            if path not in leaves:
                return leaf
            spectrum = decompose(leaf)
            rank = ranks[path] if ranks else budget.rank_for(spectrum.sigma_R, spectrum.shape)
            return _factor_weight(path, leaf, spectrum, rank, context)

        return dataclasses.replace(state, params=map_leaves(change, state.params))


def check_factors(shapes: Shapes, argument: str, options: FactorOptions) -> None:
    """Raise ConfigError for a rank above a matrix's own, a share too small for rank 1, ranks=spread
    without a share, and an unknown format.
    """
    budget = parse_rank_budget(argument)
    if options.ranks == "spread" and budget.share is None:
        raise ConfigError("ranks=spread requires a share KEPT%, such as 80%")
    if options.format:
        parse_format(f"rank1/{options.format}")
    for path in match_paths(shapes, options.on, argument):
        shape = shapes[path]
        if len(shape) != 2:
            raise ConfigError(f"{path} is a stack of matrices {shape}: exclude it with on=")
        if budget.rank is not None and budget.rank > min(shape):
            raise ConfigError(
                f"{path} {shape}: rank {budget.rank} is above the maximum {min(shape)}"
            )
        if budget.share is not None:
            rank_of_share((shape[0], shape[1]), budget.share)


def factor_by_inputs(
    name: str, decompose: Decompose, context: StepContext[FactorOptions]
) -> ModelState:
    """Replace matrices by the low-rank factors that `decompose` finds, given their inputs."""
    budget, ranks = parse_rank_budget(context.argument), None
    if context.options.ranks == "spread":
        sigmas = _collect_sigmas(name, decompose, context)
        ranks = budget.allocate(sigmas, shapes_by_path(context.state.params))

    def prepare(stats: InputStats, where: str) -> ChangeWeight:
        def change(path: str, weight: Weight) -> Weight:
            spectrum = decompose(_array(weight), stats, context.options)
            rank = ranks[path] if ranks else budget.rank_for(spectrum.sigma_R, spectrum.shape)
            return _factor_weight(path, weight, spectrum, rank, context)

        return change

    return change_by_inputs(context, name, prepare)


def _collect_sigmas(
    name: str, decompose: Decompose, context: StepContext[FactorOptions]
) -> dict[str, np.ndarray]:
    """Return the singular values by path, with inputs computed by the unchanged model."""
    state, options = context.state, context.options
    sigmas: dict[str, np.ndarray] = {}

    def record_spectra(layer: LayerInputs) -> Params:
        for site, linears in match_linears(layer, options.on):
            stats = layer.input_stats(layer.params, site)
            for linear in linears:
                w_OI = _array(get_module(layer.params, linear)["weight"])
                sigmas[f"{layer.path}.{linear}.weight"] = decompose(w_OI, stats, options).sigma_R
        return layer.params

    map_layers(
        state.model,
        state.params,
        context.token_NT,
        record_spectra,
        name=f"{name}: ranks",
        show_progress=context.show_progress,
    )
    return sigmas


def _factor_weight(
    path: str,
    weight: Weight,
    spectrum: SVDResult,
    rank: int | None,
    context: StepContext[FactorOptions],
) -> Weight:
    """Return the factors; or the weight itself, with a log line, if they would not be smaller."""
    if rank is None:
        return weight
    if not saves_numbers(spectrum.shape, rank):
        context.log(f"{path}: rank {rank} of {spectrum.shape} saves nothing, kept dense")
        return weight
    return as_factored(spectrum, rank, context.options.format or weight_format(weight))


def _array(weight: Weight) -> np.ndarray:
    return np.asarray(to_dense(weight, jnp.float32))


def decompose_svd(weight_OI: np.ndarray) -> SVDResult:
    """Return the singular value decomposition. Raises ConfigError if a weight is not finite."""
    return _decompose(weight_OI, np.ones(weight_OI.shape[1]))


def decompose_asvd(weight_OI: np.ndarray, mean_abs_I: np.ndarray, *, alpha: float) -> SVDResult:
    """Decompose as ASVD (arXiv 2312.05821): `W diag(s)`, s = (mean |x|)^alpha, in the paper 0.5.

    mean_abs_I: mean |x_j| of each input. Raises ConfigError if all are zero or one is not finite.
    """
    size_I = _check_finite("mean |x|", mean_abs_I)
    _check_inputs(weight_OI, size_I.shape, size_I.max(initial=0))
    return _decompose(weight_OI, size_I ** (2 * alpha))


def decompose_svd_llm(weight_OI: np.ndarray, gram_II: np.ndarray) -> SVDResult:
    """Decompose as SVD-LLM (arXiv 2403.07378): `W S`, where S is the Cholesky factor of X^T X.

    Truncation gives the rank-k matrix with the least output error, which is
    the norm of the singular values left out. Raises ConfigError if all inputs are zero or a number
    is not finite.
    """
    g_II = _check_finite("X^T X", gram_II)
    for side in (g_II.shape[:1], g_II.shape[1:]):
        _check_inputs(weight_OI, side, np.trace(g_II))
    return _decompose(weight_OI, (g_II + g_II.T) / 2)


def _decompose(weight_OI: np.ndarray, measure: np.ndarray) -> SVDResult:
    """Decompose by the eigenvectors of `W M W^T`. measure: M `[I, I]`, or its diagonal `[I]`."""
    w_OI = _check_finite("the weight", weight_OI)
    basis_OR = None
    if w_OI.shape[0] > w_OI.shape[1]:  # an orthonormal basis of its columns
        basis_OR, w_OI = np.linalg.qr(w_OI)
    by_RI = w_OI * measure if measure.ndim == 1 else w_OI @ measure
    squares_R, left = np.linalg.eigh(by_RI @ w_OI.T)
    left, sigma_R = left[:, ::-1], np.sqrt(np.maximum(squares_R[::-1], 0))
    return SVDResult(left if basis_OR is None else basis_OR @ left, sigma_R, left.T @ w_OI)


def split_factors(spectrum: SVDResult, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return factors `[O, K]` and `[K, I]`, float64, with column and row norms balanced."""
    right_KI = spectrum.right_RI[:rank]
    root_K = np.sqrt(np.linalg.norm(right_KI, axis=1))
    safe_K = np.where(root_K == 0, 1, root_K)
    return spectrum.left_OR[:, :rank] * safe_K, right_KI / safe_K[:, None]


def as_factored(spectrum: SVDResult, rank: int, inner: str) -> LowRankWeight:
    """Return the low-rank weight, its factors in the format `inner`."""
    format = parse_format(f"rank{rank}/{inner}")
    assert isinstance(format, LowRankFormat)
    return format.from_factors(*split_factors(spectrum, rank))


def _check_finite(what: str, array: np.ndarray) -> np.ndarray:
    wide = np.asarray(array).astype(np.float64)
    if not np.isfinite(wide).all():
        raise ConfigError(f"{what} holds NaN or infinity")
    return wide


def _check_inputs(w_OI: np.ndarray, shape: tuple[int, ...], size: float) -> None:
    if shape != w_OI.shape[1:]:
        raise ConfigError(
            f"input statistics have shape {shape}, expected {w_OI.shape[1:]} of the matrix"
        )
    if not size > 0:
        raise ConfigError("all inputs are zero: the approximation is undefined")


SVD = StepSpec(
    "factor",
    "svd",
    svd,
    "low-rank factors that approximate the weights best",
    RANK_BUDGET,
    FactorOptions,
    needs_calibration=False,
    check=check_factors,
)
ASVD = StepSpec(
    "factor",
    "asvd",
    partial(
        factor_by_inputs,
        "ASVD",
        lambda w_OI, stats, options: decompose_asvd(
            w_OI, np.asarray(stats.mean_abs_I), alpha=options.alpha
        ),
    ),
    "low-rank factors that approximate the weights times input size best",
    RANK_BUDGET,
    AsvdOptions,
    check=check_factors,
)
SVD_LLM = StepSpec(
    "factor",
    "svdllm",
    partial(
        factor_by_inputs,
        "SVD-LLM",
        lambda w_OI, stats, _: decompose_svd_llm(w_OI, np.asarray(stats.gram_II)),
    ),
    "low-rank factors that approximate the outputs best",
    RANK_BUDGET,
    FactorOptions,
    check=check_factors,
)
