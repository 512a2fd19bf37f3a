"""Automata over tokens: a table of the next state for each state and class of tokens.

A token is allowed in a state if its bytes lead the byte automaton to a state from which some
sequence of tokens reaches an end. So every spelling of an allowed text is allowed, and there are no
dead ends. Tokens that lead to the same state from every state are one class.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxllm.errors import GrammarError
from jaxllm.grammar.regex import DEAD, ByteAutomaton, can_finish
from jaxllm.grammar.vocabulary import Vocabulary, pack_mask

MAX_ENTRIES = 1 << 24  # of a table: 64 MB
_BLOCK = 1 << 23  # entries of the work array


@dataclass(frozen=True, eq=False)
class TokenAutomaton:
    """A grammar over the tokens of a vocabulary; state 0 is the start, the last is after the end.

    Attributes:
        next_SC: int32 `[S, C]`, the state after a token of each class; `DEAD` is not allowed.
        class_V: int32, the class of each token; the last class is that of end-of-text tokens.
        accepts_S: bool, whether the text may end here.
    """

    next_SC: np.ndarray
    class_V: np.ndarray
    accepts_S: np.ndarray

    start = 0

    def advance(self, state: int, token: int) -> int | None:
        """Return the state after a token; None if it is not allowed."""
        after = int(self.next_SC[state, self.class_V[token]])
        return None if after == DEAD else after

    def mask(self, state: int) -> np.ndarray:
        """Return the allowed tokens as bits, uint32 `[W]`."""
        bits_W = self._masks.get(state)
        if bits_W is None:
            bits_W = self._masks[state] = pack_mask(self.next_SC[state, self.class_V] != DEAD)
        return bits_W

    def is_complete(self, state: int) -> bool:
        """Return whether the text may end in this state."""
        return bool(self.accepts_S[state])

    def forced(self, state: int) -> list[int]:
        """Return the tokens that must follow, one after the other."""
        tokens: list[int] = []
        while (token := self._only_S[state]) >= 0 and len(tokens) < self.accepts_S.size:
            tokens.append(int(token))
            state = int(self.next_SC[state, self.class_V[token]])
        return tokens

    @cached_property
    def can_force(self) -> bool:
        """Whether a state forces two or more tokens."""
        only = self._only_S >= 0
        after_S = self.next_SC[np.arange(only.size), self.class_V[np.maximum(self._only_S, 0)]]
        return bool((only & only[after_S]).any())

    @cached_property
    def _masks(self) -> dict[int, np.ndarray]:
        return {}

    @cached_property
    def _only_S(self) -> np.ndarray:
        """The only allowed token of each state, -1 if there are several or the text may end."""
        size_C = np.bincount(self.class_V, minlength=self.next_SC.shape[1])
        first_C = np.zeros(size_C.size, np.int64)
        first_C[self.class_V[::-1]] = np.arange(self.class_V.size)[::-1]
        allowed_SC = self.next_SC != DEAD
        single_S = (allowed_SC @ size_C == 1) & ~self.accepts_S
        return np.where(single_S, first_C[allowed_SC.argmax(axis=1)], -1)


def over_tokens(automaton: ByteAutomaton, vocabulary: Vocabulary, what: str) -> TokenAutomaton:
    """Return an automaton over a vocabulary's tokens.

    Raises GrammarError if its table would be too large, or if no tokens spell any text of it.
    """
    bytes_VL, length_V = _padded_bytes(vocabulary)
    class_V, first_C = _token_classes(automaton, bytes_VL, length_V)
    states, classes = automaton.accepts_S.size + 1, first_C.size + 1
    if states * classes > MAX_ENTRIES:
        raise GrammarError(
            f"{what} needs a table of {states:,} states and {classes:,} classes of tokens,"
            f" more than {MAX_ENTRIES:,} entries. Simplify it, or use lark="
        )
    next_SC = np.full((states, classes), DEAD, np.int32)
    rows_S = np.arange(states - 1)
    next_SC[:-1, :-1] = _walk(automaton, rows_S, bytes_VL[first_C], length_V[first_C])
    class_V[list(vocabulary.eos_ids)] = classes - 1
    next_SC[:-1, -1] = np.where(automaton.accepts_S, states - 1, DEAD)
    next_SC[-1, -1] = states - 1
    accepts_S = np.append(automaton.accepts_S, True)
    return _prune(next_SC, class_V, accepts_S, what)


def _padded_bytes(vocabulary: Vocabulary) -> tuple[np.ndarray, np.ndarray]:
    """Return each token's bytes, uint8 `[V, L]`, and their number."""
    bytes_V = vocabulary.bytes_V
    length_V = np.array([len(token) for token in bytes_V])
    width = max(1, int(length_V.max()))
    joined = b"".join(token.ljust(width, b"\0") for token in bytes_V)
    return np.frombuffer(joined, np.uint8).reshape(len(bytes_V), width), length_V


def _walk(
    automaton: ByteAutomaton, rows_K: np.ndarray, bytes_VL: np.ndarray, length_V: np.ndarray
) -> np.ndarray:
    """Return the state after each token from each of these states, int32 `[K, V]`."""
    next_SN, V = automaton.next_SN, length_V.size
    after_KV = np.ascontiguousarray(next_SN[rows_K][:, bytes_VL[:, 0]])
    after_KV[:, length_V == 0] = DEAD
    flat = after_KV.reshape(-1)
    at = np.flatnonzero((after_KV != DEAD) & (length_V > 1)[None])
    state, token, column = flat[at], at % V, 1
    while at.size:  # only tokens that are alive and not at their end
        state = next_SN[state, bytes_VL[token, column]]
        column += 1
        done = (state == DEAD) | (length_V[token] == column)
        flat[at[done]] = state[done]
        at, state, token = at[~done], state[~done], token[~done]
    return after_KV


def _token_classes(
    automaton: ByteAutomaton, bytes_VL: np.ndarray, length_V: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the class of each token, int32 `[V]`, and the first token of each class.

    Columns of states are compared by a random 64-bit sum: two of 10**5 different ones are equal
    with a probability of 1e-9.
    """
    states, V = automaton.accepts_S.size, length_V.size
    weight_S = np.random.default_rng(0).integers(0, 1 << 64, states, np.uint64)
    sum_V = np.zeros(V, np.uint64)
    block = max(1, _BLOCK // V)
    for start in range(0, states, block):
        rows_K = np.arange(start, min(start + block, states))
        after_KV = _walk(automaton, rows_K, bytes_VL, length_V)
        for row, after_V in zip(rows_K, after_KV, strict=True):
            sum_V += (after_V + 1).astype(np.uint64) * weight_S[row]
    _, first_C, class_V = np.unique(sum_V, return_index=True, return_inverse=True)
    return class_V.astype(np.int32), first_C


def _prune(
    next_SC: np.ndarray, class_V: np.ndarray, accepts_S: np.ndarray, what: str
) -> TokenAutomaton:
    """Remove states that tokens do not reach, or from which they reach no end; merge classes."""
    reach_S = np.zeros(accepts_S.size, bool)
    new = np.array([0])
    while new.size:
        reach_S[new] = True
        after = np.unique(next_SC[new])
        new = after[(after != DEAD) & ~reach_S[after]]
    useful_S = can_finish(next_SC, accepts_S & (next_SC[:, -1] != DEAD)) & reach_S
    if not useful_S[0]:
        raise GrammarError(
            f"{what} matches no text that this vocabulary can spell: a byte that every match needs"
            " has no token"
        )
    useful_S[-1] = True
    number_S = np.append(np.where(useful_S, np.cumsum(useful_S) - 1, DEAD), DEAD).astype(np.int32)
    kept_SC = number_S[next_SC[useful_S]]
    columns, merged_C = np.unique(kept_SC[:, :-1], axis=1, return_inverse=True)
    merged_C = np.append(merged_C.reshape(-1), columns.shape[1]).astype(np.int32)
    table_SC = np.concatenate([columns, kept_SC[:, -1:]], axis=1)
    return TokenAutomaton(np.ascontiguousarray(table_SC), merged_C[class_V], accepts_S[useful_S])
