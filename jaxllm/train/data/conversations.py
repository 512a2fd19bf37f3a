"""The loss mask of a conversation: assistant turns, as the chat template writes them.

Templates do not mark turns, so each prefix of the conversation is rendered too: the text that a
message adds to the text before it is its turn. A template that changes earlier text when the
conversation continues (some drop earlier reasoning) is rejected.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxllm.errors import TemplateError, TokenError
from jaxllm.text.chat import ChatTemplate
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.train.data.rows import Example

MAX_CHARS = 1 << 21  # characters of an example that is encoded in one piece
Messages = Sequence[Mapping[str, Any]]


def encode_conversation(
    template: ChatTemplate, tokenizer: Tokenizer, messages: Messages, **variables: Any
) -> Example:
    """Encode a conversation and mark the assistant turns for the loss.

    A turn is what follows the prompt that `generate` would get there, with the token that ends the
    turn and without the white space after it.

    Args:
      variables: of the template (`tools`, ...).

    Raises TemplateError if the assistant turns cannot be located, and what rendering raises;
    TokenError if there is no assistant text.
    """
    text, spans = assistant_spans(template, messages, **variables)
    check_length(text, "the conversation")
    token_T = np.array(tokenizer.encode(text, parse_special=True), np.int32)
    counts_T = np.zeros(len(token_T), bool)
    for begin, end in spans:
        first, last = (_count_tokens_before(tokenizer, text, token_T, at) for at in (begin, end))
        counts_T[first : _trim_space(tokenizer, token_T, first, last)] = True
    return Example(token_T, counts_T)


def check_length(text: str, what: str) -> None:
    """Raise TokenError if a text with a loss mask is too long.

    It is encoded in one piece, which takes some 200 bytes per character.
    """
    if len(text) > MAX_CHARS:
        raise TokenError(
            f"{what} must have at most {MAX_CHARS:,} characters: got {len(text):,}. Split it into"
            ' rows, or give it as "text" or as a file of text.'
        )


def assistant_spans(
    template: ChatTemplate, messages: Messages, **variables: Any
) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a conversation, and the assistant turns as spans of characters."""
    text = template.render(messages, add_generation_prompt=False, **variables)
    spans = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = template.render(messages[:number], add_generation_prompt=True, **variables)
        after = text
        if number + 1 < len(messages):
            after = template.render(
                messages[: number + 1], add_generation_prompt=False, **variables
            )
        for part, what in ((before, "the messages before it"), (after, "the messages up to it")):
            _check_beginning(part, text, number, what)
        if len(after) > len(before):
            spans.append((len(before), len(after)))
    if not spans:
        raise TokenError('no message with the role "assistant" has text: there is nothing to learn')
    return text, spans


def _check_beginning(part: str, text: str, number: int, what: str) -> None:
    if text.startswith(part):
        return
    at = next((i for i, (a, b) in enumerate(zip(part, text, strict=False)) if a != b), len(text))
    raise TemplateError(
        f"message {number}: the chat template writes {what} differently in the whole conversation"
        f" (character {at}: {part[at : at + 20]!r} becomes {text[at : at + 20]!r}), so the"
        ' assistant turns cannot be located: give "prompt" and "completion", or another template'
    )


def common_prefix_length(first: np.ndarray, second: np.ndarray) -> int:
    """Return the number of tokens in the common prefix of both."""
    least = min(len(first), len(second))
    unlike = np.flatnonzero(first[:least] != second[:least])
    return int(unlike[0]) if unlike.size else least


def _count_tokens_before(tokenizer: Tokenizer, text: str, token_T: np.ndarray, end: int) -> int:
    """Return how many tokens lie before a character, whatever follows it."""
    if end == len(text):
        return len(token_T)
    before = np.array(tokenizer.encode(text[:end], parse_special=True), np.int32)
    return common_prefix_length(before, token_T)


def _trim_space(tokenizer: Tokenizer, token_T: np.ndarray, first: int, last: int) -> int:
    """Return the end of a turn: after its last control token, if only white space follows that."""
    ids = token_T[first:last].tolist()
    control = [i for i, token in enumerate(ids) if token in tokenizer.special_ids]
    if control and not tokenizer.decode(ids[control[-1] + 1 :]).strip():
        return first + control[-1] + 1
    return last
