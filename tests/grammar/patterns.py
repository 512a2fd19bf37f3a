"""Patterns and texts for the tests of grammars."""

import random

PATTERNS = [
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}",
    r"[0-9]+(\.[0-9]+)?",
    r"(12)+",
    r"(ab)*",
    r"[a-z]+(, [a-z]+)*",
    r"[^x]?",
    r".*",
    r"(?s).{0,5}",
    r"\d+",
    r"\w+\s\w+",
    r'"[^"\\]*"',
    r"(yes|no|maybe)",
    r"^a$|^b$",
    r"a{2,5}b?",
    r"[é-ü]+",
    r"[一-龥]{1,3}",
    r"\S+@\S+",
    r"(a|b)*abb",
    r"(?:(?:x|y)z){3}",
    r"[\w.-]+",
    r"(?a)\w+",
    r"\D\W",
    r"[^\d\s]+",
    r"a*?b",
    r"😀+|\U0001f600",
    r"\x41\n?",
    r"(a?){3}a{3}",
    r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?",
    r"(?i)[a-c]ß+",
    r"(?i)ks|[^x]",
]
ALPHABET = 'KkK\u017fsSÉéXCByab12xyz,. -"\\一龥😀A\nß9٣_@0eE+'


def random_text(rng: random.Random) -> str:
    """Return a short text of characters that the patterns treat differently."""
    return "".join(rng.choice(ALPHABET) for _ in range(rng.randrange(8)))
