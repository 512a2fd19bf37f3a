"""Regular expressions from files and users, matched in bounded time.

The dialect is RE2's: Perl's without look-around and backreferences, which no linear-time engine
supports. PEFT matches module names with Python's `re`; `match_names` supports all of its dialect,
within a time limit.
"""

import contextlib
import functools
import time
from collections.abc import Collection
from typing import Any

import re2

from jaxllm.errors import ConfigError, requires_extra

MAX_LENGTH = 1000
_OPTIONS = re2.Options()
_OPTIONS.log_errors = False
_OPTIONS.max_mem = 8 << 20
MAX_SECONDS = 1.0  # limit for matching all names with a pattern that RE2 cannot compile


def compile_pattern(regex: str, what: str = "the pattern") -> Any:
    """Compile a pattern with RE2; the result has `fullmatch`, `search` and so on, like `re`.

    Args:
        what: where the pattern comes from, for messages.

    Raises:
        ConfigError: If the pattern is not a string, is too long, or is not valid in RE2.
    """
    _check_length(regex, what)
    return _compile_re2(regex, what)


def match_names(regex: str, names: Collection[str], what: str) -> set[str]:
    """Return the names that match the whole pattern, in the dialect of Python's `re`.

    Args:
        regex: The pattern. If RE2 refuses it, a backtracking engine matches all names within
            `MAX_SECONDS`.
        names: Short texts, such as names of modules.
        what: Where the pattern comes from, for messages.

    Raises:
        ConfigError: If the pattern is invalid, too long, or takes too long.
    """
    _check_length(regex, what)
    with contextlib.suppress(ConfigError):
        linear = _compile_re2(regex, what)
        return {name for name in names if linear.fullmatch(name)}
    with requires_extra("adapters", f"the pattern {regex!r:.80}"):
        import regex as backtracking  # 0.06 s of a start that seldom needs it

    try:
        compiled = backtracking.compile(regex)
    except (backtracking.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"{what}: {regex!r:.80} is not a valid regex: {error}") from None
    end = time.monotonic() + MAX_SECONDS
    try:
        return {
            name
            for name in names
            if compiled.fullmatch(name, timeout=max(end - time.monotonic(), 1e-6))
        }
    except TimeoutError:
        raise ConfigError(
            f"{what} takes too long: {regex!r:.80} has not matched {len(names):,} names in"
            f" {MAX_SECONDS:g} seconds. Write it without nested repeats"
        ) from None


def _check_length(regex: str, what: str) -> None:
    if not isinstance(regex, str):
        raise ConfigError(f"{what}: a regex must be a string: got {regex!r:.60}")
    if len(regex) > MAX_LENGTH:
        raise ConfigError(
            f"{what}: the regex is too long: got {len(regex):,} characters, expected at most"
            f" {MAX_LENGTH:,}"
        )


@functools.lru_cache(maxsize=1024)
def _compile_re2(regex: str, what: str) -> Any:
    try:
        return re2.compile(regex, _OPTIONS)
    except (re2.error, UnicodeError) as error:
        text = error.args[0] if error.args else error
        said = text.decode(errors="replace") if isinstance(text, bytes) else str(text)
        raise ConfigError(
            f"{what}: {regex!r:.80} is not a valid regex: {said} (RE2's dialect: no look-around, no"
            " backreferences)"
        ) from None
