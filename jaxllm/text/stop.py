"""Stop strings: matched across token boundaries, and never part of the output."""

from collections.abc import Sequence
from itertools import compress

from jaxllm.errors import SamplingError


class StopStrings:
    """A filter of streamed text that ends it before the first stop string.

    Text that may be the start of a stop string is held back until it is known not to be. Hidden
    text, of special tokens, is matched too, but never part of the output.
    """

    def __init__(self, strings: Sequence[str] = ()) -> None:
        """Raises SamplingError for an empty string, or a value that is not a string."""
        for string in strings:
            if not isinstance(string, str) or not string:
                raise SamplingError(f"stop_strings must be non-empty strings: got {string!r}")
        self.strings = tuple(strings)
        self.has_matched = False
        self._pending = ""
        self._shown: list[bool] = []  # of each pending character

    def push(self, text: str, *, hidden: bool = False) -> str:
        """Add text; returns what certainly precedes any stop string."""
        if self.has_matched:
            return ""
        self._pending += text
        self._shown += [not hidden] * len(text)
        starts = [i for s in self.strings if (i := self._pending.find(s)) >= 0]
        if starts:
            self.has_matched = True
            return self._release(min(starts))
        return self._release(len(self._pending) - self._partial_length())

    def flush(self) -> str:
        """Return the held-back text at the end."""
        return "" if self.has_matched else self._release(len(self._pending))

    def _release(self, end: int) -> str:
        text = "".join(compress(self._pending[:end], self._shown))
        self._pending, self._shown = self._pending[end:], self._shown[end:]
        return text

    def _partial_length(self) -> int:
        """Return the number of characters at the end that may start a stop string."""
        longest = max(map(len, self.strings), default=1) - 1
        return next(
            (
                n
                for n in range(min(longest, len(self._pending)), 0, -1)
                if any(s.startswith(self._pending[-n:]) for s in self.strings)
            ),
            0,
        )
