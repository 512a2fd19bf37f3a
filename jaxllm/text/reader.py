"""Tokens in, text out: a continuation read token by token, up to a stop string."""

from collections.abc import Sequence

from jaxllm.text.detokenizer import Detokenizer
from jaxllm.text.stop import StopStrings
from jaxllm.text.tokenizer import Tokenizer


class Reader:
    """One row's continuation as text. Without a tokenizer all text is empty."""

    def __init__(
        self, tokenizer: Tokenizer | None, prompt: Sequence[int], stop_strings: Sequence[str] = ()
    ) -> None:
        """Raises SamplingError for a stop string that is empty."""
        self._pieces = Detokenizer(tokenizer, prompt=prompt) if tokenizer else None
        self._stop = StopStrings(stop_strings)
        self._text = ""
        self._read = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stop.found

    def push(self, token: int) -> str:
        """Read one more token; returns the text that has become certain."""
        self._read += 1
        return self._take(self._stop.push(self._pieces.push(token) if self._pieces else ""))

    def flush(self) -> str:
        """The rest of the text, when no more tokens come."""
        rest = self._stop.push(self._pieces.flush()) if self._pieces else ""
        return self._take(rest + self._stop.flush())

    def whole(self, tokens: Sequence[int]) -> str | None:
        """The text of all tokens, of which some may have been read; None without a tokenizer."""
        if self._pieces is None:
            return None
        for token in tokens[self._read :]:
            self.push(token)
        self.flush()
        return self._text

    def _take(self, text: str) -> str:
        self._text += text
        return text
