"""Regular expressions that a file or a user brings: matched in linear time, whatever they say.

RE2's dialect: Perl's without look-around and backreferences, which no linear-time engine has.
"""

import functools
from typing import Any

import re2

from jaxllm.errors import ConfigError

MAX_LENGTH = 1000
_OPTIONS = re2.Options()
_OPTIONS.log_errors = False
_OPTIONS.max_mem = 8 << 20


def compile_pattern(regex: str, what: str = "the pattern") -> Any:
    """The compiled expression: `fullmatch`, `search` and so on are those of `re`.

    what: its place, for messages. Raises ConfigError for what is no text, too long, or no
    expression of RE2's.
    """
    if not isinstance(regex, str):
        raise ConfigError(f"{what}: a regex must be a text, got {regex!r:.60}")
    if len(regex) > MAX_LENGTH:
        raise ConfigError(f"{what}: a regex of {len(regex):,} characters, at most {MAX_LENGTH:,}")
    return _compiled(regex, what)


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
