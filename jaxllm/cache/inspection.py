"""Equality of caches, and rows as marked text."""

import html
from itertools import groupby
from typing import Any

import jax
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


def caches_equal(one: Any, two: Any) -> bool:
    """Whether two caches have one structure, and the same bits in the slots that hold tokens."""

    def signature(cache: Any) -> Any:
        leaves, structure = jax.tree.flatten(cache)
        return structure, [(x.shape, x.dtype) for x in leaves]

    if signature(one) != signature(two) or not np.array_equal(
        one.next_position_B, two.next_position_B
    ):
        return False
    if not np.array_equal(one.edits_B, two.edits_B):
        return False
    states = zip(jax.tree.leaves(one.state), jax.tree.leaves(two.state), strict=True)
    if any(np.asarray(x).tobytes() != np.asarray(y).tobytes() for x, y in states):
        return False
    return all(map(_segments_equal, one.segments, two.segments))


def _segments_equal(one: Any, two: Any) -> bool:
    is_real_BS = np.asarray(one.position_BS) >= 0

    def slots_equal(x: jax.Array, y: jax.Array) -> bool:
        shared = x.shape[: is_real_BS.ndim] != is_real_BS.shape  # one row, but positions per row
        slots = is_real_BS.any(axis=0, keepdims=True) if shared else is_real_BS
        return np.asarray(x)[slots].tobytes() == np.asarray(y)[slots].tobytes()

    if not np.array_equal(one.position_BS, two.position_BS):
        return False
    return all(map(slots_equal, jax.tree.leaves(one), jax.tree.leaves(two)))
