"""JSON Schema, Lark and GBNF through `llguidance`, which is imported only when one is asked for.

Its matchers change in place. Here a state is never changed: `advance` copies it, which takes a few
microseconds.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from jaxllm.errors import GrammarError, requires_extra
from jaxllm.grammar.gbnf import gbnf_to_lark
from jaxllm.grammar.json_numbers import SCHEMA_DECODER
from jaxllm.grammar.json_schema import WHITESPACE, schema_rules
from jaxllm.grammar.vocabulary import Vocabulary

Spelling = Literal["canonical", "any"]
_MAX_ITEMS = 200_000  # places of the grammar that a text may be in at once
_NO_REWIND = re.compile(r"[\[,]\s*(max_tokens|temperature|stop)\s*=")


@dataclass(frozen=True)
class MatcherState:
    """A text so far: llguidance's matcher, which nothing changes any more, or the end of text."""

    matcher: Any
    ended: bool = False


@dataclass(frozen=True, eq=False)
class ContextFreeGrammar:
    """A grammar of llguidance over a vocabulary's tokens, with the methods of `TokenAutomaton`."""

    start: MatcherState
    vocabulary: Vocabulary

    can_force = True  # where spelling is canonical

    def advance(self, state: MatcherState, token: int) -> MatcherState | None:
        """Return the state after a token; None if it is not allowed."""
        if state.ended or token in self.vocabulary.eos_ids:
            ends = token in self.vocabulary.eos_ids and self.is_complete(state)
            return MatcherState(state.matcher, True) if ends else None
        if token >= self.vocabulary.size:
            return None
        matcher = state.matcher.deep_copy()
        taken = matcher.try_consume_tokens([token])
        _check_parser(matcher)
        return MatcherState(matcher) if taken else None

    def mask(self, state: MatcherState) -> np.ndarray:
        """Return the allowed tokens as bits, uint32 `[W]`."""
        if state.ended:
            return self.vocabulary.eos_W
        matcher = state.matcher.deep_copy()
        bits_W = np.frombuffer(matcher.compute_bitmask(), "<u4")
        _check_parser(matcher)
        bits_W = bits_W[: self.vocabulary.eos_W.size]  # it may have a word too many
        if self.is_complete(state):
            return bits_W | self.vocabulary.eos_W
        return bits_W & ~self.vocabulary.eos_W

    def is_complete(self, state: MatcherState) -> bool:
        """Return whether the text may end in this state."""
        return state.ended or bool(state.matcher.is_accepting())

    def forced(self, state: MatcherState) -> list[int]:
        """Return the tokens that must follow, one after the other: each is the only one allowed."""
        tokens: list[int] = []
        after: MatcherState | None = state
        ids = [] if self.is_complete(state) else state.matcher.deep_copy().compute_ff_tokens()
        for token in ids:
            if after is None or np.bitwise_count(self.mask(after)).sum() != 1:
                break
            after = self.advance(after, token)
            if after is not None:
                tokens.append(token)
        return tokens


def compile_context_free(
    text: str, vocabulary: Vocabulary, what: str, explain: Callable[[str], str] = str
) -> ContextFreeGrammar:
    """Return a grammar, given in llguidance's own form, over a vocabulary.

    explain: adds to its messages where in the user's text the problem is. Raises GrammarError for a
    grammar that is invalid, not supported, or matches no text.
    """
    matcher = _matcher(text, _tokenizer(vocabulary), what, explain)
    made = ContextFreeGrammar(MatcherState(matcher), vocabulary)
    if not made.mask(made.start).any():
        raise GrammarError(f"{what} matches no text that this vocabulary can spell")
    return made


def schema_text(schema: Any, whitespace: str, spelling: Spelling) -> str:
    """Return a JSON schema in llguidance's form. Raises what `schema_rules` raises."""
    expression, rules = schema_rules(schema, whitespace)
    return _with_spelling("\n".join([f"start: {expression}", *rules]), spelling)


def lark_text(grammar: str, spelling: Spelling) -> str:
    """Return a Lark grammar in llguidance's form, its schemas (%json) as `schema_text` does.

    Raises GrammarError for what cannot rewind, and for what `schema_rules` refuses.
    """
    if match := _NO_REWIND.search(grammar):
        raise GrammarError(
            f"the Lark grammar uses {match[1]}=, after which no text can be rewound. Use the"
            " options of generate instead"
        )
    parts, more, end = [], list[str](), 0
    for match in re.finditer(r"%json\s*(?=\{)", grammar):
        if match.start() < end:
            continue  # within a schema
        try:
            schema, after = SCHEMA_DECODER.raw_decode(grammar, match.end())
        except ValueError:
            continue  # llguidance reports it
        expression, rules = schema_rules(schema, WHITESPACE, f"json_{match.start()}")
        parts.append(f"{grammar[end : match.start()]}{expression}")
        more += rules
        end = after
    text = "".join(parts) + grammar[end:]
    return _with_spelling("\n".join([text, *more]), spelling)


def _with_spelling(grammar: str, spelling: Spelling) -> str:
    if spelling == "any" and not grammar.lstrip().startswith("%llguidance"):
        grammar = f'%llguidance {{"no_forcing": true}}\n{grammar}'
    return grammar


def gbnf_text(grammar: str, spelling: Spelling) -> str:
    """Return a GBNF grammar in llguidance's form. Raises GrammarError for one that is invalid."""
    return _with_spelling(gbnf_to_lark(grammar), spelling)


def _one_line(message: str) -> str:
    """Return llguidance's message without the line of the grammar that it quotes."""
    message = re.sub(r"^at \d+\(\d+\): failed to compile JSON schema: ", "", str(message).strip())
    message = re.sub(r"\. Enable '\w+' option.*| <non-verbose/>", "", message)
    return " ".join(re.split(r"\n\s*\d+ \| ", message)[0].split())[:300]


def _llguidance() -> Any:
    with requires_extra("grammar", "a grammar in JSON, Lark or GBNF", GrammarError):
        import llguidance
    return llguidance


@lru_cache(maxsize=8)
def _tokenizer(vocabulary: Vocabulary) -> Any:
    """Return llguidance's form of a vocabulary; it is built once and kept."""
    llguidance = _llguidance()
    return llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(_TokenTable(vocabulary)),
        n_vocab=vocabulary.size,
        eos_token=list(vocabulary.eos_ids),
    )


class _TokenTable:
    """The attributes that llguidance reads of a tokenizer."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        names = {
            index: vocabulary.tokenizer.token(index).encode()
            for index in vocabulary.tokenizer.special_ids
            if index < vocabulary.size
        }
        unused = {i for i, token in enumerate(vocabulary.bytes_V) if not token}
        self.tokens = [
            token or names.get(index, b"<[%d]>" % index)
            for index, token in enumerate(vocabulary.bytes_V)
        ]
        self.special_token_ids = sorted(unused)
        self.eos_token_id = vocabulary.eos_ids[0]
        self._encode = vocabulary.encode

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode(text.encode() if isinstance(text, str) else text)


def match_bytes(
    text: str, what: str, data: bytes, explain: Callable[[str], str] = str
) -> tuple[bool, bool]:
    """Return whether bytes are the beginning of a text of a grammar, and whether they are one.

    text: the grammar in llguidance's form. Raises GrammarError for one that is not supported.
    """
    matcher = _matcher(text, _byte_tokenizer(), what, explain)
    taken = matcher.try_consume_tokens(list(data))
    _check_parser(matcher)
    if taken != len(data):
        return False, False
    return True, bool(matcher.is_accepting())


def _matcher(text: str, tokenizer: Any, what: str, explain: Callable[[str], str]) -> Any:
    llguidance = _llguidance()
    limits = llguidance.LLParserLimits(
        max_items_in_row=_MAX_ITEMS, step_max_items=_MAX_ITEMS, verbose_errors=False
    )
    matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits)
    if matcher.is_error():
        raise GrammarError(f"{what} is not supported: {explain(_one_line(matcher.get_error()))}")
    return matcher


def _check_parser(matcher: Any) -> None:
    """Raise GrammarError if llguidance gave up, as it does where a text has too many readings."""
    error = matcher.get_error() if matcher.is_error() else ""
    if error and "NoExtensionBias" not in error:  # which means that no token may follow
        raise GrammarError(f"the grammar's parser failed: {_one_line(error)}")


@lru_cache(maxsize=1)
def _byte_tokenizer() -> Any:
    return _llguidance().LLTokenizer("byte")
