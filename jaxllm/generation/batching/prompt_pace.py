"""How much of the prompts runs beside rows that decode: what takes about as long as they do.

So a long prompt at most doubles the time between two tokens of the others. Where more rows wait for
their prompts than decode, prompts get more, a share for each row: idle rows cost more than a pause.
Both times are measured while the loop runs; bits do not depend on them.
"""

import time
from collections import deque
from collections.abc import Callable
from statistics import median

from jaxllm.ops.padding import next_power_of_two

_FIRST, _LEAST = 32, 8  # tokens: before anything is measured, and where a prompt is slow
_KEPT = 9  # measurements: their median leaves out those that compiled


class PromptPace:
    """Chooses the number of prompt tokens of a step from the times of those before.

    most: Where no row decodes. multiple: Of the number, if it is above 1 (`PrefixStore`).
    """

    def __init__(
        self, most: int, multiple: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.clock, self._most, self._multiple = clock, most, multiple
        self._step, self._token = deque[float](maxlen=_KEPT), deque[float](maxlen=_KEPT)

    def room(self, decoding: int, reading: int) -> int:
        """Return how many prompt tokens the next step may run.

        decoding, reading: Rows that decode, and rows with a prompt.
        """
        if not decoding:
            return self._most
        room, share = float(_FIRST), max(1.0, reading / decoding)
        if self._step and self._token:
            room = median(self._step) / max(median(self._token), 1e-9)
        fitting = min(int(room * share), self._most)
        fitting = min(max(next_power_of_two(fitting + 1) // 2, _LEAST), self._most)
        return max(fitting - fitting % self._multiple, self._multiple)

    def record(self, decoding: int, prompt_tokens: int, seconds: float) -> None:
        """Add the time of a step. Without rows that decode, nothing waits for the step's end."""
        if decoding and not prompt_tokens:
            self._step.append(seconds)
        elif decoding and self._step:
            self._token.append(max(seconds - median(self._step), 0.0) / prompt_tokens)
