"""Readers of training data: plain text, WikiText as published, and JSON lines of several kinds."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from jaxllm.compress.data.corpora import read_wikitext
from jaxllm.compress.data.cutting import WHOLE, Cut, Encoded, mapped
from jaxllm.errors import ConfigError, JaxllmError, TokenError
from jaxllm.files import as_schema, json_lines
from jaxllm.text.chat import ChatTemplate
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.train.data.conversations import check_length, conversation, shared
from jaxllm.train.data.examples import Examples, Growing, Long
from jaxllm.train.data.rows import IGNORED, Example

SEPARATOR = "\n\n"  # between the rows of WikiText
SUFFIXES = {".jsonl": "lines", ".parquet": "wikitext", ".raw": "wikitext"}  # others: "text"

_Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class Writing(NamedTuple):
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
        return self.known.encode(text)

    def encode_long(self, text: str) -> np.ndarray:
        """Encode a text of any length as a file is: beyond `cutting.WHOLE` bytes in pieces, to
        bound memory.
        """
        if len(text) <= WHOLE:
            return np.array(self.encode(text), np.int32)
        try:
            pieces = Encoded(text.encode(), self.known, Cut(width=1))
        except UnicodeEncodeError:
            raise TokenError("the text has lone surrogates, which are not characters") from None
        return np.concatenate(list(pieces.after(0)))

    @property
    def known(self) -> Tokenizer:
        if self.tokenizer is None:
            raise TokenError('text needs a tokenizer, and the model has none: give "tokens"')
        return self.tokenizer

    @property
    def begin(self) -> list[int]:
        wanted = self.known.adds_bos if self.bos is None else self.bos
        return self._token("bos", self.known.bos_id) if wanted else []

    @property
    def end(self) -> list[int]:
        wanted = self.known.eos_id is not None if self.eos is None else self.eos
        return self._token("eos", self.known.eos_id) if wanted else []

    def _token(self, name: str, index: int | None) -> list[int]:
        if index is None:
            raise TokenError(f"the tokenizer has no {name} token for training texts")
        return [index]


def read_examples(path: Path, writing: Writing, *, kind: str | None = None) -> Examples:
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
      TemplateError: as `conversation`.
    """
    kind = SUFFIXES.get(path.suffix, "text") if kind is None else kind
    if kind not in _READERS:
        raise ConfigError(f"the kind of data must be {', '.join(_READERS)}, got {kind!r:.40}")
    return _READERS[kind](path, writing)


def from_texts(texts: Iterable[str], writing: Writing) -> Examples:
    """Make an example of each text, all of it learned. Raises TokenError for an empty text, and if
    there are no texts.
    """
    growing = Growing()
    for number, text in enumerate(texts):
        example, _ = _text(_Line(text=text), writing, f"text {number}")
        growing.extend(example.token_T)
        growing.end()
    return growing.done("split", _bos(writing), {"kind": "texts"})


def _from_text(path: Path, writing: Writing) -> Examples:
    with mapped(path) as content:
        return _of_bytes(content, writing, path, "text")


def _from_wikitext(path: Path, writing: Writing) -> Examples:
    return _of_bytes(SEPARATOR.join(read_wikitext(path)).encode(), writing, path, "wikitext")


def _of_bytes(content: Any, writing: Writing, path: Path, kind: str) -> Examples:
    """Encode a file's content as one text, in pieces and without a copy."""
    if not len(content):
        raise TokenError(f"there is no data to train on: {path} is empty")
    growing = Growing()
    growing.extend(writing.begin)
    try:
        for ids in Encoded(content, writing.known, Cut(width=1)).after(0):
            growing.extend(ids)
    except TokenError as error:
        raise TokenError(f"{path}: {error}") from None
    growing.extend(writing.end)
    growing.end()
    return growing.done("split", _bos(writing), {"kind": kind, "file": path.name})


class _Line(msgspec.Struct):
    """A line of a file; its fields determine its kind."""

    text: str | None = None
    tokens: list[_Id] | None = None
    labels: list[int] | None = None
    prompt: str | None = None
    completion: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None


def _text(line: _Line, writing: Writing, where: str) -> tuple[Example, int]:
    if not line.text:
        raise TokenError(f"{where}: the text is empty")
    parts = (writing.begin, writing.encode_long(line.text), writing.end)
    return _learned(np.concatenate([np.array(part, np.int32) for part in parts]), 0), 0


def _tokens(line: _Line, writing: Writing, where: str) -> tuple[Example, int]:
    if not line.tokens:
        raise TokenError(f"{where}: the text is empty")
    token_T = np.array(line.tokens, np.int32)
    if line.labels is None:
        return _learned(line.tokens, 0), 0
    label_T = np.array(line.labels)
    if label_T.shape != token_T.shape or ((label_T != IGNORED) & (label_T != token_T)).any():
        raise TokenError(
            f"{where}: each label must equal its token, or be {IGNORED} if it is not learned"
        )
    return Example(token_T, label_T != IGNORED), 0


def _completion(line: _Line, writing: Writing, where: str) -> tuple[Example, int]:
    """Mask the tokens that the prompt has by itself; a token that joins the end of the prompt and
    the start of the completion is learned.
    """
    assert line.prompt is not None
    if not line.completion:
        raise TokenError(f"{where}: the completion is empty")
    check_length(line.prompt + line.completion, f"{where}: prompt and completion")
    begin = writing.begin
    before = np.array([*begin, *writing.encode(line.prompt)], np.int32)
    ids = [*begin, *writing.encode(line.prompt + line.completion), *writing.end]
    kept = shared(before, np.array(ids, np.int32))
    return _learned(ids, kept), int(kept < len(before))


def _messages(line: _Line, writing: Writing, where: str) -> tuple[Example, int]:
    template = writing.template
    if not isinstance(template, ChatTemplate):
        reason = f" ({template})" if template else ""
        raise TokenError(f"{where}: messages need a chat template{reason}")
    tools = {} if line.tools is None else {"tools": line.tools}
    assert line.messages is not None
    try:
        found = conversation(template, writing.known, line.messages, **tools)
    except JaxllmError as error:
        raise type(error)(f"{where}: {error}") from None
    if writing.eos:
        end = np.array(writing.end, np.int32)
        found = Example(np.append(found.token_T, end), np.append(found.counts_T, True))
    return found, 0


def _learned(ids: list[int] | np.ndarray, read: int) -> Example:
    """Make an example whose first `read` tokens are not learned."""
    return Example(np.array(ids, np.int32), np.arange(len(ids)) >= read)


class _Kind(NamedTuple):
    """A kind of line, with required and optional (`also`) fields.

    `read` returns the example, and 1 if prompt and completion share a token.
    """

    fields: frozenset[str]
    also: frozenset[str]
    read: Callable[[_Line, Writing, str], tuple[Example, int]]
    long: Long


_KINDS = (
    _Kind(frozenset({"text"}), frozenset(), _text, "split"),
    _Kind(frozenset({"tokens"}), frozenset({"labels"}), _tokens, "split"),
    _Kind(frozenset({"prompt", "completion"}), frozenset(), _completion, "left"),
    _Kind(frozenset({"messages"}), frozenset({"tools"}), _messages, "right"),
)
_WANTED = 'an object with "text", "tokens", "prompt" and "completion", or "messages"'


def _from_lines(path: Path, writing: Writing) -> Examples:
    growing, joined = Growing(), 0
    first: tuple[_Kind, str] | None = None
    for where, line in _lines(path):
        kind = _kind_of(line, where)
        first = first or (kind, where)
        if kind is not first[0]:
            raise TokenError(
                f"{where} has {_named(kind)}, but {first[1]} has {_named(first[0])}: put each kind"
                " into a separate file"
            )
        (token_T, counts_T), both = kind.read(line, writing, where)
        growing.extend(token_T, None if counts_T.all() else counts_T)
        growing.end()
        joined += both
    if first is None:
        raise TokenError(f"there is no data to train on: all lines of {path} are blank")
    source = {"kind": _named(first[0]), "file": path.name, "joined": joined}
    return growing.done(first[0].long, _bos(writing), source)


def _lines(path: Path) -> Iterator[tuple[str, _Line]]:
    for where, value in json_lines(path, TokenError, most=None):
        if not isinstance(value, dict):
            raise TokenError(f"{where} must be {_WANTED}")
        yield where, as_schema(value, _Line, where, TokenError)


def _kind_of(line: _Line, where: str) -> _Kind:
    given = {name for name in line.__struct_fields__ if getattr(line, name) is not None}
    for kind in _KINDS:
        if kind.fields <= given <= kind.fields | kind.also:
            return kind
    raise TokenError(f"{where} must be {_WANTED}: got {', '.join(sorted(given)) or 'none'}")


def _named(kind: _Kind) -> str:
    return " and ".join(sorted(kind.fields, reverse=True))


def _bos(writing: Writing) -> int | None:
    """Return the first token of examples, which truncation keeps."""
    return next(iter(writing.begin), None) if writing.tokenizer is not None else None


_READERS: dict[str, Callable[[Path, Writing], Examples]] = {
    "text": _from_text,
    "wikitext": _from_wikitext,
    "lines": _from_lines,
}
