"""Perplexity of a text under a model, with its standard error, and loss by position in the window.

The losses are grouped by the number of tokens before each in its window; the sums over all buckets
are those of the whole text. The loss keeps falling with the position if a model uses distant
tokens, and rises beyond the length it was trained for.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.evaluate.likelihood.data import Batch, Loader
from jaxllm.evaluate.likelihood.score import Columns, check_loader, run_batches, score
from jaxllm.files.plots import save_figure
from jaxllm.models.inputs import check_model
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over tokens and its standard error."""

    mean: float
    error: float

    @classmethod
    def from_values(cls, values_N: np.ndarray) -> "Estimate":
        """Return the mean of N values and its error s / sqrt(N), s the sample standard deviation.

        Computed in float64. Assumes independent tokens, as llama-perplexity does. The error of a
        single value is NaN.
        """
        values_N = np.asarray(values_N, np.float64)
        n = values_N.size
        error = values_N.std(ddof=1) / math.sqrt(n) if n > 1 else math.nan
        return cls(float(values_N.mean()), float(error))

    def exp(self) -> "Estimate":
        """Return the exponential; its error is `exp(mean) * error`, to first order.

        For the mean negative log-likelihood this is perplexity with llama-perplexity's "+/-".
        """
        # A mean above 709 nats overflows to infinity.
        with np.errstate(over="ignore", invalid="ignore"):
            mean = np.exp(np.float64(self.mean))
            return Estimate(float(mean), float(mean * self.error))


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """`exp` of the mean negative log-likelihood (nats per token) of the scored tokens."""

    tokens: int
    perplexity: Estimate
    nll: Estimate

    @classmethod
    def from_logprobs(cls, logprob_N: np.ndarray) -> "Perplexity":
        """Compute perplexity from the log-probability of each token."""
        nll = Estimate.from_values(-np.asarray(logprob_N, np.float64))
        return cls(int(np.size(logprob_N)), nll.exp(), nll)


def measures_to_json(measures: Any) -> dict[str, Any]:
    """Return the fields of a `Perplexity`, or of a `Divergence` without its perplexities.

    An estimate becomes two numbers, its own name and that with `_error` after it.
    """
    numbers: dict[str, Any] = {}
    for name, value in vars(measures).items():
        if isinstance(value, Estimate):
            numbers |= {name: value.mean, f"{name}_error": value.error}
        elif not isinstance(value, Perplexity):
            numbers[name] = value
    return numbers


def perplexity(
    model: Model,
    params: Params,
    loader: Loader,
    *,
    journal: Path | None = None,
    show_progress: bool | None = None,
) -> Perplexity:
    """Compute perplexity over the loader's scored tokens.

    Args:
        journal: File from which an interrupted evaluation resumes (see `score.run_batches`).

    Raises:
        TokenError: For ids outside the vocabulary.
        CapacityError: For windows longer than the model's context.
        NonFiniteError: If the model returns NaN or infinity.
        CheckpointError: For the journal of another evaluation.
    """
    return Perplexity.from_logprobs(
        token_logprobs(model, params, loader, journal=journal, show_progress=show_progress)
    )


def token_logprobs(
    model: Model,
    params: Params,
    loader: Loader,
    *,
    journal: Path | None = None,
    show_progress: bool | None = None,
) -> np.ndarray:
    """Return the log-probability of every scored token, float32 `[N]`, in the loader's order."""
    check_model(model, params)
    check_loader(model, loader)

    def score_batch(batch: Batch) -> Columns:
        return {"logprob": score(model, params, batch).logprob_BT[batch.scored_BT]}

    columns = run_batches(
        loader,
        score_batch,
        models={"model": (model, params)},
        journal=journal,
        description="perplexity",
        summary=_describe_progress,
        show_progress=show_progress,
    )
    return columns["logprob"]


def _describe_progress(columns: Columns) -> str:
    result = Perplexity.from_logprobs(columns["logprob"])
    return f"perplexity {result.perplexity.mean:.5f} over {result.tokens:,} tokens"


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The scored tokens at positions from `start` to `stop` (exclusive) in their window.

    tokens: their number. total: sum of their negative log-likelihoods, in nats. nll: the mean, in
    nats per token; None without tokens.
    """

    start: int
    stop: int
    tokens: int
    total: float
    nll: Estimate | None


def token_positions(loader: Loader) -> np.ndarray:
    """Return the position of each scored token in its window, int32 `[N]`.

    In the order of `token_logprobs`. Runs no model.
    """
    positions = [batch.position_BT[batch.scored_BT] for batch in loader.batches()]
    return np.concatenate(positions).astype(np.int32)


def bucket_edges(width: int, buckets: int | None = None) -> list[int]:
    """Return the edges of buckets for windows of `width` tokens, from 1 to `width`.

    buckets: number of buckets of equal size, up to rounding; by default each bucket is twice as
    large as the one before it. Raises ConfigError unless 1 <= buckets < width.
    """
    if buckets is None:
        return [*(1 << i for i in range((width - 1).bit_length())), width]
    if not 1 <= buckets < width:
        raise ConfigError(
            f"buckets must be from 1 to {width - 1}, the predicted positions of a window of"
            f" {width} tokens: got {buckets}"
        )
    return [1 + (width - 1) * i // buckets for i in range(buckets)] + [width]


def bucket_losses(
    logprob_N: np.ndarray, position_N: np.ndarray, edges: Sequence[int]
) -> list[Bucket]:
    """Group losses by position, in float64.

    logprob_N: natural logarithms, in the order of position_N. edges: ascending, as from
        `bucket_edges`.
    """
    logprob_N = np.asarray(logprob_N, np.float64)
    buckets = []
    for start, stop in itertools.pairwise(edges):
        here = logprob_N[(position_N >= start) & (position_N < stop)]
        nll = Estimate.from_values(-here) if here.size else None
        buckets.append(Bucket(start, stop, int(here.size), float(-here.sum()), nll))
    return buckets


def plot(buckets: Sequence[Bucket], mean: float, path: Path, title: str) -> None:
    """Write a PNG file: each bucket's mean with its standard error, over positions (log scale).

    mean: of all tokens, drawn as a line. Raises CheckpointError if the file cannot be written.
    """
    from matplotlib.figure import Figure

    drawn = [(b, b.nll) for b in buckets if b.nll is not None]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    middles = [(b.start * (b.stop - 1)) ** 0.5 for b, _ in drawn]
    means, errors = [nll.mean for _, nll in drawn], [nll.error for _, nll in drawn]
    axes.errorbar(middles, means, yerr=np.nan_to_num(errors), fmt="o-", capsize=3)
    axes.axhline(mean, color="grey", linewidth=0.7, linestyle="--")
    axes.annotate("all tokens", (middles[0], mean), (0, 3), textcoords="offset points", fontsize=8)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="position in the window", ylabel="nats per token", title=title)
    axes.grid(alpha=0.3)
    save_figure(figure, path)
