"""When to draft: the way of decoding that writes more tokens a second, measured in turns.

A draft saves passes where it is right, and costs its own passes and wider ones of the model. Both
depend on the text and on the machine, so both ways are measured while the text is written.
"""

import time
from collections.abc import Callable, Iterator

_TRIAL = 4  # rounds
_FIRST, _LONGEST = 32, 512  # rounds between two trials of the slower way


class DraftPace:
    """Chooses whether the next rounds draft, from the speed of those before.

    drafts: whether to draft now. left: rounds until the next choice.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._speed = {True: 0.0, False: 0.0}  # tokens per second, with a draft and without
        self._tokens = self._seconds = 0.0
        self._plan = self._choices()
        self.drafts, self.left = next(self._plan)

    def record(self, rounds: int, tokens: float, seconds: float) -> None:
        """Add rounds of the current way. tokens: those written, a mean over the rows."""
        self._tokens, self._seconds = self._tokens + tokens, self._seconds + seconds
        self.left -= rounds
        if self.left <= 0:
            self._speed[self.drafts] = self._tokens / max(self._seconds, 1e-9)
            self._tokens = self._seconds = 0.0
            self.drafts, self.left = next(self._plan)

    def _choices(self) -> Iterator[tuple[bool, int]]:
        """Yield ways and numbers of rounds; each way's first rounds, which may compile, run twice.

        The slower way is tried again after 32 rounds of the faster one, then ever more rarely.
        """
        for way in (True, True, False, False):
            yield way, _TRIAL
        faster, wait = self._speed[True] > self._speed[False], _FIRST
        while True:
            yield faster, wait
            yield not faster, _TRIAL
            before, faster = faster, self._speed[True] > self._speed[False]
            wait = min(4 * wait, _LONGEST) if faster == before else _FIRST
