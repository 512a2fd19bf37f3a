"""What devices say to each other in a compiled program: its collectives, counted.

`counts(jax.jit(f).lower(...).compile().as_text())`: what is in the body of a loop counts once.
"""

import re
from typing import NamedTuple

# As XLA calls them; with "-start" where it has them run beside other work.
KINDS = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
_BITS = {"pred": 8, "bf16": 16}  # what its name does not say
_CALL = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)[a-z0-9]*)\[([\d,]*)\]")


class Count(NamedTuple):
    """Collectives of a kind: how many, the bytes that a device has of all their results, and of the
    largest.
    """

    calls: int
    bytes: int
    largest: int


def counts(text: str) -> dict[str, Count]:
    """The collectives of a compiled program's text, by kind; a kind that it has none of is left
    out.
    """
    found: dict[str, Count] = {}
    for line in text.splitlines():
        if (call := _CALL.search(line)) is None:
            continue
        sizes = [_bytes(*array.groups()) for array in _ARRAY.finditer(call[1])]
        # A call that is started says its operands before its results.
        size = sum(sizes[len(sizes) // 2 :] if call[3] and call[2] != "all-reduce" else sizes)
        old = found.get(call[2], Count(0, 0, 0))
        found[call[2]] = Count(old.calls + 1, old.bytes + size, max(old.largest, size))
    return found


def _bytes(name: str, bits: str | None, shape: str) -> int:
    """Of an array as XLA writes it: `f32[2,3]`."""
    size = _BITS.get(name) or int(bits or 8)
    for axis in filter(None, shape.split(",")):
        size *= int(axis)
    return -(-size // 8)
