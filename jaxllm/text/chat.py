"""Chat templates: a conversation as the one text that a model was trained to continue.

A template is code from a checkpoint, so it runs in `Sandbox`, which is built anew for each rendering
and stops it by itself, on any thread.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from jaxllm.errors import TemplateError
from jaxllm.text.files import read_json, read_text
from jaxllm.text.formats import read_special_tokens

MAX_OUTPUT = 1 << 23
MAX_SECONDS = 5.0
_MAX_DEPTH = 64


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template that is known to be well-formed, and the limits under which it runs.

    `special_tokens` are the variables that it finds beside the messages: `("bos_token", "<s>")`.
    `max_output` is in characters. `max_seconds` is a deadline that is looked at in every turn of a
    loop, every call and every value built; one operation on values of at most `max_output` characters
    and 262,144 items lies between two looks.

    Raises:
      TemplateError: the source is not a template.
    """

    source: str
    special_tokens: tuple[tuple[str, str], ...] = ()
    max_output: int = MAX_OUTPUT
    max_seconds: float = MAX_SECONDS

    def __post_init__(self) -> None:
        sandbox = self._sandbox()
        with _one_line_errors("malformed chat template"):
            sandbox.from_string(self.source)
