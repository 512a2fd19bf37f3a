"""KL divergence between the next-token distributions of two models, as after quantization.

P is the reference, Q the other model. The measures are those of llama-perplexity's --kl-divergence.
"""

import dataclasses
import math
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.evaluate.likelihood.data import Batch, Loader
from jaxllm.evaluate.likelihood.perplexity import Estimate, Perplexity
from jaxllm.evaluate.likelihood.score import (
    Columns,
    check_finite,
    check_loader,
    logits,
    pad_first_column,
    run_batches,
)
from jaxllm.models.inputs import check_model
from jaxllm.ops.token_logprobs import map_rows, pick_token
from jaxllm.runtime.multihost import to_host
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params


class Differences(NamedTuple):
    """Measures per token: `[B, T]` of a batch, or `[N]` of scored tokens.

    kl: KL(P || Q) of the next-token distributions, in nats. same_top: whether P and Q predict the
    same token. reference, other: the token's log-probability under P and under Q.
    """

    kl: Any
    same_top: Any
    reference: Any
    other: Any


@dataclasses.dataclass(frozen=True)
class Divergence:
    """Measures over all scored tokens.

    kl, with quantiles and maximum: in nats. same_top: a share; its error is the binomial
    sqrt(p (1 - p) / (N - 1)). perplexity_ratio: perplexity of Q over that of P; its error is that
    of the mean paired difference of log-probabilities, in which the difficulty of the text cancels.
    delta_p: mean of q - p, the probabilities of the text's tokens; delta_p_rms: its root mean
    square.
    """

    kl: Estimate
    kl_median: float
    kl_p99: float
    kl_max: float
    same_top: Estimate
    perplexity_ratio: Estimate
    delta_p: Estimate
    delta_p_rms: float
    reference: Perplexity
    other: Perplexity

    @classmethod
    def from_differences(cls, differences: Differences) -> "Divergence":
        """Summarize the measures of N tokens. Quantiles are interpolated linearly."""
        kl_N, same_N, p_N, q_N = (np.asarray(x, np.float64) for x in differences)
        delta_N = np.exp(q_N) - np.exp(p_N)
        median, p99, largest = np.quantile(kl_N, [0.5, 0.99, 1.0])
        return cls(
            kl=Estimate.from_values(kl_N),
            kl_median=float(median),
            kl_p99=float(p99),
            kl_max=float(largest),
            same_top=Estimate.from_values(same_N),
            perplexity_ratio=Estimate.from_values(p_N - q_N).exp(),
            delta_p=Estimate.from_values(delta_N),
            delta_p_rms=math.sqrt(float(np.mean(delta_N**2))),
            reference=Perplexity.from_logprobs(p_N),
            other=Perplexity.from_logprobs(q_N),
        )


def divergence(
    model: Model,
    params: Params,
    other_model: Model,
    other_params: Params,
    loader: Loader,
    *,
    journal: Path | None = None,
    show_progress: bool | None = None,
) -> Divergence:
    """Compare a model (Q, the `other`) with a reference (P) on the loader's scored tokens.

    Args:
        journal, show_progress: as for `perplexity`. Memory: the float32 logits `[B, T, V]` of both.

    Raises:
        ConfigError: If the vocabularies differ in size, and what `perplexity` raises.
    """
    check_model(model, params)
    check_model(other_model, other_params)
    check_pair(model, other_model)
    for one in (model, other_model):
        check_loader(one, loader)

    def compare_batch(batch: Batch) -> Columns:
        arrays = batch.token_BT, batch.position_BT
        differences = _compare(model, other_model, params, other_params, *arrays)
        return select_scored(differences, batch)._asdict()

    columns = run_batches(
        loader,
        compare_batch,
        models={"model": (model, params), "other": (other_model, other_params)},
        journal=journal,
        description="divergence",
        show_progress=show_progress,
    )
    return Divergence.from_differences(Differences(**columns))


def check_pair(model: Model, other: Model) -> None:
    """Raise ConfigError for models with vocabularies of different sizes."""
    size, other_size = model.config.vocab_size, other.config.vocab_size
    if size != other_size:
        raise ConfigError(
            f"the models have vocabularies of {size} and {other_size} tokens: expected the same"
            " vocabulary"
        )


def select_scored(differences: Differences, batch: Batch) -> Differences:
    """Select the scored tokens, `[N]`. Raises NonFiniteError if a value is NaN or infinite."""
    differences = Differences(*map(np.asarray, to_host(tuple(differences))))
    scored = Differences(*(x[batch.scored_BT] for x in differences))
    for x_BT in (differences.reference, differences.other, differences.kl):
        check_finite(np.where(batch.scored_BT, x_BT, np.float32(0)), batch)
    return scored


def logits_divergence(
    model: Model,
    batches: Iterable[Batch],
    references: Iterable[jax.Array],
    others: Iterable[jax.Array],
) -> Divergence:
    """Summarize two models' logits (`run_logits`), one array of each for every batch."""
    parts = []
    for batch, p_BTV, q_BTV in zip(batches, references, others, strict=True):
        shards = model.num_data_shards(len(batch.token_BT))
        parts.append(select_scored(_differences(p_BTV, q_BTV, batch.token_BT, shards), batch))
    return Divergence.from_differences(Differences(*map(np.concatenate, zip(*parts, strict=True))))


@partial(jax.jit, static_argnums=(0, 1))
def _compare(
    model: Model,
    other: Model,
    params: Params,
    other_params: Params,
    token_BT: jax.Array,
    position_BT: jax.Array,
) -> Differences:
    p_BTV = logits(model, params, token_BT, position_BT)
    q_BTV = logits(other, other_params, token_BT, position_BT)
    return token_differences(p_BTV, q_BTV, token_BT, model.num_data_shards(len(token_BT)))


def token_differences(
    p_BTV: jax.Array, q_BTV: jax.Array, token_BT: jax.Array, data_shards: int = 1
) -> Differences:
    """Return the measures `[B, T]` of two models' float32 logits `[B, T - 1, V]`, first column 0.

    Each device computes one row at a time, so only the logits themselves take `[B, T, V]`.
    data_shards: as for `map_rows`.
    """

    def compare_rows(arrays: tuple[jax.Array, ...]) -> Differences:
        p_NTV, q_NTV, target_NT = arrays
        same_NT = jnp.argmax(p_NTV, axis=-1) == jnp.argmax(q_NTV, axis=-1)
        p_NTV, q_NTV = jax.nn.log_softmax(p_NTV), jax.nn.log_softmax(q_NTV)
        kl_NT = kl_divergence(p_NTV, q_NTV)
        return Differences(
            kl_NT, same_NT, pick_token(p_NTV, target_NT), pick_token(q_NTV, target_NT)
        )

    each = map_rows(compare_rows, (p_BTV, q_BTV, token_BT[:, 1:]), data_shards)
    return Differences(*map(pad_first_column, each))


# Jitted here, so that a reference's program is compiled once for all comparisons.
run_logits = jax.jit(logits, static_argnums=0)
_differences = jax.jit(token_differences, static_argnums=3)


def kl_divergence(p_XV: jax.Array, q_XV: jax.Array) -> jax.Array:
    """Return KL(P || Q) in nats from log-probabilities, `[..., V]` to `[...]`; never negative.

    Sums q - p - p log(q / p), which is equal because p and q sum to one. All its terms are
    nonnegative, so nothing cancels in float32 if P and Q are close.
    """
    d_XV = q_XV - p_XV
    near = jnp.abs(d_XV) < 0.5
    # Both branches are computed; the first is not selected where exp(d) could overflow.
    close_XV = jnp.exp(p_XV) * (jnp.expm1(jnp.where(near, d_XV, 0.0)) - jnp.where(near, d_XV, 0.0))
    apart_XV = jnp.exp(q_XV) - jnp.exp(p_XV) * (1.0 + d_XV)
    return jnp.where(near, close_XV, apart_XV).sum(axis=-1)
