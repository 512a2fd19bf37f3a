"""How much of the prompts runs beside rows that decode: what takes less time than they do.

So with a long prompt the others' time between two tokens stays under twice a step. Where more rows
wait for their prompts than decode, prompts get more, a share for each row: idle rows cost more than
a pause. Both times are measured while the loop runs; bits do not depend on them.
"""

import math
from collections import deque
from statistics import median

from jaxllm.ops.padding import next_power_of_two

_FIRST = 32  # tokens, before anything is measured
_KEPT = 9  # measurements: their median leaves out those that compiled
_SHARE = 0.75  # of a step's time that prompts may add to it


class PromptPace:
    """Chooses the number of prompt tokens of a step from the times of those before.

    most: Where no row decodes. multiple: Of the number, if it is above 1 (`PrefixStore`). least:
    Where prompts are slow.
    """

    def __init__(self, most: int, multiple: int, least: int = 8) -> None:
        self._most, self._multiple, self._least = most, multiple, least
        self._step, self._token = deque[float](maxlen=_KEPT), deque[float](maxlen=_KEPT)

    def room(self, decoding: int, reading: int) -> int:
        """Return how many prompt tokens the next step may run.

        decoding, reading: Rows that decode, and rows with a prompt.
        """
        if not decoding:
            return self._most
        room, share = float(_FIRST), max(1.0, reading / decoding)
        if self._step:  # the first part beside measured steps is small
            token = median(self._token) if self._token else math.inf
            room = _SHARE * median(self._step) / max(token, 1e-9)
        fitting = min(int(room * share), self._most)
        fitting = min(max(next_power_of_two(fitting + 1) // 2, self._least), self._most)
        return max(fitting - fitting % self._multiple, self._multiple)

    def record(self, decoding: int, prompt_tokens: int, seconds: float) -> None:
        """Add the time of a step. Without rows that decode, nothing waits for the step's end."""
        if decoding and not prompt_tokens:
            self._step.append(seconds)
        elif decoding and self._step:
            self._token.append(max(seconds - median(self._step), 0.0) / prompt_tokens)
