"""The bytes that each token of a vocabulary adds to a text."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from jaxllm.errors import GrammarError
from jaxllm.text.tokenizer import Tokenizer

_UNKNOWN = "\ufffd"
_BEFORE = ("\n", "\x02")  # characters that rarely merge with the next one


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model with a tokenizer, as grammars see them.

    Attributes:
        tokenizer: The model's tokenizer.
        size: Number of the model's logits; those past the tokenizer's ids are never allowed.
        eos_ids: End-of-text ids, allowed exactly where a text may end.
    """

    tokenizer: Tokenizer
    size: int
    eos_ids: tuple[int, ...]

    @cached_property
    def bytes_V(self) -> list[bytes]:
        """The bytes of each token; empty for control tokens, ends of text and unused ids."""
        bytes_V = token_bytes(self.tokenizer)[: self.size]
        bytes_V += [b""] * (self.size - len(bytes_V))
        for index in self.eos_ids:
            bytes_V[index] = b""
        return bytes_V

    @cached_property
    def eos_W(self) -> np.ndarray:
        """The mask that allows the end of text alone, as bits."""
        allowed_V = np.zeros(self.size, bool)
        allowed_V[list(self.eos_ids)] = True
        return pack_mask(allowed_V)

    def encode(self, text: bytes) -> list[int]:
        """Return the tokens that spell exactly these bytes within a text, as the tokenizer would.

        It is asked for the text alone and after a character: alone, many add a space before it. If
        neither gives these bytes, each token is the longest one that fits.
        """
        spelled = self.bytes_V
        for before in ("", *_BEFORE):
            head = self.tokenizer.encode(before)
            ids = self.tokenizer.encode(before + text.decode(errors="replace"))
            rest = ids[len(head) :]
            if ids[: len(head)] != head or max(rest, default=0) >= self.size:
                continue
            if b"".join(spelled[index] for index in rest) == text:
                return rest
        return self._encode_greedily(text)

    def _encode_greedily(self, text: bytes) -> list[int]:
        ids, tokens = self._tokens_by_bytes, []
        while text:
            fitting = [n for n in range(min(len(text), self._longest), 0, -1) if text[:n] in ids]
            if not fitting:
                break
            tokens.append(ids[text[: fitting[0]]])
            text = text[fitting[0] :]
        return tokens

    @cached_property
    def _tokens_by_bytes(self) -> dict[bytes, int]:
        return {token: index for index, token in reversed([*enumerate(self.bytes_V)]) if token}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.bytes_V))


def make_vocabulary(tokenizer: Tokenizer | None, size: int, eos_ids: Iterable[int]) -> Vocabulary:
    """Return the vocabulary. Raises GrammarError without a tokenizer or an end-of-text id."""
    eos = tuple(sorted({int(index) for index in eos_ids if 0 <= int(index) < size}))
    if tokenizer is None:
        raise GrammarError("a grammar needs a tokenizer, and the checkpoint has none")
    if not eos:
        raise GrammarError("a grammar needs an end-of-text token. Pass eos_token_id")
    return Vocabulary(tokenizer, size, eos)


@lru_cache(maxsize=8)
def _cached_bytes(tokenizer: Tokenizer) -> tuple[bytes, ...]:
    anchor, before = _anchor(tokenizer)
    spelled = []
    for index in range(tokenizer.vocab_size):
        try:
            text_bytes = tokenizer.token_bytes(index)
            if text_bytes is None:
                text = tokenizer.decode([anchor, index])
                text_bytes = text[len(before) :].encode() if text.startswith(before) else b""
        except ValueError:  # an id without a token
            text_bytes = b""
        spelled.append(b"" if index in tokenizer.special_ids else text_bytes)
    if tokenizer.unk_id is not None:
        spelled[tokenizer.unk_id] = b""
    return tuple(spelled)


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """Return the bytes that each id adds to a text, empty for control tokens and unused ids.

    Where a token stands for text, they are what decoding it after another token adds.
    """
    return list(_cached_bytes(tokenizer))


def _anchor(tokenizer: Tokenizer) -> tuple[int, str]:
    """Return a token to decode others after, and its text."""
    for index in tokenizer.encode("a b"):
        text = tokenizer.decode([index])
        if re.search(r"\w", text) and _UNKNOWN not in text:
            return index, text
    raise GrammarError(f"{tokenizer!r} has no token for a letter, so a grammar cannot use it")


def pack_mask(allowed_V: np.ndarray) -> np.ndarray:
    """Return a mask as bits, uint32 `[ceil(V / 32)]`: bit `v % 32` of word `v // 32` is token v."""
    V = allowed_V.shape[-1]
    padded = np.zeros(-(-V // 32) * 32, bool)
    padded[:V] = allowed_V
    packed: np.ndarray = np.packbits(padded, bitorder="little").view("<u4")
    return packed


def unpack_mask(bits_W: np.ndarray, size: int) -> np.ndarray:
    """Return bits as a mask, bool `[V]`."""
    unpacked: np.ndarray = np.unpackbits(bits_W.view(np.uint8), bitorder="little")[:size]
    return unpacked.astype(bool)
