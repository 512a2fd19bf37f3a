"""Regular expressions that a file or a user brings: matched in bounded time, whatever they say.

RE2's dialect: Perl's without look-around and backreferences, which no linear-time engine has. PEFT
matches names of modules with Python's `re`; `match_names` has all of its dialect, within a time
limit.
"""

import functools
import time
from collections.abc import Collection
from typing import Any

import re2
import regex as backtracking

from jaxllm.errors import ConfigError

MAX_LENGTH = 1000
_OPTIONS = re2.Options()
_OPTIONS.log_errors = False
_OPTIONS.max_mem = 8 << 20
SECONDS = 1.0  # for all names that a pattern with look-around is matched with


def compile_pattern(regex: str, what: str = "the pattern") -> Any:
    """The compiled expression: `fullmatch`, `search` and so on are those of `re`.

    what: its place, for messages. Raises ConfigError for what is no text, too long, or no
    expression of RE2's.
    """
    _check_length(regex, what)
    return _compiled(regex, what)


def check_name_pattern(regex: str, what: str) -> None:
    """Raise ConfigError if `match_names` cannot compile the pattern. what: its place."""
    _compile_for_names(regex, what)


def match_names(regex: str, names: Collection[str], what: str) -> set[str]:
    """Return the names that match the whole pattern, in the dialect of Python's `re`.

    Args:
        regex: The pattern. If RE2 refuses it, a backtracking engine matches all names within
            `SECONDS`.
        names: Short texts, such as names of modules.
        what: The pattern's place, for messages.

    Raises:
        ConfigError: If the pattern is invalid, too long, or takes too long.
    """
    compiled = _compile_for_names(regex, what)
    if not isinstance(compiled, backtracking.Pattern):
        return {name for name in names if compiled.fullmatch(name)}
    end = time.monotonic() + SECONDS
    try:
        return {
            name
            for name in names
            if compiled.fullmatch(name, timeout=max(end - time.monotonic(), 1e-6))
        }
    except TimeoutError:
        raise ConfigError(
            f"{what} takes too long: {regex!r:.80} has not matched {len(names):,} names in"
            f" {SECONDS:g} seconds. Write it without nested repeats"
        ) from None


def _compile_for_names(regex: str, what: str) -> Any:
    """The pattern as RE2 compiles it, or else as a backtracking engine does."""
    _check_length(regex, what)
    try:
        return _compiled(regex, what)
    except ConfigError:
        try:
            return backtracking.compile(regex)
        except (backtracking.error, OverflowError, RecursionError) as error:
            raise ConfigError(f"{what}: {regex!r:.80} is no valid regex: {error}") from None


def _check_length(regex: str, what: str) -> None:
    if not isinstance(regex, str):
        raise ConfigError(f"{what}: a regex must be a text, got {regex!r:.60}")
    if len(regex) > MAX_LENGTH:
        raise ConfigError(f"{what}: a regex of {len(regex):,} characters, at most {MAX_LENGTH:,}")


@functools.lru_cache(maxsize=1024)
def _compiled(regex: str, what: str) -> Any:
    try:
        return re2.compile(regex, _OPTIONS)
    except (re2.error, UnicodeError) as error:
        text = error.args[0] if error.args else error
        said = text.decode(errors="replace") if isinstance(text, bytes) else str(text)
        raise ConfigError(
            f"{what}: {regex!r:.80} is no valid regex: {said} (RE2's dialect: no look-around, no"
            " backreferences)"
        ) from None
