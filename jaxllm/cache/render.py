"""Text rendering of cache rows, with culled and patched tokens marked."""

import html
from itertools import groupby
from typing import Any

import numpy as np


def render_row(
    position_S: np.ndarray, token_S: np.ndarray, patched_S: np.ndarray, tokenizer: Any
) -> str:
    """Return the text of a row's slots; culled tokens appear as [-...-], patched ones as {+...+}.

    A culled token follows the slot before it, even if that token was moved.

    Args:
        position_S: As in `Segment`.
        tokenizer: Anything with `decode(ids) -> str`.
    """
    slots = np.flatnonzero(position_S != -1)
    live_S = position_S[slots] >= 0
    before = np.maximum.accumulate(np.where(live_S, np.arange(slots.size), -1))
    place = np.where(before < 0, -1, position_S[slots[before]])
    slots = slots[np.argsort(place, kind="stable")]

    def marks(slot: int) -> tuple[str, str]:
        if position_S[slot] < 0:
            return "[-", "-]"
        return ("{+", "+}") if patched_S[slot] else ("", "")

    text, shown = "", ""
    ids: list[int] = []
    for (left, right), run in groupby(slots.tolist(), key=marks):
        ids += token_S[list(run)].tolist()
        decoded = tokenizer.decode(ids)  # all ids: a token's text depends on those before it
        text += left + decoded[len(shown) :] + right
        shown = decoded
    return text


class RenderedRows(tuple[str, ...]):
    """The rows of a cache as marked texts; prints as lines, in notebooks as HTML del and ins."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        page = html.escape(str(self))
        for left, right, tag in (("[-", "-]", "del"), ("{+", "+}", "ins")):
            page = page.replace(left, f"<{tag}>").replace(right, f"</{tag}>")
        return f"<pre>{page}</pre>"
