"""Token log-probabilities, the basis of perplexity and of the lm-evaluation-harness adapter.

One compiled program runs a batch and reduces its logits to two numbers per token on the device.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import CapacityError, ConfigError, NonFiniteError
from jaxllm.evaluate.likelihood.data import Batch, Loader
from jaxllm.ops.token_logprobs import log_likelihood
from jaxllm.runtime.validation import check_token_ids
from jaxllm.steps import run_model
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params

MAX_LOGIT_BYTES = 1 << 28  # maximum bytes of float32 logits for the default batch size


class Scores(NamedTuple):
    """Scores of each token given those on its left, `[B, T]`; zero and False if not scored.

    logprob_BT: float32, natural logarithm. greedy_BT: whether it is the most likely token.
    """

    logprob_BT: np.ndarray
    greedy_BT: np.ndarray


def score(model: Model, params: Params, batch: Batch) -> Scores:
    """Run one batch. Raises NonFiniteError if the model returns NaN or infinity.

    Memory: one float32 `[B, T, V]`.
    """
    logprob_BT, greedy_BT = _score(model, params, batch.token_BT, batch.position_BT)
    logprob_BT = np.where(batch.scored_BT, np.asarray(logprob_BT), np.float32(0))
    check_finite(logprob_BT, batch)
    return Scores(logprob_BT, np.asarray(greedy_BT) & batch.scored_BT)


@partial(jax.jit, static_argnums=0)
def _score(
    model: Model, params: Params, token_BT: jax.Array, position_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    logits_BTV = logits(model, params, token_BT, position_BT)
    target_BT = token_BT[:, 1:]
    greedy_BT = jnp.argmax(logits_BTV, axis=-1) == target_BT
    return pad_first_column(log_likelihood(logits_BTV, target_BT)), pad_first_column(greedy_BT)


def logits(model: Model, params: Params, token_BT: jax.Array, position_BT: jax.Array) -> jax.Array:
    """Return next-token logits, float32 `[B, T - 1, V]`; on a mesh the vocabulary is sharded."""
    return run_model(
        model.with_sharded_logits(), params, (), token_BT[:, :-1], position_BT[:, :-1]
    )[0].logits


def pad_first_column(x_BT: jax.Array) -> jax.Array:
    """Prepend a zero column for the first token, which nothing predicts."""
    return jnp.pad(x_BT, ((0, 0), (1, 0)))


def check_loader(model: Model, loader: Loader) -> None:
    """Raise TokenError for ids outside the vocabulary, CapacityError for rows that are too long."""
    if not isinstance(loader, Loader):
        raise ConfigError(
            f"loader has the wrong type: got {loader!r:.60}, expected a Loader from"
            " jaxllm.evaluate.likelihood.data.loader(documents, window=...)"
        )
    config = model.config
    if loader.width - 1 > config.context_length:
        raise CapacityError(
            f"window is too long: got {loader.width} tokens, context is {config.context_length}"
        )
    for number, ids in enumerate(loader.documents):
        check_token_ids(ids, config.vocab_size, f"document {number}: ")
    check_token_ids(np.array(loader.bos or 0), config.vocab_size, "bos: ")


def check_finite(x_BT: np.ndarray, batch: Batch) -> None:
    """Raise NonFiniteError, naming the window, if a value is NaN or infinite."""
    if not np.isfinite(x_BT).all():
        row, column = np.argwhere(~np.isfinite(x_BT))[0]
        raise NonFiniteError(
            f"the model returned NaN or infinite logits: window {batch.span_B[row]}, token {column}"
        )


def default_batch(vocab_size: int, window: int) -> int:
    """Return the number of rows, 1 to 16, whose logits take at most 256 MiB (if more than one)."""
    return int(np.clip(MAX_LOGIT_BYTES // (4 * vocab_size * window), 1, 16))
