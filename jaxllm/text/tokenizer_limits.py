"""Schema and limits of a tokenizer.json, before it is passed to the `tokenizers` library.

The library has no limits of its own: neither on a text that grows tenfold in each of thirty
normalizers, nor on regular expressions.
"""

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from jaxllm.errors import CheckpointError
from jaxllm.runtime.schema import as_schema
from jaxllm.text.regex_safety import check_regex

MAX_STEPS = 64  # of normalizers, of pre-tokenizers and of decoders
MAX_GROWTH = 64  # factor by which they may lengthen a text
MAX_PIECE = 1 << 12  # characters of a piece, or of an inserted text
MAX_ADDED = 1 << 17
MAX_CHARACTERS = (
    1 << 23
)  # of all pieces: the library's tries use 100 bytes per character; 2**21 are usual

_Piece = Annotated[str, Meta(max_length=MAX_PIECE)]
_Id = Annotated[int, Meta(ge=0, lt=1 << 31)]
_SEQUENCES = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}


class _Model(msgspec.Struct):
    """The pieces and their merges; the library reads the other fields."""

    vocab: dict[_Piece, _Id] | list[tuple[_Piece, float]]
    type: str | None = None
    merges: list[str | tuple[str, str]] = []
    unk_token: _Piece | dict[str, Any] | None = None
    continuing_subword_prefix: _Piece | None = None
    end_of_word_suffix: _Piece | None = None
    max_input_chars_per_word: Annotated[int, Meta(ge=0, le=1000)] = 100


class _AddedToken(msgspec.Struct):
    """A token that is matched before all others."""

    id: _Id
    content: _Piece
    special: bool = False


class _TokenizerJson(msgspec.Struct):
    """A tokenizer.json; its normalizer, pre-tokenizer and decoder are checked step by step."""

    model: _Model
    added_tokens: Annotated[list[_AddedToken], Meta(max_length=MAX_ADDED)] = []
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None


def check_tree(tree: dict[str, Any], where: str) -> None:
    """Raise CheckpointError if a tokenizer.json is malformed or its work is not bounded."""
    pieces: _TokenizerJson = as_schema(tree, _TokenizerJson, where)
    vocab = pieces.model.vocab
    names = vocab if isinstance(vocab, dict) else (piece for piece, _ in vocab)
    total = sum(map(len, names)) + sum(len(token.content) for token in pieces.added_tokens)
    if total > MAX_CHARACTERS:
        raise CheckpointError(
            f"{where}: the pieces are too long: got {total:,} characters in total, expected at most"
            f" {MAX_CHARACTERS:,}"
        )
    for part, within in _SEQUENCES.items():
        growth = 1.0
        for count, step in enumerate(_steps(tree.get(part), within, f"{where}: {part}"), 1):
            growth *= _growth(step, f"{where}: {part}")
            if count > MAX_STEPS:
                raise CheckpointError(f"{where}: {part} has more than {MAX_STEPS} steps")
        if growth > MAX_GROWTH:
            raise CheckpointError(
                f"{where}: {part} can lengthen a text by more than a factor of {MAX_GROWTH}"
            )


def _steps(step: Any, key: str, where: str) -> Iterator[dict[str, Any]]:
    """Yield a step, or the steps of a (nested) sequence."""
    if step is None:
        return
    if not isinstance(step, dict):
        raise CheckpointError(f"{where} must be an object: got {step!r:.60}")
    if key not in step:
        yield step
        return
    for part in as_schema(step[key], list[dict[str, Any]], f"{where}: {key}"):
        yield from _steps(part, key, where)


def _growth(step: dict[str, Any], where: str) -> float:
    """Return the factor by which a step can lengthen a text; checks its regex and strings."""
    texts = [text for text in step.values() if isinstance(text, str)]
    if any(len(text) > MAX_PIECE for text in texts):
        raise CheckpointError(f"{where}: a step has a text of more than {MAX_PIECE} characters")
    pattern = step.get("pattern")
    regex = pattern.get("Regex") if isinstance(pattern, dict) else None
    if regex is not None:
        check_regex(as_schema(regex, str, where), where)
    content = step.get("content")
    if step.get("type") == "Replace" and isinstance(content, str):
        if regex is not None or not isinstance(pattern, dict):
            return 1.0 + len(content)  # it may match the empty string between any two characters
        return max(1.0, len(content) / max(1, len(str(pattern.get("String", "")))))
    return 2.0 if step.get("type") == "ByteLevel" else 1.0
