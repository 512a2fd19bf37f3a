"""Loss by position: how well a model predicts the first tokens of its windows, and the last.

The numbers are those of `perplexity`, each sorted by how many tokens stand before it in its window:
the sums over all buckets are the whole text's. A model that uses what is far away goes on getting
better; one that is past the length it was trained for gets worse.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.evaluate.likelihood.data import Loader
from jaxllm.evaluate.likelihood.perplexity import Estimate
from jaxllm.files import writing


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Tokens with `start` to before `stop` tokens before them in their window.

    nll: their mean negative log-likelihood, nats a token, None where there are none. tokens: how
    many. total: their sum.
    """

    start: int
    stop: int
    tokens: int
    total: float
    nll: Estimate | None


def token_positions(loader: Loader) -> np.ndarray:
    """How many tokens of its window stand before each token that counts, int32 `[N]`.

    In the order of `perplexity.token_logprobs`. No model is run.
    """
    found = [batch.position_BT[batch.scored_BT] for batch, _ in loader.batches()]
    return np.concatenate(found).astype(np.int32)


def edges(width: int, buckets: int | None = None) -> list[int]:
    """Where buckets begin for windows of `width` tokens, from 1, and `width` at the end.

    buckets: so many of equal size, but for rounding; by default each has twice the positions of the
    one before it, as what is far away is rarer. Raises ConfigError unless 1 <= buckets < width.
    """
    if buckets is None:
        return [*(1 << i for i in range((width - 1).bit_length())), width]
    if not 1 <= buckets < width:
        raise ConfigError(
            f"buckets must be from 1 to {width - 1}, the predicted positions of a window of"
            f" {width} tokens, got {buckets}"
        )
    return [1 + (width - 1) * i // buckets for i in range(buckets)] + [width]


def by_position(
    logprob_N: np.ndarray, position_N: np.ndarray, borders: Sequence[int]
) -> list[Bucket]:
    """The losses of each bucket. borders: ascending, as `edges` gives them.

    logprob_N: natural logarithms, in the order of position_N. Float64.
    """
    logprob_N = np.asarray(logprob_N, np.float64)
    found = []
    for start, stop in itertools.pairwise(borders):
        here = logprob_N[(position_N >= start) & (position_N < stop)]
        nll = Estimate.of(-here) if here.size else None
        found.append(Bucket(start, stop, int(here.size), float(-here.sum()), nll))
    return found


def plot(buckets: Sequence[Bucket], mean: float, path: Path, title: str) -> None:
    """Write a PNG file: each bucket's mean with its standard error, over positions (log scale).

    mean: of all, a line across. Raises CheckpointError where the file cannot be written.
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
    axes.set(xlabel="tokens before it in the window", ylabel="nats a token", title=title)
    axes.grid(alpha=0.3)
    with writing(path) as file:
        figure.savefig(file, format="png", dpi=150)
