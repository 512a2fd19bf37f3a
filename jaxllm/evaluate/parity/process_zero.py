"""A backend that runs on process 0 and broadcasts its results, for single-process references."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxllm.evaluate.parity.backends import Backend, DecodeOutput, ParityCase
from jaxllm.runtime.multihost import broadcast_arrays, broadcast_from_zero
from jaxllm.weights.paths import list_arrays


@dataclasses.dataclass(frozen=True)
class ProcessZeroBackend:
    """Runs process 0's backend as in a single process; in other processes `backend` is None."""

    name: str
    dtype: str
    backend: Any

    def activations(self, case: ParityCase) -> dict[str, np.ndarray]:
        """Return every activation, on the host of each process."""
        return broadcast_arrays(lambda: self.backend.activations(case))

    def decode(
        self, case: ParityCase, steps: int, forced_BN: np.ndarray | None = None
    ) -> DecodeOutput:
        """Return the decode output, on the host of each process."""
        found = broadcast_arrays(
            lambda: dict(list_arrays(self.backend.decode(case, steps, forced_BN))[0])
        )
        k, v = (
            tuple(x for name, x in found.items() if name.startswith(kind)) for kind in _KV_PREFIXES
        )
        return DecodeOutput(found["logits_BNV"], found["token_BN"], k, v, found["held_BP"])


_KV_PREFIXES = "k.", "v."  # name prefixes of cache entries


def on_process_zero(make: Callable[[], Backend]) -> Backend:
    """Return a backend that calls `make` and runs only on process 0.

    If `make` raises a JaxllmError, all processes raise one with the same message.
    """
    made: list[Backend] = []

    def describe() -> str:
        made.append(make())
        return json.dumps((made[0].name, made[0].dtype))

    name, dtype = json.loads(broadcast_from_zero(describe))
    return ProcessZeroBackend(name, dtype, made[0] if made else None)
