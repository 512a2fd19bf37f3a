"""A side that one process runs, and several have the numbers of: a reference is one program."""

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
    """The first process's side, run there as in one process alone; in the others `side` is None."""

    name: str
    dtype: str
    side: Any

    def stages(self, case: Case) -> dict[str, np.ndarray]:
        """Every stage, on the host of each process."""
        return arrays_told(lambda: self.side.stages(case))

    def decode(self, case: Case, steps: int, text_BN: np.ndarray | None = None) -> Decoded:
        """The same of what decoding gives."""
        found = arrays_told(lambda: dict(named_arrays(self.side.decode(case, steps, text_BN))[0]))
        k, v = (tuple(x for name, x in found.items() if name.startswith(kind)) for kind in _KEPT)
        return Decoded(found["logits_BNV"], found["token_BN"], k, v, found["held_BP"])


_KEPT = "k.", "v."  # of the names of what layers keep


def of_first(make: Callable[[], Side]) -> Side:
    """The side that `make` gives, which of several processes the first alone makes and runs. What
    it raises of ours is raised in all.
    """
    made: list[Side] = []

    def said() -> str:
        made.append(make())
        return json.dumps((made[0].name, made[0].dtype))

    name, dtype = json.loads(told(said))
    return OfFirst(name, dtype, made[0] if made else None)
