"""Prompt encoding: text or token ids, one or several, to lists of valid ids."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxllm.errors import TokenError
from jaxllm.runtime.validation import check_token_ids, is_integer
from jaxllm.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | np.ndarray | jax.Array


def split_prompts(prompt: Any) -> tuple[list[Any], bool]:
    """Return the list of prompts, and whether the argument was a single one: a text, or ids `[T]`.

    Raises TokenError for anything but a prompt or a list of prompts.
    """
    if isinstance(prompt, str):
        return [prompt], True
    items = _to_list(prompt)
    if not isinstance(items, list | tuple | range):
        raise TokenError(
            f"a prompt is text or token ids, or a list of prompts; got {prompt!r:.60}"
            f"{_remedy(prompt)}"
        )
    prompt = items
    single = len(prompt) > 0 and is_integer(prompt[0])
    return ([prompt], True) if single else (list(prompt), False)


def encode_prompt(
    prompt: Prompt,
    vocab_size: int,
    tokenizer: Tokenizer | None,
    bos: int | None,
    *,
    parse_special: bool = False,
) -> list[int]:
    """Return the token ids of one prompt; an empty prompt gives the begin-of-text token.

    tokenizer: encodes text, and prepends the begin-of-text token if the checkpoint requests it.
    bos: the begin-of-text id; by default the tokenizer's. parse_special: as for
    `Tokenizer.encode`.

    Raises TokenError for an invalid prompt or ids outside the vocabulary.
    """
    if isinstance(prompt, str):
        ids = _encode_text(prompt, tokenizer, parse_special)
        bos = tokenizer.bos_id if bos is None and tokenizer else bos
    else:
        ids = token_list(prompt, "a prompt is text or token ids")
    if not ids and bos is None:
        raise TokenError("the prompt is empty and the checkpoint has no bos token")
    ids = ids or [int(bos or 0)]
    check_token_ids(np.array(ids, object), vocab_size, "the prompt: ")  # ids of any size
    return ids


def token_list(tokens: Any, message: str = "tokens must be a list of token ids") -> list[int]:
    """Return token ids, a list or an array `[T]`, as a list. Raises TokenError for other types."""
    items = _to_list(tokens)
    if not isinstance(items, list | tuple | range) or not all(map(is_integer, items)):
        raise TokenError(f"{message}, got {tokens!r:.60}{_remedy(tokens)}")
    return [int(token) for token in items]


def _to_list(prompt: Any) -> Any:
    """Convert arrays (NumPy, JAX, others) to lists, scalars to None; return the rest unchanged."""
    if not hasattr(prompt, "__array__"):
        return prompt
    try:
        array = np.asarray(prompt)
    except (TypeError, ValueError, RuntimeError) as error:  # a tensor on a GPU
        raise TokenError(f"a prompt is text or token ids: {error!s:.200}") from None
    return array.tolist() if array.ndim else None


def _remedy(prompt: Any) -> str:
    """Return a hint if an invalid prompt is a list of chat messages, else ""."""
    first = prompt[0] if isinstance(prompt, list | tuple) and prompt else prompt
    chat = isinstance(first, Mapping)
    return ". Encode chat messages with lm.chat_prompt(messages)" * chat


def _encode_text(text: str, tokenizer: Tokenizer | None, parse_special: bool) -> list[int]:
    if tokenizer is None:
        if text:
            raise TokenError("the checkpoint has no tokenizer. Pass token ids instead of text")
        return []
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TokenError(
            f"the prompt is not valid Unicode: {error.reason} at index {error.start}"
        ) from None
    return tokenizer.encode(text, bos=tokenizer.adds_bos, parse_special=parse_special)
