"""Docstrings as data: the Args of a command and the options of `LM.generate` are written once."""

import inspect
import re
from typing import Any


def split_docstring(source: Any) -> tuple[str, dict[str, str]]:
    """Return the docstring of a function or class up to its Args or Attributes, and these by name.

    They are the docstring's last section; the text of each is one line.
    """
    docstring = inspect.cleandoc(source.__doc__ or "")
    text, *sections = re.split(r"\n+(?:Args|Attributes):\n", docstring, maxsplit=1)
    rows = re.findall(r"^( +)(\w+): (.*(?:\n\1 +.*)*)", "".join(sections), re.MULTILINE)
    return text, {name: " ".join(words.split()) for _, name, words in rows}
