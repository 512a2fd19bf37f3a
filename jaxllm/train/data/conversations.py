"""What of a conversation is learned: what the assistant says, as the chat template writes it.

Templates do not tell which words are whose, but they are rendered for the beginnings of a
conversation too: what a turn adds to what stood before it is that turn. A template that writes the
beginning otherwise once the conversation goes on (some leave out earlier thoughts) is refused.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxllm.errors import TemplateError, TokenError
from jaxllm.text.chat import ChatTemplate
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.train.data.rows import Example

LONGEST = 1 << 21  # characters of an example that is encoded whole
Messages = Sequence[Mapping[str, Any]]


def conversation(
    template: ChatTemplate, tokenizer: Tokenizer, messages: Messages, **variables: Any
) -> Example:
    """Token ids of a conversation, of which what the assistant says is learned.

    That is what follows the prompt that `generate` would be given there, with the token that ends
    the turn and without the white space after it. variables: of the template (`tools`, ...).

    Raises TemplateError where the assistant's words cannot be told from the others', and what
    rendering raises; TokenError where the assistant says nothing.
    """
    text, spans = assistant_spans(template, messages, **variables)
    check_length(text, "the conversation")
    token_T = np.array(tokenizer.encode(text, parse_special=True), np.int32)
    counts_T = np.zeros(len(token_T), bool)
    for begin, end in spans:
        first, last = (_tokens_before(tokenizer, text, token_T, at) for at in (begin, end))
        counts_T[first : _without_space(tokenizer, token_T, first, last)] = True
    return Example(token_T, counts_T)


def check_length(text: str, what: str) -> None:
    """Raise TokenError for a text too long for an example whose parts are learned differently: it
    is encoded whole, which takes some 200 bytes a character.
    """
    if len(text) > LONGEST:
        raise TokenError(
            f"{what} must have at most {LONGEST:,} characters: got {len(text):,}. Split it into"
            ' rows, or give it as "text" or as a file of text.'
        )


def assistant_spans(
    template: ChatTemplate, messages: Messages, **variables: Any
) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation, and from where to where the assistant speaks, in characters."""
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
        raise TokenError('no message with the role "assistant" says anything: nothing is learned')
    return text, spans


def _check_beginning(part: str, text: str, number: int, what: str) -> None:
    if text.startswith(part):
        return
    at = next((i for i, (a, b) in enumerate(zip(part, text, strict=False)) if a != b), len(text))
    raise TemplateError(
        f"message {number}: the chat template writes {what} otherwise in the whole conversation"
        f" (character {at}: {part[at : at + 20]!r} becomes {text[at : at + 20]!r}), so what is"
        ' learned cannot be told from the rest: give "prompt" and "completion", or another template'
    )


def shared(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens both begin with."""
    least = min(len(one), len(other))
    unlike = np.flatnonzero(one[:least] != other[:least])
    return int(unlike[0]) if unlike.size else least


def _tokens_before(tokenizer: Tokenizer, text: str, token_T: np.ndarray, at: int) -> int:
    """The tokens of a text that lie before a character whatever follows it."""
    if at == len(text):
        return len(token_T)
    before = np.array(tokenizer.encode(text[:at], parse_special=True), np.int32)
    return shared(before, token_T)


def _without_space(tokenizer: Tokenizer, token_T: np.ndarray, first: int, last: int) -> int:
    """The end of a turn: after its last control token, where only white space follows that."""
    ids = token_T[first:last].tolist()
    control = [i for i, token in enumerate(ids) if token in tokenizer.special_ids]
    if control and not tokenizer.decode(ids[control[-1] + 1 :]).strip():
        return first + control[-1] + 1
    return last
