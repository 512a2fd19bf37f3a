"""Perplexity of a text under a model, with its standard error."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.evaluate.likelihood.data import Batch, Loader
from jaxllm.evaluate.likelihood.run import Columns, run_batches
from jaxllm.evaluate.likelihood.score import check_loader, score
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
        with np.errstate(
            over="ignore", invalid="ignore"
        ):  # a mean above 709 nats overflows to infinity
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
        journal: File from which an interrupted evaluation resumes (see `run.run_batches`).

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
