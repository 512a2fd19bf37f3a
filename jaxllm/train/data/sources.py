"""Readers of training data: plain text, WikiText as published, and JSON lines of several kinds.

The loss mask of a conversation marks the assistant turns. Templates do not mark turns, so each
prefix of the conversation is rendered too: the text that a message adds to the text before it is
its turn. A template that changes earlier text when the conversation continues (some drop earlier
reasoning) is rejected.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from jaxllm.data.chunking import MAX_PIECE_BYTES, ChunkSpec, EncodedPieces, map_file
from jaxllm.data.wikitext import read_wikitext
from jaxllm.errors import ConfigError, JaxllmError, TemplateError, TokenError
from jaxllm.files import read_json_lines
from jaxllm.runtime.schema import as_schema
from jaxllm.text.chat import ChatTemplate
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.train.data.examples import Examples, LongPolicy, Pieces, build_examples, from_ids
from jaxllm.train.data.rows import IGNORED, Example

SEPARATOR = "\n\n"  # between the rows of WikiText
MAX_CHARS = 1 << 21  # characters of an example that is encoded in one piece
SUFFIXES = {".jsonl": "lines", ".parquet": "wikitext", ".raw": "wikitext"}  # others: "text"

Messages = Sequence[Mapping[str, Any]]
_Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class TextEncoder(NamedTuple):
    """How texts become tokens.

    Attributes:
        template: the chat template, or the error that explains why there is none.
        bos, eos: whether to add these tokens to a text. None: add bos if the tokenizer adds it to
            prompts, and eos if it has one. Conversations get neither, unless eos is True.
    """

    tokenizer: Tokenizer | None
    template: ChatTemplate | JaxllmError | None = None
    bos: bool | None = None
    eos: bool | None = None

    def encode(self, text: str) -> list[int]:
        """Encode a text without bos and eos. Raises TokenError if there is no tokenizer."""
        return self.required_tokenizer.encode(text)

    def encode_long(self, text: str) -> np.ndarray:
        """Encode a text as a file is: beyond `MAX_PIECE_BYTES` bytes in pieces, to bound memory."""
        if len(text) <= MAX_PIECE_BYTES:
            return np.array(self.encode(text), np.int32)
        try:
            pieces = EncodedPieces(text.encode(), self.required_tokenizer, ChunkSpec(width=1))
        except UnicodeEncodeError:
            raise TokenError("the text has lone surrogates, which are not characters") from None
        return np.concatenate(list(pieces))

    @property
    def required_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise TokenError('text needs a tokenizer, and the model has none: give "tokens"')
        return self.tokenizer

    @property
    def bos_ids(self) -> list[int]:
        wanted = self.required_tokenizer.adds_bos if self.bos is None else self.bos
        return self._special_ids("bos", self.required_tokenizer.bos_id) if wanted else []

    @property
    def eos_ids(self) -> list[int]:
        wanted = self.required_tokenizer.eos_id is not None if self.eos is None else self.eos
        return self._special_ids("eos", self.required_tokenizer.eos_id) if wanted else []

    def _special_ids(self, name: str, index: int | None) -> list[int]:
        if index is None:
            raise TokenError(f"the tokenizer has no {name} token for training texts")
        return [index]


def read_examples(path: Path, encoder: TextEncoder, *, kind: str | None = None) -> Examples:
    """Read the examples of a file.

    JSON lines are objects, all of one kind: "text"; "tokens" (ids, used as they are) with optional
    "labels", -100 for tokens that are not learned; "prompt" and "completion", of which the second
    is learned; or "messages" with optional "tools", of which assistant turns are learned. Blank
    lines and other fields are ignored. A long "text" is encoded in pieces, as a text file is.

    Args:
        kind: "text" (one UTF-8 text), "wikitext" (`.raw`, or `.parquet` with a column `text`: one
            text) or "lines" (JSON lines). Default: by the suffix (`SUFFIXES`), else "text".

    Raises:
        CheckpointError: if the file cannot be read.
        TokenError: with the line, for other objects, mixed kinds, an empty text or no data.
        ConfigError: for an unknown kind, or if pyarrow is missing.
        TemplateError: as `encode_conversation`.
    """
    kind = SUFFIXES.get(path.suffix, "text") if kind is None else kind
    if kind not in _READERS:
        raise ConfigError(f"the kind of data must be {', '.join(_READERS)}, got {kind!r:.40}")
    return _READERS[kind](path, encoder)


def from_texts(texts: Iterable[str], encoder: TextEncoder) -> Examples:
    """Make an example of each text, all of it learned. Raises TokenError for an empty text, and if
    there are no texts.
    """
    ids = (
        _text_example(_Line(text=text), encoder, f"text {number}")[0].token_T
        for number, text in enumerate(texts)
    )
    return from_ids(ids, bos=_bos_id(encoder), source={"kind": "texts"})


def _from_text(path: Path, encoder: TextEncoder) -> Examples:
    with map_file(path) as content:
        return _encode_bytes(content, encoder, path, "text")


def _from_wikitext(path: Path, encoder: TextEncoder) -> Examples:
    return _encode_bytes(SEPARATOR.join(read_wikitext(path)).encode(), encoder, path, "wikitext")


def _encode_bytes(content: Any, encoder: TextEncoder, path: Path, kind: str) -> Examples:
    """Encode a file's content as one text, in pieces and without a copy."""
    if not len(content):
        raise TokenError(f"there is no data to train on: {path} is empty")
    pieces = EncodedPieces(content, encoder.required_tokenizer, ChunkSpec(width=1))
    ids = itertools.chain([encoder.bos_ids], pieces, [encoder.eos_ids])
    source = {"kind": kind, "file": path.name}
    try:
        return build_examples([((x, None) for x in ids)], bos=_bos_id(encoder), source=source)
    except TokenError as error:
        raise TokenError(f"{path}: {error}") from None


class _Line(msgspec.Struct):
    """A line of a file; its fields determine its kind."""

    text: str | None = None
    tokens: list[_Id] | None = None
    labels: list[int] | None = None
    prompt: str | None = None
    completion: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None


def _text_example(line: _Line, encoder: TextEncoder, where: str) -> tuple[Example, int]:
    if not line.text:
        raise TokenError(f"{where}: the text is empty")
    parts = (encoder.bos_ids, encoder.encode_long(line.text), encoder.eos_ids)
    return _make_example(np.concatenate([np.array(part, np.int32) for part in parts]), 0), 0


def _tokens_example(line: _Line, encoder: TextEncoder, where: str) -> tuple[Example, int]:
    if not line.tokens:
        raise TokenError(f"{where}: the text is empty")
    token_T = np.array(line.tokens, np.int32)
    if line.labels is None:
        return _make_example(line.tokens, 0), 0
    label_T = np.array(line.labels)
    if label_T.shape != token_T.shape or ((label_T != IGNORED) & (label_T != token_T)).any():
        raise TokenError(
            f"{where}: each label must equal its token, or be {IGNORED} if it is not learned"
        )
    return Example(token_T, label_T != IGNORED), 0


def _completion_example(line: _Line, encoder: TextEncoder, where: str) -> tuple[Example, int]:
    """Mask the tokens that the prompt has by itself; a token that joins the end of the prompt and
    the start of the completion is learned.
    """
    assert line.prompt is not None
    if not line.completion:
        raise TokenError(f"{where}: the completion is empty")
    check_length(line.prompt + line.completion, f"{where}: prompt and completion")
    begin = encoder.bos_ids
    before = np.array([*begin, *encoder.encode(line.prompt)], np.int32)
    ids = [*begin, *encoder.encode(line.prompt + line.completion), *encoder.eos_ids]
    kept = common_prefix_length(before, np.array(ids, np.int32))
    return _make_example(ids, kept), int(kept < len(before))


def _messages_example(line: _Line, encoder: TextEncoder, where: str) -> tuple[Example, int]:
    template = encoder.template
    if not isinstance(template, ChatTemplate):
        reason = f" ({template})" if template else ""
        raise TokenError(f"{where}: messages need a chat template{reason}")
    tools = {} if line.tools is None else {"tools": line.tools}
    assert line.messages is not None
    try:
        example = encode_conversation(template, encoder.required_tokenizer, line.messages, **tools)
    except JaxllmError as error:
        raise type(error)(f"{where}: {error}") from None
    if encoder.eos:
        end = np.array(encoder.eos_ids, np.int32)
        example = Example(np.append(example.token_T, end), np.append(example.loss_mask_T, True))
    return example, 0


def _make_example(ids: list[int] | np.ndarray, num_prompt: int) -> Example:
    """Make an example whose first `num_prompt` tokens are not learned."""
    return Example(np.array(ids, np.int32), np.arange(len(ids)) >= num_prompt)


class _Kind(NamedTuple):
    """A kind of line.

    fields, optional: required and optional fields. read: returns the example, and 1 if prompt and
    completion share a token.
    """

    fields: frozenset[str]
    optional: frozenset[str]
    read: Callable[[_Line, TextEncoder, str], tuple[Example, int]]
    long_policy: LongPolicy


_KINDS = (
    _Kind(frozenset({"text"}), frozenset(), _text_example, "split"),
    _Kind(frozenset({"tokens"}), frozenset({"labels"}), _tokens_example, "split"),
    _Kind(frozenset({"prompt", "completion"}), frozenset(), _completion_example, "left"),
    _Kind(frozenset({"messages"}), frozenset({"tools"}), _messages_example, "right"),
)
_WANTED = 'an object with "text", "tokens", "prompt" and "completion", or "messages"'


def _from_lines(path: Path, encoder: TextEncoder) -> Examples:
    lines, joined = _lines(path), 0
    if (first := next(lines, None)) is None:
        raise TokenError(f"there is no data to train on: all lines of {path} are blank")
    kind = _line_kind(first[1], first[0])

    def read_line(where: str, line: _Line) -> Pieces:
        nonlocal joined
        if (own := _line_kind(line, where)) is not kind:
            raise TokenError(
                f"{where} has {_kind_name(own)}, but {first[0]} has {_kind_name(kind)}: put each"
                " kind into a separate file"
            )
        (token_T, counts_T), both = kind.read(line, encoder, where)
        joined += both
        return [(token_T, None if counts_T.all() else counts_T)]

    examples = build_examples(
        (read_line(*row) for row in itertools.chain([first], lines)),
        long=kind.long_policy,
        bos=_bos_id(encoder),
    )
    source = {"kind": _kind_name(kind), "file": path.name, "joined": joined}
    return dataclasses.replace(examples, source=source)


def _lines(path: Path) -> Iterator[tuple[str, _Line]]:
    for where, value in read_json_lines(path, TokenError, max_bytes=None):
        if not isinstance(value, dict):
            raise TokenError(f"{where} must be {_WANTED}")
        yield where, as_schema(value, _Line, where, TokenError)


def _line_kind(line: _Line, where: str) -> _Kind:
    names = {name for name in line.__struct_fields__ if getattr(line, name) is not None}
    for kind in _KINDS:
        if kind.fields <= names <= kind.fields | kind.optional:
            return kind
    raise TokenError(f"{where} must be {_WANTED}: got {', '.join(sorted(names)) or 'none'}")


def _kind_name(kind: _Kind) -> str:
    return " and ".join(sorted(kind.fields, reverse=True))


def _bos_id(encoder: TextEncoder) -> int | None:
    """Return the first token of examples, which truncation keeps."""
    return next(iter(encoder.bos_ids), None) if encoder.tokenizer is not None else None


_READERS: dict[str, Callable[[Path, TextEncoder], Examples]] = {
    "text": _from_text,
    "wikitext": _from_wikitext,
    "lines": _from_lines,
}


def encode_conversation(
    template: ChatTemplate, tokenizer: Tokenizer, messages: Messages, **variables: Any
) -> Example:
    """Encode a conversation and mark the assistant turns for the loss.

    A turn is what follows the prompt that `generate` would get there, with the token that ends the
    turn and without the white space after it.

    Args:
        variables: of the template (`tools`, ...).

    Raises:
        TemplateError: If the assistant turns cannot be located, and what rendering raises.
        TokenError: If there is no assistant text.
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
