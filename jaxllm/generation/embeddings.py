"""Text embeddings: pooled hidden states of a layer, computed in batches of similar lengths.

Token log-probabilities and last logits, which need the same forward pass, are here too. Nothing is
cached, so any layer can be used.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import CapacityError, ConfigError, NonFiniteError, TokenError
from jaxllm.models.inputs import check_model
from jaxllm.ops.padding import next_power_of_two, pad_texts
from jaxllm.ops.pooling import POOLING_MASKS, l2_normalize, pool
from jaxllm.ops.token_logprobs import log_likelihood
from jaxllm.runtime.progress import steps_bar
from jaxllm.runtime.validation import check_int, check_int_array, check_token_ids, is_integer
from jaxllm.steps import run_model
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params

LOGITS_BYTES = 1 << 28  # bytes of float32 logits per batch
_TOP_WIDTH = 32  # of the likeliest tokens' program, which serves shorter lists too


@partial(jax.jit, static_argnums=0, static_argnames="layer")
def _embed_batch(
    model: Model,
    params: Params,
    token_BT: jax.Array,
    position_BT: jax.Array,
    counted_BT: jax.Array,
    normalize: bool | jax.Array,
    *,
    layer: int,
) -> jax.Array:
    """Return the mean hidden states of the counted tokens, float32 `[B, D]`, from checked input.

    position_BT: positions, -1 for padding. layer: an index into `Output.hidden_states`, where 0 is
    the embeddings; later layers and logits are not computed.
    """
    trace, _, _ = run_model(model, params, (), token_BT, position_BT)
    x_BD: jax.Array = pool(trace.hidden_states[layer], counted_BT, "mean")
    return jnp.where(normalize, l2_normalize(x_BD), x_BD)


def embeddings(
    model: Model,
    params: Params,
    texts: Sequence[Sequence[int]],
    *,
    layer: int = -1,
    pooling: str = "mean",
    normalize: bool = False,
    batch: int = 16,
    show_progress: bool | None = None,
) -> np.ndarray:
    """Return one embedding per text, float32 `[N, D]`, in the order of the texts.

    Args:
        texts: lists of token ids (see `LM.encode`).
        layer: 0 for the token embeddings, n for the output of block n, -1 for the last, after the
            final norm, -2 for the one before; the numbering of transformers' hidden_states.
        pooling: "mean", "last" or "cls" (the first token).
        normalize: scale to Euclidean norm 1.
        batch: texts per batch. Texts of similar lengths run together, padded to a power of two.

    Raises:
        ConfigError: for an option out of range.
        TokenError: for a text that is empty or has an id outside the vocabulary.
        CapacityError: for a text longer than the model's context.
        NonFiniteError: for hidden states that are NaN or infinite.
    """
    check_model(model, params, any_head=True)
    if not isinstance(texts, Iterable):
        raise TokenError(f"texts must be a list of lists of token ids, got {texts!r:.60}")
    layer = _check_options(model, layer, pooling, batch)
    if not isinstance(normalize, bool):
        raise ConfigError(f"normalize must be True or False, got {normalize!r:.40}")
    ids = [check_text(model, number, text) for number, text in enumerate(texts)]

    def run(token_BT: np.ndarray, position_BT: np.ndarray) -> jax.Array:
        counted_BT = POOLING_MASKS[pooling](position_BT >= 0)
        return _embed_batch(
            model, params, token_BT, position_BT, counted_BT, normalize, layer=layer
        )

    return _run_batches(ids, batch, model.config.hidden_size, run, "hidden states", show_progress)


def last_logits(
    model: Model,
    params: Params,
    texts: Sequence[Sequence[int]],
    *,
    tokens: Sequence[int] | None = None,
    batch: int = 16,
    show_progress: bool | None = None,
) -> np.ndarray:
    """Return the logits at the last token of each text, float32 `[N, V]`, in the texts' order.

    tokens: ids of the tokens whose logits to return, in this order; by default all. A score head
    gives its outputs, `[N, labels]`. Raises what `embeddings` raises.
    """
    check_model(model, params, any_head=True)
    check_int("batch", batch, 1, error=ConfigError)
    ids = [check_text(model, number, text) for number, text in enumerate(texts)]
    head = model.config.score
    outputs = model.config.vocab_size if head is None else len(head.labels)
    token_V = np.arange(outputs) if tokens is None else np.array(tokens)
    run = partial(_last_logits, model, params, token_V)
    return _run_batches(ids, batch, len(token_V), run, "logits", show_progress)


@partial(jax.jit, static_argnums=0)
def _last_logits(
    model: Model, params: Params, token_V: jax.Array, token_BT: jax.Array, position_BT: jax.Array
) -> jax.Array:
    last_B = position_BT.argmax(axis=1).astype(jnp.int32)
    trace, _, _ = run_model(model, params, (), token_BT, position_BT, column_B=last_B)
    return trace.logits[:, 0, token_V]


def _run_batches(
    ids: list[np.ndarray],
    batch: int,
    width: int,
    run: Callable[[np.ndarray, np.ndarray], jax.Array],
    what: str,
    show_progress: bool | None,
) -> np.ndarray:
    """Return a row of `width` numbers per text. run: computes those of a batch of texts, padded.

    Raises NonFiniteError, naming what the numbers are.
    """
    vectors_ND, groups = np.zeros((len(ids), width), np.float32), group_by_length(ids, batch)
    with steps_bar("embedding", len(groups), show_progress) as advance:
        for members in groups:
            batch_BD = run(*pad_batch([ids[member] for member in members], batch))
            vectors_ND[members] = np.asarray(batch_BD)[: len(members)]
            advance()
    if not np.isfinite(vectors_ND).all():
        bad = int(np.argmin(np.isfinite(vectors_ND).all(axis=1)))
        raise NonFiniteError(f"the {what} of text {bad} are NaN or infinite")
    return vectors_ND


def log_probs(
    model: Model, params: Params, texts: Sequence[Sequence[int]], *, batch: int = 16
) -> list[np.ndarray]:
    """Return the log-probability of each token but the first, float32 `[T - 1]` per text.

    batch: the maximum batch size, as for `embeddings`; long texts run in smaller batches, whose
    float32 logits fit into `LOGITS_BYTES` bytes. The batch may change the last bits of a result.
    Raises what `embeddings` raises.
    """
    check_model(model, params)
    ids = [check_text(model, number, text) for number, text in enumerate(texts)]
    logprobs = [np.zeros(0, np.float32)] * len(ids)
    for members in group_by_length(ids, batch, LOGITS_BYTES // (4 * model.config.vocab_size)):
        arrays = pad_batch([ids[member] for member in members], batch, targets=1)
        logprob_BT = np.asarray(_log_probs(model, params, *arrays))
        for row, member in enumerate(members):
            logprobs[member] = logprob_BT[row, : len(ids[member]) - 1]
            if not np.isfinite(logprobs[member]).all():
                raise NonFiniteError("the model returned NaN or infinite logits")
    return logprobs


@partial(jax.jit, static_argnums=0)
def _log_probs(
    model: Model, params: Params, token_BT: jax.Array, position_BT: jax.Array
) -> jax.Array:
    logits_BTV = run_model(
        model.with_sharded_logits(), params, (), token_BT[:, :-1], position_BT[:, :-1]
    )[0].logits
    return log_likelihood(logits_BTV, token_BT[:, 1:])


def prompt_logprobs(
    model: Model, params: Params, ids: Sequence[int], *, top: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the log-probability of each token but the first, and the likeliest tokens there.

    top: how many of the likeliest. Returns float32 `[T - 1]`, the numbers of `log_probs`; int32 and
    float32 `[T - 1, top]`, best first. Raises what `embeddings` raises.
    """
    check_model(model, params)
    token_T = check_text(model, 0, ids)
    width = min(next_power_of_two(top, _TOP_WIDTH), model.config.vocab_size) if top else 0
    logprob_BT, top_BTN, top_logprob_BTN = _top_log_probs(
        model, params, *pad_batch([token_T], 1, targets=1), top=width
    )
    known = slice(len(token_T) - 1)
    logprob_T = np.asarray(logprob_BT)[0, known]
    if not np.isfinite(logprob_T).all():
        raise NonFiniteError("the model returned NaN or infinite logits")
    best_TN, best_logprob_TN = (np.asarray(x)[0, known, :top] for x in (top_BTN, top_logprob_BTN))
    return logprob_T, best_TN, best_logprob_TN


@partial(jax.jit, static_argnums=0, static_argnames="top")
def _top_log_probs(
    model: Model, params: Params, token_BT: jax.Array, position_BT: jax.Array, *, top: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    logits_BTV = run_model(model, params, (), token_BT[:, :-1], position_BT[:, :-1])[0].logits
    top_BTN = jax.lax.top_k(logits_BTV, top)[1]
    top_logprob_BNT = jax.vmap(log_likelihood, (None, 2))(logits_BTV, top_BTN)
    return (
        log_likelihood(logits_BTV, token_BT[:, 1:]),
        top_BTN,
        jnp.moveaxis(top_logprob_BNT, 0, 2),
    )


def group_by_length(
    texts: list[np.ndarray], batch: int, max_columns: float = math.inf
) -> list[list[int]]:
    """Return batches of text indices, shortest texts first.

    max_columns: maximum of rows times padded width in a batch of several rows.
    """
    left, groups = sorted(range(len(texts)), key=lambda i: len(texts[i])), []
    while left:
        count = min(batch, len(left))
        while count > 1 and count * _padded_width(len(texts[left[count - 1]])) > max_columns:
            count -= 1
        groups.append(left[:count])
        left = left[count:]
    return groups


def pad_batch(
    texts: list[np.ndarray], batch: int, *, targets: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and positions `[B, T]` of texts; few sizes mean few compiled programs.

    targets: 1 if the last token of a text is no input. The width is then that of
    `evaluate.likelihood`, so a text alone has the same bits there.
    """
    rows: list[Any] = [*texts, *[[]] * (min(batch, next_power_of_two(len(texts))) - len(texts))]
    return pad_texts(rows, width=_padded_width(max(map(len, texts)) - targets) + targets)


def _padded_width(length: int) -> int:
    return next_power_of_two(length, 8)


def _check_options(model: Model, layer: int, pooling: str, batch: int) -> int:
    """Check the options; return the layer as a non-negative index."""
    count = model.config.num_hidden_layers + 1
    if not is_integer(layer) or not -count <= layer < count:
        raise ConfigError(f"layer must be from {-count} to {count - 1}, got {layer!r:.40}")
    if not isinstance(pooling, str) or pooling not in POOLING_MASKS:
        raise ConfigError(f"pooling must be one of {', '.join(POOLING_MASKS)}, got {pooling!r:.40}")
    check_int("batch", batch, 1, error=ConfigError)
    return int(layer) % count


def check_text(model: Model, index: int, text: Any) -> np.ndarray:
    """Return the ids of a text; raise as `embeddings` does, naming the text's number."""
    ids, config = check_int_array(f"text {index}", text, TokenError), model.config
    if ids.ndim != 1 or not ids.size:
        raise TokenError(f"text {index} must be a non-empty list of token ids, got {text!r:.60}")
    check_token_ids(ids, config.vocab_size, f"text {index}: ")
    if ids.size > config.context_length:
        raise CapacityError(
            f"text {index} has {ids.size} tokens, the model's context is {config.context_length}"
        )
    return ids
