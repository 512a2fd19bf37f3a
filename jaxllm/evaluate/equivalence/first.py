"""A backend that runs on process 0 and broadcasts its results, for single-process references."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxllm.distributed import arrays_told, told
from jaxllm.evaluate.equivalence.sides import Case, Decoded, Side
from jaxllm.weights.paths import named_arrays


@dataclasses.dataclass(frozen=True)
class OfFirst:
    """Runs process 0's backend as in a single process; in other processes `side` is None."""

    name: str
    dtype: str
    side: Any

    def stages(self, case: Case) -> dict[str, np.ndarray]:
        """Return every activation, on the host of each process."""
        return arrays_told(lambda: self.side.stages(case))

    def decode(self, case: Case, steps: int, text_BN: np.ndarray | None = None) -> Decoded:
        """Return the decode output, on the host of each process."""
        found = arrays_told(lambda: dict(named_arrays(self.side.decode(case, steps, text_BN))[0]))
        k, v = (tuple(x for name, x in found.items() if name.startswith(kind)) for kind in _KEPT)
        return Decoded(found["logits_BNV"], found["token_BN"], k, v, found["held_BP"])


_KEPT = "k.", "v."  # name prefixes of cache entries


def of_first(make: Callable[[], Side]) -> Side:
    """Return a backend that calls `make` and runs only on process 0.

    If `make` raises a JaxllmError, all processes raise one with the same message.
    """
    made: list[Side] = []

    def said() -> str:
        made.append(make())
        return json.dumps((made[0].name, made[0].dtype))

    name, dtype = json.loads(told(said))
    return OfFirst(name, dtype, made[0] if made else None)
