"""Incremental detokenization: text from token ids, one at a time, never half a character.

Byte tokens go through an incremental UTF-8 decoder. Any other token is decoded together with the
previous one, which determines whether a leading space is part of the text; the text of the previous
token is then removed. The work per token does not grow with the text.
"""

import codecs
from collections.abc import Sequence
from itertools import islice

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
