"""Prompts: text or token ids, one or several, as lists of ids that the model knows."""

from collections.abc import Mapping, Sequence
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
    found = _without_array(prompt)
    if not isinstance(found, list | tuple | range):
        raise TokenError(
            f"a prompt is text or token ids, or a list of prompts; got {prompt!r:.60}"
            f"{_remedy(prompt)}"
        )
    prompt = found
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
        ids = token_list(prompt, "a prompt is text or token ids")
    if not ids and bos is None:
        raise TokenError("the prompt is empty and the checkpoint names no bos token")
    ids = ids or [int(bos or 0)]
    check_ids(np.array(ids, object), vocab_size, "the prompt: ")  # ids of any size
    return ids


def token_list(tokens: Any, meaning: str = "tokens must be a list of token ids") -> list[int]:
    """Return token ids, a list or an array `[T]`, as a list. Raises TokenError for other things."""
    found = _without_array(tokens)
    if not isinstance(found, list | tuple | range) or not all(map(is_whole, found)):
        raise TokenError(f"{meaning}, got {tokens!r:.60}{_remedy(tokens)}")
    return [int(token) for token in found]


def _without_array(prompt: Any) -> Any:
    """An array of NumPy, JAX or another library as lists; None for one number. Others as is."""
    if not hasattr(prompt, "__array__"):
        return prompt
    try:
        array = np.asarray(prompt)
    except (TypeError, ValueError, RuntimeError) as error:  # a tensor on a GPU
        raise TokenError(f"a prompt is text or token ids: {error!s:.200}") from None
    return array.tolist() if array.ndim else None


def _remedy(prompt: Any) -> str:
    """What to do with what is no prompt, if it is the messages of a chat."""
    first = prompt[0] if isinstance(prompt, list | tuple) and prompt else prompt
    chat = isinstance(first, Mapping)
    return ". Messages of a chat: give lm.chat_prompt(messages)" * chat


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
