"""Texts for published models: what `gemma3_270m.json` has tokens and log-probabilities of."""

from random import Random

STRINGS = 300

# Read as they are, with a begin-of-text token first.
READ = (
    "The lighthouse keeper climbed the stairs every evening, lit the lamp, and wrote the weather"
    " into a small blue book. In forty years he had missed two days: the day of his wedding, and"
    " the day the sea took the lower door.",
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n"
    "    return total / len(values)\n\n\nprint(mean([1, 2, 3]))\n",
    "Der Zug nach Hamburg f\u00e4hrt um 9:30 Uhr von Gleis 7 ab. \u6771\u4eac\u306f\u65e5\u672c"
    "\u306e\u9996\u90fd\u3067\u3059\u3002 1 + 1 = 2, and 12 \u00d7 12 = 144 \U0001f600.",
)
CONTINUED = (
    "Water boils at 100 degrees Celsius, and it freezes at",
    "The three primary colors are",
    "Q: What is the capital of France?\nA:",
)
# A question, as Gemma's chat template writes it.
CHAT = (
    "<bos><start_of_turn>user\nName the largest planet of the solar system.<end_of_turn>\n"
    "<start_of_turn>model\n"
)
_FIXED = (
    "", " ", "  ", "   a", "a  b   c    d", "\n", "\n\n", "\n\n\n x \t\t y\r\n", " trailing ",
    "Hello, World! I'm he'LL we'Ve 'tis don't", "3 33 333 3333 12345678 3.14 \u00bd 4\u00b2",
    "\u043d\u0435\u0449\u043e \u043d\u0430 \u0411\u044a\u043b\u0433\u0430\u0440\u0441\u043a\u0438",
    "na\u00efve caf\u00e9 e\u0301te\u0301 \u00c4rger", "\u4f60\u597d\u3001\u4e16\u754c",
    "\uc548\ub155\ud558\uc138\uc694 \u0e01\u0e02\u0e04 \u0939\u093f\u0928\u094d\u0926\u0940",
    "\U0001f999\U0001f680 \U0001f468\u200d\U0001f469\u200d\U0001f466", "<unused7> <table><tr></td>",
    "def f(x):\n    return x**2  # comment\n\n\nclass A:\n\tpass\n", "\u2581\u2581escaped",
    "----====!!!!???  ...../// \\\\ http://x.y/z?a=1&b=2", "\x01\x7f\x80\xa0\xad\ufeff\u200b\u2028",
    "\U0010ffff\ue000\U000f0000", "the " * 40, "a" * 300, "=" * 70, " " * 50, "\n" * 40,
    '{"a": [1, 2.5e-3, null]}', "for (int i = 0; i < n; ++i) { a[i] += b[i] << 2; }",
    "$\\int_0^\\infty e^{-x^2} dx$", "SELECT * FROM t WHERE a >= 3 AND b <> 'x';",
)  # fmt: skip
_PARTS = (
    "the", " the", "ing", "ation", " ", "  ", "\n", "\t", "\u00e9", "\u6f22", "\U0001f600", "<",
    "\u2581", "=", "==", "0", "42", "don't", "'S", "\u00df", "\u0391\u0392", "\u0627", "\u0301",
    "\u200d", "\ufffd", "CamelCase", "snake_case", "http://", "x=1;", "{}", "\\n", "\r\n", "\u3000",
)  # fmt: skip
_RANGES = ((0x20, 0x7F), (0xA0, 0x600), (0x900, 0xD7FF), (0x1F300, 0x1FAFF))


def varied_texts() -> list[str]:
    """Return `STRINGS` texts: spaces, code, scripts, emoji, random characters and words."""
    random, texts = Random(7), [*_FIXED]
    while len(texts) < STRINGS:
        kind = len(texts) % 3
        if kind == 0:
            parts = (random.choice(_PARTS) for _ in range(random.randrange(1, 16)))
            texts.append("".join(parts))
        elif kind == 1:
            ranges = (random.choice(_RANGES) for _ in range(random.randrange(1, 16)))
            texts.append("".join(chr(random.randrange(*limits)) for limits in ranges))
        else:
            words = (
                "".join(random.choices("etaoinshrdlucmfwyp", k=random.randrange(1, 9)))
                for _ in range(random.randrange(1, 9))
            )
            texts.append(" ".join(words))
    return texts
