"""Regular expressions as automata over bytes, against Python's `re`."""

import gc
import itertools
import random
import re

import numpy as np
import pytest

from jaxllm.errors import GrammarError
from jaxllm.grammar import regex
from jaxllm.grammar.regex import DEAD, ByteAutomaton, compile_choice, compile_regex
from tests.grammar.patterns import PATTERNS, random_text


def _walk(automaton: ByteAutomaton, rng: random.Random) -> bytes:
    """Return bytes that the automaton allows, often all of a text."""
    state, found = 0, bytearray()
    for _ in range(rng.randrange(14)):
        allowed = np.flatnonzero(automaton.next_SN[state] != DEAD)
        if not allowed.size or (automaton.accepts_S[state] and rng.random() < 0.2):
            break
        found.append(int(rng.choice(allowed.tolist())))
        state = int(automaton.next_SN[state, found[-1]])
    return bytes(found)


def _accepts(automaton: ByteAutomaton, text: str) -> bool:
    state = automaton.run(text.encode())
    return state != DEAD and bool(automaton.accepts_S[state])


@pytest.mark.parametrize("pattern", PATTERNS)
def test_automaton_accepts_what_re_fullmatch_accepts(pattern: str) -> None:
    """On 340 texts of each pattern, half of them walks through the automaton."""
    automaton, expected, rng = compile_regex(pattern), re.compile(pattern), random.Random(pattern)
    texts = [random_text(rng) for _ in range(170)]
    texts += [_walk(automaton, rng).decode(errors="ignore") for _ in range(170)]
    assert any(map(expected.fullmatch, texts))
    for text in texts:
        assert _accepts(automaton, text) == (expected.fullmatch(text) is not None), text


def test_brackets_that_may_change_their_meaning_give_no_warning() -> None:
    """A client's pattern must not write to a server's log; here warnings are errors."""
    automaton = compile_regex("[[a]b")
    assert _accepts(automaton, "[b") and _accepts(automaton, "ab") and not _accepts(automaton, "b")


@pytest.mark.parametrize("pattern", [r"(ab)*", r"[0-9]{4}-[0-9]{2}", r"[^x]?", r"(a|b)*abb"])
def test_automaton_is_minimal_without_dead_ends(pattern: str) -> None:
    """No two states have the same future, and each leads to an end."""
    automaton = compile_regex(pattern)
    S = automaton.accepts_S.size
    differ = automaton.accepts_S[:, None] != automaton.accepts_S[None]
    for _ in range(S):  # pairs that some text tells apart
        wide = np.pad(differ, ((0, 1), (0, 1)), constant_values=True)
        wide[S, S] = False
        for byte in range(256):
            after = automaton.next_SN[:, byte]
            differ = differ | wide[after[:, None], after[None]]
    assert differ.sum() == S * (S - 1)
    ends = automaton.accepts_S.copy()
    for _ in range(S):
        ends |= np.append(ends, False)[automaton.next_SN].any(axis=1)
    assert ends.all()


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(?=a)b", "look-around"),
        (r"(a)\1", "a reference to a group"),
        ("a(", "is invalid: missing"),
        (".{0,100000}", "too large"),
        (r"[^\x00-\U0010ffff]", "matches no text"),
        (r"a\bb", "word boundary"),
        ("a++", "possessive"),
        ("(?m)a", "flag"),
        ("(a|b)*a(a|b){20}", "needs more than 20,000 states"),
    ],
)
def test_unsupported_pattern_is_refused_by_name(pattern: str, message: str) -> None:
    """In one line."""
    with pytest.raises(GrammarError, match=re.escape(message)) as error:
        compile_regex(pattern)
    assert "\n" not in str(error.value)


def test_choice_accepts_exactly_its_texts() -> None:
    """Also texts that begin like others, and none outside."""
    texts = ["yes", "yesterday", "nö", "", "日本"]
    automaton = compile_choice(texts)
    for text in [*texts, "y", "ye", "yester", "n", "日", "no"]:
        assert _accepts(automaton, text) == (text in texts)


@pytest.mark.parametrize("texts", [[], "yes", [1], None])
def test_invalid_choice_is_refused(texts: object) -> None:
    """An empty list, a single text, and what is no text."""
    with pytest.raises(GrammarError, match="choice must be a list"):
        compile_choice(texts)  # type: ignore[arg-type]


@pytest.mark.parametrize("pattern", ["(?i)k[r-t]a", "(?i)K[^S]É", "(?ai)kS[a-c]"])
def test_case_is_ignored_as_in_re(pattern: str) -> None:
    """Also of letters with three forms, such as the Kelvin sign and the long s."""
    automaton, expected = compile_regex(pattern), re.compile(pattern)
    for letters in itertools.product("kK\u212asS\u017faAéÉ", repeat=3):
        text = "".join(letters)
        assert _accepts(automaton, text) == (expected.fullmatch(text) is not None), text


def test_long_texts_compile_in_few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal ends of long texts are merged in a few rounds; without enough of them nothing is."""
    monkeypatch.setattr(regex, "MAX_ROUNDS", 3)
    ends = compile_choice(["x" + "a" * 500, "y" + "a" * 500])
    assert ends.accepts_S.size == 502
    automaton = compile_regex("(a{0,40}b)?")
    for text in ("", "b", "a" * 40 + "b", "a" * 41 + "b", "a", "ab" * 2):
        assert _accepts(automaton, text) == bool(re.fullmatch("(a{0,40}b)?", text)), text


def test_pattern_leaves_nothing_to_the_garbage_collector() -> None:
    """A server's memory does not grow by the large patterns of its clients."""
    compile_regex("[a-z]{3}")
    gc.collect()
    gc.disable()
    try:
        compile_regex("[a-zà-ü]{300}")
        with pytest.raises(GrammarError, match="too large"):
            compile_regex("[à-ü]{150000}")
        assert gc.collect() < 300
    finally:
        gc.enable()


def test_large_pattern_is_refused_before_its_states_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A character needs a state wherever repeats write it; anchors need none."""
    monkeypatch.setattr(regex, "MAX_FRAGMENT_STATES", 1000)
    compile_regex("^(a|b[cd]){0,30}(?:x$)")
    monkeypatch.setattr(regex._Builder, "new_state", None)
    for pattern in ("(x{0,99}){0,999}", "(a|b){796,}(c|de|f[a-z])(?i:z){200}", "a{99999999}"):
        with pytest.raises(GrammarError, match="too large"):
            compile_regex(pattern)
