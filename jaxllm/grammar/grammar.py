"""`Grammar`, the texts that a row may write, and `Matcher`, a place in one; both immutable."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, Protocol, Self, get_args

import numpy as np

from jaxllm.errors import GrammarError
from jaxllm.grammar import context_free
from jaxllm.grammar.automaton import over_tokens
from jaxllm.grammar.gbnf import gbnf_to_lark
from jaxllm.grammar.json_numbers import SCHEMA_DECODER
from jaxllm.grammar.json_schema import WHITESPACE, keyword_place
from jaxllm.grammar.regex import DEAD, ByteAutomaton, compile_choice, compile_regex
from jaxllm.grammar.vocabulary import Vocabulary, make_vocabulary, unpack_mask
from jaxllm.text.tokenizer import Tokenizer

GrammarKind = Literal["regex", "choice", "json_schema", "lark", "gbnf"]
KINDS: tuple[GrammarKind, ...] = get_args(GrammarKind)


class CompiledGrammar(Protocol):
    """A grammar over tokens. Its states are values that nothing changes."""

    @property
    def start(self) -> Any: ...
    def advance(self, state: Any, token: int) -> Any | None: ...
    def mask(self, state: Any) -> np.ndarray: ...
    def is_complete(self, state: Any) -> bool: ...
    @property
    def can_force(self) -> bool: ...
    def forced(self, state: Any) -> list[int]: ...


@dataclass(frozen=True)
class Grammar:
    """A set of texts, for any tokenizer. Make one with `regex`, `choice`, `json_schema`, ...

    Attributes:
        kind: The language in which it is written.
        text: The regex, the Lark or GBNF grammar; the schema or the choices as JSON.
        whitespace: Of a JSON schema: a regex for the whitespace allowed in each place.
        spelling: "any": every sequence of tokens that spells an allowed text. "canonical": where
            the text is forced, only the tokens that the tokenizer would use. The texts are equal.
    """

    kind: GrammarKind
    text: str
    whitespace: str = ""
    spelling: context_free.Spelling = "any"

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Texts that `re.fullmatch(pattern, text)` accepts.

        Raises:
            GrammarError: For a pattern that is invalid or not regular.
        """
        made = cls("regex", pattern)
        _ = made._byte_automaton
        return made

    @classmethod
    def choice(cls, texts: Iterable[str]) -> Self:
        """One of these texts. Raises GrammarError for an empty list."""
        compile_choice(texts := texts if isinstance(texts, str) else list(texts))
        return cls("choice", json.dumps(texts))

    @classmethod
    def json_schema(
        cls,
        schema: Any,
        *,
        whitespace: str = WHITESPACE,
        spelling: context_free.Spelling = "canonical",
    ) -> Self:
        """JSON that a schema describes.

        Args:
            schema: A mapping, its JSON text, or a pydantic model.
            whitespace: A regex for the whitespace between tokens of JSON, "" for none.

        Raises:
            GrammarError: For invalid JSON. Unsupported schemas are refused when the grammar is
                compiled for a tokenizer.
        """
        if hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        try:
            if isinstance(schema, bytes):
                schema = schema.decode()
            text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
            read = SCHEMA_DECODER.decode(text)
        except (TypeError, ValueError) as error:
            raise GrammarError(f"json_schema is not JSON: {error}") from None
        if not isinstance(read, Mapping | bool):
            raise GrammarError(
                "json_schema must be a mapping, its JSON text or a pydantic model: got"
                f" {schema!r:.60}"
            )
        return cls("json_schema", text, whitespace, spelling)

    @classmethod
    def lark(cls, grammar: str, *, spelling: context_free.Spelling = "canonical") -> Self:
        """Texts of a Lark grammar, as llguidance reads it; `start` is its first rule."""
        return cls("lark", _check_text("lark", grammar), spelling=spelling)

    @classmethod
    def gbnf(cls, grammar: str, *, spelling: context_free.Spelling = "canonical") -> Self:
        """Texts of a grammar in llama.cpp's form; `root` is its first rule.

        Raises:
            GrammarError: For one that is invalid, with the line or the rule.
        """
        gbnf_to_lark(_check_text("gbnf", grammar))
        return cls("gbnf", grammar, spelling=spelling)

    def compile(self, vocabulary: Vocabulary) -> CompiledGrammar:
        """Return the grammar over a vocabulary's tokens; equal ones are compiled once.

        Raises:
            GrammarError: For what is not supported, and if no tokens spell any text of it.
        """
        return _compile(self, vocabulary)

    def matcher(
        self, tokenizer: Tokenizer, *, vocab_size: int | None = None, eos_token_ids: Any = None
    ) -> "Matcher":
        """Return the matcher of an empty text.

        Args:
            vocab_size: Number of the model's logits, by default the tokenizer's.
            eos_token_ids: By default the tokenizer's.
        """
        eos = [tokenizer.eos_id] if eos_token_ids is None else eos_token_ids
        size = tokenizer.vocab_size if vocab_size is None else vocab_size
        ids = [index for index in eos if index is not None]
        return start_matcher(self, make_vocabulary(tokenizer, size, ids))

    def allows(self, text: str) -> bool:
        """Return whether a text is the beginning of one of this grammar, or one of it."""
        return self._state_after(text)[0]

    def complete(self, text: str) -> bool:
        """Return whether a text is one of this grammar."""
        return self._state_after(text)[1]

    def _state_after(self, text: str) -> tuple[bool, bool]:
        """Return whether a text is a beginning, and whether it is complete."""
        if not isinstance(text, str):
            raise GrammarError(f"text must be a text: got {text!r:.60}")
        data = text.encode()
        if self.kind in ("regex", "choice"):
            state = self._byte_automaton.run(data)
            return state != DEAD, state != DEAD and bool(self._byte_automaton.accepts_S[state])
        return context_free.match_bytes(self._llguidance_text, self._what, data, self._explain)

    @cached_property
    def _byte_automaton(self) -> ByteAutomaton:
        if self.kind == "regex":
            return compile_regex(self.text)
        return compile_choice(json.loads(self.text))

    @property
    def _llguidance_text(self) -> str:
        if self.kind == "json_schema":
            schema = SCHEMA_DECODER.decode(self.text)
            return context_free.schema_text(schema, self.whitespace, self.spelling)
        make = context_free.lark_text if self.kind == "lark" else context_free.gbnf_text
        return make(self.text, self.spelling)

    @property
    def _what(self) -> str:
        return f"{self.kind} {self.text!r:.60}"

    def _explain(self, message: str) -> str:
        if self.kind != "json_schema":
            return message
        return keyword_place(json.loads(self.text), message)


def _check_text(name: str, text: Any) -> str:
    if not isinstance(text, str) or not text.strip():
        raise GrammarError(f"{name} must be a grammar as text: got {text!r:.60}")
    return text


@lru_cache(maxsize=64)
def _compile(grammar: Grammar, vocabulary: Vocabulary) -> CompiledGrammar:
    if grammar.kind in ("regex", "choice"):
        return over_tokens(grammar._byte_automaton, vocabulary, grammar._what)
    return context_free.compile_context_free(
        grammar._llguidance_text, vocabulary, grammar._what, grammar._explain
    )


@dataclass(frozen=True)
class Matcher:
    """A place in a text of a grammar: the tokens so far. `take` returns the next one.

    Two are equal if grammar, vocabulary (the same tokenizer) and tokens are. Pickled, it is these,
    and the text is read anew.
    """

    grammar: Grammar
    vocabulary: Vocabulary
    tokens: tuple[int, ...] = ()
    _state: Any = field(default=None, compare=False, repr=False)

    def take(self, token: int) -> "Matcher":
        """Return the matcher after a token.

        Raises:
            GrammarError: For a token that is not allowed, with its place.
        """
        state = self._compiled.advance(self._state, int(token))
        if state is None:
            raise GrammarError(
                f"token {int(token)} is not allowed after {len(self.tokens)} tokens of a"
                f" {self.grammar.kind} grammar"
            )
        return replace(self, tokens=(*self.tokens, int(token)), _state=state)

    def take_all(self, tokens: Iterable[int]) -> "Matcher":
        """Return the matcher after several tokens."""
        matcher = self
        for token in tokens:
            matcher = matcher.take(token)
        return matcher

    def rewind(self, count: int) -> "Matcher":
        """Return the matcher without the last `count` tokens."""
        if not 0 <= count <= len(self.tokens):
            raise GrammarError(f"rewind needs 0 to {len(self.tokens)} tokens: got {count}")
        kept = self.tokens[: len(self.tokens) - count]
        return start_matcher(self.grammar, self.vocabulary).take_all(kept)

    def allowed(self) -> np.ndarray:
        """Return which tokens may follow, bool `[V]`."""
        return unpack_mask(self.mask(), self.vocabulary.size)

    def mask(self) -> np.ndarray:
        """Return which tokens may follow as bits, uint32 `[W]`: bit `v % 32` of word `v // 32`."""
        return self._compiled.mask(self._state)

    def forced(self) -> list[int]:
        """Return the tokens that must follow, if the text can go on in one way only."""
        return self._compiled.forced(self._state)

    @property
    def can_force(self) -> bool:
        """Whether two or more tokens may be forced in a row."""
        return self._compiled.can_force

    @property
    def complete(self) -> bool:
        """Whether the text may end here."""
        return self._compiled.is_complete(self._state)

    @property
    def _compiled(self) -> CompiledGrammar:
        return self.grammar.compile(self.vocabulary)

    def __iter__(self) -> Iterator[int]:
        """Iterate over the allowed tokens."""
        return iter(np.flatnonzero(self.allowed()).tolist())

    def __reduce__(self) -> Any:
        return _rebuild, (self.grammar, self.vocabulary, self.tokens)


def start_matcher(grammar: Grammar, vocabulary: Vocabulary) -> Matcher:
    """Return the matcher of an empty text. Raises what `Grammar.compile` raises."""
    return Matcher(grammar, vocabulary, (), grammar.compile(vocabulary).start)


def _rebuild(grammar: Grammar, vocabulary: Vocabulary, tokens: tuple[int, ...]) -> Matcher:
    return start_matcher(grammar, vocabulary).take_all(tokens)


def as_grammar(value: Any, kind: GrammarKind) -> Grammar:
    """Return the grammar of an option: the value of `regex=`, `choice=`, ..."""
    if isinstance(value, Grammar) and value.kind == kind:
        return value
    if kind == "choice" and isinstance(value, str):
        value = value.split(",")
    make: Any = getattr(Grammar, kind)
    return make(value)
