"""Masks of grammars inside compiled programs: a call from XLA to Python with the text so far.

A mask depends on nothing but the grammar and the generated tokens. So the loops that fork, rewind,
reorder or speculate need not know of it.
The matchers of recent texts are kept; the one of a text is made from that of the text before its
last token.
"""

import ctypes
import itertools
import zlib
from collections import OrderedDict
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import GrammarError
from jaxllm.grammar.grammar import Grammar
from jaxllm.grammar.vocabulary import Vocabulary
from jaxllm.ops import native

_MAX_TEXTS = 8192  # states kept, of about 5 kB each
_MAX_GRAMMARS = 1024
_STATES: OrderedDict[tuple[int, bytes], Any] = OrderedDict()  # by `_Texts.id` and token ids
_IDS = itertools.count()


class _Texts:
    """A grammar and its states after recent texts, which are in `_STATES`.

    id: a number that no other had, so that no state is taken for one of another grammar.
    """

    def __init__(self, grammar: Grammar, vocabulary: Vocabulary) -> None:
        self.name, self.id = (grammar, vocabulary), next(_IDS)
        self._compiled = grammar.compile(vocabulary)

    def mask(self, text: bytes) -> np.ndarray:
        """Return the mask after a text: the end of text alone if it is none of the grammar."""
        state = self._state(text)
        return self.name[1].eos_W if state is None else self._compiled.mask(state)

    def _state(self, text: bytes) -> Any:
        if not text:
            return self._compiled.start
        key = (self.id, text)
        if key in _STATES:
            _STATES.move_to_end(key)
            return _STATES[key]
        known = len(text) - 4
        while known and (self.id, text[:known]) not in _STATES:
            known -= 4
        state = _STATES[self.id, text[:known]] if known else self._compiled.start
        for token in np.frombuffer(text[known:], np.int32).tolist():
            state = None if state is None else self._compiled.advance(state, token)
        _STATES[key] = state
        if len(_STATES) > _MAX_TEXTS:
            _STATES.popitem(last=False)
        return state


_GRAMMARS: OrderedDict[int, _Texts] = OrderedDict()
_LOCK = Lock()


def register(grammar: Grammar, vocabulary: Vocabulary) -> int:
    """Compile a grammar for `mask_tokens`; return its number.

    It is the same in all processes of a group, which register the same grammars in the same order.
    """
    made = _Texts(grammar, vocabulary)
    native.set_mask_function(_C_MASK)  # here: a kept program is loaded without being traced
    name = repr((grammar, vocabulary.tokenizer.name, vocabulary.size, vocabulary.eos_ids))
    number = (zlib.crc32(name.encode()) & 0x7FFFFFFF) or 1
    with _LOCK:
        while number in _GRAMMARS and _GRAMMARS[number].name != made.name:
            number = number % 0x7FFFFFFF + 1
        _GRAMMARS.setdefault(number, made)
        _GRAMMARS.move_to_end(number)
        if len(_GRAMMARS) > _MAX_GRAMMARS:
            _GRAMMARS.popitem(last=False)
    return number


def mask_tokens(
    grammar_B: jax.Array, prompt_B: jax.Array, length_B: jax.Array, token_BL: jax.Array, size: int
) -> jax.Array:
    """Return which tokens may follow in each row, bool `[B, V]`, inside a compiled program.

    Args:
        grammar_B: numbers of `register`; 0 allows every token.
        prompt_B: where the generated text begins.
        length_B: where it ends.
        token_BL: the text.
        size: V.
    """
    words = -(-size // 32)
    out = jax.ShapeDtypeStruct((*prompt_B.shape, words), jnp.uint32)
    arrays = grammar_B, prompt_B, length_B, token_BL
    if native.is_enabled() and jax.default_backend() == "cpu":
        call = jax.ffi.ffi_call("jaxllm_mask_tokens", out, vmap_method="broadcast_all")
        bits_BW = call(*arrays)
    else:
        bits_BW = jax.pure_callback(_mask_arrays, out, *arrays, vmap_method="broadcast_all")
    index_V = np.arange(size, dtype=np.uint32)
    word_BV = jnp.take(bits_BW, (index_V >> 5).astype(np.int32), axis=-1)
    return (word_BV >> jnp.broadcast_to(index_V & 31, word_BV.shape)) & 1 != 0


def _mask_arrays(grammar_B: Any, prompt_B: Any, length_B: Any, token_BL: Any) -> np.ndarray:
    """Return the masks of rows, uint32 `[..., W]`; leading axes are rows."""
    grammar_B, prompt_B, length_B, token_BL = map(
        np.asarray, (grammar_B, prompt_B, length_B, token_BL)
    )
    rows = [
        _row_mask(int(grammar), token_L[int(prompt) : int(length)].tobytes())
        for grammar, prompt, length, token_L in zip(
            grammar_B.reshape(-1),
            prompt_B.reshape(-1),
            length_B.reshape(-1),
            token_BL.reshape(-1, token_BL.shape[-1]),
            strict=True,
        )
    ]
    width = max((row.size for row in rows if row is not None), default=0)
    full = np.full(width, 0xFFFFFFFF, np.uint32)
    return np.stack([full if row is None else row for row in rows]).reshape(*prompt_B.shape, width)


def _row_mask(grammar: int, text: bytes) -> np.ndarray | None:
    """Return the mask of a text; None allows every token."""
    with _LOCK:
        texts = _GRAMMARS.get(grammar)
        try:
            return None if texts is None else texts.mask(text)
        except GrammarError:  # raised again where the row's text is checked (`completion`)
            return None


def _fill_masks(
    grammar: int, prompt: int, length: int, token: int, rows: int, width: int, bits: int, words: int
) -> None:
    """Fill the masks of rows, given the addresses of arrays: `_mask_arrays` for the kernels."""

    def array(address: int, *shape: int) -> np.ndarray:
        count = int(np.prod(shape))
        memory = (ctypes.c_int32 * count).from_address(address)
        return np.frombuffer(memoryview(memory), np.int32).reshape(shape)

    bits_BW = array(bits, rows, words).view(np.uint32)
    bits_BW[:] = 0xFFFFFFFF  # whatever goes wrong, the loops end and their text is checked
    grammar_B, prompt_B, length_B = (array(x, rows) for x in (grammar, prompt, length))
    token_BL = array(token, rows, width)
    for row in range(rows):
        begin, end = int(prompt_B[row]), int(length_B[row])
        mask_W = _row_mask(int(grammar_B[row]), token_BL[row, begin:end].tobytes())
        if mask_W is not None:
            bits_BW[row] = mask_W


_C_MASK = native.MaskFunction(_fill_masks)
