"""Parsers of the LoRA options, with PEFT's names and meanings."""

import re
from collections.abc import Callable
from typing import TypeVar

from jaxllm.errors import ConfigError

V = TypeVar("V", int, float)


def parse_modules(option: str, values: list[str] | None) -> str | list[str] | None:
    """Return module names for `LoraConfig`: a list of name suffixes, one regex, or "all-linear".

    Values of only word characters, dots, dashes and commas are names; any other is a regex. Raises
    ConfigError for a regex among several values.
    """
    if not values:
        return None
    if len(values) == 1 and values[0].lower() == "all-linear":
        return values[0].lower()
    if all(re.fullmatch(r"[\w.,-]+", text) for text in values):
        return [name for text in values for name in text.split(",") if name]
    if len(values) > 1:
        raise ConfigError(
            f"{option} must be names or one regex: got {', '.join(values):.80}. Join regexes with"
            " |."
        )
    return values[0]


def parse_layers(text: str | None) -> list[int] | None:
    """Parse layer numbers like "0,4-7". Raises ConfigError for any other text."""
    if text is None:
        return None
    found: list[int] = []
    for part in text.split(","):
        numbers = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part)
        if numbers is None or int(numbers[2] or numbers[1]) < int(numbers[1]):
            raise ConfigError(
                f"--layers-to-transform must be numbers or ranges, as in 0,4-7: got {text!r:.60}"
            )
        found += range(int(numbers[1]), int(numbers[2] or numbers[1]) + 1)
    return found


def parse_patterns(
    option: str, values: list[str] | None, to_number: Callable[[str], V]
) -> dict[str, V]:
    """Parse "REGEX=NUMBER" texts to a dict. Raises ConfigError for any other text."""
    patterns: dict[str, V] = {}
    for text in values or []:
        regex, _, value = text.rpartition("=")
        try:
            patterns[regex] = to_number(value)
        except ValueError:
            regex = ""
        if not regex:
            raise ConfigError(
                f"{option} must be REGEX=NUMBER, as in down_proj=16: got {text!r:.60}"
            )
    return patterns
