"""Embeddings of texts: the hidden states of a layer, one vector a text, in batches of like lengths.

The log-probabilities of a text's tokens, from the same pass, are here too.
`decode.batch` pools what it decodes into a cache; here nothing is kept, so any layer will do.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from jaxllm.errors import CapacityError, ConfigError, NonFiniteError, TokenError
from jaxllm.inputs import check_model
from jaxllm.ops.likelihood import log_likelihood
from jaxllm.ops.pooling import COUNTED, normalized, pool
from jaxllm.progress import steps_bar
from jaxllm.shapes import pad_texts, power_of_two
from jaxllm.steps import run
from jaxllm.weights.paths import Params, for_sums
from jaxllm.whole import check_ids, is_whole, whole, whole_array

LOGITS = 1 << 28  # bytes of the float32 logits of texts that run together


@partial(jax.jit, static_argnums=0, static_argnames=("layer", "pooling", "normalize"))
def embed(
    model: nn.Module,
    params: Params,
    token_BT: jax.Array,
    position_BT: jax.Array,
    *,
    layer: int,
    pooling: str,
    normalize: bool,
) -> jax.Array:
    """The pooled hidden states of texts, float32 `[B, D]`, on checked input.

    token_BT: ids. position_BT: their positions, -1 for padding. layer: which of
    `Output.hidden_states`, the embeddings being 0; later layers and logits are not computed.
    """
    trace, _, _ = run(model, params, (), token_BT, position_BT)
    x_BD: jax.Array = pool(trace.hidden_states[layer], position_BT >= 0, pooling)
    return normalized(x_BD) if normalize else x_BD


def embeddings(
    model: nn.Module,
    params: Params,
    texts: Sequence[Sequence[int]],
    *,
    layer: int = -1,
    pooling: str = "mean",
    normalize: bool = False,
    batch: int = 16,
    show_progress: bool | None = None,
) -> np.ndarray:
    """One embedding a text, float32 `[N, D]`, in the order of the texts.

    texts: token ids each (`LM.encode` makes them of text). layer: 0 for the embedding table's rows,
    n for the output of block n, -1 for the last, after the final norm, as transformers counts its
    hidden_states. pooling: "mean", "last" or "cls" (the first). normalize: to Euclidean norm 1.
    batch: how many texts run together; those of like lengths do, in widths of powers of two.

    Raises ConfigError for an option out of its range, TokenError for a text that is empty or has an
    id outside the vocabulary, CapacityError for one longer than the model's context,
    NonFiniteError for hidden states that are NaN or infinite.
    """
    check_model(model, params)
    if not isinstance(texts, Iterable):
        raise TokenError(f"texts must be a list of texts, of token ids each; got {texts!r:.60}")
    layer = _checked_options(model, layer, pooling, batch)
    ids = [checked_text(model, number, text) for number, text in enumerate(texts)]
    found = np.zeros((len(ids), model.config.hidden_size), np.float32)
    groups = list(_groups([len(text) for text in ids], batch))
    with steps_bar("embedding", len(groups), show_progress) as advance:
        for members, width in groups:
            rows = min(batch, power_of_two(len(members)))
            texts_B: list[Any] = [ids[member] for member in members] + [[]] * (rows - len(members))
            found_BD = embed(
                model,
                params,
                *pad_texts(texts_B, width=width),
                layer=layer,
                pooling=pooling,
                normalize=normalize,
            )
            found[members] = np.asarray(found_BD)[: len(members)]
            advance()
    if not np.isfinite(found).all():
        bad = int(np.argmin(np.isfinite(found).all(axis=1)))
        raise NonFiniteError(f"the hidden states of text {bad} are NaN or infinite")
    return found


def log_probs(
    model: nn.Module, params: Params, texts: Sequence[Sequence[int]], *, batch: int = 16
) -> list[np.ndarray]:
    """The log-probability of each token but the first given those before it, float32 `[T - 1]` each
    text.

    batch: at most so many run together, as in `embeddings`, of long ones fewer: their float32
    logits are to fit `LOGITS`. Neighbours may move the last bits. Raises as `embeddings` does.
    """
    ids = [checked_text(model, number, text) for number, text in enumerate(texts)]
    found = [np.zeros(0, np.float32)] * len(ids)
    size = 4 * model.config.vocab_size
    for members, width in _groups([len(text) for text in ids], batch, LOGITS // size):
        rows = min(batch, power_of_two(len(members)))
        texts_B: list[Any] = [ids[member] for member in members] + [[]] * (rows - len(members))
        token_BT, position_BT = pad_texts(texts_B, width=width)
        logprob_BT = np.asarray(_log_probs(model, params, token_BT, position_BT))
        for row, member in enumerate(members):
            found[member] = logprob_BT[row, : len(ids[member]) - 1]
            if not np.isfinite(found[member]).all():
                raise NonFiniteError("the model returned NaN or infinite logits")
    return found


@partial(jax.jit, static_argnums=0)
def _log_probs(
    model: nn.Module, params: Params, token_BT: jax.Array, position_BT: jax.Array
) -> jax.Array:
    logits_BTV = run(for_sums(model), params, (), token_BT, position_BT)[0].logits[:, :-1]
    return log_likelihood(logits_BTV, token_BT[:, 1:])


def _groups(
    lengths: list[int], batch: int, most: int | None = None
) -> Iterator[tuple[list[int], int]]:
    """Which texts run together, the shortest first, and how wide. most: columns of several rows."""
    left = sorted(range(len(lengths)), key=lambda i: lengths[i])
    while left:
        count = min(batch, len(left))
        while most is not None and count > 1 and count * _width(lengths[left[count - 1]]) > most:
            count -= 1
        members, left = left[:count], left[count:]
        yield members, _width(lengths[members[-1]])


def _width(length: int) -> int:
    return power_of_two(length, 8)


def _checked_options(model: nn.Module, layer: int, pooling: str, batch: int) -> int:
    """The layer, counted from the front."""
    count = model.config.num_hidden_layers + 1
    if not is_whole(layer) or not -count <= layer < count:
        raise ConfigError(f"layer must be from {-count} to {count - 1}, got {layer!r:.40}")
    if not isinstance(pooling, str) or pooling not in COUNTED:
        raise ConfigError(f"pooling must be one of {', '.join(COUNTED)}, got {pooling!r:.40}")
    whole("batch", batch, 1, error=ConfigError)
    return int(layer) % count


def checked_text(model: nn.Module, number: int, text: Any) -> np.ndarray:
    """A text's ids. Raises TokenError and CapacityError as `embeddings`, with its number."""
    ids, config = whole_array(f"text {number}", text, TokenError), model.config
    if ids.ndim != 1 or not ids.size:
        raise TokenError(f"text {number} must be token ids, at least one; got {text!r:.60}")
    check_ids(ids, config.vocab_size, f"text {number}: ")
    if ids.size > config.context_length:
        raise CapacityError(
            f"text {number} has {ids.size} tokens; the model's context is {config.context_length}"
        )
    return ids
