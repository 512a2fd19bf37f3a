"""Incremental detokenization: text from token ids, one at a time, never half a character.

A continuation ends before the first of its stop strings, also across the borders of tokens.

Byte tokens go through an incremental UTF-8 decoder. Any other token is decoded together with the
previous one, which determines whether a leading space is part of the text; the text of the previous
token is then removed. The work per token does not grow with the text.
"""

import codecs
from collections.abc import Sequence
from itertools import compress, islice

from jaxllm.errors import SamplingError
from jaxllm.text.tokenizer import Tokenizer

_LONGEST_CHARACTER = 4


class Detokenizer:
    """The text of a growing sequence of token ids.

    * The pieces of ids that encode a text, concatenated, are `tokenizer.decode` of all the ids.
    * A character appears in the piece that completes it. Invalid bytes appear as U+FFFD as soon as
      they are known to be invalid: after at most three more tokens.
    * Special tokens are skipped, as in `decode`; with `skip_special=False` they appear as written.
      An id without a token is skipped too.
    * With `prompt`, the text continues the prompt's (in Llama, with a leading space).
    """

    def __init__(
        self, tokenizer: Tokenizer, *, prompt: Sequence[int] = (), skip_special: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._skip_ids = tokenizer.special_ids if skip_special else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._previous: list[int] = []
        shown = (index for index in reversed(prompt) if self._has_text(index))
        for index in reversed(list(islice(shown, _LONGEST_CHARACTER))):
            self.push(index)

    def push(self, token_id: int) -> str:
        """Return the text that this token completes, or "" while a character is incomplete.

        Raises:
            TokenError: the id is not a whole number from 0 up; the state is unchanged.
        """
        if not self._has_text(token_id):
            return ""
        raw = self._tokenizer.token_bytes(token_id)
        previous, self._previous = self._previous, [int(token_id)]
        if raw is not None:
            return self._utf8.decode(raw)
        before = self._decode(previous)
        return self.flush() + self._decode([*previous, token_id])[len(before) :]

    def _has_text(self, token_id: int) -> bool:
        return token_id in self._tokenizer and int(token_id) not in self._skip_ids

    def flush(self) -> str:
        """Return the rest at the end: U+FFFD for an incomplete character, else ""."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest

    def _decode(self, ids: Sequence[int]) -> str:
        # Special ids come here only with `skip_special=False`, which needs a second library object.
        return self._tokenizer.decode(ids, skip_special=self._skip_special)


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
