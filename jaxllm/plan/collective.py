"""One kind of message between devices, and what it makes each of them send.

Rings: of n bytes an all-reduce over t devices sends 2 n (t - 1) / t from each, gathering or
scattering n bytes n (t - 1) / t (Patarasuk and Yuan 2009).
"""

import dataclasses
from typing import Literal

Kind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"]


@dataclasses.dataclass(frozen=True)
class Collective:
    """One that a program has `count` times. axis: the outermost that it is over, with all within it
    that share its work; over: how many devices; bytes: of its result on each. times: how often a
    loop runs it.
    """

    what: str
    kind: Kind
    axis: str
    over: int
    count: int
    bytes: int
    times: int = 1

    @property
    def calls(self) -> int:
        """How many of them a step waits for."""
        return self.count * self.times

    @property
    def sent(self) -> float:
        """Bytes that a device sends for all of them."""
        share = (self.over - 1) / self.over
        parts = {
            "all-reduce": 2 * share,
            "all-gather": share,
            "reduce-scatter": self.over * share,  # its result is a share
            "all-to-all": share,
            "collective-permute": 1.0,
        }
        return self.calls * self.bytes * parts[self.kind]
