"""Streaming decoder: the text of a continuation, token by token, up to a stop string."""

from collections.abc import Sequence

from jaxllm.text.detokenizer import Detokenizer
from jaxllm.text.stop import StopStrings
from jaxllm.text.tokenizer import Tokenizer


class StreamDecoder:
    """The text of one row's continuation. Without a tokenizer all text is empty.

    A special token counts as its name in stop strings that contain this name, as in transformers.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, prompt: Sequence[int], stop_strings: Sequence[str] = ()
    ) -> None:
        """Raises SamplingError for an empty stop string."""
        self._detokenizer = Detokenizer(tokenizer, prompt=prompt) if tokenizer else None
        self._stop = StopStrings(stop_strings)
        self._names = dict[int, str]()  # of special tokens that occur in stop strings
        if tokenizer is not None and stop_strings:
            named = ((index, tokenizer.token(index)) for index in tokenizer.special_ids)
            self._names = {i: name for i, name in named if any(name in s for s in stop_strings)}
        self._text = ""
        self._token_count = 0

    @property
    def has_stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stop.has_matched

    def push(self, token: int) -> str:
        """Read one more token; returns the text that is now final."""
        self._token_count += 1
        text = self._stop.push(self._detokenizer.push(token) if self._detokenizer else "")
        return self._append(text + self._stop.push(self._names.get(token, ""), hidden=True))

    def flush(self) -> str:
        """Return the rest of the text after the last token."""
        rest = self._stop.push(self._detokenizer.flush()) if self._detokenizer else ""
        return self._append(rest + self._stop.flush())

    def decode_all(self, tokens: Sequence[int]) -> str | None:
        """Return the text of all tokens, some already read; None without a tokenizer."""
        if self._detokenizer is None:
            return None
        for token in tokens[self._token_count :]:
            self.push(token)
        self.flush()
        return self._text

    def _append(self, text: str) -> str:
        self._text += text
        return text
