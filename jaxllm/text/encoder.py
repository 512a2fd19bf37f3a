"""Text to ids by the `tokenizers` library, whole or with the few pieces that a text can have.

The library takes seconds to build a BPE of 262,144 pieces. All symbols of a text, from single
characters to its tokens, are substrings of the words that the normalizer and the pre-tokenizer make
of it. A BPE of those pieces alone, with their merges in the same order, gives the same tokens, and
takes a millisecond. So the whole vocabulary is built only once much text has been encoded.
"""

import math
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import msgspec
import tokenizers

from jaxllm.text.sentencepiece_model import derive_merges

# Characters of texts that are encoded by their pieces: about a second. In all of Gemma's vocabulary
# they take 0.1 s, and building it takes 3.
MAX_CHARACTERS = 1 << 18
_BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))


class Merges(Protocol):
    """The merges of a BPE."""

    def select(self, pieces: Iterable[str]) -> list[tuple[str, str]]:
        """Return the merges of these pieces to another of them, the first one first."""


class ListedMerges:
    """Merges in their order, as two pieces with a space between them.

    Of equal ones the last counts, as in the library.
    """

    def __init__(self, merges: Sequence[str]) -> None:
        self.merges = merges

    @cached_property
    def _ranks(self) -> dict[str, int]:
        return dict(zip(self.merges, range(len(self.merges)), strict=True))

    def select(self, pieces: Iterable[str]) -> list[tuple[str, str]]:
        """Return the merges among these pieces, the first one first."""
        if not (known := frozenset(pieces)):
            return []
        ranks, merges = self._ranks, {}
        for left, right in ((p[:cut], p[cut:]) for p in known for cut in range(1, len(p))):
            if left in known and right in known:
                merges[ranks.get(f"{left} {right}", -1)] = left, right
        merges.pop(-1, None)
        return [merges[rank] for rank in sorted(merges)]


class ScoredMerges:
    """The merges that follow from the scores of SentencePiece's pieces (`derive_merges`)."""

    def __init__(self, vocab: Mapping[str, int], scores: Sequence[float]) -> None:
        self.vocab, self.scores = vocab, scores

    def select(self, pieces: Iterable[str]) -> list[tuple[str, str]]:
        """Return the merges among these pieces, the first one first."""
        return derive_merges({piece: self.scores[self.vocab[piece]] for piece in pieces})


class PieceEncoder:
    """Encodes each text with a BPE of the pieces that can occur in it.

    Args:
        tree: a tokenizer.json with a BPE; its merges are not read.
        special: added tokens that no text becomes.
    """

    def __init__(self, tree: Mapping[str, Any], merges: Merges, special: frozenset[str]) -> None:
        self._tree, self._model, self._merges = tree, tree["model"], merges
        self._special, self._vocab = special, tree["model"]["vocab"]
        self._added = [t for t in tree["added_tokens"] if t["content"] not in special]
        self._longest = max(map(len, self._vocab), default=0)
        always = _BYTE_TOKENS if self._model.get("byte_fallback") else frozenset()
        self._always = self._vocab.keys() & always - special
        # Its tokens are the words that a BPE would split.
        words = {"type": "Unigram", "unk_id": 0, "vocab": [[secrets.token_hex(16), 0.0]]}
        self._splitter = self._build(words, self._added)
        self._build_subset(set(), [])

    @property
    def decoder(self) -> Any:
        """The library's decoder, from tokens to text; None if there is none."""
        return self._splitter.decoder

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        words = set(self._splitter.encode(text, add_special_tokens=False).tokens)
        pieces = {
            piece
            for word in words
            for start in range(len(word))
            for stop in range(start + 1, min(start + self._longest, len(word)) + 1)
            if (piece := word[start:stop]) in self._vocab
        }
        added = [t for t in self._added if t.get("normalized", True) or t["content"] in text]
        bpe, ids = self._build_subset(pieces - self._special, added)
        return [ids[i] for i in bpe.encode(text, add_special_tokens=False).ids]

    def _build_subset(
        self, pieces: set[str], added: Sequence[Mapping[str, Any]]
    ) -> tuple[tokenizers.Tokenizer, dict[int | None, int]]:
        """Return a library object with these pieces and added tokens, and our ids by its ids."""
        named = {piece: self._vocab[piece] for piece in pieces}
        named |= {piece: self._vocab[piece] for piece in self._always}
        unknown = self._model.get("unk_token")
        if unknown is not None:
            index = self._vocab[unknown]
            unknown = secrets.token_hex(16) if unknown in self._special else unknown
            named[unknown] = index
        vocab = {piece: i for i, piece in enumerate(named)}
        fields = {"vocab": vocab, "merges": self._merges.select(pieces), "unk_token": unknown}
        bpe = self._build(self._model | fields, added)
        ids: dict[int | None, int] = dict(enumerate(named.values()))
        return bpe, ids | {bpe.token_to_id(token["content"]): token["id"] for token in added}

    def _build(self, model: Any, added: Any) -> tokenizers.Tokenizer:
        tree = {**self._tree, "model": model, "added_tokens": added}
        return tokenizers.Tokenizer.from_str(msgspec.json.encode(tree).decode())


class Encoder:
    """Encodes by pieces at first, and with the whole vocabulary once that is worth building.

    A text longer than `MAX_CHARACTERS` waits for it. Otherwise it is built in a thread, once the
    texts together are as long.

    Args:
        whole: the library's object, or what builds it.
        by_pieces: by default, the object is used from the start.
    """

    def __init__(
        self,
        whole: tokenizers.Tokenizer | Callable[[], tokenizers.Tokenizer],
        by_pieces: PieceEncoder | None = None,
    ) -> None:
        self._whole, self._by_pieces, self._characters = whole, by_pieces, 0
        self._is_building = False

    @cached_property
    def library_tokenizer(self) -> tokenizers.Tokenizer:
        """The library's object."""
        return self._whole() if callable(self._whole) else self._whole

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without tokens that the library would add around it."""
        self._characters += len(text)
        if (
            self._by_pieces is None
            or "library_tokenizer" in vars(self)
            or len(text) > MAX_CHARACTERS
        ):
            return self.library_tokenizer.encode(text, add_special_tokens=False).ids
        if self._characters > MAX_CHARACTERS and not self._is_building:
            self._is_building = True
            threading.Thread(target=lambda: self.library_tokenizer, daemon=True).start()
        return self._by_pieces.encode(text)


def find_merges(tree: Mapping[str, Any], scores: Sequence[float] | None) -> Merges | None:
    """Return the merges if `PieceEncoder` gives this tree's tokens, else None.

    None also for a tree that the library refuses: building it then raises its error.

    Args:
        tree: a tokenizer.json that `check_tree` has checked.
        scores: those of `TokenizerTree`.
    """
    model = tree["model"]
    vocab, unknown = model["vocab"], model.get("unk_token")
    if model.get("type") != "BPE" or not isinstance(vocab, dict) or model.get("dropout"):
        return None
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    if not (unknown is None or (isinstance(unknown, str) and unknown in vocab)):
        return None
    if not _has_library_ids(tree):
        return None
    # A byte token stands for a byte that is no piece: it must not be part of another piece.
    byte_tokens = vocab.keys() & (_BYTE_TOKENS if model.get("byte_fallback") else frozenset())
    if scores is not None:
        apart = all(math.isnan(scores[vocab[name]]) for name in byte_tokens)
        return ScoredMerges(vocab, scores) if apart else None
    if (merges := write_merges(model.get("merges", []))) is None:
        return None
    parts = " ".join(merges).split(" ") if merges else []
    joined = map("".join, zip(parts[::2], parts[1::2], strict=True))
    if not all(map(vocab.__contains__, parts)) or not all(map(vocab.__contains__, joined)):
        return None
    return ListedMerges(merges) if byte_tokens.isdisjoint(parts) else None


def write_merges(merges: Sequence[Any]) -> Sequence[str] | None:
    """Return merges as two pieces with a space between them; None if one is not such a pair.

    Args:
        merges: all strings with a space, or all pairs.
    """
    if merges and not isinstance(merges[0], str):
        if str in set(map(type, merges)):
            return None
        merges = [" ".join(merge) for merge in merges]
    elif set(map(type, merges)) - {str} or "#version" in "".join(merges):
        return None  # the library skips strings with a version
    return None if [merge for merge in merges if merge.count(" ") != 1] else merges


def _has_library_ids(tree: Mapping[str, Any]) -> bool:
    """Return whether the added tokens have the ids that the library gives them.

    It numbers tokens that are no pieces upwards, from the number of pieces or after the largest id
    of an added token so far.
    """
    vocab, last = tree["model"]["vocab"], -1
    for token in tree["added_tokens"]:
        index = vocab.get(token["content"])
        if index is None:
            index = max(len(vocab), last + 1)
        if index != token["id"] or not token["content"]:
            return False
        last = index if index > last else last
    return True
