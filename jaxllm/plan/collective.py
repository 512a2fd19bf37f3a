"""A collective operation, and the bytes that each device sends for it.

With ring algorithms over t devices an all-reduce of n bytes sends 2 n (t - 1) / t from each device;
an all-gather or reduce-scatter sends n (t - 1) / t (Patarasuk and Yuan 2009).
"""

import dataclasses
from typing import Literal

Kind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"]


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective that a program contains `count` times.

    Attributes:
      axis: the outermost mesh axis that it runs over.
      over: number of devices.
      bytes: size of its result on each device.
      times: number of times that a loop runs it.
    """

    what: str
    kind: Kind
    axis: str
    over: int
    count: int
    bytes: int
    times: int = 1

    @property
    def total_calls(self) -> int:
        """The number of calls in a step."""
        return self.count * self.times

    @property
    def bytes_sent(self) -> float:
        """The bytes that a device sends for all calls."""
        share = (self.over - 1) / self.over
        parts = {
            "all-reduce": 2 * share,
            "all-gather": share,
            "reduce-scatter": self.over * share,  # its result is one shard
            "all-to-all": share,
            "collective-permute": 1.0,
        }
        return self.total_calls * self.bytes * parts[self.kind]
