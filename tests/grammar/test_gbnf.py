"""GBNF as a grammar of characters, against a matcher of characters in this file."""

import random
from typing import Any

import pytest

import jaxllm
from jaxllm.errors import GrammarError
from jaxllm.grammar import Grammar, context_free

# A character that the grammar's text spells, and the characters that it matches.
CHARACTERS = {
    "[ab]": "ab", "[a-c]": "abc", "[^a]": 'bc\n"]é😀', "[^a-c\\n]": '"]é😀', ".": 'abc\n"]é😀',
    "[é😀]": "é😀", '["\\]]': '"]', "[\\x61\\u00e9]": "aé", "[b-\\U0001F600]": "bcé😀",
}  # fmt: skip
LITERALS = {'"a"': "a", '"ab"': "ab", '"b\\n"': "b\n", '"\\"\\x5D"': '"]', '""': "", '"é"': "é"}
REPEATS = {
    "*": (0, 9), "+": (1, 9), "?": (0, 1), "{2}": (2, 2), "{1,}": (1, 9), "{0,2}": (0, 2),
    "{ 1 , 3 }": (1, 3), "{0}": (0, 0),
}  # fmt: skip


class Rules:
    """Random rules: their text in GBNF, and their parts as nested tuples for `ends`."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.names = rng, ["root", "a-b", "c2", "D"]
        self.parts, lines = {}, []
        for number, name in enumerate(self.names):
            text, self.parts[name] = self.alternatives(number, 2)
            lines.append(f"{name} ::= {text}{rng.choice(['', '  ', ' # (comment'])}\n")
        order = rng.sample(lines, len(lines))
        self.text = "# rules\n\n" + "".join(order)

    def alternatives(self, number: int, depth: int) -> tuple[str, Any]:
        found = [self.sequence(number, depth) for _ in range(self.rng.choice([1, 1, 2, 3]))]
        between = self.rng.choice(["|", " | ", " |\n  "])
        return between.join(text for text, _ in found), ("any", [part for _, part in found])

    def sequence(self, number: int, depth: int) -> tuple[str, Any]:
        texts, parts = [], []
        for _ in range(self.rng.choice([0, 1, 1, 2, 2, 3])):
            # After a character any rule may follow, else a later one: nothing is left-recursive.
            read = any(kind == "one" for kind, *_ in parts)
            text, part = self.item(number, depth, read)
            if self.rng.random() < 0.3:
                sign = self.rng.choice([*REPEATS])
                text, part = text + sign, ("repeat", part, *REPEATS[sign])
            texts.append(text)
            parts.append(part)
        # Not "": after ::= and | a line may end, so that the next rule would be read.
        return " ".join(texts) or self.rng.choice(["()", '""']), ("all", parts)

    def item(self, number: int, depth: int, read: bool) -> tuple[str, Any]:
        kind = self.rng.choice(["one", "one", "literal", "rule", "group"])
        later = self.names if read else self.names[number + 1 :]
        if kind == "rule" and later:
            name = self.rng.choice(later)
            return name, ("rule", name)
        if kind == "group" and depth:
            text, part = self.alternatives(number, depth - 1)
            return f"({self.rng.choice(['', ' ', chr(10)])}{text})", part
        if kind == "literal":
            text = self.rng.choice([*LITERALS])
            return text, ("all", [("one", c) for c in LITERALS[text]])
        text = self.rng.choice([*CHARACTERS])
        return text, ("one", CHARACTERS[text])

    def ends(self, part: Any, text: str, at: int, known: dict[Any, set[int]]) -> set[int]:
        """Return where a part that begins at a place of a text may end."""
        kind, *rest = part
        if kind == "one":
            return {at + 1} if text[at : at + 1] and text[at] in rest[0] else set()
        if kind == "rule":
            if (rest[0], at) not in known:
                known[rest[0], at] = self.ends(self.parts[rest[0]], text, at, known)
            return known[rest[0], at]
        if kind == "any":
            return {end for inner in rest[0] for end in self.ends(inner, text, at, known)}
        if kind == "all":
            found = {at}
            for inner in rest[0]:
                found = {end for place in found for end in self.ends(inner, text, place, known)}
            return found
        inner, low, high = rest
        found, reached = {at}, {at} if low == 0 else set()
        for count in range(1, high + 1):
            found = {end for place in found for end in self.ends(inner, text, place, known)}
            reached |= found if count >= low else set()
        return reached


def test_random_grammars_accept_what_their_characters_do() -> None:
    """Ambiguous, nested and recursive ones, on texts of at most seven characters."""
    rng, accepted, judged = random.Random(4), 0, 0
    for _ in range(120):
        rules = Rules(rng)
        try:
            grammar = Grammar.gbnf(rules.text)
        except GrammarError as error:
            assert "matches no text" in str(error)
            continue
        texts = {"".join(rng.choices('aabbc\n"]é😀', k=rng.randrange(8))) for _ in range(12)}
        for text in sorted(texts):
            expected = len(text) in rules.ends(("rule", "root"), text, 0, {})
            assert grammar.complete(text) == expected, (rules.text, text)
            accepted, judged = accepted + expected, judged + 1
    assert judged > 900 and accepted > 100


ARITHMETIC = r"""
root ::= (expr "=" ws term "\n")+
expr ::= term ([-+*/] term)*
term ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num ::= [0-9]+ ws
ws ::= [ \t\n]*
"""
LIST = r"""
root ::= item+
item ::= "- " [^\r\n\x0b\x0c\x85\u2028\u2029]+ "\n"
"""
MOVES = r"""
# Two moves in a line.
root ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n")+
move ::= (pawn | piece | castle) [+#]?
piece ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle ::= "O-O" "-O"?
"""
JSON = r"""
root ::= object
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
    string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    ("grammar", "accepted", "refused"),
    [
        ('root ::= num "5"\nnum ::= [0-9]+\n', ["15", "555"], ["5", "1", "51"]),
        (
            'root ::= "<think>" any "</think>" [a-z]+\nany ::= [^<]* ("<" [^/] [^<]*)*',
            ["<think>a <b\n></think>ok", "<think></think>x"],
            ["<think></b></think>ok", "<think>a</think>"],
        ),
        ("root ::= .*", ["", "a\nb", "日😀"], []),
        ('root ::= ("a"{2}){3}', ["a" * 6], ["a" * 5, "a" * 7]),
        ('root ::= (("a"+)?)*', ["", "a", "aaa"], ["b"]),
        ('root ::= "a"{2}{3} | "(" root ")"', ["a" * 6, "((aaaaaa))"], ["a" * 5, "(aaaaaa"]),
        ('root ::= [a-] "x" [\\]\\[^]', ["-x^", "ax]"], ["bx^", "axa"]),
        ('root ::= "x"\nroot ::= "y"', ["y"], ["x"]),
        (ARITHMETIC, ["a +1=\n2\n", "(b*2)/x_1=3 \n\ny=1\n"], ["a=1", "a+=1\n", "(a=1\n"]),
        (LIST, ["- milk\n- two - eggs\n"], ["- a", "- \n", "-a\n", "- a\u2028\n"]),
        (
            MOVES,
            ["1. e4 e5\n2. Nf3 Nc6\n10. O-O-O exd8=Q+\n", "1. R1xa3# a6\n2. a3 b1\n"],
            ["1. e4 e5\n", "1. e9 e5\n2. e4 e5\n"],
        ),
        (JSON, ['{"a": [1, -2.5e3, {"b\\u00e9": null}], "": ""}', "{}\n  "], ["[1]", '{"a":01}']),
    ],
)  # fmt: skip
def test_grammars_mean_what_llama_cpp_reads(
    grammar: str, accepted: list[str], refused: list[str]
) -> None:
    """Also in the forms of its examples: arithmetic, a list, moves of chess, JSON."""
    made = Grammar.gbnf(grammar)
    assert [text for text in accepted if not made.complete(text)] == []
    assert [text for text in refused if made.complete(text)] == []


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('x ::= "a"', "has no rule root: its rules are x"),
        ("root ::= foo", "rule root uses foo, which is no rule"),
        ('root ::= root "a" | "b"', "rule root is left-recursive"),
        ('root ::= a\na ::= "x"? root "y"', "rule root is left-recursive"),
        ('root ::= a root "x" | "z"\na ::= "y"?', "rule root is left-recursive"),
        ('root ::= "a" root', "matches no text"),
        ('root ::= "a"\n\nb ::= (', "invalid in line 3, at its end: expected )"),
        ('root ::= "abc', "unexpected end of the grammar"),
        ('root ::= "\\q"', r"\q is no character"),
        ('root = "a"', "invalid in line 1, at '= \"a\"': expected ::= after root"),
        ('root ::= "a"{3,2}', "{3,2} repeats at least 3 and at most 2 times"),
        ('root ::= "a"{,3}', "expected {m}, {m,} or {m,n}"),
        ("root ::= *", "nothing is before the repeat"),
        ('root ::= "a" )', "expected the end of the line"),
        (f"root ::= {'(' * 200}", "more than 100 groups"),
        ("root ::= []", "a class of characters needs one"),
        ("root ::= [z-a]", "a range of characters from 'z' to 'a' is empty"),
        ("root ::= [\\uD800]", r"\uD800 is no character"),
        ("root ::= ok\nok <- x", "line 2, at '<- x': expected ::= after ok"),
    ],
)
def test_invalid_grammar_is_refused_by_name(grammar: str, message: str) -> None:
    """Where it is made, in one line."""
    with pytest.raises(GrammarError) as error:
        Grammar.gbnf(grammar)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["gbnf", "lark"])
def test_thousands_of_alternatives_are_read(kind: str) -> None:
    """Those that are rules, not the characters of one terminal."""
    words = [f'"w{number}" x' for number in range(3000)]
    if kind == "gbnf":
        grammar = Grammar.gbnf('root ::= x "!" | x root | ' + " | ".join(words) + '\nx ::= "("')
    else:
        grammar = Grammar.lark("start: " + " | ".join(words) + '\nx: "("')
    assert grammar.complete("w2999(") and not grammar.complete("w3000(")


def test_parser_that_gives_up_is_named(
    shallow: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without a tokenizer, and in a text of a model, where nothing else is written to stderr."""
    monkeypatch.setattr(context_free, "_MAX_ITEMS", 40)
    words = " | ".join(f'"w{number}" root?' for number in range(100))
    grammar = Grammar.gbnf(f'root ::= "a" "b" "c" "d" ({words})')
    with pytest.raises(GrammarError, match=r"parser failed: .* max is 40"):
        grammar.complete("abcdw1")
    lm = jaxllm.load(shallow("llama"), dtype="float32")
    with pytest.raises(GrammarError, match=r"^the grammar's parser failed"):
        lm.generate("Once", grammar=grammar, max_new_tokens=9)
    assert "Traceback" not in capfd.readouterr().err
