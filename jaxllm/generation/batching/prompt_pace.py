"""How much of the prompts runs beside rows that decode: what takes less time than they do.

So with a long prompt the others' time between two tokens stays under twice a step. Where more rows
wait for their prompts than decode, prompts get more, a share for each row: idle rows cost more than
a pause. Both times are measured while the loop runs; bits do not depend on them.
"""

from collections import Counter, defaultdict, deque
from statistics import median

from jaxllm.generation.loops.microbatch import bucket_rows
from jaxllm.ops.padding import next_power_of_two

_KEPT = 9  # measurements of each kind
_TRIED = 2  # steps without prompts before the first with one: the first may have compiled
_FRESH = 32  # steps with prompts after which one without measures again
_SHARE = 0.75  # of a step's time that prompts may add to it


class PromptPace:
    """Chooses the number of prompt tokens of a step from the times of those before.

    most: Where no row decodes. multiple: Of the number, if it is above 1 (`PrefixStore`). least:
    Where prompts are slow.
    """

    def __init__(self, most: int, multiple: int, least: int = 8) -> None:
        self._most, self._multiple, self._least = most, multiple, least
        self._token = deque[float](maxlen=_KEPT)
        # By the number of rows of the program that decodes, which decides what a step takes.
        self._steps = defaultdict[int, deque[float]](lambda: deque(maxlen=_KEPT))
        self._age = Counter[int]()

    def room(self, decoding: int, reading: int) -> int:
        """Return how many prompt tokens the next step may run; 0 to measure it without.

        decoding, reading: Rows that decode, and rows with a prompt.
        """
        if not decoding:
            return self._most
        size = bucket_rows(decoding)
        if len(self._steps[size]) < _TRIED or self._age[size] >= _FRESH:
            return 0
        room = 0.0  # the first part is small
        if self._token:
            room = _SHARE * min(self._steps[size]) / max(median(self._token), 1e-9)
        fitting = min(int(room * max(1.0, reading / decoding)), self._most)
        fitting = min(max(next_power_of_two(fitting + 1) // 2, self._least), self._most)
        return max(fitting - fitting % self._multiple, self._multiple)

    def record(self, decoding: int, prompt_tokens: int, seconds: float) -> None:
        """Add the time of a step. Without rows that decode, nothing waits for the step's end."""
        if not decoding:
            return
        size = bucket_rows(decoding)
        if not prompt_tokens:
            self._steps[size].append(seconds)
            self._age[size] = 0
        elif self._steps[size]:
            self._age[size] += 1
            self._token.append(max(seconds - min(self._steps[size]), 0.0) / prompt_tokens)
