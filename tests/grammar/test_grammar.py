"""`Grammar` and `Matcher`: masks against llguidance, spelled texts, values that fork and rewind."""

import json
import pickle
import random
import re
import sys

import numpy as np
import pytest

from jaxllm.errors import GrammarError
from jaxllm.grammar import Grammar, Matcher
from jaxllm.grammar.automaton import TokenAutomaton
from jaxllm.grammar.context_free import compile_context_free
from jaxllm.grammar.grammar import start_matcher
from jaxllm.grammar.vocabulary import make_vocabulary, unpack_mask
from tests.grammar.patterns import PATTERNS
from tests.grammar.vocabularies import NAMES, vocabulary

# What means the same in llguidance: its \s has no U+001C to U+001F, and its \w and \d are those of
# another version of Unicode.
COMPARED = [
    pattern.replace(r"\d", "[0-9]")
    for pattern in PATTERNS
    if not pattern.startswith(("(?", "^")) and not re.search(r"\\[DwWsS]|\[\^\\d", pattern)
]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def _walk(matcher: Matcher, rng: random.Random, steps: int = 12) -> Matcher:
    for _ in range(steps):
        allowed = np.flatnonzero(matcher.allowed())
        if not allowed.size:
            break
        matcher = matcher.take(int(rng.choice(allowed.tolist())))
    return matcher


@pytest.mark.parametrize("name", NAMES)
def test_automaton_masks_equal_llguidance(name: str) -> None:
    """In every state of random walks over the patterns: every spelling of an allowed text."""
    words, states, rng = vocabulary(name), 0, random.Random(0)
    for pattern in COMPARED:
        ours = Grammar.regex(pattern).compile(words)
        escaped = pattern.replace("/", r"\/").replace("\n", r"\n")
        lark = f'%llguidance {{"no_forcing": true}}\nstart: /{escaped}/'
        theirs = compile_context_free(lark, words, pattern)
        for _ in range(15):
            state, other = ours.start, theirs.start
            for _ in range(10):
                mask = ours.mask(state)
                np.testing.assert_array_equal(mask, theirs.mask(other), err_msg=pattern)
                states += 1
                allowed = np.flatnonzero(unpack_mask(mask, words.size))
                token = int(rng.choice(allowed.tolist()))
                if token in words.eos_ids:
                    break
                state, other = ours.advance(state, token), theirs.advance(other, token)
    assert states > 1500


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_walks_spell_texts_that_match(name: str, pattern: str) -> None:
    """What tokens of complete walks spell matches, and end of text is allowed just there."""
    words, rng = vocabulary(name), random.Random(pattern)
    start = start_matcher(Grammar.regex(pattern), words)
    spelled = words.bytes_V
    for _ in range(6):
        matcher = start
        for _ in range(rng.randrange(1, 10)):
            allowed = matcher.allowed()
            assert allowed.any()
            ends = list(words.eos_ids)
            assert allowed[ends].all() == matcher.complete
            allowed[ends] = False
            if not allowed.any():
                break
            matcher = matcher.take(int(rng.choice(np.flatnonzero(allowed).tolist())))
        text = b"".join(spelled[token] for token in matcher.tokens)
        if matcher.complete:
            assert re.fullmatch(pattern, text.decode())


def test_text_may_be_spelled_in_any_way() -> None:
    """The tokenizer's spelling, and one of single bytes, are both allowed."""
    words = vocabulary("demo:llama")
    matcher = start_matcher(Grammar.regex("the [a-z]+ cat"), words)
    spelled = words.bytes_V
    single = {token: i for i, token in enumerate(spelled) if len(token) == 1}
    letters = [single[bytes([byte])] for byte in b"the big cat"]
    assert matcher.take_all(words.encode(b"the big cat")).complete
    assert matcher.take_all(letters).complete


def _grammars() -> list[Grammar]:
    return [
        Grammar.regex(r"[a-z]{2,5}( [a-z]{2,5})*"),
        Grammar.choice(["yes", "no", "yesterday"]),
        Grammar.json_schema(PERSON),
        Grammar.lark('start: "begin" inner* "b"\ninner: /[0-9]+/ | "(" inner ")"'),
        Grammar.gbnf('root ::= "x" [0-9]+ ("," [0-9]+)*'),
    ]


@pytest.mark.parametrize("grammar", _grammars(), ids=lambda g: g.kind)
def test_matcher_is_a_value(grammar: Grammar) -> None:
    """A fork, a rewind and a pickle have the masks of the text read anew; taking changes none."""
    words, rng = vocabulary("demo:llama"), random.Random(1)
    start = start_matcher(grammar, words)
    trunk = _walk(start, rng, 4)
    before = trunk.allowed()
    branches = [_walk(trunk, random.Random(seed), 5) for seed in range(4)]
    np.testing.assert_array_equal(trunk.allowed(), before)
    for branch in branches:
        anew = start_matcher(grammar, words).take_all(branch.tokens)
        assert anew == branch
        np.testing.assert_array_equal(anew.allowed(), branch.allowed())
        back = branch.rewind(len(branch.tokens) - len(trunk.tokens))
        np.testing.assert_array_equal(back.allowed(), before)
        assert back == trunk
        read = pickle.loads(pickle.dumps(branch))
        np.testing.assert_array_equal(read.allowed(), branch.allowed())


@pytest.mark.parametrize("grammar", _grammars(), ids=lambda g: g.kind)
def test_forced_tokens_are_the_only_ones(grammar: Grammar) -> None:
    """Each forced token is allowed, and the only one where every spelling is."""
    words, seen = vocabulary("demo:llama"), 0
    for seed in range(5):
        matcher, rng = start_matcher(grammar, words), random.Random(seed)
        for _ in range(8):
            after = matcher
            for token in matcher.forced():
                allowed = np.flatnonzero(after.allowed())
                assert token in allowed
                assert grammar.spelling == "canonical" or allowed.size == 1
                after, seen = after.take(token), seen + 1
            allowed = np.flatnonzero(matcher.allowed())
            if set(allowed.tolist()) <= set(words.eos_ids):
                break
            matcher = matcher.take(int(rng.choice(allowed.tolist())))
    assert seen or grammar.kind in ("regex", "choice")


def test_grammar_tells_beginnings_and_texts() -> None:
    """Without a tokenizer."""
    for grammar, text in zip(
        _grammars(),
        ["abc de", "yes", '{"name":"x","age":3,"tags":["a"]}', "begin12(3)b", "x1,2"],
        strict=True,
    ):
        assert grammar.complete(text) and grammar.allows(text)
        assert grammar.allows(text[:2])
        assert not grammar.allows(f"{text}!") and not grammar.complete(f"{text}!")
    assert not Grammar.choice(["yes", "no"]).complete("y")


def test_schema_of_pydantic_model_is_taken() -> None:
    """As are its JSON text and a mapping."""
    pydantic = pytest.importorskip("pydantic")
    model = pydantic.create_model("Point", x=(int, ...), y=(int, ...))
    grammar = Grammar.json_schema(model)
    assert grammar.complete('{"x":1,"y":2}') and not grammar.complete('{"x":1}')
    assert Grammar.json_schema(json.dumps(PERSON)) == Grammar.json_schema(PERSON)


def test_whitespace_of_json_is_bounded() -> None:
    """Eight characters in each place by default, none if asked for."""
    assert Grammar.json_schema(PERSON).allows("{" + " " * 8)
    assert not Grammar.json_schema(PERSON).allows("{" + " " * 9)
    assert not Grammar.json_schema(PERSON, whitespace="").allows("{ ")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Grammar.json_schema({"properties": {"x": {"not": {}}}}),
            '"not"] at /properties/x/not',
        ),
        (
            lambda: Grammar.json_schema({"items": {"type": "sting"}}),
            "Invalid type: sting at /items/type",
        ),
        (lambda: Grammar.json_schema({"$ref": "#/nope"}), "Pointer '/nope' does not exist"),
        (lambda: Grammar.json_schema({"x-guidance": {"lenient": True}}), "would weaken it"),
        (lambda: Grammar.lark("start: nope"), 'unknown name: "nope"'),
        (lambda: Grammar.lark('start: start "a"'), "matches no text"),
        (
            lambda: Grammar.lark("start[max_tokens=3]: /a*/"),
            "max_tokens=, after which no text can be rewound",
        ),
        (lambda: Grammar.gbnf("root ::= ("), "GBNF grammar is invalid"),
        (lambda: Grammar.regex("\x00\xff[\U0010fffe]"), None),
    ],
)
def test_unsupported_grammar_is_refused_by_name(make: object, message: str | None) -> None:
    """In one line, with the keyword and its place in the schema."""
    words = vocabulary("demo:llama")
    if message is None:  # every byte has a token
        assert start_matcher(make(), words).allowed().any()  # type: ignore[operator]
        return
    with pytest.raises(GrammarError, match=re.escape(message)) as error:
        start_matcher(make(), words)  # type: ignore[operator]
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("schema", ["{", 3, object()])
def test_value_that_is_no_schema_is_refused(schema: object) -> None:
    """JSON that does not parse, a number, an object."""
    with pytest.raises(GrammarError, match="json_schema"):
        Grammar.json_schema(schema)


def test_missing_tokenizer_and_end_are_refused() -> None:
    """Grammars are about tokens, and end with an end-of-text token."""
    with pytest.raises(GrammarError, match="needs a tokenizer"):
        make_vocabulary(None, 10, [1])
    with pytest.raises(GrammarError, match="end-of-text"):
        make_vocabulary(vocabulary("demo:llama").tokenizer, 10, [])


def test_forbidden_token_is_refused_with_its_place() -> None:
    """And so is rewinding before the beginning."""
    matcher = start_matcher(Grammar.choice(["ab"]), vocabulary("demo:llama"))
    with pytest.raises(GrammarError, match="not allowed after 0 tokens"):
        matcher.take(5)
    with pytest.raises(GrammarError, match="rewind needs 0 to 0"):
        matcher.rewind(1)


def test_byte_without_token_is_refused() -> None:
    """A vocabulary that cannot spell the pattern's only text."""
    words = vocabulary("demo:llama")
    few = make_vocabulary(words.tokenizer, 40, [2])  # control tokens and a few bytes
    missing = next(b for b in range(33, 127) if bytes([b]) not in few.bytes_V)
    with pytest.raises(GrammarError, match="has no token"):
        start_matcher(Grammar.regex(re.escape(chr(missing))), few)


@pytest.mark.parametrize("grammar", [Grammar.regex("(?s).*"), Grammar.lark("start: /(?s:.*)/")])
def test_control_tokens_are_never_allowed(grammar: Grammar) -> None:
    """Not even where any text is; the end of text is."""
    words = vocabulary("demo:llama")
    allowed = start_matcher(grammar, words).allowed()
    special = sorted(words.tokenizer.special_ids)
    assert allowed.sum() > 1000
    assert [token for token in special if allowed[token]] == list(words.eos_ids)
    assert len(special) > 1


def test_table_of_automaton_is_small() -> None:
    """A date over 1,536 tokens: classes of equal columns."""
    compiled = Grammar.regex(r"[0-9]{4}-[0-9]{2}-[0-9]{2}").compile(vocabulary("demo:llama"))
    assert isinstance(compiled, TokenAutomaton)
    assert compiled.next_SC.size < 1000


@pytest.mark.parametrize("name", NAMES)
def test_vocabulary_encodes_exactly_the_bytes(name: str) -> None:
    """Also where the tokenizer adds a space before a text, and for bytes that are no text."""
    words = vocabulary(name)
    texts = (b'{"name":', b" a b", b"", "é日😀".encode(), b"\xff\xfe", b"\n\n", b"  x")
    for text in texts:
        assert b"".join(words.bytes_V[token] for token in words.encode(text)) == text


@pytest.mark.parametrize("name", NAMES)
def test_schema_allows_the_tokenizers_own_spelling(name: str) -> None:
    """With keys that are forced, in canonical tokens."""
    words = vocabulary(name)
    matcher = start_matcher(Grammar.json_schema(PERSON, whitespace=""), words)
    text = b"".join(words.bytes_V[token] for token in matcher.forced())
    assert b'{"name":"'.startswith(text)
    matcher = _walk(matcher, random.Random(0), 200)
    spelled = b"".join(words.bytes_V[token] for token in matcher.tokens).decode(errors="ignore")
    assert spelled.startswith('{"name":"') and matcher.grammar.allows(spelled)


@pytest.mark.parametrize("grammar", _grammars()[2:], ids=lambda g: g.kind)
def test_missing_llguidance_is_named(grammar: Grammar, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that installs it; regexes and choices do without."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(GrammarError, match=r" JSON.* pip install 'jaxllm\[grammar\]'"):
        grammar.complete("x")
    assert Grammar.choice(["x"]).complete("x")
