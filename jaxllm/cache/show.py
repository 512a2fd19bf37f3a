"""A row of a cache as text, with what was done to it marked."""

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
