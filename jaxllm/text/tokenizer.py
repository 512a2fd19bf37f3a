"""Text to token ids and back: a thin immutable wrapper around the `tokenizers` library.

Plain text never becomes a special token: a tokenizer has two encoders, and only the one that
`parse_special=True` uses recognizes the spelling of control tokens.
"""

import operator
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import msgspec
import tokenizers

from jaxllm.errors import CheckpointError, JaxllmError, TokenError
from jaxllm.text.byte_level import symbols_to_bytes
from jaxllm.text.encoder import Encoder, Merges, PieceEncoder, find_merges
from jaxllm.text.formats import (
    TOKENIZER_FILES,
    TokenizerTree,
    find_tokenizer_format,
    read_tree,
    token_ids,
)

__all__ = ["TOKENIZER_FILES", "Tokenizer", "has_tokenizer"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def has_tokenizer(path: str | Path) -> bool:
    """Return whether a directory has the files of a tokenizer, in any of the three formats."""
    return find_tokenizer_format(Path(path)) is not None


@dataclass(frozen=True, repr=False, eq=False)
class Tokenizer:
    """A checkpoint's tokenizer, immutable and thread-safe.

    * `encode` adds no token unless requested, and without `parse_special=True` no text becomes a
      special token (except the unknown token, for text outside the vocabulary).
    * Ids are those of the checkpoint: no token is added, renumbered or dropped. `vocab_size` is the
      largest id plus one; the model's embedding may be larger.
    * `bos_id`, `eos_id`, `pad_id`, `unk_id` are None if the checkpoint has no such token.
    * `adds_bos`: whether prompts of the checkpoint start with `bos_id`; `encode` ignores it.
    * `end_id`: the token that the checkpoint puts after a whole text (embedding models do), or
      None; `encode` ignores it.
    * Encoding is deterministic and complete: a file's dropout, truncation and padding are off.
    """

    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    unk_id: int | None
    adds_bos: bool
    end_id: int | None
    special_ids: frozenset[int]
    name: str
    _plain: Encoder = field(repr=False)
    _parsing: Encoder = field(repr=False)
    _decoder: Any = field(repr=False)
    _tokens: Mapping[int, str] = field(repr=False)
    _ids: Mapping[str, int] = field(repr=False)
    _byte_tokens: str | None = field(repr=False)

    @classmethod
    def from_directory(cls, path: str | Path) -> Self:
        """Read the tokenizer of a checkpoint directory.

        Uses the first that exists: `tokenizer.json`; `vocab.json` with `merges.txt` (GPT-2's
        byte-level BPE); `tokenizer.model` (SentencePiece BPE). Special tokens come from
        `tokenizer_config.json`, `special_tokens_map.json` and `added_tokens.json`.

        Raises:
            CheckpointError: none of these exists, or a file is malformed or contradicts another.
        """
        directory = Path(path)
        return cls.from_tree(directory, read_tree(directory))

    @classmethod
    def from_tree(cls, directory: Path, source: TokenizerTree) -> Self:
        """Return the tokenizer of a tree; `directory` gives its name, also for messages.

        Raises:
            CheckpointError: the tree is malformed.
        """
        tree = source.tree | {"post_processor": None}
        special = {token["content"] for token in tree["added_tokens"] if token.get("special")}
        ids = token_ids(tree)
        merges = find_merges(tree, source.scores)
        if merges is None:
            plain, parsing, decoder = _build_whole(directory, source, special)
        else:
            plain, parsing, decoder = _build_by_pieces(directory, source, merges, special)
        roles = {role: ids.get(token) for role, token in source.roles.items()}
        tokens = dict(zip(ids.values(), ids, strict=True))
        return cls(
            vocab_size=max(tokens, default=-1) + 1,
            bos_id=roles.get("bos"),
            eos_id=roles.get("eos"),
            pad_id=roles.get("pad"),
            unk_id=roles.get("unk"),
            adds_bos=source.adds_bos,
            end_id=None if source.end is None else ids.get(source.end),
            special_ids=frozenset(t["id"] for t in tree["added_tokens"] if t.get("special")),
            name=directory.resolve().name,
            _plain=plain,
            _parsing=parsing,
            _decoder=decoder,
            _tokens=tokens,
            _ids=ids,
            _byte_tokens=_find_byte_tokens(tree.get("decoder")),
        )

    def encode(
        self, text: str, *, bos: bool = False, eos: bool = False, parse_special: bool = False
    ) -> list[int]:
        """Return the ids of a text, optionally with `bos_id` before and `eos_id` after.

        With `parse_special`, special tokens spelled out in the text become control tokens: use it
        for the output of chat templates, not for user input.

        Raises:
            TokenError: the text is not a string of Unicode scalar values, or the tokenizer lacks
                the requested bos or eos token.
        """
        if not isinstance(text, str):
            raise TokenError(f"text to encode must be a string: got {type(text).__name__}")
        encoder = self._parsing if parse_special else self._plain
        with _library_errors(TokenError, f"{self!r} cannot encode this text"):
            ids = encoder.encode(text)
        begin = [self._require_id("bos", self.bos_id)] if bos else []
        end = [self._require_id("eos", self.eos_id)] if eos else []
        return [*begin, *ids, *end]

    def __contains__(self, index: int) -> bool:
        """Return whether an id has a token; padding of a model's embedding has none."""
        return _check_id(index) in self._tokens

    @lru_cache(maxsize=8)  # noqa: B019 - few tokenizers live in a process
    def missing_ids(self, size: int, without: tuple[int, ...] = ()) -> tuple[range, ...]:
        """Return the ids below `size` that have no token, without some."""
        has_gaps = len(self._tokens) < self.vocab_size  # as in few vocabularies
        start = 0 if has_gaps else self.vocab_size
        others = (*without, *(self._tokens if has_gaps else ()))
        edges = [start - 1, *sorted({i for i in others if start <= i < size}), size]
        return tuple(range(a + 1, b) for a, b in pairwise(edges) if b > a + 1)

    def unlike_ids(self, other: "Tokenizer") -> list[int]:
        """Return the ids that are another token in another tokenizer."""
        sizes = range(max(self.vocab_size, other.vocab_size))
        return [i for i in sizes if self._tokens.get(i) != other._tokens.get(i)]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text of ids, by default without special tokens.

        Bytes that are not UTF-8 become U+FFFD. An id without a token has no text.

        Raises:
            TokenError: an id is not a whole number from 0 up.
        """
        checked = [int(index) for index in ids if index in self]
        skipped = self.special_ids if skip_special else frozenset[int]()
        tokens = [self._tokens[index] for index in checked if index not in skipped]
        return " ".join(tokens) if self._decoder is None else self._decoder.decode(tokens)

    def token(self, index: int) -> str:
        """Return a token as the vocabulary spells it ("\u2581the", "<0x0A>"), for display.

        An id without a token is spelled "". Raises TokenError as `decode` does.
        """
        return self._tokens.get(_check_id(index), "")

    def id(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary spells it, None if there is none."""
        return self._ids.get(token)

    def token_bytes(self, index: int) -> bytes | None:
        """Return the raw bytes of a token, or None if it represents text.

        All tokens of a byte-level vocabulary are bytes; in others only byte-fallback tokens are.

        Raises:
            TokenError: As `decode` does.
        """
        token = self.token(index)
        if self._byte_tokens == "every token":
            return symbols_to_bytes(token)
        match = _BYTE_TOKEN.fullmatch(token) if self._byte_tokens == "byte tokens" else None
        return bytes.fromhex(match[1]) if match else None

    def __repr__(self) -> str:
        return (
            f"Tokenizer({self.name!r}, vocab_size={self.vocab_size}, "
            f"bos_id={self.bos_id}, eos_id={self.eos_id})"
        )

    def _require_id(self, role: str, index: int | None) -> int:
        if index is None:
            raise TokenError(f"{self!r} has no {role} token; encode without {role}=True")
        return index


def _check_id(index: int) -> int:
    try:
        number = operator.index(index)
    except TypeError as error:
        kind = type(index).__name__
        raise TokenError(f"a token id must be an integer: got {kind}") from error
    if number < 0:
        raise TokenError(f"a token id must be at least 0: got {number}")
    return number


def _build_whole(
    directory: Path, source: TokenizerTree, special: set[str]
) -> tuple[Encoder, Encoder, Any]:
    """Return two encoders, without and with special tokens in text, and the decoder.

    Raises CheckpointError for a tree that the library refuses.
    """
    tree = source.with_merges()
    hidden = _random_names(special)
    without = _hide_special(tree, hidden)
    plain = _build(directory, without)
    for token in tree["added_tokens"]:
        index = plain.token_to_id(hidden.get(token["content"], token["content"]))
        if index != token["id"]:
            raise CheckpointError(
                f"{directory}: the id {token['id']} of the added token {token['content']!r} "
                f"leaves a gap; it would become {index}"
            )
    parsing = Encoder(partial(_build, directory, tree))
    if len(without["model"].get("merges", ())) < len(tree["model"].get("merges", ())):
        _ = parsing.library_tokenizer  # an omitted merge may be the malformed one
    return Encoder(plain), parsing, plain.decoder


def _build_by_pieces(
    directory: Path, source: TokenizerTree, merges: Merges, special: set[str]
) -> tuple[Encoder, Encoder, Any]:
    """Return the same, from the merges that `find_merges` found."""
    with _library_errors(CheckpointError, f"the tokenizer in {directory} is malformed"):
        plain = PieceEncoder(source.tree, merges, frozenset(special))
        parsing = PieceEncoder(source.tree, merges, frozenset())
    return (
        Encoder(partial(_build_merged, directory, source, special), plain),
        Encoder(partial(_build_merged, directory, source, frozenset()), parsing),
        plain.decoder,
    )


def _build_merged(
    directory: Path, source: TokenizerTree, special: Set[str]
) -> tokenizers.Tokenizer:
    """Return the library's object in which no text becomes one of the tokens in `special`."""
    return _build(directory, _hide_special(source.with_merges(), _random_names(special)))


def _random_names(tokens: Set[str]) -> dict[str, str]:
    return {token: f"<{secrets.token_hex(16)}>" for token in tokens}


def _build(directory: Path, tree: Mapping[str, Any]) -> tokenizers.Tokenizer:
    with _library_errors(CheckpointError, f"the tokenizer in {directory} is malformed"):
        return tokenizers.Tokenizer.from_str(msgspec.json.encode(tree).decode())


@contextmanager
def _library_errors(kind: type[JaxllmError], what: str) -> Iterator[None]:
    """Convert errors of `tokenizers`, including Rust panics, to a jaxllm error."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise kind(f"{what}: {' '.join(str(error).split())[:200]}") from error


def _hide_special(tree: dict[str, Any], hidden: Mapping[str, str]) -> dict[str, Any]:
    """Return a tree with the same ids in which no text can become one of the tokens in `hidden`.

    The tokens are renamed to the random values of `hidden`, and BPE merges that involve one are
    removed.
    """
    model = dict(tree["model"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = {hidden.get(name, name): i for name, i in model["vocab"].items()}
    else:
        model["vocab"] = [[hidden.get(name, name), score] for name, score in model["vocab"]]
    if isinstance(unknown := model.get("unk_token"), str) and unknown in hidden:
        model["unk_token"] = hidden[unknown]
    prefix = len(model.get("continuing_subword_prefix") or "")
    if "merges" in model:
        model["merges"] = [m for m in model["merges"] if _keeps_merge(m, prefix, hidden)]
    added = [t | {"content": hidden.get(t["content"], t["content"])} for t in tree["added_tokens"]]
    return tree | {"model": model, "added_tokens": added}


def _keeps_merge(merge: Any, prefix: int, names: Mapping[str, str]) -> bool:
    """Return whether a merge, a string or a pair, involves none of these tokens.

    A malformed merge is kept, for the `tokenizers` library to reject.
    """
    parts = merge.split(" ") if isinstance(merge, str) else merge
    if len(parts) != 2:
        return True
    left, right = parts
    return left not in names and right not in names and left + right[prefix:] not in names


def _find_byte_tokens(decoder: Any) -> str | None:
    """Return which tokens a decoder turns into bytes: "every token", "byte tokens" or None."""
    steps = decoder.get("decoders", [decoder]) if isinstance(decoder, dict) else []
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return "every token"
    return "byte tokens" if "ByteFallback" in kinds else None
