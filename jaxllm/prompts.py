"""Prompts: text or token ids, one or several, as lists of ids that the model knows."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxllm.errors import TokenError
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.whole import check_ids, is_whole

Prompt = str | Sequence[int] | np.ndarray | jax.Array


def each_of(prompt: Any) -> tuple[list[Any], bool]:
    """The prompts, and whether one was given by itself: a text, or ids `[T]`.

    Raises TokenError for what is neither one nor a list of them.
    """
    if isinstance(prompt, str):
        return [prompt], True
    if isinstance(prompt, np.ndarray | jax.Array):
        prompt = np.asarray(prompt)
        prompt = list(prompt) if prompt.ndim else None
    if not isinstance(prompt, list | tuple | range):
        raise TokenError(f"a prompt is text or token ids, or a list of prompts; got {prompt!r:.60}")
    single = len(prompt) > 0 and is_whole(prompt[0])
    return ([prompt], True) if single else (list(prompt), False)


def encode(
    prompt: Prompt, vocab_size: int, tokenizer: Tokenizer | None, bos: int | None
) -> list[int]:
    """The token ids of one prompt; of an empty one the begin-of-text token's.

    tokenizer: of texts, which get the begin-of-text token where the checkpoint asks for it. bos: by
    default the tokenizer's own.

    Raises TokenError for what is no prompt, or has ids outside the vocabulary.
    """
    if isinstance(prompt, str):
        ids = _of_text(prompt, tokenizer)
        bos = tokenizer.bos_id if bos is None and tokenizer else bos
    else:
        if isinstance(prompt, np.ndarray | jax.Array):
            prompt = np.asarray(prompt).tolist()
        if not isinstance(prompt, list | tuple | range) or not all(map(is_whole, prompt)):
            raise TokenError(f"a prompt is text or token ids, got {prompt!r:.60}")
        ids = [int(token) for token in prompt]
    if not ids and bos is None:
        raise TokenError("the prompt is empty and the checkpoint names no bos token")
    ids = ids or [int(bos or 0)]
    check_ids(np.array(ids, object), vocab_size, "the prompt: ")  # ids of any size
    return ids


def _of_text(text: str, tokenizer: Tokenizer | None) -> list[int]:
    if tokenizer is None:
        if text:
            raise TokenError("the checkpoint has no tokenizer: give token ids, not text")
        return []
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TokenError(f"the prompt is no text: {error.reason} at {error.start}") from None
    return tokenizer.encode(text, bos=tokenizer.adds_bos)
