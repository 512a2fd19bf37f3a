"""Loss by position in the window.

The log-probabilities are those of `perplexity`, grouped by the number of tokens before each in its
window; the sums over all buckets are those of the whole text. The loss keeps falling with the
position if a model uses distant tokens, and rises beyond the length it was trained for.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.evaluate.likelihood.data import Loader
from jaxllm.evaluate.likelihood.perplexity import Estimate
from jaxllm.files.plots import save_figure


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

    In the order of `perplexity.token_logprobs`. Runs no model.
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
