"""Communication of a compiled program: its collectives, counted.

Use `count_collectives(jax.jit(f).lower(...).compile().as_text())`. A collective in a loop body
counts once.
"""

import re
from typing import NamedTuple

# XLA's names; with "-start" if they run asynchronously.
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
_BITS = {"pred": 8, "bf16": 16}  # dtypes whose name does not end in the number of bits
_CALL = re.compile(rf"= (.*?) ({'|'.join(COLLECTIVES)})(-start)?\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)[a-z0-9]*)\[([\d,]*)\]")


class CollectiveStats(NamedTuple):
    """Collectives of one kind, with the bytes on one device of all their results."""

    calls: int
    bytes: int
    largest: int


def count_collectives(text: str) -> dict[str, CollectiveStats]:
    """Count the collectives in a compiled program's text, by kind; kinds it lacks are omitted."""
    stats: dict[str, CollectiveStats] = {}
    for line in text.splitlines():
        if (call := _CALL.search(line)) is None:
            continue
        sizes = [_array_bytes(*array.groups()) for array in _ARRAY.finditer(call[1])]
        # The "-start" form lists operands before results.
        size = sum(sizes[len(sizes) // 2 :] if call[3] and call[2] != "all-reduce" else sizes)
        old = stats.get(call[2], CollectiveStats(0, 0, 0))
        stats[call[2]] = CollectiveStats(old.calls + 1, old.bytes + size, max(old.largest, size))
    return stats


def _array_bytes(name: str, bits: str | None, shape: str) -> int:
    """Return the bytes of an array in XLA's notation, such as `f32[2,3]`."""
    size = _BITS.get(name) or int(bits or 8)
    for axis in filter(None, shape.split(",")):
        size *= int(axis)
    return -(-size // 8)
