"""A row of a cache as text, with what was done to it marked."""

import html
from itertools import groupby
from typing import Any

import numpy as np


def marked_text(
    position_S: np.ndarray, token_S: np.ndarray, patched_S: np.ndarray, tokenizer: Any
) -> str:
    """The text of a row's slots; culled tokens stand as [-...-], patched ones as {+...+}.

    position_S: as in `Segment`. What was culled follows the slot before it, wherever that token was
    moved to. tokenizer: anything with `decode(ids) -> str`.
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
        now = tokenizer.decode(ids)  # all of it: a token's spelling depends on those before it
        text += left + now[len(shown) :] + right
        shown = now
    return text


class Shown(tuple[str, ...]):
    """The rows of a cache as marked texts; as text the lines, in a notebook with strokes."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        page = html.escape(str(self))
        for left, right, tag in (("[-", "-]", "del"), ("{+", "+}", "ins")):
            page = page.replace(left, f"<{tag}>").replace(right, f"</{tag}>")
        return f"<pre>{page}</pre>"
