"""Weights as a table of HTML, for notebooks."""

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxllm.weights.formats import as_weight
from jaxllm.weights.paths import flatten

_NUMBER = re.compile(r"\.(\d+)(?=\.)")


def render_table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an HTML table with a title; all text is escaped."""

    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    body = "".join(line("td", row) for row in rows)
    caption = f"<caption><code>{html.escape(title)}</code></caption>"
    return f"<table>{caption}<thead>{line('th', head)}</thead><tbody>{body}</tbody></table>"


def render_params(title: str, params: Mapping[str, Any]) -> str:
    """Return a table of the weights; paths that differ only in numbers share a row.

    Columns: the path with `*` for numbers, how many there are, the shape of each, the format, and
    the bytes of all; the last row is the total.
    """
    groups: dict[tuple[str, str, str], list[int]] = {}
    for path, leaf in flatten(params):
        weight = as_weight(leaf)
        shape = " x ".join(map(str, weight.shape))
        key = (_NUMBER.sub(".*", path), shape, weight.format)
        groups.setdefault(key, []).append(weight.nbytes)
    rows = [
        (path, str(len(sizes)), shape, name, f"{sum(sizes):,}")
        for (path, shape, name), sizes in groups.items()
    ]
    sizes = [size for some in groups.values() for size in some]
    rows.append(("total", str(len(sizes)), "", "", f"{sum(sizes):,}"))
    return render_table(title, ("weight", "count", "shape", "format", "bytes"), rows)
