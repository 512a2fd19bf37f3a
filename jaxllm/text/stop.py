"""Stop strings: matched across token boundaries, and never part of the output."""

from collections.abc import Sequence

from jaxllm.errors import SamplingError


class StopStrings:
    """A filter of streamed text that ends it before the first stop string.

    Text that may be the start of a stop string is held back until it is known not to be.
    """

    def __init__(self, strings: Sequence[str] = ()) -> None:
        """Raises SamplingError for an empty string, or a value that is not a string."""
        for string in strings:
            if not isinstance(string, str) or not string:
                raise SamplingError(f"stop_strings must be non-empty strings: got {string!r}")
        self.strings = tuple(strings)
        self.found = False
        self._held = ""

    def push(self, text: str) -> str:
        """Add text; returns what certainly precedes any stop string."""
        if self.found:
            return ""
        self._held += text
        starts = [i for s in self.strings if (i := self._held.find(s)) >= 0]
        if starts:
            self.found = True
            return self._release(min(starts))
        return self._release(len(self._held) - self._doubtful())

    def flush(self) -> str:
        """Return the held-back text at the end."""
        return "" if self.found else self._release(len(self._held))

    def _release(self, end: int) -> str:
        text, self._held = self._held[:end], self._held[end:]
        return text

    def _doubtful(self) -> int:
        """Return the number of characters at the end that may start a stop string."""
        longest = max(map(len, self.strings), default=1) - 1
        return next(
            (
                n
                for n in range(min(longest, len(self._held)), 0, -1)
                if any(s.startswith(self._held[-n:]) for s in self.strings)
            ),
            0,
        )
