"""The page's branch view: a text's tokens, their attention and the likeliest next ones.

The text is prefilled up to its last token, which then runs alone: the attention of one query needs
little memory at any length.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.errors import NonFiniteError
from jaxllm.ops.padding import bucket_size, next_power_of_two
from jaxllm.steps import forward, prefill
from jaxllm.text.detokenizer import Detokenizer

if TYPE_CHECKING:
    from jaxllm.lm import LM
    from jaxllm.text.tokenizer import Tokenizer

NEXT_TOKENS = 3


def describe_tokens(lm: "LM", ids: Sequence[int]) -> dict[str, Any]:
    """Return each token's text and attention, and the likeliest next tokens.

    Args:
        ids: At least one token, at most the context.

    Returns:
        `tokens`, a list of `{"id", "text", "attention"}`, and `next`, a list of `{"id", "text",
        "logprob"}`, best first. The tokens' texts, concatenated, are the text; a character is in
        the token that completes it. A token without a text also has a "name".

    Raises:
        NonFiniteError: The model returned NaN.
    """
    attention_T, logprob_V = last_step(lm, ids)
    best_N = np.argsort(-logprob_V, kind="stable")[:NEXT_TOKENS].tolist()
    whole = Detokenizer(lm.tokenizer) if lm.tokenizer else None
    tokens: list[dict[str, Any]] = [
        {"id": token, **_read_text(lm.tokenizer, whole, token), "attention": float(attention)}
        for token, attention in zip(ids, attention_T, strict=True)
    ]
    following: list[dict[str, Any]] = []
    for token in best_N:
        behind = Detokenizer(lm.tokenizer, prompt=ids) if lm.tokenizer else None
        text = _read_text(lm.tokenizer, behind, token)
        following.append({"id": token, **text, "logprob": float(logprob_V[token])})
    return {"tokens": tokens, "next": following}


def last_step(lm: "LM", ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the last token's attention to each token, and the next token's log-probabilities.

    Returns:
        float64 `[T]`, the mean over layers and heads, which sums to 1; float64 `[V]`.
    """
    token_T = np.asarray(ids, np.int32)
    before = len(token_T) - 1
    cache = lm.init_cache(1, bucket_size(len(token_T)))
    if before:
        padded_T = np.zeros(next_power_of_two(before, 8), np.int32)
        padded_T[:before] = token_T[:-1]
        lengths_B = np.array([before], np.int32)
        cache = prefill(
            lm.model, lm.params, cache, padded_T[None], lengths_B=lengths_B, donate=True
        ).cache
    out = forward(lm.model, lm.params, cache, token_T[None, -1:], attention_mass=True)
    logit_V = np.asarray(out.logits, np.float64)[0, -1]
    if not np.isfinite(logit_V.max()):
        raise NonFiniteError("the model returned NaN or infinite logits")
    mass_S = np.asarray(out.attention_mass, np.float64)[0]
    position_S = np.concatenate([np.asarray(s.position_BS)[0] for s in cache.segments])
    attention_T = np.zeros(len(token_T))
    held_S = position_S >= 0
    np.add.at(attention_T, position_S[held_S], mass_S[:-1][held_S])
    attention_T[-1] = mass_S[-1]
    logit_V -= logit_V.max()
    return attention_T / attention_T.sum(), logit_V - np.log(np.exp(logit_V).sum())


def _read_text(
    tokenizer: "Tokenizer | None", detokenizer: Detokenizer | None, token: int
) -> dict[str, str]:
    """Return the text that a token completes, and its name if there is none."""
    if tokenizer is None or detokenizer is None:
        return {"text": "", "name": str(token)}
    if token not in tokenizer:  # the embedding has more rows than the vocabulary has tokens
        return {"text": "", "name": str(token)}
    text = detokenizer.push(token)
    if text:
        return {"text": text}
    raw = tokenizer.token_bytes(token)
    if raw is None or token in tokenizer.special_ids:
        return {"text": "", "name": tokenizer.token(token)}
    return {"text": "", "name": "".join(f"<0x{byte:02X}>" for byte in raw)}
