"""Draws README's picture, `docs/cache.svg`: what a step reads and returns, and what a fork shares.

One decision: a background and colours of its own, so that it reads on a dark page too.

    python scripts/draw_cache.py
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path

TARGET = Path(__file__).resolve().parents[1] / "docs" / "cache.svg"
WIDTH, HEIGHT = 840, 520
CELL, TALL = 60, 32  # a slot of a cache
INK, FAINT, PAPER = "#1f2933", "#52606d", "#fbfbf8"
OLD, NEW, STEP = (
    "#d6e6f5",
    "#fbe0b5",
    "#e4e7eb",
)  # fills: slots that were there, new ones, functions
DASHED = 'stroke-dasharray="3 3"'
CODE = 'font-family="ui-monospace, Menlo, Consolas, monospace"'

TITLE = "A cache is a value"
STORY = (
    "forward reads a cache and tokens and returns logits and a delta. commit makes the next cache"
    " of the cache and the delta; the cache stays as it was. fork makes rows with tails of their"
    " own that share one frozen segment by reference."
)


def text(x: float, y: float, words: str, *, color: str = FAINT, more: str = "") -> str:
    """Words from x on; their baseline is y."""
    return f'<text x="{x}" y="{y}" fill="{color}" {more}>{escape(words)}</text>'


def code(x: float, y: float, words: str) -> str:
    """The same in the type of code."""
    return text(x, y, words, color=INK, more=CODE)


def box(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{fill}"'
        f' stroke="{INK}" {more}/>'
    )


def function(x: float, y: float, name: str) -> str:
    """A function, 120 by 48."""
    middle = f'text-anchor="middle" font-weight="bold" {CODE}'
    return box(x, y, 120, 48, STEP) + text(x + 60, y + 29, name, color=INK, more=middle)


def cell(x: float, y: float, word: str, fill: str) -> str:
    """A token, or an empty slot."""
    middle = 'text-anchor="middle"'
    dashed = "" if word else DASHED
    return box(x, y, CELL, TALL, fill, dashed) + text(
        x + CELL / 2, y + 21, word, color=INK, more=middle
    )


def slots(
    x: float, y: float, old: Sequence[str] = (), new: Sequence[str] = (), room: int = 0
) -> str:
    """Slots side by side: tokens that were there, new ones, and empty ones."""
    row = [*((word, OLD) for word in old), *((word, NEW) for word in new), *[("", "none")] * room]
    return "".join(cell(x + CELL * i, y, word, fill) for i, (word, fill) in enumerate(row))


def arrow(*points: tuple[float, float], dashed: bool = False) -> str:
    """A line through the points, with its head at the last."""
    through = " ".join(f"{x},{y}" for x, y in points)
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<polyline points="{through}" fill="none" stroke="{INK}" stroke-width="1.5"'
        f' marker-end="url(#head)"{dashes}/>'
    )


def bars(x: float, y: float, heights: Sequence[float]) -> str:
    """Logits as a small histogram that stands on y."""
    return "".join(
        f'<rect x="{x + 14 * i}" y="{y - h}" width="10" height="{h}" fill="#7b8794"/>'
        for i, h in enumerate(heights)
    )


def draw() -> str:
    """The picture as SVG."""
    past = ("Once", "upon", "a", "time")
    parts = [
        # A step: what goes in at the left, what comes out at the right.
        code(30, 32, "tokens"),
        cell(30, 40, "there", PAPER),
        arrow((90, 56), (510, 56), (510, 110)),
        code(30, 118, "cache"),
        slots(30, 126, past, room=2),
        arrow((390, 142), (450, 142)),
        text(398, 134, "reads"),
        function(450, 110, "forward"),
        arrow((570, 122), (610, 122), (610, 78), (650, 78)),
        bars(656, 94, (8, 14, 30, 10, 20, 6, 12)),
        code(656, 56, "logits"),
        arrow((570, 146), (650, 146)),
        code(656, 122, "delta"),
        slots(656, 130, new=["there"]),
        text(724, 144, "new keys"),
        text(724, 160, "and values"),
        # The only place where a cache grows.
        arrow((330, 158), (330, 200), (510, 200), (510, 230)),
        arrow((686, 162), (686, 254), (570, 254)),
        function(450, 230, "commit"),
        arrow((450, 254), (390, 254)),
        code(30, 230, "next"),
        text(72, 230, "a new value; cache is as it was"),
        slots(30, 238, past, ["there"], 1),
        # Branches.
        arrow((90, 270), (90, 366)),
        code(100, 322, "fork(next, 2, capacity=4)"),
        text(320, 322, "copies no keys and no values"),
        slots(30, 396, (*past, "there"), room=1),
        code(30, 388, "frozen"),
        text(90, 388, "stored once, whatever the number of rows"),
        arrow((520, 374), (450, 374), (450, 404), (392, 404), dashed=True),
        arrow((520, 450), (450, 450), (450, 420), (392, 420), dashed=True),
        text(400, 366, "by reference"),
        code(520, 350, "row 0"),
        text(572, 350, "its own tail, two steps later"),
        slots(520, 358, new=["was", "a"], room=2),
        code(520, 426, "row 1"),
        text(572, 426, "its own tail, two steps later"),
        slots(520, 434, new=["lived", "an"], room=2),
        # Colours.
        box(30, 480, 16, 16, OLD),
        text(54, 493, "a token's keys and values"),
        box(260, 480, 16, 16, NEW),
        text(284, 493, "new ones"),
        box(390, 480, 16, 16, "none", DASHED),
        text(414, 493, "room"),
    ]
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        ' font-family="Helvetica, Arial, sans-serif" font-size="14">\n'
        f"<title>{TITLE}</title>\n<desc>{STORY}</desc>\n"
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"'
        f' markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{INK}"/></marker>'
        "</defs>\n"
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="{PAPER}"/>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    TARGET.write_text(draw(), encoding="utf-8")
