"""Stop strings: found wherever they begin and end in the tokens, and never shown."""

from collections.abc import Sequence

from jaxllm.errors import SamplingError


class StopStrings:
    """A text given in pieces and passed on in pieces, up to the first of some strings.

    What may be the beginning of a stop string is held back until it is known not to be.
    """

    def __init__(self, strings: Sequence[str] = ()) -> None:
        """Raises SamplingError for an empty string, or what is not a string."""
        for string in strings:
            if not isinstance(string, str) or not string:
                raise SamplingError(f"stop_strings must be non-empty texts, got {string!r}")
        self.strings = tuple(strings)
        self.found = False
        self._held = ""

    def push(self, text: str) -> str:
        """Take more text; returns what is certain to come before any stop string."""
        if self.found:
            return ""
        self._held += text
        starts = [i for s in self.strings if (i := self._held.find(s)) >= 0]
        if starts:
            self.found = True
            return self._release(min(starts))
        return self._release(len(self._held) - self._doubtful())

    def flush(self) -> str:
        """The rest, when no more text comes."""
        return "" if self.found else self._release(len(self._held))

    def _release(self, end: int) -> str:
        text, self._held = self._held[:end], self._held[end:]
        return text

    def _doubtful(self) -> int:
        """How many characters at the end may be the beginning of a stop string."""
        longest = max(map(len, self.strings), default=1) - 1
        return next(
            (
                n
                for n in range(min(longest, len(self._held)), 0, -1)
                if any(s.startswith(self._held[-n:]) for s in self.strings)
            ),
            0,
        )
